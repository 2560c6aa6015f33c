"""Clients for `benchmarks/flower.py troubles`: scikit-learn's digits or tumours, some of them in trouble.

A client finds its own rows by the run's settings, which come with every message: the data, the model it
trains (a logistic regression in NumPy, or a network of torch's), the trouble, how many clients there are,
and the seed. About a third of the clients is in trouble; under `label skew` all are.
"""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_breast_cancer, load_digits

TROUBLES = ("none", "label skew", "flips", "crashes", "NaN")
SERVERS = {"digits": (500, 100), "breast cancer": (150, 60)}
"""Rows that models are tested on, and the server's own samples."""
EPOCHS, BATCH, RATE = 4, 20, 0.1

app = ClientApp()


@dataclass(frozen=True)
class Setting:
    """What a federation is made of."""

    data: str
    model: str
    trouble: str
    clients: int
    seed: int


@cache
def rows(data, seed):
    """Standardised features and classes in the seed's order; tumours are 0, malignant, or 1, benign."""
    table, classes = {"digits": load_digits, "breast cancer": load_breast_cancer}[data](
        return_X_y=True
    )
    order = np.random.default_rng(seed).permutation(len(classes))
    scaled = (table - table.mean(0)) / (table.std(0) + 1e-6)
    return scaled[order].astype(np.float32), classes[order]


def server_rows(setting):
    """Those that models are tested on, and the server's own."""
    tested, own = SERVERS[setting.data]
    x, y = rows(setting.data, setting.seed)
    return (x[:tested], y[:tested]), (x[tested:][:own], y[tested:][:own])


def client_rows(setting, client):
    """A client's own; under label skew it holds few classes, and those who flip call c by C - 1 - c."""
    x, y = (array[sum(SERVERS[setting.data]) :] for array in rows(setting.data, setting.seed))
    order = np.argsort(y, kind="stable") if setting.trouble == "label skew" else np.arange(len(y))
    own = np.array_split(order, setting.clients)[client]
    flips = setting.trouble == "flips" and in_trouble(setting, client)
    return x[own], y.max() - y[own] if flips else y[own]


def in_trouble(setting, client):
    """Whether it is one of the first third."""
    return client < max(1, round(0.3 * setting.clients))


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


@app.train()
def train(message, context):
    config = message.content["config"]
    setting = Setting(**{name: config[name] for name in Setting.__dataclass_fields__})
    client, model = int(context.node_config["partition-id"]), MODELS[setting.model]
    x, y = client_rows(setting, client)
    troubled = in_trouble(setting, client)
    if troubled and setting.trouble == "crashes":
        raise RuntimeError("no disk left")
    rng = np.random.default_rng([setting.seed, client, config["server-round"]])
    arrays = model.trained(message.content["arrays"], x, y, rng)
    if troubled and setting.trouble == "NaN":
        blank = {name: np.full_like(own.numpy(), np.nan) for name, own in arrays.items()}
        arrays = ArrayRecord({name: Array(own) for name, own in blank.items()})
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
