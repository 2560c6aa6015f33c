"""Trials of Flower's strategies that a new user would make, on tables and text, on a CPU.

    python benchmarks/flower_trials.py [--seeds 7] [--out DIR]

- colluders: 4 of 10 clients return one model trained on shifted labels; 200, 100, 40 and 20 samples.
- honest: 14 and 16 clients with equal shares of a table, nothing wrong.
- regression: 3 of 10 clients have the wrong sign; `score=` with 200, 40 and 20 samples.
- late: two of ten clients alone hold four of the classes and join in round 25 of 40.

The tables are scikit-learn's made-up ones, the text the docstrings of flower_circumstances. Clients train a
small network in NumPy, that of examples/flower_app, and messages go to them in this process. Rivals are
Flower's own. Writes a row for each run to DIR/flower_trials; DIR is docs/results by default.
"""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower_app"))

import network
import numpy as np
import pandas as pd
from flower import InProcess
from flower_circumstances import text_data
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedMedian, MultiKrum
from sklearn.datasets import make_classification
from table import DOCS, options, write_rows

from apportion.bridges.flower import LearnedAggregation

TESTED, MOST, OWN = 1000, 200, 60
"""Rows that models are tested on, the server's samples, and the samples of a client."""


@dataclass(frozen=True)
class Trial:
    """A federation in this process: what each client holds, and what the server tests on."""

    x: list[np.ndarray]
    y: list[np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    own: tuple[np.ndarray, np.ndarray]
    rounds: int
    rate: float
    same: tuple[int, ...] = ()
    """Clients that return one model: each trains on the data and the batches of the first."""
    joins: int = 0
    """Round in which the last two clients join."""

    def trained(self, arrays, client, n):
        """The model of a client in round n."""
        if n < self.joins and client >= len(self.x) - 2:
            raise RuntimeError("this client has not joined yet")
        source = self.same[0] if client in self.same else client
        rng = np.random.default_rng([source, n])
        x, y = self.x[source], self.y[source]
        return network.trained(arrays, x, y, rng, rate=self.rate)

    def start(self, seed):
        """First parameters."""
        classes = int(self.test[1].max()) + 1
        return network.start(self.x[0].shape[1], seed, classes)

    def level(self, arrays):
        """Test accuracy in %."""
        x, y = self.test
        return 100 * float((network.logits(arrays, x).argmax(1) == y).mean())

    def learned(self, samples):
        """Our strategy, with so many of the server's samples."""
        x, y = (array[:samples] for array in self.own)
        return LearnedAggregation(lambda a: network.logits(a.to_numpy_ndarrays(), x), y)


class Regression(Trial):
    """Linear models; clients take steps down the squared error."""

    def trained(self, arrays, client, n):
        (weights,), x, y = arrays, self.x[client], self.y[client]
        for _ in range(4):
            weights = weights - self.rate * x.T @ (x @ weights - y) / len(y)
        return [weights.astype(np.float32)]

    def start(self, seed):
        return [np.zeros(self.x[0].shape[1], np.float32)]

    def level(self, arrays):
        """Mean squared error on the test set."""
        x, y = self.test
        return float(((x @ arrays[0] - y) ** 2).mean())

    def learned(self, samples):
        x, y = (array[:samples] for array in self.own)
        return LearnedAggregation(score=lambda a: (x @ a.to_numpy_ndarrays()[0] - y) ** 2)


def table(seed):
    """A table of eight classes by 30 features."""
    x, y = make_classification(
        5000, 30, n_informative=15, n_redundant=5, n_classes=8, n_clusters_per_class=1,
        class_sep=1.5, random_state=seed,
    )  # fmt: skip
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32), y


def text(seed):
    """Docstrings by 100 features, and the package that each is from."""
    data = text_data()
    order = np.random.default_rng(seed).permutation(len(data.labels))
    return data.images.reshape(len(order), -1)[order], data.labels[order].astype(int)


def dealt(x, y, clients, own=OWN):
    """The rows of the test, of the server and of each client."""
    rest = slice(TESTED + MOST, None)
    parts = [slice(n * own, (n + 1) * own) for n in range(clients)]
    return (
        [x[rest][part] for part in parts], [y[rest][part] for part in parts],
        (x[:TESTED], y[:TESTED]), (x[TESTED : TESTED + MOST], y[TESTED : TESTED + MOST]),
    )  # fmt: skip


