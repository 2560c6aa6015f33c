"""Flower is told to report nothing before anything imports it."""

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
