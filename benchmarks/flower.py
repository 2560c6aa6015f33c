"""Flower's own strategies and the shipped policy on five kinds of federations, in real Flower.

    python benchmarks/flower.py [--seeds 8] [--simulated 1] [--rounds 20]

The clients are those of examples/flower_app, on digits that the policy was not trained on; every run is
`Strategy.start` of Flower. With the first seeds (`--simulated`) the messages go through Flower's
simulation, worker processes and all; every seed also has them handed to the client app in this process,
which is quicker and must come to the same accuracies, but for the order in which clients are added up.
Writes docs/results/flower/table.csv, a row for each run, and about.json.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower_app"))

import client_app
import network
import numpy as np
import pandas as pd
import server_app
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedYogi
from flwr.simulation import run_simulation
from flwr.supercore.task_identity import TaskIdentity

from apportion.bridges.flower import LearnedAggregation
from apportion.domains.federated.data import embedded_digits, halves, mixture
from apportion.runs.environment import installed, versions

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "flower"
KINDS = ("equal", "dirichlet-0.1", "two-labels", "flipped-3", "paper")
CLIENTS, TESTED = 10, 1000
SAMPLES = (200, 20)
"""Of the server's own."""


@dataclass(frozen=True)
class FlowerFederation:
    """Where the clients' digits lie, and what the server has: what it tests on, then its own."""

    kind: str
    seed: int
    folder: Path
    images: np.ndarray
    labels: np.ndarray

    def strategies(self) -> dict[str, tuple[int | None, FedAvg]]:
        """Each with the number of the server's samples that it looks at."""
        plain = {"fraction_evaluate": 0.0}
        found: dict[str, tuple[int | None, FedAvg]] = {
            "FedAvg": (None, FedAvg(**plain)),
            "FedAvgM": (None, FedAvgM(server_momentum=0.7, **plain)),
            "FedYogi": (None, FedYogi(eta=0.05, **plain)),
        }
        for samples in SAMPLES:
            own = slice(TESTED, TESTED + samples)

            def predict(arrays: ArrayRecord, own=own) -> np.ndarray:
                return network.logits(arrays.to_numpy_ndarrays(), self.images[own])

            strategy = LearnedAggregation(predict, self.labels[own])
            found[f"LearnedAggregation, {samples} samples"] = (samples, strategy)
        found["LearnedAggregation, no samples"] = (0, LearnedAggregation())
        return found


def deal(kind: str, seed: int, folder: Path) -> FlowerFederation:
    """Write the digits of a federation's clients to files, as if they lay on many machines."""
    digits = embedded_digits().pooled(2)
    dealt = mixture(digits, [(kind, CLIENTS, seed)], halves(digits)[1])
    if not (dealt.partition.factors == 1).all():
        raise ValueError(f"{kind}: the example's clients send their updates as they are")
    images = dealt.digits.images.reshape(len(dealt.digits.images), -1)
    folder.mkdir()
    for client, count in enumerate(dealt.partition.counts):
        np.savez(
            folder / f"client-{client}.npz",
            images=images[dealt.partition.index[client][:count]],
            labels=dealt.partition.labels[client][:count],
        )
    own = np.random.default_rng(seed).permutation(np.flatnonzero(digits.server))
    own = own[: TESTED + max(SAMPLES)]
    return FlowerFederation(kind, seed, folder, images[own], digits.labels[own])


class InProcess:
    """Flower's grid without its processes: messages go to the client app here and now."""

    def __init__(self):
        # Who sends a message; Flower's own processes are told so by its superlink.
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def get_node_ids(self):
        return range(1, CLIENTS + 1)

    def send_and_receive(self, messages, *, timeout=None):
        return [self._replied(message) for message in messages]

    def _replied(self, message):
        node = message.metadata.dst_node_id
        config = {"partition-id": node - 1, "num-partitions": CLIENTS}
        return client_app.app(message, Context(1, node, config, RecordDict(), {}))


def runs(grid, how: str, federations: list[FlowerFederation], rounds: int) -> list[dict]:
    """Every strategy in every federation, from the same first model."""
    rows = []
    for own in federations:
        test = {"test": (own.images[:TESTED], own.labels[:TESTED])}
        for name, (samples, strategy) in own.strategies().items():
            begun = time.perf_counter()
            tested = server_app.federate(grid, strategy, own.folder, test, rounds, seed=own.seed)
            rows.append({
                "kind": own.kind, "strategy": name, "samples": samples, "seed": own.seed, "how": how,
                "accuracy": round(tested[-1], 4), "mean": round(float(np.mean(tested[1:])), 4),
                "seconds": round(time.perf_counter() - begun, 2),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def simulated(federations: list[FlowerFederation], rounds: int) -> list[dict]:
    """The same through Flower's simulation."""
    rows: list[dict] = []
    server = ServerApp()

    @server.main()
    def main(grid, context):
        rows.extend(runs(grid, "simulation", federations, rounds))

    run_simulation(
        server, client_app.app, num_supernodes=CLIENTS, backend_config=server_app.BACKEND
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--simulated", type=int, default=1, help="seeds that Flower simulates, too")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=FOLDER)
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        federations = [
            deal(kind, seed, Path(name) / f"{kind}-{seed}")
            for seed in range(asked.seeds)
            for kind in KINDS
        ]
        rows = runs(InProcess(), "in process", federations, asked.rounds)
        first = [own for own in federations if own.seed < asked.simulated]
        rows += simulated(first, asked.rounds) if first else []
    table = pd.DataFrame(rows)
    wide = table.pivot(index=["kind", "strategy", "seed"], columns="how", values="accuracy")
    both = wide.dropna() if "simulation" in wide else wide.iloc[:0]
    apart = (both["simulation"] - both["in process"]).abs() if len(both) else pd.Series(dtype=float)
    about = {
        "command": "python benchmarks/flower.py "
        f"--seeds {asked.seeds} --simulated {asked.simulated} --rounds {asked.rounds}",
        "versions": versions() | {name: installed(name) for name in ("flwr", "ray")},
        "clients": CLIENTS,
        "tested_on": TESTED,
        "options": {"FedAvgM": {"server_momentum": 0.7}, "FedYogi": {"eta": 0.05}},
        "runs_in_both": len(both),
        # Between the simulation and the run in one process.
        "largest_difference": float(apart.max()) if len(apart) else None,
        "seconds": round(float(table["seconds"].sum()), 1),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(asked.out / "table.csv", index=False)
    (asked.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    print(table.groupby(["how", "kind", "strategy"])["accuracy"].mean().unstack().to_string())


if __name__ == "__main__":
    main()
