"""How far an aggregation policy should take the clients' counts back, where they hold more or less.

    python benchmarks/aggregator_sizes.py try POLICY MNIST --out DIR [--where NAME ...]
    python benchmarks/aggregator_sizes.py choose POLICY --out DIR
    python benchmarks/aggregator_sizes.py judge POLICY MNIST --out DIR [--where NAME ...]
    python benchmarks/aggregator_sizes.py table

A larger client's model looks better one round ahead, so that a policy starves small clients, which costs
variety in later rounds. `try` lets `levelled` variants of the policy in the folder POLICY aggregate in
training federations of clients that differ in how much they hold, alone and with faults; `choose` takes
one by the rule of `chosen` and writes it into DIR; `judge` compares POLICY, the one in DIR and FedAvg on
validation. All images are of MNIST (the usual mnist.npz), and none of those that the study `federations`
deals out. `table` writes sizes_table.csv, gains over FedAvg in points, out of sizes.csv.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from aggregator_calibration import FOLDER, IMAGES, LAST, NARROW, SERVERS, SETTINGS, levelled

from apportion.domains.federated.aggregators import BySamples, Learned, run_episode
from apportion.domains.federated.clients import Owned
from apportion.domains.federated.data import KINDS, Digits, Mixture, halves, load_mnist, mixture
from apportion.domains.federated.federation import Federation, federation_of
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.states import LARGEST
from apportion.runs.policy_file import load_policy, save_policy
from apportion.statistics import compare
from apportion.trees import stack, take

ALONE, LIARS, CLAIMING = "sizes", "flipped-3", "flipped-3, claiming few"
CROSSED = tuple(
    f"{ALONE}+{fault}" for fault in ("noisy-labels", "flipped-1", "flipped-3", "reversed", "scaled")
)
CLAIMED = 5
"""Samples that who lies about their number says it holds."""
LINES = [(theta, NARROW) for theta in (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)]
GRID = (*LINES, (3.0, 0.5), (4.0, 1.0))
"""What is tried: theta, and the reach of the unit that says it."""
LOSS = 0.003
"""What may be lost where faults meet sizes."""
FEDAVG, BEFORE, AFTER = "FedAvg", "before", "after"
COLUMNS = ["part", "where", "kind", "seed", "method", "late", "last"]
"""`late` is the mean test accuracy of the last five rounds, `last` that of the last."""


@dataclass(frozen=True)
class Circumstance:
    """What federations have in common."""

    clients: int = 10
    samples: int = 200
    """The server's."""
    model: str = "perceptron"
    width: int = SETTINGS.width


USUAL = "10 clients, 200 samples"
CIRCUMSTANCES = {
    USUAL: Circumstance(),
    "10 clients, 20 samples": Circumstance(samples=20),
    "5 clients, 200 samples": Circumstance(clients=5),
    "convolutional, 200 samples": Circumstance(model="convolutional", width=8),
}


@dataclass(frozen=True)
class Part:
    """Federations to try policies in, or to judge them by."""

    name: str
    images: slice
    """Of those that the study does not deal out."""
    servers: int
    test: int
    seed: int
    alone: Sequence[int]
    """Seeds that deal the clients of the kind alone."""
    others: Sequence[int]
    """Those of other kinds."""


TRAINING = Part(
    "training", slice(IMAGES), SERVERS, 2000, 77, range(7000, 7008), range(7000, 7002)
)  # fmt: skip
VALIDATION = Part(
    "validation", slice(IMAGES, None), 10000, 8000, 1000,
    [*range(1000, 1008), *range(2000, 2008)], range(1000, 1002),
)  # fmt: skip


class Claimed(Federation):
    """A federation in which who lies about its labels says that it holds few samples."""

    held: jax.Array

    def __init__(self, federation: Federation, dealt: Mixture):
        for field in dataclasses.fields(Federation):
            setattr(self, field.name, getattr(federation, field.name))
        lies = dealt.partition.labels != dealt.digits.labels[dealt.partition.index]
        self.held = federation.counts
        self.counts = jnp.where(jnp.asarray(lies.any(1)), CLAIMED, federation.counts)

    def train(self, model, client, *, key):
        owned = Owned(self.images, self.index[client], self.local_labels[client], self.held[client])
        return model + self.factors[client] * (self.descend(model, owned, key=key) - model)


@eqx.filter_jit
def ends(federation, aggregators, task, key):
    """Test accuracy of the last rounds and of the last, under each of stacked policies and FedAvg."""

    def one(aggregator):
        tested = run_episode(federation, aggregator, task, key=key).tested
        return jnp.stack([tested[-LAST:].mean(), tested[-1]])

    return jnp.concatenate([eqx.filter_vmap(one)(aggregators), one(BySamples())[None]])


def wanted(part: Part, where: str) -> list[tuple[str, int]]:
    """Kinds and seeds: the kind alone everywhere, few of it with convolutions, others in one place."""
    alone = [(ALONE, seed) for seed in part.alone]
    if CIRCUMSTANCES[where].model == "convolutional":
        return alone[:4]
    others = [(kind, seed) for kind in (LIARS, CLAIMING, *CROSSED) for seed in part.others]
    return [*others, *alone] if where == USUAL else alone


