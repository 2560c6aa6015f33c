"""Our simulator against Flower's, at equal work on the same CPU in one run.

    python benchmarks/federated.py [--size reduced|paper] [--mnist mnist.npz] [--rounds 10]

Ten clients train the same model with the same code for the same steps, and the server scores every
submitted model and the aggregate on its evaluation set. Both sides are timed from their third
round on, when everything is compiled and every worker runs.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
sys.path.insert(0, str(Path(__file__).parent))

import flower_client
import jax
import jax.numpy as jnp
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from jax.flatten_util import ravel_pytree


def ours(size: str, rounds: int) -> float:
    """Seconds a round of one episode under equal shares, as it is stepped in training."""
    federation, task = flower_client.setting(size)
    shares = task.mask / task.mask.sum()

    @jax.jit
    def several(state, keys):
        def one(state, key):
            step = federation.step(task, state, shares, key=key)
            return step.state, step.reward

        return jax.lax.scan(one, state, keys)

    state = jax.jit(lambda: federation.reset(task, key=jax.random.key(0)))()
    keys = jax.random.split(jax.random.key(1), rounds)
    state, _ = jax.block_until_ready(several(state, keys))
    begun = time.perf_counter()
    jax.block_until_ready(several(state, keys))
    return (time.perf_counter() - begun) / rounds


class Scoring(FedAvg):
    """FedAvg that also scores every submitted model, as the learned strategy must."""

    score = staticmethod(lambda models: None)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        models = [
            jnp.asarray(r.content["arrays"].to_numpy_ndarrays()[0])
            for r in replies
            if r.has_content()
        ]
        type(self).score(jnp.stack(models))
        return super().aggregate_train(server_round, replies)


def flowers(size: str, rounds: int) -> float:
    """Seconds a round in Flower's simulation with one worker a core."""
    federation, task = flower_client.setting(size)
    score = jax.jit(lambda models: federation.correct(models, federation.evaluation))
    Scoring.score = staticmethod(lambda models: jax.block_until_ready(score(models)))
    times: list[float] = []
    server = ServerApp()

    def evaluate(server_round, arrays):
        model = jnp.asarray(arrays.to_numpy_ndarrays()[0])
        accuracy = float(score(model[None]).sum())
        times.append(time.perf_counter())
        return MetricRecord({"accuracy": accuracy})

    @server.main()
    def main(grid, context):
        first, _ = ravel_pytree(federation.model.start(key=jax.random.key(0)))
        Scoring(fraction_evaluate=0.0).start(
            grid,
            ArrayRecord([jax.device_get(first)]),
            num_rounds=rounds + 3,
            timeout=600.0,
            train_config=ConfigRecord({"size": size}),
            evaluate_fn=evaluate,
        )

    run_simulation(
        server,
        flower_client.app,
        num_supernodes=task.width,
        backend_config={
            "init_args": {
                "num_cpus": os.cpu_count(),
                "include_dashboard": False,
                "log_to_driver": False,
                "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
            },
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return (times[-1] - times[3]) / (len(times) - 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=["reduced", "paper"], default="reduced")
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    if asked.mnist is not None:
        os.environ["BENCHMARK_MNIST"] = str(asked.mnist.resolve())
    here, there = ours(asked.size, asked.rounds), flowers(asked.size, asked.rounds)
    found = {
        "size": asked.size,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "seconds_a_round": here,
        "seconds_a_round_flower": there,
        "times_faster": there / here,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
