"""Kinds of federations: who holds which images, with what labels, and who attacks.

A kind is a skew, a fault among clients that hold alike, or both: `paper+flipped-3`. A policy that has
met one kind is lost in the others, and one that has met skews and faults apart takes the few who hold
rare digits for those who lie, so it learns from a mixture of all. Every task of a mixture has clients
of its own, dealt anew out of a common pool of images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apportion.domains.federated.digits import CLASSES, Digits
from apportion.domains.federated.partitions import Partition, sample_images
from apportion.errors import InputError
from apportion.runs.settings import suggest
from apportion.tasks import Tasks


@dataclass
class Dealt:
    """The clients of one federation, each with places of images, labels of its own and a factor."""

    places: list[np.ndarray]
    labels: list[np.ndarray]
    factors: np.ndarray
    noise: np.ndarray
    """Standard deviation of the noise on each client's images."""


Deal = Callable[["Pool", int, int], Dealt]
"""The federation of so many clients with at most so many images each."""
Fault = Callable[["Pool", Dealt], None]
"""Makes some of a federation's clients faulty."""


@dataclass(frozen=True)
class Pool:
    """Images to deal out, and the randomness that decides who gets which."""

    labels: np.ndarray
    """Of all images."""
    places: np.ndarray
    """Of those to deal out."""
    rng: np.random.Generator

    def by_mix(self, mixes: Sequence[np.ndarray], samples: int) -> Dealt:
        """Clients whose classes are mixed in these proportions, nobody's image being another's too."""
        order = self.rng.permutation(self.places)
        left = {c: order[self.labels[order] == c].tolist() for c in range(CLASSES)}
        everything = tuple(range(CLASSES))
        places = [sample_images(left, everything, mix, samples, self.rng) for mix in mixes]
        return Dealt(
            places,
            [self.labels[own] for own in places],
            np.ones(len(places), np.float32),
            np.zeros(len(places), np.float32),
        )

    def some(self, dealt: Dealt, tenths: int) -> np.ndarray:
        """So many tenths of the clients, at least one."""
        clients = len(dealt.places)
        count = max(1, round(clients * tenths / 10))
        return self.rng.choice(clients, count, replace=False)


def _equal(pool: Pool, clients: int, samples: int) -> Dealt:
    return pool.by_mix([np.full(CLASSES, 1 / CLASSES)] * clients, samples)


def _dirichlet(concentration: float) -> Deal:
    def deal(pool: Pool, clients: int, samples: int) -> Dealt:
        mixes = pool.rng.dirichlet(np.full(CLASSES, concentration), clients)
        return pool.by_mix(list(mixes), samples)

    return deal


def _two_labels(pool: Pool, clients: int, samples: int) -> Dealt:
    mixes = np.zeros((clients, CLASSES))
    for mix in mixes:
        mix[pool.rng.choice(CLASSES, 2, replace=False)] = 0.5
    return pool.by_mix(list(mixes), samples)


