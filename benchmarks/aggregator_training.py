"""How an aggregation policy is best trained: uniform draws, priorities, the worst tasks, which kinds.

    python benchmarks/aggregator_training.py train VARIANT [--updates N] [--seed 1] [--start P] [--out DIR]
    python benchmarks/aggregator_training.py peers [--out DIR]
    python benchmarks/aggregator_training.py table [--out DIR]

`train` makes a policy, of the one in the folder P where it is given, saves it, and tries it, gated as in
use, in six federations of each kind of clients that training never saw, skews and faults alone and
combined; `peers` tries FedAvg, shares by gradient with momentum, nearest-neighbour mixing and the shipped
policy. Both take minutes on a graphics card and add a cell, test accuracy after the last round by kind
and federation, to cells.json in DIR (docs/results/aggregator_training). `table` writes table.csv out of
all cells, paired by federation. The federations are none of the study's: they are dealt out of 5,000
digits, by seeds from 100.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.domains.federated.aggregators import (
    Aggregator,
    BySamples,
    GradientShares,
    Learned,
    NearestMixing,
    run_each,
)
from apportion.domains.federated.data import KINDS, embedded_digits
from apportion.domains.federated.federation import training_world, unseen_world
from apportion.domains.federated.policy import AggregationPolicy, shipped_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.training import ThroughRounds, shortfall
from apportion.memory import Replay
from apportion.priority import Priority
from apportion.runs.environment import devices
from apportion.runs.policy_file import load_policy, save_policy
from apportion.statistics import compare
from apportion.training import Chunks, train

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "aggregator_training"
FIRST_SEED, FEDERATIONS = 100, 6
ALONE = ",".join(KINDS)
CROSSED = tuple(
    f"{skew}+{fault}"
    for skew in ("dirichlet-0.1", "dirichlet-0.3", "two-labels", "sizes", "paper")
    for fault in ("noisy-labels", "flipped-1", "flipped-3", "reversed", "scaled")
)
"""Skews with faults, of which policies are trained by default on some."""
CIRCUMSTANCES = {"200 samples": (10, 200), "20 samples": (10, 20), "5 clients": (5, 200)}
"""How many clients there are, and how many samples the server has."""
TOGETHER = ", combined"
"""What is added to a circumstance's name for the kinds that are crossed."""
PEERS: dict[str, Aggregator] = {
    "FedAvg": BySamples(),
    "gradient shares, momentum": GradientShares(momentum=0.5),
    "nearest-neighbour mixing": NearestMixing(0.3),
    "shipped policy": Learned(shipped_policy()),
}


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    alpha: float = 0.0
    """Degree of prioritisation by how little the policy gains over FedAvg; 0 draws uniformly."""
    together: int = 8
    """Tasks in an update."""
    rollouts: int = 2
    """Episodes of each."""
    worst: float = 1.0
    """The part of the tasks that counts: those in which the policy gains least."""
    relative: bool = True
    """Whether the policy reads clients relative to each other."""
    kinds: str = ALONE
    """To learn from."""
    rounds: int = 30
    rate: float = 1e-2
    """Step size at first."""

    def weigh(self, gains: jax.Array) -> jax.Array:
        """All weight on the worst part, alike."""
        count = max(1, round(self.worst * len(gains)))
        return (jnp.argsort(jnp.argsort(gains)) < count) * (len(gains) / count)


VARIANTS = {
    "combined": Variant(together=16, kinds="all"),
    "combined-20-rounds": Variant(together=16, kinds="all", rounds=20),
    "crossed": Variant(together=16, kinds=",".join((*KINDS, *CROSSED))),
    "crossed-gone-on": Variant(together=16, kinds=",".join((*KINDS, *CROSSED)), rate=5e-3),
    "uniform": Variant(),
    "cvar": Variant(worst=0.4),
    "plain": Variant(relative=False),
    "one-task": Variant(together=1, rollouts=16),
    "one-task-pmtl": Variant(alpha=0.5, together=1, rollouts=16),
    "one-task-pmtl-1": Variant(alpha=1.0, together=1, rollouts=16),
}


