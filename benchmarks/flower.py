"""Flower's own strategies and the shipped policy in real Flower: kinds of federations, and troubles.

    python benchmarks/flower.py [--seeds 8] [--simulated 1] [--rounds 20]
    python benchmarks/flower.py troubles [--seeds 4] [--simulated 1] [--rounds 20]

The first has five kinds of federations with the clients of examples/flower_app, on digits that the policy
was not trained on. `troubles` has scikit-learn's digits and tumours, logistic regressions and, where torch
is installed, networks of torch's; 3, 10 and 40 clients, who hold few classes, flip labels, crash or send
NaN (`flower_clients.py`). Every run is `Strategy.start` of Flower. With the first seeds (`--simulated`) the
messages go through Flower's simulation, worker processes and all; every seed also has them handed to the
client app in this process, which is quicker and must come to the same accuracies, but for the order in
which clients are added up. Writes table.csv, a row for each run, and about.json to docs/results/flower,
or to docs/results/flower_troubles.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower_app"))

import client_app
import flower_clients
import network
import numpy as np
import pandas as pd
import server_app
from flower_clients import MODELS, SERVERS, TROUBLES, Setting
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedYogi
from flwr.simulation import run_simulation
from flwr.supercore.task_identity import TaskIdentity

from apportion.bridges.flower import LearnedAggregation
from apportion.domains.federated.data import embedded_digits, halves, mixture
from apportion.runs.environment import installed, versions

RESULTS = Path(__file__).parents[1] / "docs" / "results"
KINDS = ("equal", "dirichlet-0.1", "two-labels", "flipped-3", "paper")
CLIENTS, TESTED = 10, 1000
SAMPLES = (200, 20)
"""Of the server's own."""
CROWDS = (3, 10, 40)
"""Clients of federations in trouble."""


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

    def __init__(self, app: ClientApp, clients: int):
        self.app, self.clients = app, clients
        # Who sends a message; Flower's own processes are told so by its superlink.
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def get_node_ids(self):
        return range(1, self.clients + 1)

    def send_and_receive(self, messages, *, timeout=None):
        return [self._replied(message) for message in messages]

    def _replied(self, message):
        node = message.metadata.dst_node_id
        config = {"partition-id": node - 1, "num-partitions": self.clients}
        try:
            return self.app(message, Context(1, node, config, RecordDict(), {}))
        except Exception as error:  # as Flower's own processes do
            return Message(Error(0, str(error)), reply_to=message)


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


def troubled_runs(grid, how: str, settings: list[Setting], rounds: int) -> list[dict]:
    """FedAvg and the shipped policy in every federation, from the same first model."""
    rows = []
    for own in settings:
        model, (test, server) = MODELS[own.model], flower_clients.server_rows(own)
        first = (test[0].shape[1], int(test[1].max()) + 1, own.seed)

        def predict(arrays: ArrayRecord, model=model, features=server[0]) -> np.ndarray:
            return model.scores(arrays, features)

        for strategy in (FedAvg(fraction_evaluate=0.0), LearnedAggregation(predict, server[1])):
            tested: list[float] = []

            def evaluate(n, arrays, model=model, test=test, tested=tested) -> MetricRecord:
                tested.append(float((model.scores(arrays, test[0]).argmax(1) == test[1]).mean()))
                return MetricRecord({"accuracy": tested[-1]})

            begun = time.perf_counter()
            strategy.start(
                grid, model.start(*first), num_rounds=rounds, timeout=120.0,
                train_config=ConfigRecord(vars(own)), evaluate_fn=evaluate,
            )  # fmt: skip
            rows.append({
                **vars(own), "strategy": type(strategy).__name__, "how": how,
                "accuracy": round(tested[-1], 4), "mean": round(float(np.mean(tested[1:])), 4),
                "seconds": round(time.perf_counter() - begun, 2),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def simulated(app: ClientApp, clients: int, computing: Callable[[Any], list[dict]]) -> list[dict]:
    """What is computed with Flower's simulation for a grid."""
    rows: list[dict] = []
    server = ServerApp()

    @server.main()
    def main(grid, context):
        rows.extend(computing(grid))

    run_simulation(server, app, num_supernodes=clients, backend_config=server_app.BACKEND)
    return rows


def kinds(seeds: int, first: int, rounds: int) -> list[dict]:
    """Every kind of federation, the first seeds in the simulation, too."""
    with tempfile.TemporaryDirectory() as name:
        federations = [
            deal(kind, seed, Path(name) / f"{kind}-{seed}")
            for seed in range(seeds)
            for kind in KINDS
        ]
        rows = runs(InProcess(client_app.app, CLIENTS), "in process", federations, rounds)
        again = [own for own in federations if own.seed < first]
        if again:
            rows += simulated(
                client_app.app, CLIENTS, lambda grid: runs(grid, "simulation", again, rounds)
            )
    return rows


def troubles(seeds: int, first: int, rounds: int) -> list[dict]:
    """Every trouble, the first seeds in the simulation, too."""
    models = [name for name in MODELS if name != "torch" or installed("torch") is not None]
    app, rows = flower_clients.app, []
    for clients in CROWDS:
        each = product(range(seeds), SERVERS, models, TROUBLES)
        settings = [Setting(data, model, what, clients, seed) for seed, data, model, what in each]
        rows += troubled_runs(InProcess(app, clients), "in process", settings, rounds)
        again = [own for own in settings if own.seed < first]
        if again:
            computing = partial(troubled_runs, how="simulation", settings=again, rounds=rounds)
            rows += simulated(app, clients, computing)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["kinds", "troubles"], default="kinds")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--simulated", type=int, default=1, help="seeds that Flower simulates, too")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    in_kinds = asked.what == "kinds"
    seeds = asked.seeds or (8 if in_kinds else 4)
    rows = (kinds if in_kinds else troubles)(seeds, asked.simulated, asked.rounds)
    table = pd.DataFrame(rows)
    measured = ["how", "accuracy", "mean", "seconds"]
    runs_of = [
        name for name in table.columns.drop("samples", errors="ignore") if name not in measured
    ]
    wide = table.pivot(index=runs_of, columns="how", values="accuracy")
    both = wide.dropna() if "simulation" in wide else wide.iloc[:0]
    apart = (both["simulation"] - both["in process"]).abs() if len(both) else pd.Series(dtype=float)
    about = {
        "command": f"python benchmarks/flower.py {'' if in_kinds else 'troubles '}"
        f"--seeds {seeds} --simulated {asked.simulated} --rounds {asked.rounds}",
        "versions": versions() | {name: installed(name) for name in ("flwr", "ray", "torch")},
        "clients": CLIENTS if in_kinds else CROWDS,
        "tested_on": TESTED if in_kinds else {data: own[0] for data, own in SERVERS.items()},
        "runs_in_both": len(both),
        # Between the simulation and the run in one process.
        "largest_difference": float(apart.max()) if len(apart) else None,
        "seconds": round(float(table["seconds"].sum()), 1),
    }
    if in_kinds:
        about["options"] = {"FedAvgM": {"server_momentum": 0.7}, "FedYogi": {"eta": 0.05}}
    folder = asked.out or RESULTS / ("flower" if in_kinds else "flower_troubles")
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "table.csv", index=False)
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    shown = [name for name in runs_of if name not in ("seed", "strategy")]
    print(table.pivot_table("accuracy", ["how", *shown], "strategy").round(3).to_string())


if __name__ == "__main__":
    main()
