"""Flower's side of `benchmarks/federated.py`: a client that trains with the simulator's own step.

It is a module of its own because Flower's workers import it: in `__main__` every round would
compile anew.
"""

import os
import time
from functools import cache

import jax
import jax.numpy as jnp
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from jax.flatten_util import ravel_pytree

from apportion.domains.federated.data import read_digits
from apportion.domains.federated.federation import build, sample_tasks
from apportion.domains.federated.settings import paper_size, reduced_size

app = ClientApp()


@cache
def setting(size):
    """The federation of that size, and the clients of its first unseen task."""
    mnist = os.environ.get("BENCHMARK_MNIST")
    if size == "paper":
        # Few images at a time: the layers of ten models then stay in a CPU's cache.
        settings = paper_size(mnist, precision="float32", block=20)
    else:
        settings = reduced_size(state="accuracy")
    federation, partition = build(settings, read_digits(settings))
    return federation, sample_tasks(settings, partition, 0)[1][0]


def first(size):
    """The first model, as Flower sends it."""
    model, _ = ravel_pytree(setting(size)[0].model.start(key=jax.random.key(0)))
    return [jax.device_get(model)]


def scorer(size):
    """Accuracies of models on the server's evaluation set, all of them at once."""
    federation, _ = setting(size)
    correct = jax.jit(lambda models: federation.correct(models, federation.evaluation).sum(1))
    return lambda models: jax.device_get(correct(jnp.stack([jnp.asarray(m[0]) for m in models])))


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
    begun = time.perf_counter()
    trained = jax.device_get(step(size)(model, client, jax.random.key(config["server-round"])))
    seconds = time.perf_counter() - begun
    content = {
        "arrays": ArrayRecord([trained]),
        "metrics": MetricRecord({"num-examples": 1, "seconds": seconds}),
    }
    return Message(RecordDict(content), reply_to=message)
