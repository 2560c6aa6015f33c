"""Who holds which digits: the clients of a universe, their data disjoint and skewed.

The paper's split gives most clients the digits 0-5 and the rest 6-9, and makes a task of 8 of the
former and 2 of the latter. The other skews of federated learning are in `kinds.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.domains.federated.digits import Digits
from apportion.errors import InputError
from apportion.tasks import Task

MAJORITY, MINORITY = tuple(range(6)), tuple(range(6, 10))


@dataclass(frozen=True)
class Partition:
    """For each client the images it holds, its own labels of them, how many, and its group.

    Rows are padded to the largest client by repeating an image; `counts` says how many are real.
    """

    index: np.ndarray
    labels: np.ndarray
    counts: np.ndarray
    groups: np.ndarray
    multiples: np.ndarray | None = None
    """What each client multiplies its update by before it sends it: 1 unless it attacks."""
    names: np.ndarray | None = None
    """A number for each client that decides its batches: its place, unless given."""

    @property
    def factors(self) -> np.ndarray:
        """The multiples, 1 where none are given."""
        return np.ones(self.universe, np.float32) if self.multiples is None else self.multiples

    @property
    def identities(self) -> np.ndarray:
        """The names, places where none are given."""
        return np.arange(self.universe) if self.names is None else self.names

    @property
    def universe(self) -> int:
        """Number of clients M."""
        return len(self.counts)


def paper_split(
    digits: Digits, clients: tuple[int, int] = (60, 40), samples: int = 600, *, seed: int = 0
) -> Partition:
    """Clients of group 0 see random digits 0-5, clients of group 1 random digits 6-9.

    A group whose digits do not suffice shares them evenly, where that costs a client at most one
    image in a hundred (MNIST has 23,983 of the 24,000 images of 6-9).
    """
    rng = np.random.default_rng(seed)
    rows, groups = [], []
    for group, (count, classes) in enumerate(zip(clients, (MAJORITY, MINORITY), strict=True)):
        pool = rng.permutation(np.flatnonzero(np.isin(digits.labels, classes) & ~digits.server))
        if len(pool) < 0.99 * samples * count:
            raise InputError(
                f"partition: {count} clients of {samples} images need {count * samples} digits "
                f"{classes[0]}-{classes[-1]}, but there are {len(pool)}; ask for fewer of either"
            )
        rows += np.array_split(pool[: samples * count], count)
        groups += [group] * count
    return _padded(digits, rows, groups)


def sample_images(left, seen, mix, samples, rng) -> np.ndarray:
    """`samples` images by the mix, taken out of what is left of each class."""
    taken: list[int] = []
    while len(taken) < samples:
        open_ = np.array([len(left[c]) > 0 for c in seen])
        chance = np.where(open_, mix + 1e-9, 0.0)
        wanted = rng.multinomial(samples - len(taken), chance / chance.sum())
        for c, count in zip(seen, wanted, strict=True):
            taken += left[c][:count]
            del left[c][:count]
    return np.array(taken)


def _padded(digits: Digits, rows: list[np.ndarray], groups: list[int]) -> Partition:
    counts = np.array([len(row) for row in rows], np.int32)
    widest = counts.max()
    index = np.stack([np.pad(row, (0, widest - len(row)), mode="edge") for row in rows])
    return Partition(
        index.astype(np.int32), digits.labels[index].astype(np.int32), counts, np.array(groups)
    )


def side_by_side(partitions: Sequence[Partition]) -> Partition:
    """Partitions as one universe, one after the other; a client keeps the name it has in its own."""
    widest = max(own.index.shape[1] for own in partitions)

    def rows(name: str) -> np.ndarray:
        tables = [getattr(own, name) for own in partitions]
        return np.concatenate(
            [np.pad(t, ((0, 0), (0, widest - t.shape[1])), mode="edge") for t in tables]
        )

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(own, name) for own in partitions])

    return Partition(
        *(rows("index"), rows("labels"), column("counts"), column("groups")),
        *(column("factors"), column("identities")),
    )


def skewed_tasks(
    partition: Partition,
    training: int,
    unseen: int,
    *,
    sizes: tuple[int, int] = (8, 2),
    seen: tuple[int, int] = (40, 25),
    seed: int = 0,
) -> tuple[Task]:
    """Training tasks over the first `seen` clients of each group, unseen tasks over the others.

    In every task the majority comes first: clients 8 and 9 are the paper's minority.
    """
    pools = [np.flatnonzero(partition.groups == group) for group in (0, 1)]
    first = [pool[:cut] for pool, cut in zip(pools, seen, strict=True)]
    rest = [pool[cut:] for pool, cut in zip(pools, seen, strict=True)]
    return (
        mixed_tasks(first, sizes, training, seed=seed),
        mixed_tasks(rest, sizes, unseen, seed=seed + 1),
    )


def mixed_tasks(
    pools: Sequence[np.ndarray], sizes: Sequence[int], count: int, *, seed: int = 0
) -> Task:
    """Distinct tasks of so many clients out of each pool, in the pools' order."""
    rng = np.random.default_rng(seed)
    for pool, size in zip(pools, sizes, strict=True):
        if size > len(pool):
            raise InputError(f"tasks: {size} clients were asked for out of a group of {len(pool)}")
    available = math.prod(math.comb(len(p), s) for p, s in zip(pools, sizes, strict=True))
    if count > available:
        raise InputError(
            f"tasks: {count} distinct tasks of {tuple(sizes)} clients were asked for, but there "
            f"are only {available}; ask for fewer"
        )
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < count:
        task = [np.sort(rng.choice(p, s, replace=False)) for p, s in zip(pools, sizes, strict=True)]
        drawn[tuple(int(i) for i in np.concatenate(task))] = None
    return Task.of(drawn)
