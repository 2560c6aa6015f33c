"""Compare the simulator with real Flower: the same clients, data, first models and batches.

    python benchmarks/flower_simulator.py [--seeds 1] [--rounds 12] [--out DIR]

Three data sets: digits, scikit-learn's table of tumours, and the docstrings of flower_circumstances.
Three kinds of federations: equal clients, Dirichlet skew, and four colluders in ten. FedAvg and the shipped
policy run in the simulator, in Flower's simulation, and with `flwr run`, which starts a server process that
runs this file as an app. Flower's client trains by the simulator's own `train` with the same key, so that
what is compared is the strategy, the messages and the processes. Writes a row for each run to
DIR/flower_simulator; DIR is docs/results by default.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from importlib import import_module
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from apportion.bridges.flower import LearnedAggregation
from apportion.domains.federated.aggregators import BySamples, Learned, run_episodes
from apportion.domains.federated.clients import unravelled
from apportion.domains.federated.data import Digits, embedded_digits, mixture
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import shipped_policy
from apportion.domains.federated.settings import GradientSettings

KINDS, CLIENTS = ("equal", "dirichlet-0.3", "colluders"), 10
SIZES = {"digits": (60, 150, 800), "tumours": (30, 100, 150), "docstrings": (50, 150, 800)}
"""A client's samples, the server's, and those that models are tested on."""
BACKEND = {
    "init_args": {"num_cpus": 2, "log_to_driver": False},
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
}
PROJECT = """[project]
name = "simulator"
version = "0.1.0"
description = "The simulator's clients in Flower"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "apportion"
[tool.flwr.app.components]
serverapp = "flower_simulator:server"
clientapp = "flower_simulator:app"
[tool.flwr.app.config]
folder = ""
"""

app = ClientApp()
server = ServerApp()


def tumours() -> Digits:
    """Tumours by 30 standardised measures, as squares of 36 numbers, malignant or benign."""
    from sklearn.datasets import load_breast_cancer

    table, classes = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(classes))
    scaled = np.pad((table - table.mean(0)) / table.std(0), ((0, 0), (0, 6)))[order]
    squares = scaled.reshape(-1, 6, 6).astype(np.float32)
    return Digits(squares, classes[order].astype(np.int32), np.arange(len(classes)) < 255)


def write_data(folder: Path, seeds: int, rounds: int) -> None:
    """Write the data sets to files, so that every process reads the same."""
    from flower_circumstances import text_data

    found = {"digits": embedded_digits().pooled(2), "tumours": tumours(), "docstrings": text_data()}
    for name, data in found.items():
        np.savez(folder / f"{name}.npz", **vars(data))
    (folder / "sizes.json").write_text(json.dumps({"seeds": seeds, "rounds": rounds}))


@cache
def world(folder: str, name: str):
    """The federations of a data set, one task for each kind and seed, and their keys."""
    with np.load(Path(folder) / f"{name}.npz") as file:
        digits = Digits(**file)
    sizes = json.loads((Path(folder) / "sizes.json").read_text())
    samples, own, tested = SIZES[name]
    wanted = [(kind, CLIENTS, seed) for seed in range(sizes["seeds"]) for kind in KINDS]
    dealt = mixture(digits, wanted, np.flatnonzero(~digits.server), samples=samples)
    settings = GradientSettings(
        width=16, rounds=sizes["rounds"], epochs=3, client_rate=0.1, evaluation=own, test=tested,
        pooling=1,
    )  # fmt: skip
    federation = Federation(dealt.digits, dealt.partition, settings, drawn=(own, own), gate=True)
    return federation, dealt.tasks, wanted, jax.random.split(jax.random.key(0), len(wanted))


@eqx.filter_jit
def trained(federation, model, task, client, n, key):
    """The simulator's client in round n of the episode with this key."""
    reset_key, walk_key = jax.random.split(key)
    rounds = jax.random.split(walk_key, federation.horizon)
    # `reset` trains the clients of the first round, and every step those of the next.
    first = jax.random.split(reset_key)[1]
    round_key = jax.lax.select(n == 0, first, rounds[n - 1])
    member = task.members[client]
    own = jax.random.fold_in(round_key, federation.identities[member])
    return federation.train(model, member, n, key=own), federation.reported(task)[client]


@app.train()
def train(message, context):
    """Train as the simulator's client does."""
    config = message.content["config"]
    federation, tasks, _, keys = world(config["folder"], config["data"])
    (model,) = message.content["arrays"].to_numpy_ndarrays()
    client, place = int(context.node_config["partition-id"]), int(config["task"])
    n = np.int32(config["server-round"] - 1)
    made, count = trained(federation, model, tasks[place], np.int32(client), n, keys[place])
    arrays = ArrayRecord({"model": Array(np.asarray(made))})
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": int(count)})}
    return Message(RecordDict(content), reply_to=message)


