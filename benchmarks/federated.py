"""Our simulator against Flower's, at equal work on the same CPU in one run.

    python benchmarks/federated.py [--size reduced|paper] [--mnist mnist.npz] [--client torch]

Ten clients train the same model on the same images for the same steps, and the server scores every
submitted model and the aggregate on its evaluation set. Flower's clients run the simulator's own
compiled step or, with `--client torch`, one in PyTorch as in Flower's quickstart. Either side has
all cores: ours spreads the clients of one episode over them, Flower has a worker of one thread on
each. Both are timed when everything is compiled and every worker runs; medians are reported.
Writes benchmarks/results/federated-SIZE-CLIENT.json.
"""

import argparse
import importlib
import itertools
import json
import math
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
sys.path.insert(0, str(Path(__file__).parent))

import equinox as eqx
import flower_client
import jax
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from jax.sharding import AxisType, NamedSharding, PartitionSpec

FOLDER = Path(__file__).parent / "results"
CORES = len(os.sched_getaffinity(0))
WARM_UP = 3


class Ours:
    """One episode under equal shares, stepped as in training, its clients spread over the cores."""

    def __init__(self, size: str, rounds: int):
        federation, task = flower_client.setting(size)
        devices = jax.devices()[: math.gcd(task.width, CORES)]
        mesh = jax.make_mesh(
            (len(devices),), ("entities",), axis_types=(AxisType.Auto,), devices=devices
        )
        self.rounds = rounds
        task = jax.device_put(task, NamedSharding(mesh, PartitionSpec("entities")))
        shares = task.mask / task.mask.sum()
        held, form = eqx.partition(federation, eqx.is_array)
        keys = jax.random.split(jax.random.key(1), rounds)
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

        self.state = start(held, task)
        self.run = lambda state: several(held, task, shares, state, keys)
        self.state, rewards = jax.block_until_ready(self.run(self.state))
        self.accuracy = float(rewards[-1])

    def seconds(self) -> float:
        """Seconds a round."""
        begun = time.perf_counter()
        jax.block_until_ready(self.run(self.state))
        return (time.perf_counter() - begun) / self.rounds


class Scoring(FedAvg):
    """FedAvg that also scores every submitted model, as the learned strategy must."""

    def __init__(self, score):
        super().__init__(fraction_evaluate=0.0)
        self.score = score
        self.trained: list[float] = []
        self.scored: list[float] = []

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error.reason}")
        begun = time.perf_counter()
        self.score([reply.content["arrays"].to_numpy_ndarrays() for reply in replies])
        self.scored.append(time.perf_counter() - begun)
        self.trained.append(sum(float(r.content["metrics"]["seconds"]) for r in replies))
        return super().aggregate_train(server_round, replies)


def flowers(client, size: str, rounds: int) -> dict[str, float]:
    """Seconds a round in Flower's simulation, how much of it is training and scoring, and the
    accuracy after as many rounds as ours.
    """
    score, tested, times, server = client.scorer(size), [], [], ServerApp()
    strategy = Scoring(score)

    def evaluate(server_round, arrays):
        tested.append(float(score([arrays.to_numpy_ndarrays()])[0]))
        times.append(time.perf_counter())
        return MetricRecord({"accuracy": tested[-1]})

    @server.main()
    def main(grid, context):
        strategy.start(
            grid,
            ArrayRecord(client.first(size)),
            num_rounds=rounds + WARM_UP,
            timeout=120.0,
            train_config=ConfigRecord({"size": size}),
            evaluate_fn=evaluate,
        )

    # Read by the workers, for this process has started its own JAX: one thread each.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    run_simulation(
        server,
        client.app,
        num_supernodes=flower_client.setting(size)[1].width,
        backend_config={
            "init_args": {"num_cpus": CORES, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    each = [after - before for before, after in itertools.pairwise(times)][WARM_UP:]
    return {
        "seconds_a_round_flower": statistics.median(each),
        "of_it_training": statistics.median(strategy.trained[WARM_UP:]) / CORES,
        "of_it_scoring": statistics.median(strategy.scored[WARM_UP:]),
        "accuracy_flower": tested[rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=["reduced", "paper"], default="reduced")
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--client", choices=["ours", "torch"], default="ours")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    if asked.size == "paper" and asked.mnist is None:
        parser.error("--size paper needs --mnist")
    if asked.mnist is not None:
        os.environ["BENCHMARK_MNIST"] = str(asked.mnist.resolve())
    jax.config.update("jax_num_cpu_devices", CORES)
    ours = Ours(asked.size, asked.rounds)
    # Before and after Flower's run, lest the machine's other work count for one side alone.
    seconds = [ours.seconds() for _ in range(3)]
    client = "flower_torch_client" if asked.client == "torch" else "flower_client"
    there = flowers(importlib.import_module(client), asked.size, asked.rounds)
    seconds += [ours.seconds() for _ in range(3)]
    here = statistics.median(seconds)
    found = {
        "size": asked.size,
        "client": asked.client,
        "cores": CORES,
        "rounds": asked.rounds,
        "load": os.getloadavg()[0],
        "seconds_a_round": here,
        "accuracy": ours.accuracy,
        **there,
        "times_faster": there["seconds_a_round_flower"] / here,
    }
    written = FOLDER / f"federated-{asked.size}-{asked.client}.json"
    written.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # Flower's server thread would wait for its clients until the round's timeout.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
