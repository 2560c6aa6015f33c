"""A client: it trains the model it receives on its own digits and returns it."""

from functools import cache
from pathlib import Path

import network
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@cache
def own_digits(folder, client):
    """Return the client's digits, which in a real federation never leave its machine."""
    with np.load(Path(folder) / f"client-{client}.npz") as file:
        return file["images"], file["labels"]


@app.train()
def train(message, context):
    config = message.content["config"]
    client = int(context.node_config["partition-id"])
    images, labels = own_digits(config["data"], client)
    arrays = message.content["arrays"].to_numpy_ndarrays()
    rng = np.random.default_rng([client, config["server-round"]])
    content = {
        "arrays": ArrayRecord(network.trained(arrays, images, labels, rng)),
        "metrics": MetricRecord({"num-examples": len(labels)}),
    }
    return Message(RecordDict(content), reply_to=message)
