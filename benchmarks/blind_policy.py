"""The shipped policy for servers without samples, on every kind of federation, in the simulator.

    python benchmarks/blind_policy.py [--seeds 8]

There is no gate without samples, so that nothing keeps the policy from harm but what it has learned. Eight
federations of each kind, of clients that training never saw, against FedAvg, FedAvgM and the defences that
need no samples either, in three circumstances. Writes docs/results/blind/table.csv, a row for each
circumstance, kind and aggregator with the paired gain over FedAvg, and about.json.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.domains.federated.aggregators import (
    Aggregator,
    BySamples,
    Learned,
    Median,
    NearestMixing,
    ServerStep,
    run_each,
)
from apportion.domains.federated.data import KINDS, Digits, embedded_digits
from apportion.domains.federated.federation import unseen_world
from apportion.domains.federated.policy import shipped_blind_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.runs.environment import devices, versions
from apportion.statistics import compare

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "blind"
FIRST_SEED = 100
"""Of the federations; those of training are below."""
PEERS: dict[str, Aggregator] = {
    "FedAvg": BySamples(),
    "FedAvgM": ServerStep(momentum=0.7),
    "median": Median(),
    "nearest-neighbour mixing": NearestMixing(0.3),
}


@dataclass(frozen=True)
class Circumstance:
    """What differs from the training's own."""

    clients: int = 10
    images: int = 80
    model: str = "perceptron"
    peers: tuple[str, ...] = tuple(PEERS)


CIRCUMSTANCES = {
    "10 clients, as in training": Circumstance(),
    "20 clients of 60 images": Circumstance(20, 60, peers=("FedAvg", "FedAvgM")),
    "convolutional": Circumstance(model="convolutional", peers=("FedAvg", "FedAvgM")),
}
_run = eqx.filter_jit(run_each)


def finals(own: Circumstance, digits: Digits, seeds: range) -> dict[str, np.ndarray]:
    """Test accuracy (kinds, seeds) after the last round, by aggregator."""
    settings = GradientSettings(state="blind", samples=own.images)
    width = 8 if own.model == "convolutional" else settings.width
    settings = replace(settings, model=own.model, width=width)
    wanted = [(kind, own.clients, seed) for kind in KINDS for seed in seeds]
    federation, dealt = unseen_world(settings, digits, wanted)
    keys = jax.random.split(jax.random.key(FIRST_SEED), len(wanted))
    aggregators = {name: PEERS[name] for name in own.peers}
    aggregators["learned"] = Learned(shipped_blind_policy(), gated=False)
    found = {}
    for name, aggregator in aggregators.items():
        tested = _run(federation, aggregator, dealt.tasks, jnp.asarray(keys)).tested[:, -1]
        found[name] = np.asarray(tested, float).reshape(len(KINDS), len(seeds))
        print(f"{own}: {name} {found[name].mean():.4f}", flush=True)
    return found


def rows(circumstance: str, found: dict[str, np.ndarray]) -> list[dict]:
    """A row for each kind and aggregator, and one for the mean of the kinds."""
    made = []
    for name, tested in found.items():
        plain = found["FedAvg"]
        gains = [compare(ours, theirs) for ours, theirs in zip(tested, plain, strict=True)]
        gains.append(compare(tested.mean(0), plain.mean(0)))
        means = [*tested.mean(1), tested.mean()]
        worst = [*(tested - plain).min(1), (tested - plain).min()]
        for kind, mean, gain, least in zip([*KINDS, "mean"], means, gains, worst, strict=True):
            made.append({
                "circumstance": circumstance, "kind": kind, "aggregator": name, "seeds": gain.n,
                "accuracy": round(float(mean), 4), "gain": round(gain.value, 4),
                "low": round(gain.low, 4), "high": round(gain.high, 4), "worst run": round(float(least), 4),
            })  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=FOLDER)
    asked = parser.parse_args()
    begun, digits, made = time.perf_counter(), embedded_digits(), []
    seeds = range(FIRST_SEED, FIRST_SEED + asked.seeds)
    for name, own in CIRCUMSTANCES.items():
        made += rows(name, finals(own, digits, seeds))
    asked.out.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(made).to_csv(asked.out / "table.csv", index=False)
    about = {
        "command": f"python benchmarks/blind_policy.py --seeds {asked.seeds}",
        "policy": "apportion train federated --state blind",
        "versions": versions(),
        "devices": devices(),
        "seconds": round(time.perf_counter() - begun),
    }
    (asked.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