def _papers(pool: Pool, clients: int, samples: int) -> Dealt:
    """Most clients see six classes, one in five the other four: the paper's, whichever they are."""
    order = pool.rng.permutation(CLASSES)
    mixes = np.zeros((clients, CLASSES))
    minority = max(1, clients // 5)
    mixes[: clients - minority, order[:6]] = 1 / 6
    mixes[clients - minority :, order[6:]] = 1 / 4
    return pool.by_mix(list(mixes), samples)


def _sizes(pool: Pool, clients: int, samples: int) -> Dealt:
    dealt = _equal(pool, clients, samples)
    size = 0.6 * samples * np.exp(0.8 * pool.rng.normal(size=clients))
    counts = np.clip(size, min(10, samples), samples).astype(int)
    for client, count in enumerate(counts):
        # Images come class by class: the first ones would be of the first classes alone.
        kept = pool.rng.permutation(samples)[:count]
        dealt.places[client] = dealt.places[client][kept]
        dealt.labels[client] = dealt.labels[client][kept]
    return dealt


def _noisy_images(pool: Pool, dealt: Dealt) -> None:
    dealt.noise[pool.some(dealt, 3)] = 0.7


def _noisy_labels(pool: Pool, dealt: Dealt) -> None:
    for client in pool.some(dealt, 3):
        own = dealt.labels[client]
        hit = pool.rng.random(len(own)) < 0.7
        dealt.labels[client] = np.where(hit, pool.rng.integers(0, CLASSES, len(own)), own)


def _flipped(tenths: int, factor: float = 1.0) -> Fault:
    def lie(pool: Pool, dealt: Dealt) -> None:
        for client in pool.some(dealt, tenths):
            dealt.labels[client] = CLASSES - 1 - dealt.labels[client]
            dealt.factors[client] = factor

    return lie


def _reversed(pool: Pool, dealt: Dealt) -> None:
    dealt.factors[pool.some(dealt, 2)] = -1.0


SKEWS: dict[str, Deal] = {
    "equal": _equal,
    "dirichlet-0.1": _dirichlet(0.1),
    "dirichlet-0.3": _dirichlet(0.3),
    "dirichlet-1": _dirichlet(1.0),
    "two-labels": _two_labels,
    "sizes": _sizes,
    "paper": _papers,
}
"""Who holds which images, and how many."""
FAULTS: dict[str, Fault] = {
    "noisy-images": _noisy_images,
    "noisy-labels": _noisy_labels,
    "flipped-1": _flipped(1),
    "flipped-3": _flipped(3),
    "reversed": _reversed,
    "scaled": _flipped(1, factor=4.0),
}
"""Clients that are noisy or attack.

`flipped-1` and `flipped-3` are one and three clients of ten that call every digit d by 9 - d,
`reversed` two that send their update backwards, `scaled` one that flips and sends it fourfold.
"""
KINDS = (*list(SKEWS)[:-1], *FAULTS, "paper")
"""Skews and faults, each alone: the kinds of the study."""
ATTACKED = ("flipped-1", "flipped-3", "reversed", "scaled")
"""Those with clients that attack."""
COMBINED = tuple(
    f"{skew}+{fault}"
    for skew in ("dirichlet-0.1", "dirichlet-0.3", "two-labels", "sizes", "paper")
    for fault in ("flipped-3", "reversed", "scaled")
)
"""Skews with attackers among the clients, to learn from beside the others."""


def kinds_of(names: str) -> tuple[str, ...]:
    """Kinds by their names joined by commas; `all` are all alone, and those that are combined by default.

    Examples
    --------
    >>> kinds_of("equal,paper+noisy-labels")
    ('equal', 'paper+noisy-labels')
    """
    if names == "all":
        return KINDS + COMBINED
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        skew, _, fault = name.partition("+")
        if name not in KINDS and not (skew in SKEWS and fault in FAULTS):
            near = suggest(name, KINDS + COMBINED)
            raise InputError(
                f"kinds: {name!r} is none; choose all, or some of {', '.join(KINDS)}, or a skew and a "
                f"fault such as {COMBINED[-1]}{near}"
            )
    return chosen


def _deal(kind: str, pool: Pool, clients: int, samples: int) -> Dealt:
    """The federation of a kind; faults by themselves befall clients that hold alike."""
    parts = kind.split("+")
    dealt = SKEWS.get(parts[0], _equal)(pool, clients, samples)
    if parts[-1] in FAULTS:
        FAULTS[parts[-1]](pool, dealt)
    return dealt


@dataclass(frozen=True)
class Mixture:
    """Federations of several kinds over one set of images: a task each, and the kind of each task."""

    digits: Digits
    partition: Partition
    tasks: Tasks
    kinds: tuple[str, ...]


Wanted = tuple[str, int, int]
"""A federation's kind, how many clients it has, and the seed that deals it."""


def mixture(
    digits: Digits, wanted: Sequence[Wanted], places: np.ndarray, *, samples: int = 80
) -> Mixture:
    """These federations, dealt out of these images, each as if it were the only one.

    Noisy images are added to the others, and no server's set holds them.
    """
    for kind, clients, seed in wanted:
        if clients * samples > len(places):
            raise InputError(
                f"mixture: {clients} clients of {samples} images need {clients * samples}, but there "
                f"are {len(places)}; ask for fewer of either ({kind}, seed {seed})"
            )
    pools = [
        Pool(digits.labels, places, np.random.default_rng([*_number(kind), clients, seed]))
        for kind, clients, seed in wanted
    ]
    dealt = [
        _deal(kind, pool, clients, samples)
        for pool, (kind, clients, _) in zip(pools, wanted, strict=True)
    ]
    digits, rows = _with_noise(digits, dealt, pools)
    sizes = [clients for _, clients, _ in wanted]
    firsts = np.cumsum([0, *sizes])
    tasks = Tasks.of([range(a, a + m) for a, m in zip(firsts[:-1], sizes, strict=True)])
    kinds = tuple(kind for kind, _, _ in wanted)
    return Mixture(digits, _partition(dealt, rows, samples), tasks, kinds)


def _number(kind: str) -> list[int]:
    """What sets a kind's randomness apart."""
    return [KINDS.index(part) for part in kind.split("+")]


def _with_noise(
    digits: Digits, dealt: Sequence[Dealt], pools: Sequence[Pool]
) -> tuple[Digits, list[np.ndarray]]:
    """The images with noisy copies behind them, and where each client's images then lie."""
    images, labels, rows, end = [digits.images], [digits.labels], [], len(digits.labels)
    for federation, pool in zip(dealt, pools, strict=True):
        for places, noise in zip(federation.places, federation.noise, strict=True):
            if noise == 0:
                rows.append(places)
                continue
            clean = digits.images[places]
            images.append((clean + noise * pool.rng.normal(size=clean.shape)).astype(np.float32))
            labels.append(digits.labels[places])
            rows.append(np.arange(end, end + len(places)))
            end += len(places)
    server = np.pad(digits.server, (0, end - len(digits.server)))
    whole = replace(
        digits, images=np.concatenate(images), labels=np.concatenate(labels), server=server
    )
    return whole, rows


def _partition(dealt: Sequence[Dealt], rows: list[np.ndarray], samples: int) -> Partition:
    """The clients of all federations, one after the other; a group is a federation."""

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, samples - len(values)), mode="edge")

    own_labels = [own for federation in dealt for own in federation.labels]
    return Partition(
        np.stack([padded(own) for own in rows]).astype(np.int32),
        np.stack([padded(own) for own in own_labels]).astype(np.int32),
        np.array([len(own) for own in rows], np.int32),
        np.repeat(np.arange(len(dealt)), [len(federation.places) for federation in dealt]),
        np.concatenate([federation.factors for federation in dealt]),
        np.concatenate([np.arange(len(federation.places)) for federation in dealt]),
    )
