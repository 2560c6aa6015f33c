"""What a round of federated learning costs: ours against Flower's simulator, and on a graphics card.

    python benchmarks/federated.py
    python benchmarks/federated.py --images mnist.npz    (on a graphics card)

On a processor ten clients train the same model on the same images for the same steps, and the server scores
every submitted model and the aggregate on its evaluation set; Flower's clients run the simulator's own
compiled step. Either side has all cores: ours spreads the clients of one episode over them, Flower has a
worker of one thread on each. Both are timed when everything is compiled and every worker runs. On a card:
seconds an episode of the paper's size costs in training.
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
sys.path.insert(0, str(Path(__file__).parent))

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from table import facts, median_seconds, options, spread, write

from apportion.domains.federated.data import Digits, read_digits
from apportion.domains.federated.federation import paper_world
from apportion.domains.federated.settings import PPOSettings, paper_size, reduced_size
from apportion.domains.federated.training import train_paper_policies

CORES = len(os.sched_getaffinity(0))
ROUNDS, WARM_UP = 10, 3


@cache
def setting():
    """The federation for two cores, the clients of its first unseen task, and how one trains."""
    settings = reduced_size(state="accuracy")
    federation, [(_, unseen)] = paper_world(settings, read_digits(settings), [0])
    trained = jax.jit(
        lambda model, client, key: federation.train(model, client, jnp.asarray(0), key=key)
    )
    return federation, unseen[0], trained


def ours() -> tuple[Callable[[], float], float]:
    """One episode under equal shares, stepped as in training, its clients spread over the cores: what
    times seconds a round, and the accuracy in the end."""
    federation, task, _ = setting()
    devices = jax.devices()[: math.gcd(task.width, CORES)]
    axis = {"axis_types": (AxisType.Auto,), "devices": devices}
    mesh = jax.make_mesh((len(devices),), ("entities",), **axis)
    task = jax.device_put(task, NamedSharding(mesh, PartitionSpec("entities")))
    shares = task.mask / task.mask.sum()
    held, form = eqx.partition(federation, eqx.is_array)
    keys = jax.random.split(jax.random.key(1), ROUNDS)
    held, keys = jax.device_put((held, keys), NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def start(held, task):
        return eqx.combine(held, form).reset(task, key=jax.random.key(0))

    @jax.jit
    def several(held, task, shares, state, keys):
        def one(state, key):
            step = eqx.combine(held, form).step(task, state, shares, key=key)
            return step.state, step.reward

        return jax.lax.scan(one, state, keys)

    begin, rewards = several(held, task, shares, start(held, task), keys)

    def again() -> None:
        jax.block_until_ready(several(held, task, shares, begin, keys))

    return lambda: median_seconds(again) / ROUNDS, float(rewards[-1])


def client_app():
    """Flower's client, which trains with the simulator's own step.

    Its function is looked up by workers as `federated.train`: in `__main__` each round would compile again.
    """
    import federated
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(federated.train)
    return app


def train(message, context):
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    _, task, trained = setting()
    client = task.members[int(context.node_config["partition-id"])]
    model = jnp.asarray(message.content["arrays"].to_numpy_ndarrays()[0])
    key = jax.random.key(message.content["config"]["server-round"])
    begun = time.perf_counter()
    arrays = ArrayRecord([jax.device_get(trained(model, client, key))])
    seconds = time.perf_counter() - begun
    metrics = MetricRecord({"num-examples": 1, "seconds": seconds})
    content = RecordDict({"arrays": arrays, "metrics": metrics})
    return Message(content, reply_to=message)


def flowers() -> dict[str, Any]:
    """Seconds a round in Flower's simulation, how much of it is training and scoring, and the
    accuracy after as many rounds as ours.
    """
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    federation, task, _ = setting()
    correct = jax.jit(lambda models: federation.correct(models, federation.evaluation).sum(1))
    tested, times, trained, scored, server = [], [], [], [], ServerApp()

    def score(records: list) -> Any:
        models = [jnp.asarray(record.to_numpy_ndarrays()[0]) for record in records]
        return jax.device_get(correct(jnp.stack(models)))

    class Scoring(FedAvg):
        """FedAvg that also scores every submitted model, as the learned strategy must."""

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            for reply in replies:
                if reply.has_error():
                    raise RuntimeError(f"a client failed: {reply.error.reason}")
            begun = time.perf_counter()
            score([reply.content["arrays"] for reply in replies])
            scored.append(time.perf_counter() - begun)
            trained.append(sum(float(r.content["metrics"]["seconds"]) for r in replies))
            return super().aggregate_train(server_round, replies)

    def evaluate(server_round, arrays):
        tested.append(float(score([arrays])[0]))
        times.append(time.perf_counter())
        return MetricRecord({"accuracy": tested[-1]})

    @server.main()
    def main(grid, context):
        first, _ = ravel_pytree(federation.model.start(key=jax.random.key(0)))
        Scoring(fraction_evaluate=0.0).start(
            grid,
            ArrayRecord([jax.device_get(first)]),
            num_rounds=ROUNDS + WARM_UP,
            timeout=120.0,
            evaluate_fn=evaluate,
        )

    # Read by the workers, for this process has started its own JAX: one thread each.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    backend = {
        "init_args": {"num_cpus": CORES, "log_to_driver": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, client_app(), num_supernodes=task.width, backend_config=backend)
    return {
        "seconds": [after - before for before, after in itertools.pairwise(times)][WARM_UP:],
        "training": statistics.median(trained[WARM_UP:]) / CORES,
        "scoring": statistics.median(scored[WARM_UP:]),
        "accuracy": tested[ROUNDS],
    }


def against_flower(asked: argparse.Namespace) -> None:
    jax.config.update("jax_num_cpu_devices", CORES)
    about = facts("flwr")
    seconds, accuracy = ours()
    # Before and after Flower's run, lest the machine's other work count for one side alone.
    before = [seconds() for _ in range(3)]
    there = flowers()
    here, flower = spread([*before, *(seconds() for _ in range(3))]), spread(there["seconds"])
    row = {
        "seconds a round, ours": here,
        "Flower": flower,
        "of it training": there["training"],
        "of it scoring": there["scoring"],
        "ratio": {
            "median": flower["median"] / here["median"],
            "least": flower["least"] / here["most"],
            "most": flower["most"] / here["least"],
        },
        "accuracy, ours": accuracy,
        "accuracy, Flower": there["accuracy"],
    }
    text = (
        "Ten clients, size reduced, Flower's with our compiled step; seconds, medians with the "
        "least and the most: of Flower's rounds in one simulation, of ours before and after it."
    )
    title = "A round of federated learning against Flower"
    write("federated", title, text, [row], about, asked.out)


def episodes(settings: PPOSettings, digits: Digits, runs: int) -> dict[str, float]:
    """How many episodes of training go on at once, some policies each with tasks of its own, and the
    seconds that one takes, updates of the policy included, once it is compiled."""
    times: list[tuple[int, float]] = []
    federation, tasks = paper_world(settings, digits, range(runs))
    train_paper_policies(
        replace(settings, steps=8, chunk=2), federation, [own for own, _ in tasks],
        ["mtl"] * runs, range(runs),
        on_chunk=lambda chunk: times.append((chunk.step, time.perf_counter())),
    )  # fmt: skip
    (first, begin), (last, end) = times[0], times[-1]
    count = runs * settings.rollouts
    seconds = (end - begin) / (last - first) / count
    return {"episodes at once": count, "seconds an episode": seconds}


def on_gpu(asked: argparse.Namespace) -> None:
    settings = paper_size(asked.images)
    about, digits = facts(precision=settings.precision), read_digits(settings)
    rows = (episodes(settings, digits, runs) for runs in (1, 2, 9))
    text = "The paper's sizes, 50 rounds an episode."
    write("federated_gpu", "An episode of the paper's federation", text, rows, about, asked.out)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--images", type=Path, help="the paper's episodes, on a graphics card")
    asked = parser.parse_args()
    on_gpu(asked) if asked.images else against_flower(asked)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # Flower's server thread would wait for its clients until the round's timeout.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