def in_flower(grid, folder: str, how: str, seeds: int) -> None:
    """Run both strategies in the federations of the first seeds, and write a row for each."""
    rows = []
    for name in SIZES:
        federation, tasks, wanted, keys = world(folder, name)
        for place, (kind, _, seed) in enumerate(wanted):
            if seed >= seeds:
                continue
            reset_key = jax.random.split(keys[place])[0]
            begun = _begun(federation, tasks[place], reset_key)
            places = np.asarray(begun.server.places)
            labels = np.asarray(federation.labels)[places]

            def predict(arrays, federation=federation, places=places):
                images, flat = federation.images[places], arrays["model"].numpy()
                return np.asarray(_logits(federation, flat, images))

            for strategy in (FedAvg(fraction_evaluate=0.0), LearnedAggregation(predict, labels)):
                config = {"folder": folder, "data": name, "task": place}
                found = strategy.start(
                    grid, ArrayRecord({"model": Array(np.asarray(begun.aggregate))}),
                    num_rounds=federation.horizon, train_config=ConfigRecord(config),
                )  # fmt: skip
                accuracy = float(_tested(federation, found.arrays["model"].numpy()))
                rows.append([name, kind, seed, type(strategy).__name__, how, round(accuracy, 4)])
                (Path(folder) / f"{how}.json").write_text(json.dumps(rows))


@eqx.filter_jit
def _begun(federation, task, key):
    return federation.reset(task, key=key)


@eqx.filter_jit
def _tested(federation, model):
    return federation.test_accuracy(model)


@eqx.filter_jit
def _logits(federation, flat, images):
    return federation.model.logits(unravelled(federation.model, flat), images)


@server.main()
def main_of_app(grid, context):
    """What `flwr run` runs: the federations of the first seed."""
    in_flower(grid, str(context.run_config["folder"]), "flwr run", 1)


def in_simulator(folder: str) -> list[list]:
    """The same federations in the simulator."""
    rows, rules = [], {"FedAvg": BySamples(), "LearnedAggregation": Learned(shipped_policy())}
    for name in SIZES:
        federation, tasks, wanted, keys = world(folder, name)
        for method, rule in rules.items():
            last = np.asarray(run_episodes(federation, rule, tasks, keys).tested)[:, -1]
            rows += [
                [name, kind, seed, method, "simulator", round(float(accuracy), 4)]
                for (kind, _, seed), accuracy in zip(wanted, last, strict=True)
            ]
    return rows


def run_by_flwr(folder: Path) -> None:
    """Start Flower's server, run this file as an app, and stop the server."""
    here = folder / "app"
    here.mkdir()
    (here / "pyproject.toml").write_text(PROJECT)
    shutil.copy(__file__, here)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        runtime, control = (str(each.getsockname()[1]) for each in sockets)
    environment = os.environ | {
        "FLWR_HOME": str(folder / "home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": runtime,
        "FLWR_LOCAL_CONTROL_API_PORT": control,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = "flower-superlink --insecure --simulation --isolation subprocess --host 127.0.0.1"
    addresses = ["--port", runtime, "--control-api-address", f"127.0.0.1:{control}"]
    with subprocess.Popen([*command.split(), *addresses], env=environment) as link:
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{runtime}/health", timeout=2).close()
                    break
                time.sleep(0.5)
            nodes = f"num-supernodes={CLIENTS} client-resources-num-cpus=1"
            run = ["flwr", "run", str(here), "--stream", "--federation-config", nodes]
            run += ["--run-config", f"folder='{folder}'"]
            subprocess.run(run, env=environment, check=True, timeout=3000)
        finally:
            link.terminate()


def main() -> None:
    from flwr.simulation import run_simulation
    from table import DOCS, options

    parser = options(__doc__, out=DOCS / "results")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    # Workers look the client app up by the module's name, which `__main__` is not.
    own, simulated = import_module("flower_simulator"), ServerApp()
    with tempfile.TemporaryDirectory() as name:
        own.write_data(Path(name), asked.seeds, asked.rounds)
        rows = own.in_simulator(name)

        @simulated.main()
        def main_of_simulation(grid, context):
            own.in_flower(grid, name, "simulation", asked.seeds)

        run_simulation(simulated, own.app, num_supernodes=CLIENTS, backend_config=BACKEND)
        run_by_flwr(Path(name))
        for how in ("simulation", "flwr run"):
            rows += json.loads((Path(name) / f"{how}.json").read_text())
    write_comparison(rows, asked.seeds, asked.rounds, asked.out)


def write_comparison(rows: list[list], seeds: int, rounds: int, out: Path) -> None:
    """Write all rows, and by how much Flower's accuracies differ from the simulator's."""
    import pandas as pd
    from table import write_rows

    heads = pd.Index(["data", "kind", "seed", "strategy", "how", "accuracy"])
    table = pd.DataFrame(rows, columns=heads)
    wide = table.pivot(index=list(heads[:4]), columns="how", values="accuracy")
    about: dict = {
        "command": f"python benchmarks/flower_simulator.py --seeds {seeds} --rounds {rounds}"
    }
    for how in ("simulation", "flwr run"):
        apart = (wide[how] - wide["simulator"]).dropna().abs()
        about[how] = {"runs": len(apart), "largest_difference": round(float(apart.max()), 4)}
    write_rows(out / "flower_simulator", table, about, ("flwr", "ray", "scikit-learn"))


if __name__ == "__main__":
    main()
