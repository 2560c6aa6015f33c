"""Seconds an episode of the paper's size costs in training on a GPU, beside the GPU's limits.

    python benchmarks/federated_gpu.py --mnist mnist.npz --out results/speed

Writes speed.json; `--kernels` also counts what the card did in a step of training, kernel by kernel, from
JAX's own trace of it. The studies themselves are `apportion study fig6 --scale paper --mnist mnist.npz` and
`apportion study federations --scale paper --mnist mnist.npz`.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
from kernels import Trace, by_kernel

from apportion.domains.federated.data import Digits, read_digits
from apportion.domains.federated.federation import build, sample_tasks
from apportion.domains.federated.settings import GradientSettings, paper_size
from apportion.domains.federated.training import train_paper_policies
from apportion.domains.settings import Method
from apportion.training import OnChunk

BANDWIDTH, ARITHMETIC = 4.3e12, 7.9e14  # of an H200: copied bytes, bf16 products, a second


def limits(settings: GradientSettings) -> dict[str, float]:
    """Operations and bytes of an episode, counted, and the seconds an H200 needs for each.

    Operations: the hidden layer is computed once forward, and once more backward. Bytes of the layer: what
    moving it would take, written and read once each way in bf16; one kernel for both layers leaves it in
    registers. Bytes of parameters: read twice and their gradient written in a step, then both read and the
    new ones written, in float32; read once to score.
    """
    places = (28 // settings.pooling - 4) ** 2
    clients = sum(settings.task_sizes)
    layer = places * settings.width
    convolution, dense = 2 * layer * 25, 2 * layer * 10
    trained = clients * settings.samples * settings.epochs
    scored = (clients + 1) * settings.evaluation
    steps = clients * settings.epochs * -(-settings.samples // settings.batch)
    operations = trained * (3 * convolution + 3 * dense) + scored * (convolution + dense)
    of_layer = 2 * layer * (4 * trained + 2 * scored)
    of_parameters = 4 * 10 * layer * (6 * steps + clients + 1)
    return {
        "operations": settings.rounds * operations,
        "layer_bytes": settings.rounds * of_layer,
        "parameter_bytes": settings.rounds * of_parameters,
        "arithmetic_seconds": settings.rounds * operations / ARITHMETIC,
        "bandwidth_seconds": settings.rounds * of_layer / BANDWIDTH,
        "parameter_seconds": settings.rounds * of_parameters / BANDWIDTH,
    }


def train(settings: GradientSettings, digits: Digits, runs: int, on_chunk: OnChunk) -> None:
    """Some policies at once, each with tasks of its own."""
    federation, partition = build(settings, digits)
    tasks = [sample_tasks(settings, partition, seed)[0] for seed in range(runs)]
    methods: list[Method] = ["mtl"] * runs
    train_paper_policies(settings, federation, tasks, methods, range(runs), on_chunk=on_chunk)


def speed(settings: GradientSettings, digits: Digits, runs: int) -> dict[str, float]:
    """Seconds an episode of training takes, updates of the policy included, once it is compiled."""
    times: list[tuple[int, float]] = []
    train(
        replace(settings, steps=8, chunk=2),
        digits,
        runs,
        lambda chunk: times.append((chunk.step, time.perf_counter())),
    )
    (first, begin), (last, end) = times[0], times[-1]
    episodes = runs * settings.rollouts
    return {
        "episodes_at_once": episodes,
        "seconds_an_episode": (end - begin) / (last - first) / episodes,
    }


def kernels(settings: GradientSettings, digits: Digits, runs: int) -> dict[str, object]:
    """Which kernels an episode's time goes to: milliseconds and launches an episode, the ten longest."""
    trace, ran = Trace(), []

    def trace_the_third(chunk) -> None:
        if chunk.step == 2:
            trace.start()
        if chunk.step == 3:
            ran.extend(trace.stop())

    train(replace(settings, steps=3, chunk=1), digits, runs, trace_the_third)
    episodes = runs * settings.rollouts
    found = by_kernel(ran, episodes)
    return {
        "episodes_at_once": episodes,
        "launches": len(ran) / episodes,
        "milliseconds": sum(kernel.microseconds for kernel in found) / 1e3,
        "longest": [
            {
                "kernel": kernel.name,
                "milliseconds": kernel.microseconds / 1e3,
                "launches": kernel.launches,
            }
            for kernel in found[:10]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 9], help="policies at once")
    parser.add_argument("--kernels", action="store_true", help="count what the card does")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    settings = paper_size(asked.mnist, rounds=asked.rounds, precision=asked.precision)
    digits = read_digits(settings)
    found = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "precision": settings.precision,
        **limits(settings),
        "measured": [speed(settings, digits, runs) for runs in asked.runs],
    }
    if asked.kernels:
        found["kernels"] = kernels(settings, digits, asked.runs[0])
    (asked.out / "speed.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
