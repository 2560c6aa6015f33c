"""The example's clients, some of which fail when the server asks for faults."""

import os
import signal
import time

import client_app
import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp

RAISES, SLEEPS, DIES, SENDS_NAN = range(4)
SLEEPY, DEADLY, HOPELESS = (2,), (4,), 8
"""Rounds in which one sleeps, in which one's process is killed, and in which nobody replies."""

app = ClientApp()


@app.train()
def train(message, context):
    config = message.content["config"]
    client, n = int(context.node_config["partition-id"]), config["server-round"]
    faulty = bool(config["faults"])
    if faulty and (client == RAISES or n == HOPELESS):
        raise RuntimeError("no disk left")
    if faulty and client == SLEEPS and n in SLEEPY:
        time.sleep(float(config["sleep"]))
    if faulty and client == DIES and n in DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    reply = client_app.train(message, context)
    reply.content["who"] = MetricRecord({"client": client})
    if faulty and client == SENDS_NAN:
        arrays = reply.content["arrays"].to_numpy_ndarrays()
        reply.content["arrays"] = ArrayRecord([np.full_like(array, np.nan) for array in arrays])
    return reply
