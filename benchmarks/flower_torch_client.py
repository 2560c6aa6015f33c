"""The same client as in `flower_client`, written in PyTorch as in Flower's own quickstart.

Model, images, batches and steps are the same; PyTorch is no dependency of this package and is
imported where it is needed.
"""

import time
from functools import cache

import numpy as np
from flower_client import setting
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@cache
def own(size, place):
    """A client's images and its own labels of them."""
    import torch

    federation, task = setting(size)
    client = int(task.members[place])
    count = int(federation.counts[client])
    images = np.asarray(federation.images)[np.asarray(federation.index[client, :count])]
    labels = np.asarray(federation.local_labels[client, :count])
    return torch.tensor(images[:, None]), torch.tensor(labels, dtype=torch.int64)


@cache
def network(size):
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = setting(size)[0].model
    places = (model.side - model.kernel + 1) ** 2
    return nn.Sequential(
        nn.Conv2d(1, model.channels, model.kernel),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(model.channels * places, model.classes),
    )


def first(size):
    """The first model, as Flower sends it."""
    return [leaf.detach().numpy() for leaf in network(size).parameters()]


def put(net, arrays):
    import torch

    with torch.no_grad():
        for leaf, array in zip(net.parameters(), arrays, strict=True):
            leaf.copy_(torch.tensor(array))


def scorer(size):
    """Accuracies of models on the server's evaluation set, one after the other."""
    import torch

    federation, _ = setting(size)
    chosen = np.asarray(federation.evaluation)
    images = torch.tensor(np.asarray(federation.images)[chosen][:, None])
    labels = torch.tensor(np.asarray(federation.labels)[chosen])
    net = network(size)

    def accuracies(models):
        found = []
        for model in models:
            put(net, model)
            with torch.no_grad():
                answers = [net(block).argmax(1) for block in images.split(100)]
            found.append(float((torch.cat(answers) == labels).float().mean()))
        return np.array(found)

    return accuracies


@app.train()
def train(message, context):
    import torch

    torch.set_num_threads(1)
    config = message.content["config"]
    federation, _ = setting(config["size"])
    images, labels = own(config["size"], int(context.node_config["partition-id"]))
    net = network(config["size"])
    begun = time.perf_counter()
    put(net, message.content["arrays"].to_numpy_ndarrays())
    descent = torch.optim.SGD(net.parameters(), float(federation.learning_rate))
    for _ in range(federation.epochs):
        for batch in torch.randperm(len(labels)).split(federation.batch):
            descent.zero_grad()
            torch.nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            descent.step()
    seconds = time.perf_counter() - begun
    content = {
        "arrays": ArrayRecord([leaf.detach().numpy() for leaf in net.parameters()]),
        "metrics": MetricRecord({"num-examples": 1, "seconds": seconds}),
    }
    return Message(RecordDict(content), reply_to=message)
