"""Flower's own strategies and the shipped policy in real Flower: kinds of federations, and troubles.

    python benchmarks/flower.py [kinds] [--seeds 8] [--simulated 1] [--rounds 20]
    python benchmarks/flower.py troubles --seeds 4 --simulated 0 --rounds 10

`kinds` has five kinds of federations with the clients of examples/flower_app, on digits that the policy
was not trained on. `troubles` has scikit-learn's digits and tumours, logistic regressions and, where torch
is installed, networks of torch's; 3, 10 and 40 clients, who hold few classes, or about a third of whom flip
labels, crash or send NaN. Every run is `Strategy.start` of Flower. With the first seeds (`--simulated`) the
messages go through Flower's simulation, worker processes and all; every seed also has them handed to the
client app in this process, which is quicker and must come to the same accuracies, but for the order in
which clients are added up. Writes table.csv, a row for each run, and about.json to docs/results/flower,
or to docs/results/flower_troubles.
"""

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower_app"))

import client_app
import network
import numpy as np
import pandas as pd
import server_app
from flwr.app import (
    Array,
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
from sklearn.datasets import load_breast_cancer, load_digits
from table import DOCS, options, write_rows

from apportion.bridges.flower import LearnedAggregation
from apportion.domains.federated.data import embedded_digits, halves, mixture
from apportion.runs.environment import installed

KINDS = ("equal", "dirichlet-0.1", "two-labels", "flipped-3", "paper", "colluders")
CLIENTS, CROWDS = 10, (3, 10, 40)
"""Clients of a kind of federation, and of federations in trouble."""
TESTED, SAMPLES = 1000, (200, 20)
"""Digits that models are tested on, and the server's own."""
TROUBLES = ("none", "label skew", "flips", "crashes", "NaN")
SERVERS = {"digits": (500, 100), "breast cancer": (150, 60)}
"""Rows that models are tested on, and the server's own samples, in federations in trouble."""
EPOCHS, BATCH, RATE = 4, 20, 0.1

app = ClientApp()


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


@cache
def rows(data, seed):
    """Standardised features and classes in the seed's order; tumours are 0, malignant, or 1, benign."""
    table, classes = {"digits": load_digits, "breast cancer": load_breast_cancer}[data](
        return_X_y=True
    )
    order = np.random.default_rng(seed).permutation(len(classes))
    scaled = (table - table.mean(0)) / (table.std(0) + 1e-6)
    return scaled[order].astype(np.float32), classes[order]


def batches(count, rng):
    """Places of a client's rows, batch by batch for all its epochs."""
    for _ in range(EPOCHS):
        yield from np.array_split(rng.permutation(count), max(1, count // BATCH))


def _logistic_start(features, classes, seed):
    return ArrayRecord([np.zeros((features, classes), np.float32), np.zeros(classes, np.float32)])


def _logistic_trained(record, x, y, rng):
    weights, bias = (array.copy() for array in record.to_numpy_ndarrays())
    for chosen in batches(len(y), rng):
        scores = x[chosen] @ weights + bias
        error = np.exp(scores - scores.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(chosen)), y[chosen]] -= 1
        error *= RATE / len(chosen)
        weights -= x[chosen].T @ error
        bias -= error.sum(0)
    return ArrayRecord([weights, bias])


def _logistic_scores(record, x):
    weights, bias = record.to_numpy_ndarrays()
    return x @ weights + bias


def _torch_network(features, classes, seed=0):
    import torch

    torch.manual_seed(seed)
    layers = torch.nn.Linear(features, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes)
    return torch.nn.Sequential(*layers)


def _torch_loaded(record):
    state = record.to_torch_state_dict()
    network = _torch_network(state["0.weight"].shape[1], len(state["2.bias"]))
    network.load_state_dict(state)
    return network


def _torch_trained(record, x, y, rng):
    import torch

    network = _torch_loaded(record)
    steps, loss = torch.optim.SGD(network.parameters(), lr=RATE), torch.nn.CrossEntropyLoss()
    features, classes = torch.from_numpy(x), torch.from_numpy(y)
    for chosen in batches(len(y), rng):
        steps.zero_grad()
        loss(network(features[chosen]), classes[chosen]).backward()
        steps.step()
    return ArrayRecord(network.state_dict())


def _torch_scores(record, x):
    import torch

    with torch.no_grad():
        return _torch_loaded(record)(torch.from_numpy(x)).numpy()


MODELS = {
    "logistic": SimpleNamespace(
        start=_logistic_start, trained=_logistic_trained, scores=_logistic_scores
    ),
    "torch": SimpleNamespace(
        start=lambda *sizes: ArrayRecord(_torch_network(*sizes).state_dict()),
        trained=_torch_trained,
        scores=_torch_scores,
    ),
}
"""First arrays of so many features and classes, those after a client's epochs, and scores of rows."""


@dataclass(frozen=True)
class Troubled:
    """A federation some of whose clients are in trouble; what it is made of comes with every message."""

    data: str
    model: str
    trouble: str
    clients: int
    seed: int

    def server_rows(self):
        """Those that models are tested on, and the server's own."""
        tested, own = SERVERS[self.data]
        x, y = rows(self.data, self.seed)
        return (x[:tested], y[:tested]), (x[tested:][:own], y[tested:][:own])

    def client_rows(self, client):
        """A client's own; under label skew it holds few classes, and those who flip call c by C - 1 - c."""
        x, y = (array[sum(SERVERS[self.data]) :] for array in rows(self.data, self.seed))
        order = np.argsort(y, kind="stable") if self.trouble == "label skew" else np.arange(len(y))
        own = np.array_split(order, self.clients)[client]
        return x[own], y.max() - y[own] if self.has("flips", client) else y[own]

    def has(self, trouble, client):
        """Whether this is the trouble, and the client one of the first third."""
        return self.trouble == trouble and client < max(1, round(0.3 * self.clients))

    def strategies(self) -> Iterator[tuple[dict, FedAvg]]:
        """FedAvg and the shipped policy, each with what its row says of it."""
        _, (features, labels) = self.server_rows()
        predict = partial(MODELS[self.model].scores, x=features)
        for strategy in (FedAvg(fraction_evaluate=0.0), LearnedAggregation(predict, labels)):
            yield {**vars(self), "strategy": type(strategy).__name__}, strategy

    def play(self, grid, strategy: FedAvg, rounds: int) -> list[float]:
        """The accuracies after each round, that of the first model in front."""
        model, ((x, y), _), tested = MODELS[self.model], self.server_rows(), []

        def evaluate(n: int, arrays: ArrayRecord) -> MetricRecord:
            tested.append(float((model.scores(arrays, x).argmax(1) == y).mean()))
            return MetricRecord({"accuracy": tested[-1]})

        strategy.start(
            grid, model.start(x.shape[1], int(y.max()) + 1, self.seed), num_rounds=rounds,
            timeout=120.0, train_config=ConfigRecord(vars(self)), evaluate_fn=evaluate,
        )  # fmt: skip
        return tested


@app.train()
def train(message, context):
    """A client that may be in trouble: it finds its own rows by what the message says."""
    config = message.content["config"]
    own = Troubled(**{name: config[name] for name in Troubled.__dataclass_fields__})
    client = int(context.node_config["partition-id"])
    x, y = own.client_rows(client)
    if own.has("crashes", client):
        raise RuntimeError("no disk left")
    rng = np.random.default_rng([own.seed, client, config["server-round"]])
    arrays = MODELS[own.model].trained(message.content["arrays"], x, y, rng)
    if own.has("NaN", client):
        blank = {name: np.full_like(each.numpy(), np.nan) for name, each in arrays.items()}
        arrays = ArrayRecord({name: Array(each) for name, each in blank.items()})
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


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


def runs(grid, how: str, federations: Sequence[Kind | Troubled], rounds: int) -> list[dict]:
    """Every strategy in every federation, from the same first model."""
    rows = []
    for own in federations:
        for row, strategy in own.strategies():
            begun = time.perf_counter()
            tested = own.play(grid, strategy, rounds)
            seconds = round(time.perf_counter() - begun, 2)
            rows.append(row | {"how": how, "accuracy": round(tested[-1], 4), "seconds": seconds})
            print(rows[-1], flush=True)
            if isinstance(strategy, LearnedAggregation):
                rows[-1]["summary"] = strategy.summary()
    return rows


def both_ways(
    app: ClientApp, clients: int, federations: Sequence[Kind | Troubled], first: int, rounds: int
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


def troubles(seeds: int, first: int, rounds: int) -> list[dict]:
    """Every trouble."""
    models = [name for name in MODELS if name != "torch" or installed("torch")]
    found = []
    # Flower's workers look its functions up by the module's name, which `__main__` is not.
    app = import_module("flower").app
    for clients in CROWDS:
        each = product(range(seeds), SERVERS, models, TROUBLES)
        federations = [Troubled(data, model, what, clients, n) for n, data, model, what in each]
        found += both_ways(app, clients, federations, first, rounds)
    return found


def main() -> None:
    parser = options(__doc__, out=DOCS / "results")
    parser.add_argument("what", nargs="?", choices=["kinds", "troubles"], default="kinds")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--simulated", type=int, default=1, help="seeds that Flower simulates, too")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    play, folder = (kinds, "flower") if asked.what == "kinds" else (troubles, "flower_troubles")
    table = pd.DataFrame(play(asked.seeds, asked.simulated, asked.rounds))
    summaries = table.pop("summary")
    federation = table.columns.difference(["how", "accuracy", "seconds"]).tolist()
    wide = table.pivot(index=federation, columns="how", values="accuracy")
    wide = wide.reindex(columns=["simulation", "in process"])
    apart = (wide["simulation"] - wide["in process"]).dropna().abs()
    about = {
        "command": f"python benchmarks/flower.py {asked.what} --seeds {asked.seeds} "
        f"--simulated {asked.simulated} --rounds {asked.rounds}",
        "runs_in_both": len(apart),
        # Between the simulation and the run in one process.
        "largest_difference": float(apart.max()) if len(apart) else None,
        "seconds": round(float(table["seconds"].sum()), 1),
    }
    write_rows(asked.out / folder, table, about, ("flwr", "ray", "torch"))
    if asked.what == "kinds":
        # The tutorial shows that of the first federation with colluders.
        shown = summaries[(table["kind"] == "colluders")].dropna().iloc[0]
        (asked.out / folder / "summary.txt").write_text(f"{shown}\n")


if __name__ == "__main__":
    main()
