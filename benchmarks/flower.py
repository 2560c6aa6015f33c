"""Flower's own strategies and the shipped policy in real Flower, in several kinds of federations.

    python benchmarks/flower.py [--seeds 8] [--simulated 1] [--rounds 20]

The clients are those of examples/flower_app, on digits that the policy was not trained on. Every run is
Flower's `Strategy.start`. For the first seeds (`--simulated`) the messages go through Flower's simulation
with its worker processes; for every seed they are also handed to the client app in this process, which is
faster and gives the same accuracies up to the order of summation. Writes table.csv, a row for each run, and
about.json to docs/results/flower.
"""

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower_app"))

import client_app
import network
import numpy as np
import pandas as pd
import server_app
from flwr.app import (
    ArrayRecord,
    Context,
    Error,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedYogi
from flwr.simulation import run_simulation
from flwr.supercore.task_identity import TaskIdentity
from table import DOCS, options, write_rows

from apportion.bridges.flower import LearnedAggregation
from apportion.domains.federated.data import embedded_digits, halves, mixture

KINDS = ("equal", "dirichlet-0.1", "two-labels", "flipped-3", "paper", "colluders")
CLIENTS = 10
TESTED, SAMPLES = 1000, (200, 20)
"""Digits that models are tested on, and the server's own."""


@dataclass(frozen=True)
class Kind:
    """A kind of federation: where its clients' digits lie, what the server tests on, and its own."""

    kind: str
    seed: int
    folder: Path
    images: np.ndarray
    labels: np.ndarray

    @classmethod
    def dealt(cls, kind: str, seed: int, folder: Path) -> "Kind":
        """Write the digits of the clients to files, as if they lay on many machines."""
        digits = embedded_digits().pooled(2)
        dealt = mixture(digits, [(kind, CLIENTS, seed)], halves(digits)[1])
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
        return cls(kind, seed, folder, images[own], digits.labels[own])

    def strategies(self) -> Iterator[tuple[dict, FedAvg]]:
        """Each with what its row says of it."""
        plain = {"fraction_evaluate": 0.0}
        found: dict[str, FedAvg] = {
            "FedAvg": FedAvg(**plain),
            "FedAvgM": FedAvgM(server_momentum=0.7, **plain),
            "FedYogi": FedYogi(eta=0.05, **plain),
        }
        for samples in SAMPLES:
            own = slice(TESTED, TESTED + samples)

            def predict(arrays: ArrayRecord, own=own) -> np.ndarray:
                return network.logits(arrays.to_numpy_ndarrays(), self.images[own])

            strategy = LearnedAggregation(predict, self.labels[own])
            found[f"LearnedAggregation, {samples} samples"] = strategy
        for name, strategy in found.items():
            yield {"kind": self.kind, "strategy": name, "seed": self.seed}, strategy

    def play(self, grid, strategy: FedAvg, rounds: int) -> list[float]:
        """The accuracies after each round, that of the first model in front."""
        test = {"test": (self.images[:TESTED], self.labels[:TESTED])}
        return server_app.federate(grid, strategy, self.folder, test, rounds, seed=self.seed)


class InProcess:
    """Flower's grid without its processes: messages go to the client app here and now."""

    def __init__(self, app: ClientApp, clients: int):
        self.app, self.clients = app, clients
        # Who sends a message; the superlink sets it for Flower's own processes.
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


def runs(grid, how: str, federations: Sequence[Kind], rounds: int) -> list[dict]:
    """Every strategy in every federation, from the same first model."""
    rows = []
    for own in federations:
        for row, strategy in own.strategies():
            begun = time.perf_counter()
            tested = own.play(grid, strategy, rounds)
            seconds = round(time.perf_counter() - begun, 2)
            rows.append(row | {"how": how, "accuracy": round(tested[-1], 4), "seconds": seconds})
            print(rows[-1], flush=True)
    return rows


def both_ways(
    app: ClientApp, clients: int, federations: Sequence[Kind], first: int, rounds: int
) -> list[dict]:
    """All federations in this process, those of the first seeds in Flower's simulation, too."""
    rows = runs(InProcess(app, clients), "in process", federations, rounds)
    again, server = [own for own in federations if own.seed < first], ServerApp()

    @server.main()
    def main(grid, context):
        rows.extend(runs(grid, "simulation", again, rounds))

    if again:
        run_simulation(server, app, num_supernodes=clients, backend_config=server_app.BACKEND)
    return rows


def kinds(seeds: int, first: int, rounds: int) -> list[dict]:
    """Every kind of federation."""
    with tempfile.TemporaryDirectory() as name:
        federations = [
            Kind.dealt(kind, seed, Path(name) / f"{kind}-{seed}")
            for seed, kind in product(range(seeds), KINDS)
        ]
        return both_ways(client_app.app, CLIENTS, federations, first, rounds)


def main() -> None:
    parser = options(__doc__, out=DOCS / "results")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--simulated", type=int, default=1, help="seeds that Flower simulates, too")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    table = pd.DataFrame(kinds(asked.seeds, asked.simulated, asked.rounds))
    federation = table.columns.difference(["how", "accuracy", "seconds"]).tolist()
    wide = table.pivot(index=federation, columns="how", values="accuracy")
    wide = wide.reindex(columns=["simulation", "in process"])
    apart = (wide["simulation"] - wide["in process"]).dropna().abs()
    about = {
        "command": f"python benchmarks/flower.py --seeds {asked.seeds} "
        f"--simulated {asked.simulated} --rounds {asked.rounds}",
        "runs_in_both": len(apart),
        # Between the simulation and the run in one process.
        "largest_difference": float(apart.max()) if len(apart) else None,
        "seconds": round(float(table["seconds"].sum()), 1),
    }
    write_rows(asked.out / "flower", table, about, ("flwr", "ray"))


if __name__ == "__main__":
    main()
