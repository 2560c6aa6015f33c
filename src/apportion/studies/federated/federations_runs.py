"""The runs behind `federations`, as arrays: other federations than the paper's.

Three experiments, each at the small size: tasks of unequal difficulty, where prioritisation could
pay; policies carried over to other partitions and numbers of clients; and clients that lie, where
learned shares meet the usual defences. No plotting or tables, so that a bare GPU can do it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from apportion.domains.federated.aggregators import (
    UNIFORM,
    Aggregator,
    Krum,
    Median,
    TrimmedMean,
    run_episodes,
)
from apportion.domains.federated.digits import CLASSES, Digits
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.partitions import (
    MAJORITY,
    MINORITY,
    Partition,
    dirichlet_split,
    mixed_tasks,
)
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.training import build, draw, stack, train_policies, try_policies
from apportion.policy import Policy
from apportion.tasks import Tasks

ALL = tuple(range(CLASSES))
DEFENCES: dict[str, Aggregator] = {
    "FedAvg": UNIFORM,
    "median": Median(),
    "trimmed mean": TrimmedMean(0.3),
    "Krum": Krum(3),
}
EXPERIMENTS = ("unequal", "transfer", "poisoned")
LIARS = ("equal clients", "skewed clients")
PRIORITIES = {
    "the paper's": {"scorer": "reward-variance", "alpha": 0.5, "beta": 1.0},
    "reward variance": {"scorer": "reward-variance", "alpha": 1.0, "beta": 0.0},
    "gradient norm": {"scorer": "gradient-norm", "alpha": 1.0, "beta": 0.0},
    "realised gain": {"scorer": "realised-gain", "alpha": 1.0, "beta": 0.0},
}
"""Ways to draw tasks where they are unequal: the paper's corrects the bias, the others keep it."""
Progress = Callable[[str, float], None]
Arrays = dict[str, np.ndarray]


def sizes(scale: Literal["quick", "paper"], *, seed: int = 0) -> FederatedSettings:
    """Settings of the experiments; `paper` has clients enough for tasks of 50."""
    if scale == "paper":
        return FederatedSettings(
            clients=(120, 60), seen=(70, 40), unseen=4, test=4000, steps=24, seed=seed
        )
    return FederatedSettings(
        model="perceptron", width=32, rounds=8, unseen=4, steps=8, samples=60, seed=seed
    )


