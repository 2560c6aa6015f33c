"""Federations of scikit-learn's small data sets, driven through a strategy's own methods."""

import sys
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Error, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_breast_cancer, load_digits

from apportion.bridges.flower import LearnedAggregation
from bridges.flower.test_strategy import NOBODY, begin, message

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "flower_app"))

import network


def shuffled_digits(seed):
    """1,797 digits of 8 x 8 pixels in [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    return (images[order] / 16).astype(np.float32), labels[order]


def shuffled_patients(seed):
    """569 tumours by 30 standardised measures, malignant or benign."""
    table, labels = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    scaled = (table - table.mean(0)) / table.std(0)
    return scaled[order].astype(np.float32), labels[order]


class SmallFederation:
    """Clients with rows of their own, and a server with samples and a test set."""

    def __init__(self, x, y, parts, *, tested, samples, seed=0, rate=0.15, crash=(), nan=()):
        self.test, self.own = (x[:tested], y[:tested]), (x[tested:][:samples], y[tested:][:samples])
        rest = slice(tested + samples, None)
        self.clients = [(x[rest][part], y[rest][part]) for part in parts(y[rest])]
        self.seed, self.rate, self.crash, self.nan = seed, rate, crash, nan
        self.classes = int(y.max()) + 1

    def start(self):
        return network.start(self.test[0].shape[1], self.seed, classes=self.classes)

    def learned(self, **options):
        images, labels = self.own

        def predict(arrays):
            return network.logits(arrays.to_numpy_ndarrays(), images)

        return LearnedAggregation(predict, labels, **(NOBODY | options))

    def fedavg(self):
        return FedAvg(fraction_evaluate=0.0, **NOBODY)

    def run(self, strategy, rounds, present=lambda n, client: True, first=None):
        """The test accuracy after each round; `present` says who takes part."""
        model = ArrayRecord(self.start() if first is None else first)
        found = []
        for n in range(1, rounds + 1):
            begin(strategy, model, n)
            nodes = [node for node in range(len(self.clients)) if present(n, node)]
            made, _ = strategy.aggregate_train(n, [self.reply(model, n, node) for node in nodes])
            model = model if made is None else made
            images, labels = self.test
            answers = network.logits(model.to_numpy_ndarrays(), images).argmax(1)
            found.append(float((answers == labels).mean()))
        return np.array(found)

    def reply(self, model, n, node):
        if node in self.crash:
            return message(node, error=Error(1, "no disk left"))
        images, labels = self.clients[node]
        rng = np.random.default_rng([self.seed, node, n])
        arrays = network.trained(model.to_numpy_ndarrays(), images, labels, rng, rate=self.rate)
        if node in self.nan:
            arrays = [np.full_like(array, np.nan) for array in arrays]
        metrics = MetricRecord({"num-examples": len(labels)})
        return message(node, RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}))


def evenly(count, each):
    """Equal parts of so many rows."""
    return lambda labels: [np.arange(each) + each * client for client in range(count)]
