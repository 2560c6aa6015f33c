"""A hospital: after it has joined, it trains the model it receives on its own patients."""

import patients
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    config, number = message.content["config"], int(context.node_config["partition-id"])
    if number >= patients.HOSPITALS - patients.LATE and config["server-round"] < config["joins"]:
        raise RuntimeError("this hospital has not joined yet")
    measures, classes = patients.hospital(number)
    arrays = patients.trained(message.content["arrays"].to_numpy_ndarrays(), measures, classes)
    content = {
        "arrays": ArrayRecord(arrays),
        "metrics": MetricRecord({"num-examples": len(classes)}),
    }
    return Message(RecordDict(content), reply_to=message)