def colluders(data, seed):
    """Four of ten clients return one model of labels shifted by one."""
    xs, ys, test, own = dealt(*data(seed), 10)
    same = (6, 7, 8, 9)
    ys[6] = (ys[6] + 1) % (int(test[1].max()) + 1)
    return Trial(xs, ys, test, own, 20, 0.1, same=same)


def honest(clients, seed):
    """Clients with equal shares of a table that learn slowly."""
    return Trial(*dealt(*table(seed), clients), 20, 0.03)


def regression(seed):
    """Three of ten clients have targets of the wrong sign."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3000, 20)).astype(np.float32)
    weights = rng.normal(size=20) / 20**0.5
    y = (x @ weights + 0.5 * rng.normal(size=3000)).astype(np.float32)
    xs, ys, test, own = dealt(x, y, 10)
    return Regression(xs, [-own if n >= 7 else own for n, own in enumerate(ys)], test, own, 20, 0.1)


def late(seed):
    """Two of ten clients alone hold four of the eight classes, and join in round 25 of 40."""
    x, y = table(seed)
    xs, ys, test, own = dealt(x, y, 10)
    rest_x, rest_y = x[TESTED + MOST :], y[TESTED + MOST :]
    rare = rest_y >= 4
    for part, clients in ((~rare, range(8)), (rare, range(8, 10))):
        for place, n in enumerate(clients):
            own_rows = np.flatnonzero(part)[place * OWN : (place + 1) * OWN]
            xs[n], ys[n] = rest_x[own_rows], rest_y[own_rows]
    return Trial(xs, ys, test, own, 40, 0.1, joins=25)


PLAIN = {"fraction_evaluate": 0.0}
RIVALS = {
    "FedAvg": lambda: FedAvg(**PLAIN),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, **PLAIN),
    "median": lambda: FedMedian(**PLAIN),
    "Multi-Krum": lambda: MultiKrum(num_malicious_nodes=4, num_nodes_to_select=6, **PLAIN),
}
TRIALS = {
    "colluders, table": (lambda seed: colluders(table, seed), (200, 100, 40, 20)),
    "colluders, text": (lambda seed: colluders(text, seed), (200, 100, 40, 20)),
    "honest, 14 clients": (lambda seed: honest(14, seed), (200, 20)),
    "honest, 16 clients": (lambda seed: honest(16, seed), (200, 20)),
    "regression, 3 of 10 wrong": (regression, (200, 40, 20)),
    "late": (late, (200, 20)),
}
"""Each trial, and its numbers of samples."""


def final_level(trial, strategy, seed):
    """What the model of the last round comes to."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        client = int(context.node_config["partition-id"])
        arrays = message.content["arrays"].to_numpy_ndarrays()
        made = trial.trained(arrays, client, int(message.content["config"]["server-round"]))
        metrics = MetricRecord({"num-examples": len(trial.y[client])})
        content = {"arrays": ArrayRecord(made), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    grid = InProcess(app, len(trial.x))
    result = strategy.start(grid, ArrayRecord(trial.start(seed)), num_rounds=trial.rounds)
    return trial.level(result.arrays.to_numpy_ndarrays())


def main() -> None:
    parser = options(__doc__, out=DOCS / "results")
    parser.add_argument("--seeds", type=int, default=7)
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    about = {"command": f"python benchmarks/flower_trials.py --seeds {asked.seeds}"}
    rows = []
    for name, (make, counts) in TRIALS.items():
        for seed in range(asked.seeds):
            trial = make(seed)
            strategies = {rival: made() for rival, made in RIVALS.items()}
            strategies |= {f"learned, {n} samples": trial.learned(n) for n in counts}
            for strategy, own in strategies.items():
                level = round(final_level(trial, own, seed), 3)
                row = {"trial": name, "seed": seed, "strategy": strategy, "level": level}
                rows.append(row)
        found = pd.DataFrame(rows).query("trial == @name").groupby("strategy", sort=False)
        print(name, found["level"].agg(["mean", "std"]).round(2).to_string(), sep="\n", flush=True)
        packages = ("flwr", "scikit-learn")
        write_rows(asked.out / "flower_trials", pd.DataFrame(rows), about, packages)


if __name__ == "__main__":
    main()
