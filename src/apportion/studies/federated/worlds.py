"""The worlds of the study `federations`: clients, and the tasks policies learn from and are tried on.

Three of them: tasks of unequal difficulty, other splits and numbers of clients, and clients that flip
their labels. Tasks come from a seed alone, whatever else is computed beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apportion.domains.federated.digits import CLASSES, Digits
from apportion.domains.federated.partitions import (
    MAJORITY,
    MINORITY,
    Partition,
    dirichlet_split,
    mixed_tasks,
)
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.training import build, sample_tasks
from apportion.tasks import Tasks

ALL = tuple(range(CLASSES))
FLIPPED = ("equal clients", "skewed clients")
"""Whom the clients that flip their labels are among."""

TasksOf = Callable[[int], Tasks]
"""The tasks of a seed."""


@dataclass(frozen=True)
class World:
    """Where the policies of an experiment learn, and where they are tried."""

    settings: FederatedSettings
    partition: Partition
    training: TasksOf
    tried: dict[str, tuple[Partition, TasksOf]]
    """Clients and unseen tasks of each setting."""


def unequal_tasks(settings: FederatedSettings, digits: Digits) -> World:
    """Eight training tasks of clients that are all alike, two of the paper's 8 + 2 clients.

    Twice the usual updates, since a task must be met several times before its score means anything.
    """
    majority, minority = settings.clients
    small = replace(settings, samples=settings.samples // 2, steps=2 * settings.steps)
    partition = dirichlet_split(
        digits,
        (majority, minority, (majority + minority) // 2),
        small.samples,
        100.0,
        (MAJORITY, MINORITY, ALL),
        seed=settings.seed,
    )
    *skewed, alike = _groups(partition)
    seen = [group[:cut] for group, cut in zip(skewed, settings.seen, strict=True)]
    rest = [group[cut:] for group, cut in zip(skewed, settings.seen, strict=True)]

    def training(seed: int) -> Tasks:
        easy = mixed_tasks([alike], (10,), 8, seed=seed)
        return easy.joined(mixed_tasks(seen, (8, 2), 2, seed=seed))

    def unseen(seed: int) -> Tasks:
        return mixed_tasks(rest, (8, 2), settings.unseen, seed=seed + 100)

    return World(small, partition, training, {f"{settings.state} state": (partition, unseen)})


def other_federations(settings: FederatedSettings, digits: Digits, widths: Sequence[int]) -> World:
    """Train on the paper's split with 10 clients; try other splits and numbers of clients."""
    _, partition = build(settings, digits)
    rest = [group[cut:] for group, cut in zip(_groups(partition), settings.seen, strict=True)]

    def training(seed: int) -> Tasks:
        return sample_tasks(settings, partition, seed)[0]

    def unseen(seed: int) -> Tasks:
        return sample_tasks(settings, partition, seed)[1]

    skewed = partition.with_quantity_skew(1.0, seed=settings.seed)
    tried: dict[str, tuple[Partition, TasksOf]] = {
        "the split trained on": (partition, unseen),
        "quantity skew": (skewed, unseen),
    }
    everyone = [np.arange(partition.universe)]
    for concentration in (0.1, 0.5):
        other = dirichlet_split(
            digits, (partition.universe,), settings.samples, concentration, seed=settings.seed
        )
        tasks = _unseen_tasks(everyone, (10,), settings)
        tried[f"Dirichlet({concentration:g}) labels"] = (other, tasks)
    for width in widths:
        parts = (width - width // 5, width // 5)
        if all(part <= len(group) for part, group in zip(parts, rest, strict=True)):
            tried[f"{width} clients"] = (partition, _unseen_tasks(rest, parts, settings))
    return World(settings, partition, training, tried)


def flipped_labels(settings: FederatedSettings, digits: Digits, kind: str) -> World:
    """Clients that flip their labels: 3 of 10 among equals, 2 of 10 in the paper's skewed tasks."""
    majority, minority = settings.clients
    third = majority // 3
    counts, classes, sizes = {
        "equal clients": ((majority, minority), (ALL, ALL), (7, 3)),
        "skewed clients": (
            (majority - third, minority, third), (MAJORITY, MINORITY, MAJORITY), (6, 2, 2)
        ),
    }[kind]  # fmt: skip
    small = replace(settings, samples=settings.samples // 2)
    honest = dirichlet_split(digits, counts, small.samples, 100.0, classes, seed=settings.seed)
    groups = _groups(honest)
    partition = honest.with_flipped_labels(groups[-1].tolist())
    seen = [group[: len(group) // 2] for group in groups]
    rest = [group[len(group) // 2 :] for group in groups]

    def training(seed: int) -> Tasks:
        return mixed_tasks(seen, sizes, settings.tasks, seed=seed)

    def unseen(seed: int) -> Tasks:
        return mixed_tasks(rest, sizes, settings.unseen, seed=seed + 100)

    return World(small, partition, training, {kind: (partition, unseen)})


def _groups(partition: Partition) -> list[np.ndarray]:
    """The clients of each group."""
    return [np.flatnonzero(partition.groups == group) for group in np.unique(partition.groups)]


def _unseen_tasks(
    pools: Sequence[np.ndarray], sizes: Sequence[int], settings: FederatedSettings
) -> TasksOf:
    return lambda seed: mixed_tasks(pools, sizes, settings.unseen, seed=seed)
