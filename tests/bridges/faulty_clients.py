"""The example's clients, some of which fail when the server asks for faults."""

import os
import signal
import time

import client_app
import numpy as np
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    config = message.content["config"]
    client, n = int(context.node_config["partition-id"]), config["server-round"]
    faulty = bool(config["faults"])
    if faulty and client == 0:
        raise RuntimeError("no disk left")
    if faulty and client == 1:
        time.sleep(float(config["sleep"]))
    if faulty and client == 2 and n in (3, 11):
        os.kill(os.getpid(), signal.SIGKILL)
    reply = client_app.train(message, context)
    if faulty and client == 3:
        arrays = reply.content["arrays"].to_numpy_ndarrays()
        reply.content["arrays"] = ArrayRecord([np.full_like(array, np.nan) for array in arrays])
    return reply