class Record:
    """Test accuracies (seeds, tasks, rounds) under `experiment/setting/method`, as they come in."""

    def __init__(self, total: int, progress: Progress | None, on_stage: Callable | None):
        self.arrays: Arrays = {}
        self.total, self.progress, self.on_stage = total, progress, on_stage
        self.done = 0

    def add(self, name: str, tested: jax.Array) -> None:
        self.arrays[name] = np.asarray(tested, float)

    def finish(self, what: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(what, self.done / self.total)
        if self.on_stage is not None:
            self.on_stage(self.arrays)


def compute(
    settings: FederatedSettings,
    digits: Digits,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    experiments: Collection[str] = EXPERIMENTS,
    states: Sequence[str] = ("accuracy", "rich"),
    sizes: Sequence[int] = (5, 20, 50),
    priorities: Sequence[str] = tuple(PRIORITIES),
    progress: Progress | None = None,
    on_stage: Callable[[Arrays], None] | None = None,
) -> Arrays:
    """The experiments asked for; names are `experiment/setting/method`."""
    stages = {"unequal": len(priorities), "transfer": 1, "poisoned": len(LIARS)}
    total = len(states) * sum(stages[experiment] for experiment in experiments)
    record = Record(total, progress, on_stage)
    for state in states:
        here = replace(settings, state=state)
        if "unequal" in experiments:
            unequal(record, here, digits, seeds, priorities)
        if "transfer" in experiments:
            transfer(record, here, digits, seeds, sizes)
        if "poisoned" in experiments:
            for liars in LIARS:
                poisoned(record, here, digits, seeds, liars)
    return record.arrays


def learn(
    settings: FederatedSettings,
    federation: Federation,
    tasks: Sequence[Tasks],
    methods: Sequence,
    seeds: Sequence[int],
) -> Policy:
    """One stacked policy for each method and seed, methods outermost."""
    runs = [(method, place) for method in methods for place in range(len(seeds))]
    return train_policies(
        replace(settings, tasks=len(tasks[0])),
        federation,
        [tasks[place] for _, place in runs],
        [method for method, _ in runs],
        [seeds[place] for _, place in runs],
    ).policies


def attempt(federation: Federation, policies: Policy, tasks: Sequence[Tasks]) -> jax.Array:
    """Test accuracy (runs, tasks, rounds) of stacked policies, each on its seed's tasks."""
    keys = stack([_keys(len(own), place) for place, own in enumerate(tasks)])
    return try_policies(federation, policies, stack(tasks), keys).tested


def defend(federation: Federation, aggregator: Aggregator, tasks: Sequence[Tasks]) -> jax.Array:
    """The same under an aggregator that learns nothing, with the same batches."""
    return stack(
        [
            run_episodes(federation, aggregator, own, key=jax.random.key(1000 + place)).tested
            for place, own in enumerate(tasks)
        ]
    )


def _keys(count: int, place: int):
    return jax.random.split(jax.random.key(1000 + place), count)


def unequal(
    record: Record,
    settings: FederatedSettings,
    digits: Digits,
    seeds: Sequence[int],
    priorities: Sequence[str],
) -> None:
    """Eight training tasks of clients that are all alike, two of the paper's 8 + 2 clients.

    Twice the usual updates, since a task must be met several times before its score tells anything.
    """
    first, second = settings.clients
    alike = (first + second) // 2
    clients = (first, second, alike)
    small = replace(settings, samples=settings.samples // 2, steps=2 * settings.steps)
    partition = dirichlet_split(
        digits, clients, small.samples, 100.0, (MAJORITY, MINORITY, ALL), seed=settings.seed
    )
    pools = [np.flatnonzero(partition.groups == group) for group in range(3)]
    seen = [pool[:cut] for pool, cut in zip(pools, settings.seen, strict=False)]
    rest = [pool[cut:] for pool, cut in zip(pools, settings.seen, strict=False)]
    training, unseen = [], []
    for seed in seeds:
        easy = mixed_tasks(pools[2:], (10,), 8, seed=seed)
        hard = mixed_tasks(seen, (8, 2), 2, seed=seed)
        training.append(jax.tree.map(lambda a, b: jnp.concatenate([a, b]), easy, hard))
        unseen.append(mixed_tasks(rest, (8, 2), settings.unseen, seed=seed + 100))
    federation, _ = build(small, digits, partition)
    setting = f"{settings.state} state"
    record.add(f"unequal/{setting}/FedAvg", defend(federation, UNIFORM, unseen))
    for place, priority in enumerate(priorities):
        methods = ("mtl", "pmtl") if place == 0 else ("pmtl",)
        drawing = replace(small, **PRIORITIES[priority])
        policies = learn(drawing, federation, training, methods, seeds)
        tested = attempt(federation, policies, list(unseen) * len(methods))
        for row, method in enumerate(methods):
            name = "MTL" if method == "mtl" else f"P-MTL, {priority}"
            own = tested[row * len(seeds) : (row + 1) * len(seeds)]
            record.add(f"unequal/{setting}/{name}", own)
        record.finish(f"unequal tasks: {setting}, {priority}")


def transfer(
    record: Record,
    settings: FederatedSettings,
    digits: Digits,
    seeds: Sequence[int],
    sizes: Sequence[int],
) -> None:
    """Train on the paper's split with 10 clients; try other splits and numbers of clients."""
    federation, partition = build(settings, digits)
    drawn = [draw(settings, partition, seed) for seed in seeds]
    policies = learn(settings, federation, [own for own, _ in drawn], ("mtl",), seeds)
    unseen = [tasks for _, tasks in drawn]
    pools = [
        np.flatnonzero(partition.groups == group)[cut:] for group, cut in enumerate(settings.seen)
    ]
    places: list[tuple[str, Partition, Sequence[Tasks]]] = [
        ("the split trained on", partition, unseen),
        ("quantity skew", partition.with_quantity_skew(1.0, seed=settings.seed), unseen),
    ]
    for concentration in (0.1, 0.5):
        other = dirichlet_split(
            digits, (partition.universe,), settings.samples, concentration, seed=settings.seed
        )
        pool = [np.arange(partition.universe)]
        tasks = [mixed_tasks(pool, (10,), settings.unseen, seed=seed) for seed in seeds]
        places.append((f"Dirichlet({concentration:g}) labels", other, tasks))
    for size in sizes:
        parts = (size - size // 5, size // 5)
        if all(part <= len(pool) for part, pool in zip(parts, pools, strict=True)):
            tasks = [mixed_tasks(pools, parts, settings.unseen, seed=seed) for seed in seeds]
            places.append((f"{size} clients", partition, tasks))
    for name, split, tasks in places:
        there, _ = build(settings, digits, split)
        label = f"MTL, {settings.state} state"
        record.add(f"transfer/{name}/{label}", attempt(there, policies, tasks))
        if f"transfer/{name}/FedAvg" not in record.arrays:
            record.add(f"transfer/{name}/FedAvg", defend(there, UNIFORM, tasks))
    record.finish(f"transfer: {settings.state} state")


def poisoned(
    record: Record,
    settings: FederatedSettings,
    digits: Digits,
    seeds: Sequence[int],
    kind: str,
) -> None:
    """Clients that flip their labels: 3 of 10 among equals, 2 of 10 in the paper's skewed tasks."""
    first, second = settings.clients
    if kind == "equal clients":
        honest, sizes = ((first, ALL),), (7, 3)
        liars = (second, ALL)
    else:
        third = first // 3
        honest, sizes = ((first - third, MAJORITY), (second, MINORITY)), (6, 2, 2)
        liars = (third, MAJORITY)
    groups = (*honest, liars)
    small = replace(settings, samples=settings.samples // 2)
    partition = dirichlet_split(
        digits,
        tuple(count for count, _ in groups),
        small.samples,
        100.0,
        tuple(classes for _, classes in groups),
        seed=settings.seed,
    )
    partition = partition.with_flipped_labels(
        np.flatnonzero(partition.groups == len(groups) - 1).tolist()
    )
    pools = [np.flatnonzero(partition.groups == group) for group in range(len(groups))]
    seen = [pool[: len(pool) // 2] for pool in pools]
    rest = [pool[len(pool) // 2 :] for pool in pools]
    training = [mixed_tasks(seen, sizes, settings.tasks, seed=seed) for seed in seeds]
    unseen = [mixed_tasks(rest, sizes, settings.unseen, seed=seed + 100) for seed in seeds]
    federation, _ = build(small, digits, partition)
    policies = learn(small, federation, training, ("mtl",), seeds)
    record.add(
        f"poisoned/{kind}/MTL, {settings.state} state", attempt(federation, policies, unseen)
    )
    for name, aggregator in DEFENCES.items():
        if f"poisoned/{kind}/{name}" not in record.arrays:
            record.add(f"poisoned/{kind}/{name}", defend(federation, aggregator, unseen))
    record.finish(f"poisoned: {kind}, {settings.state} state")