def trained(
    variant: Variant, updates: int, seed: int, start: AggregationPolicy | None = None
) -> AggregationPolicy:
    """A policy of a variant; the seed decides its first parameters, unless it starts as another, and
    every draw.
    """
    settings = GradientSettings(kinds=variant.kinds, rounds=variant.rounds, copies=12, hidden=32)
    federation, dealt = training_world(settings, embedded_digits())
    policy_key, run_key = jax.random.split(jax.random.key(seed))
    result = train(
        federation,
        dealt.tasks,
        start
        or AggregationPolicy(
            federation.channels, settings.hidden, relative=variant.relative, key=policy_key
        ),
        ThroughRounds(
            variant.rollouts,
            variant.rate,
            updates=updates,
            others=dealt.tasks,
            together=variant.together,
            weigh=variant.weigh,
            logarithm=True,
        ),
        steps=updates,
        selection=Priority(variant.alpha, beta=0.0),
        scorer=shortfall,
        replay=Replay(act_periods=0),
        chunks=Chunks(40),
        key=run_key,
    )
    assert isinstance(result.policy, AggregationPolicy)
    return result.policy


def finals(circumstance: str, aggregator: Aggregator) -> dict[str, list[list[float]]]:
    """Test accuracy after the last round by kind and federation, on the same batches for all: of the
    kinds of the study, and of those that are crossed.
    """
    settings = GradientSettings(pooling=1, samples=120, rounds=30, epochs=2, client_rate=0.1)
    seeds = range(FIRST_SEED, FIRST_SEED + FEDERATIONS)
    clients, samples = CIRCUMSTANCES[circumstance]
    wanted = [(kind, clients, seed) for kind in (*KINDS, *CROSSED) for seed in seeds]
    federation, dealt = unseen_world(settings, embedded_digits(), wanted, samples=samples)
    keys = jnp.stack([jax.random.fold_in(jax.random.key(77), n) for n in range(len(wanted))])
    tested = _run(federation, aggregator, dealt.tasks, keys).tested[:, -1]
    rows = np.asarray(tested, float).reshape(-1, FEDERATIONS).round(4).tolist()
    return {circumstance: rows[: len(KINDS)], circumstance + TOGETHER: rows[len(KINDS) :]}


_run = eqx.filter_jit(run_each)


def add_cell(out: Path, name: str, seed: int, updates: int, aggregator: Aggregator) -> None:
    """Try an aggregator in every circumstance, and add what it gave to the cells."""
    path = out / "cells.json"
    cells = json.loads(path.read_text()) if path.exists() else []
    found = {}
    for here in CIRCUMSTANCES:
        found |= finals(here, aggregator)
    cells.append({
        "variant": name, "seed": seed, "updates": updates, "device": devices()[0], "finals": found
    })  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(cell) for cell in cells) + "\n]\n")


def table(out: Path) -> pd.DataFrame:
    """A row for each circumstance, variant and seed; gains are paired by federation."""
    cells = json.loads((out / "cells.json").read_text())
    rows = []
    for here in dict.fromkeys(here for cell in cells for here in cell["finals"]):
        own = [cell for cell in cells if here in cell["finals"]]
        found = {cell["variant"]: np.array(cell["finals"][here]) for cell in own}
        plain, rival = found["FedAvg"], found["gradient shares, momentum"]
        kinds = CROSSED if here.endswith(TOGETHER) else KINDS
        for cell in own:
            values = np.array(cell["finals"][here])
            lead = compare(values.mean(0), rival.mean(0))
            gains = (values - plain).mean(1)
            rows.append({
                "circumstance": here, "variant": cell["variant"], "seed": cell["seed"],
                "updates": cell["updates"], "accuracy": round(float(values.mean()), 4),
                "over FedAvg": round(float(gains.mean()), 4),
                "over gradient shares": round(lead.value, 4),
                "low": round(lead.low, 4), "high": round(lead.high, 4),
                "worst kind": kinds[int(gains.argmin())],
                "worst over FedAvg": round(float(gains.min()), 4),
            })  # fmt: skip
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["train", "peers", "table"])
    parser.add_argument("variant", nargs="?", choices=list(VARIANTS), default="uniform")
    parser.add_argument("--updates", type=int, default=1080)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER)
    asked = parser.parse_args()
    if asked.command == "train":
        start = None if asked.start is None else load_policy(asked.start)
        assert start is None or isinstance(start, AggregationPolicy)
        policy = trained(VARIANTS[asked.variant], asked.updates, asked.seed, start)
        save_policy(policy, asked.out / f"{asked.variant}-{asked.seed}")
        add_cell(asked.out, asked.variant, asked.seed, asked.updates, Learned(policy))
    elif asked.command == "peers":
        for name, peer in PEERS.items():
            add_cell(asked.out, name, 0, 0, peer)
    else:
        table(asked.out).to_csv(asked.out / "table.csv", index=False)


if __name__ == "__main__":
    main()
