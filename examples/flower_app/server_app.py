"""Ten clients, learned shares against FedAvg, in Flower's own simulation.

Run with: python examples/flower_app/server_app.py    (about a minute on two cores)

Eight clients hold the digits 0-5, two hold 6-9. The policy in the package was trained in its
simulator on other clients.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import client_app
import network
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from apportion.bridges.flower import LearnedAggregation
from apportion.domains.federated.data import embedded_digits, paper_split, skewed_tasks

CLIENTS = 10
BACKEND = {
    "init_args": {"num_cpus": 2, "log_to_driver": False},
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
}
"""Flower's simulation on two cores."""

app = ServerApp()


def share_out(folder):
    """Write the digits of each client and of the server to files, as if they were on separate machines."""
    digits = embedded_digits().pooled(2)
    images = digits.images.reshape(len(digits.images), -1)
    partition = paper_split(digits, (28, 18), 80)
    _, unseen = skewed_tasks(partition, 1, 1, seen=(18, 11))
    for place, client in enumerate(np.asarray(unseen.members[0])):
        rows = partition.index[client][: partition.counts[client]]
        np.savez(folder / f"client-{place}.npz", images=images[rows], labels=digits.labels[rows])
    own = np.random.default_rng(0).permutation(np.flatnonzero(digits.server))
    return {
        name: (images[rows], digits.labels[rows])
        for name, rows in (("evaluation", own[:200]), ("test", own[200:1200]))
    }


def learned(server_data, **options):
    """Return the strategy, which needs a function that evaluates a model on the server's samples."""
    images, labels = server_data["evaluation"]
    return LearnedAggregation(
        predict=lambda arrays: network.logits(arrays.to_numpy_ndarrays(), images),
        labels=labels,
        **options,
    )


def federate(
    grid, strategy, folder, server_data, rounds=20, timeout=120.0, on_model=None, seed=0, **config
):
    """Run the rounds and return the test accuracy of each round's model, starting with the first model."""
    images, labels = server_data["test"]
    tested = []

    def evaluate(server_round, arrays):
        model = arrays.to_numpy_ndarrays()
        tested.append(float((network.logits(model, images).argmax(1) == labels).mean()))
        if on_model is not None:
            on_model(model)
        return MetricRecord({"accuracy": tested[-1]})

    strategy.start(
        grid,
        ArrayRecord(network.start(images.shape[1], seed)),
        num_rounds=rounds,
        timeout=timeout,
        train_config=ConfigRecord({"data": str(folder), **config}),
        evaluate_fn=evaluate,
    )
    return tested


@app.main()
def main(grid, context):
    rounds = int(context.run_config.get("rounds", 20))
    with tempfile.TemporaryDirectory() as name:
        data = share_out(Path(name))
        strategy = learned(data)
        plain = federate(grid, FedAvg(fraction_evaluate=0.0), Path(name), data, rounds)
        better = federate(grid, strategy, Path(name), data, rounds)
    print("round    FedAvg   learned")
    for n in sorted({1, *range(5, rounds + 1, 5), rounds}):
        print(f"{n:5d} {plain[n]:9.3f} {better[n]:9.3f}")
    print(strategy.to_frame().groupby("outcome")["share"].agg(["count", "max"]).to_string())


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(app, client_app.app, num_supernodes=CLIENTS, backend_config=BACKEND)
