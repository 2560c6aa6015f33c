"""Flower's side of `benchmarks/federated.py`: a client that trains with the simulator's own step.

It is a module of its own because Flower's workers import it: in `__main__` every round would
compile anew.
"""

import os
from functools import cache

import jax
import jax.numpy as jnp
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from apportion.jobs.federated_runs import build, draw, read_digits
from apportion.jobs.federated_settings import FederatedSettings, paper_size

app = ClientApp()


@cache
def setting(size):
    """The federation of that size, and the clients of its first unseen task."""
    mnist = os.environ.get("BENCHMARK_MNIST")
    if size == "paper":
        settings = paper_size(mnist, precision="float32")
    else:
        settings = FederatedSettings()
    federation, partition = build(settings, read_digits(settings))
    return federation, draw(settings, partition, 0)[1][0]


@cache
def step(size):
    federation, _ = setting(size)
    return jax.jit(lambda model, client, key: federation.train(model, client, key=key))


@app.train()
def train(message, context):
    config = message.content["config"]
    size = config["size"]
    place = int(context.node_config["partition-id"])
    client = setting(size)[1].members[place]
    model = jnp.asarray(message.content["arrays"].to_numpy_ndarrays()[0])
    trained = step(size)(model, client, jax.random.key(config["server-round"]))
    content = {
        "arrays": ArrayRecord([jax.device_get(trained)]),
        "metrics": MetricRecord({"num-examples": 1}),
    }
    return Message(RecordDict(content), reply_to=message)