def tried(mnist: Digits, part: Part, where: str, methods: dict[str, AggregationPolicy]):
    """A row for every federation of a circumstance and each policy, gated, and FedAvg."""
    own = CIRCUMSTANCES[where]
    places = np.random.default_rng(11).permutation(halves(mnist)[0])[part.images]
    server = np.arange(len(places)) < part.servers
    digits = Digits(mnist.images[places], mnist.labels[places], server)
    settings = replace(SETTINGS, model=own.model, width=own.width)
    cells = wanted(part, where)
    asked = [(kind.partition(",")[0], own.clients, seed) for kind, seed in cells]
    dealt = mixture(digits, asked, np.flatnonzero(~server), samples=settings.samples)
    drawn = (own.samples, own.samples)
    federation = federation_of(settings, dealt, 400, part.test, drawn, seed=part.seed)
    claimed = Claimed(federation, dealt)
    policies = stack([Learned(policy) for policy in methods.values()])
    for place, (kind, seed) in enumerate(cells):
        number = KINDS.index(asked[place][0].rpartition("+")[2])
        key = jax.random.fold_in(jax.random.key(50_000 + seed), number)
        task = take(dealt.tasks, place)
        found = ends(claimed if kind == CLAIMING else federation, policies, task, key)
        print(where, kind, seed, (100 * found[:, 0]).round(2), flush=True)
        for method, (late, last) in zip([*methods, FEDAVG], np.asarray(found, float), strict=True):
            yield (part.name, where, kind, seed, method, round(late, 5), round(last, 5))


def named(theta: float, reach: float) -> str:
    """A try's name.

    >>> named(2.0, 0.05)
    '2, 0.05'
    """
    return f"{theta:g}, {reach:g}"


def most_gained(theta: float, reach: float) -> float:
    """By what factor a client's odds rise at most when it claims fewer samples than the others.

    >>> round(most_gained(0.0, 0.05)), round(most_gained(3.0, 0.5), 1)
    (1, 6.6)
    """
    apart = np.linspace(-12, 0, 2001)
    return float(np.exp((apart - theta / reach * np.tanh(np.tanh(reach * apart))).max()))


def chosen(rows: pd.DataFrame) -> tuple[float, float]:
    """By the last five rounds in training federations: the greatest mean over the circumstances where
    clients differ in size alone, among those that lose at most `LOSS` in each crossed kind against the
    policy as it was, and that let nobody gain more by understating its count than FedAvg lets it gain
    by overstating.
    """
    late = rows.pivot_table(index=["kind", "where"], columns="method", values="late")
    late = late.groupby("kind").mean()
    crossed = late.loc[list(CROSSED)]

    def allowed(way: tuple[float, float]) -> bool:
        lost = crossed[named(*GRID[0])] - crossed[named(*way)]
        return bool((lost <= LOSS).all()) and most_gained(*way) <= LARGEST

    return max(filter(allowed, GRID), key=lambda way: late.loc[ALONE, named(*way)])


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Gains over FedAvg after the last round and in the last five, in points, paired by federation."""
    found = []
    for (part, where, kind), own in rows.groupby(["part", "where", "kind"], sort=False):
        late, last = (own.pivot(index="seed", columns="method", values=v) for v in ("late", "last"))
        for method in dict.fromkeys(own["method"]):
            gain = compare(100 * last[method], 100 * last[FEDAVG])
            found.append({
                "part": part, "where": where, "kind": kind, "method": method, "federations": gain.n,
                "accuracy": last[method].mean(), "gain": gain.value, "low": gain.low, "high": gain.high,
                "gain of the last five": 100 * (late[method] - late[FEDAVG]).mean(),
            })  # fmt: skip
    return pd.DataFrame(found).round(4)


def added(file: Path, rows) -> None:
    """Rows in place of earlier ones of the same federation and method."""
    new = pd.DataFrame(rows, columns=COLUMNS)
    if file.exists():
        new = pd.concat([pd.read_csv(file), new])
    new.drop_duplicates(COLUMNS[:5], keep="last").to_csv(file, index=False)


def loaded(folder: Path) -> AggregationPolicy:
    policy = load_policy(folder)
    assert isinstance(policy, AggregationPolicy)
    return policy


def choose(asked: argparse.Namespace) -> None:
    """Write the policy that the rule takes, and its numbers."""
    rows = pd.read_csv(asked.out / "sizes.csv")
    theta, reach = chosen(rows[rows["part"] == TRAINING.name])
    about = json.loads((asked.policy / "policy.json").read_text())["about"]
    save_policy(levelled(loaded(asked.policy), theta, reach), asked.out, about)
    (asked.out / "counts.json").write_text(json.dumps({"theta": theta, "reach": reach}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("try", "choose", "judge"):
        command = commands.add_parser(name)
        command.add_argument("policy", type=Path)
        if name != "choose":
            command.add_argument("mnist", type=Path)
            command.add_argument("--where", nargs="+", choices=CIRCUMSTANCES)
        command.add_argument("--out", type=Path, required=True)
    commands.add_parser("table")
    asked = parser.parse_args()
    match asked.command:
        case "try":
            before = loaded(asked.policy)
            methods = {named(*way): levelled(before, *way) for way in GRID}
            for where in asked.where or list(CIRCUMSTANCES)[:3]:
                rows = tried(load_mnist(asked.mnist), TRAINING, where, methods)
                added(asked.out / "sizes.csv", rows)
        case "choose":
            choose(asked)
        case "judge":
            before = loaded(asked.policy)
            methods = {BEFORE: levelled(before, 0.0), AFTER: loaded(asked.out)}
            for where in asked.where or CIRCUMSTANCES:
                rows = tried(load_mnist(asked.mnist), VALIDATION, where, methods)
                added(asked.out / "sizes.csv", rows)
        case _:
            table(pd.read_csv(FOLDER / "sizes.csv")).to_csv(FOLDER / "sizes_table.csv", index=False)


if __name__ == "__main__":
    main()
