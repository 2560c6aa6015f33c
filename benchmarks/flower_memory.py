"""Time and memory of a server's round with ten models of ten million parameters.

    python benchmarks/flower_memory.py [--clients 10] [--millions 10]

Each strategy aggregates rounds of the same replies, timed from the second on, when everything is compiled
and the strategy remembers a move. Memory is what the strategy allocates at its
peak beyond the replies themselves (tracemalloc, which NumPy and Python report to), in units of one model;
the time that the server's own model takes to answer (`predict`) is shown apart. Writes
docs/results/flower/memory.json.
"""

import argparse
import json
import logging
import os
import statistics
import time
import tracemalloc
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from apportion.bridges.flower import LearnedAggregation
from apportion.runs.environment import devices, installed, versions

FILE = Path(__file__).parents[1] / "docs" / "results" / "flower" / "memory.json"
SAMPLES, CLASSES, ROUNDS = 200, 10, 3


class NoNodes:
    """A grid that sends nothing: replies are handed to the strategy directly."""

    def get_node_ids(self):
        return []


class Predicting:
    """A wide perceptron's answers, and the seconds that they took."""

    def __init__(self, pixels: int):
        self.images = np.random.default_rng(1).normal(size=(SAMPLES, pixels)).astype(np.float32)
        self.seconds = 0.0

    def __call__(self, arrays: ArrayRecord) -> np.ndarray:
        begun = time.perf_counter()
        first, second = arrays.to_numpy_ndarrays()
        answers = np.maximum(self.images @ first, 0) @ second
        self.seconds += time.perf_counter() - begun
        return answers


def shapes(parameters: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Nearly all in one array, the worst case for whoever works array by array."""
    pixels = 784
    hidden = round(parameters / (pixels + CLASSES))
    return (pixels, hidden), (hidden, CLASSES)


def replies(start: list[np.ndarray], clients: int, seed: int) -> list[Message]:
    """What the clients send, each a step away from the model that was sent out."""
    found = []
    for client in range(clients):
        rng = np.random.default_rng([seed, client])
        arrays = [own + 0.01 * rng.standard_normal(own.shape, np.float32) for own in start]
        metrics = MetricRecord({"num-examples": 10 + client})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        facts = Metadata(1, "", client + 1, 1, "x", "", 0.0, 60.0, "train")
        found.append(Message(content=content, metadata=facts))
    return found


def measure(strategy: FedAvg, start: list[np.ndarray], clients: int, predict: Predicting) -> dict:
    """Medians of the measured rounds, and the peak of another."""
    model, seconds, answering = ArrayRecord(start), [], []
    for n in range(1, ROUNDS + 1):
        sent = replies(model.to_numpy_ndarrays(), clients, n)
        list(strategy.configure_train(n, model, ConfigRecord(), NoNodes()))
        predict.seconds = 0.0
        begun = time.perf_counter()
        made, _ = strategy.aggregate_train(n, sent)
        seconds.append(time.perf_counter() - begun - predict.seconds)
        answering.append(predict.seconds)
        assert made is not None
        model = made
    peak = traced(strategy, model, clients)
    return {
        "seconds": round(statistics.median(seconds[1:]), 2),
        "seconds_predicting": round(statistics.median(answering[1:]), 2),
        "peak_bytes": peak,
        "peak_in_models": round(peak / sum(array.nbytes for array in start), 2),
    }


def traced(strategy: FedAvg, model: ArrayRecord, clients: int) -> int:
    """The peak of one more round, apart from the timed ones, for tracing slows what it watches."""
    list(strategy.configure_train(ROUNDS + 1, model, ConfigRecord(), NoNodes()))
    sent = replies(model.to_numpy_ndarrays(), clients, ROUNDS + 1)
    tracemalloc.start()
    strategy.aggregate_train(ROUNDS + 1, sent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--millions", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=FILE)
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    own = shapes(int(asked.millions * 1e6))
    start = [rng.normal(0, 0.03, shape).astype(np.float32) for shape in own]
    predict = Predicting(own[0][0])
    nobody = {"min_train_nodes": 0, "min_available_nodes": 0}
    labels = np.arange(SAMPLES) % CLASSES
    strategies = {
        "FedAvg": FedAvg(fraction_evaluate=0.0, **nobody),
        "LearnedAggregation": LearnedAggregation(predict, labels, **nobody),
    }
    found = {
        "command": "python benchmarks/flower_memory.py "
        f"--clients {asked.clients} --millions {asked.millions:g}",
        "versions": versions() | {"flwr": installed("flwr")},
        "devices": devices(),
        "clients": asked.clients,
        "parameters": sum(array.size for array in start),
        "model_bytes": sum(array.nbytes for array in start),
        "rounds": {
            name: measure(strategy, start, asked.clients, predict)
            for name, strategy in strategies.items()
        },
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["rounds"], indent=1))


if __name__ == "__main__":
    main()
