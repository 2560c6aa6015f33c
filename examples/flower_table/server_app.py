"""Seven hospitals and a table of two classes: two hospitals join late, and only they have one of them.

Run with: flwr run examples/flower_table --stream --federation-config "num-supernodes=7"
"""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import patients
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from apportion.bridges.flower import LearnedAggregation

app = ServerApp()


def learned():
    """Return the strategy, which evaluates models on the server's own patients."""
    _, (measures, classes) = patients.server_patients()
    return LearnedAggregation(
        predict=lambda arrays: patients.scores(arrays.to_numpy_ndarrays(), measures),
        labels=classes,
    )


def federate(grid, strategy, rounds, joins):
    """Run the rounds and return the test accuracy of each round's model, starting with the first model."""
    (measures, classes), _ = patients.server_patients()
    tested = []

    def evaluate(server_round, arrays):
        answers = patients.scores(arrays.to_numpy_ndarrays(), measures).argmax(1)
        tested.append(float((answers == classes).mean()))
        return MetricRecord({"accuracy": tested[-1]})

    first, config = ArrayRecord(patients.start()), ConfigRecord({"joins": joins})
    strategy.start(grid, first, num_rounds=rounds, train_config=config, evaluate_fn=evaluate)
    return tested


@app.main()
def main(grid, context):
    rounds, joins = (int(context.run_config[name]) for name in ("rounds", "joins"))
    plain = federate(grid, FedAvg(fraction_evaluate=0.0), rounds, joins)
    strategy = learned()
    better = federate(grid, strategy, rounds, joins)
    print("round    FedAvg   learned")
    for n in sorted({1, joins - 1, rounds}):
        print(f"{n:5d} {plain[n]:9.3f} {better[n]:9.3f}")
    print(strategy.summary())
