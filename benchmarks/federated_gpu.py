"""The federated studies at paper size on a GPU, and the seconds an episode costs beside its limits.

    python benchmarks/federated_gpu.py --mnist mnist.npz --out results/fig6
    python benchmarks/federated_gpu.py --mnist mnist.npz --out results/federations --study federations
    python benchmarks/federated_gpu.py --mnist mnist.npz --out results/speed --study speed

The first two write runs.npz (and measured.json), from which `study_from` of `apportion.studies.federated.fig6`
and `apportion.studies.federated.federations` draw anywhere; the last times training alone, in speed.json.
Needs jax with a GPU, equinox, optax and jaxtyping alone.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax

from apportion.domains.federated.digits import Digits
from apportion.domains.federated.settings import FederatedSettings, paper_size
from apportion.domains.federated.training import build, draw, read_digits, train_policies
from apportion.studies.federated import federations_runs
from apportion.studies.federated.fig6_runs import compute, save

BANDWIDTH, ARITHMETIC = 4.3e12, 7.9e14  # of an H200: copied bytes, bf16 products, a second


def limits(settings: FederatedSettings) -> dict[str, float]:
    """Operations and bytes of an episode, counted, and the seconds an H200 needs for either.

    Bytes: the hidden layer is written and read once forward, and once more backward, in bf16.
    """
    places = (28 // settings.pooling - 4) ** 2
    clients = sum(settings.task_sizes)
    layer = places * settings.width
    forward = 2 * layer * 25 + 2 * layer * 10
    trained = clients * settings.samples * settings.epochs
    judged = (clients + 1) * settings.evaluation
    operations = settings.rounds * (trained * (2 * forward + 2 * layer * 10) + judged * forward)
    moved = settings.rounds * 2 * layer * (4 * trained + 2 * judged)
    return {
        "operations": operations,
        "bytes": moved,
        "arithmetic_seconds": operations / ARITHMETIC,
        "bandwidth_seconds": moved / BANDWIDTH,
    }


def speed(settings: FederatedSettings, digits: Digits, runs: int) -> dict[str, float]:
    """Seconds an episode of training takes, updates of the policy included, once it is compiled."""
    federation, partition = build(settings, digits)
    times: list[tuple[int, float]] = []
    train_policies(
        replace(settings, steps=8),
        federation,
        [draw(settings, partition, seed)[0] for seed in range(runs)],
        ["mtl" for _ in range(runs)],
        range(runs),
        chunk=2,
        progress=lambda done, steps: times.append((done, time.perf_counter())),
    )
    (first, begin), (last, end) = times[0], times[-1]
    episodes = runs * settings.rollouts
    return {
        "episodes_at_once": episodes,
        "seconds_an_episode": (end - begin) / (last - first) / episodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--study", choices=["fig6", "federations", "speed"], default="fig6")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--experiments", nargs="*", default=federations_runs.EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--unseen", type=int, default=4)
    parser.add_argument("--richer", nargs="*", default=["rich"])
    parser.add_argument("--precision", default="bfloat16")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()

    def say(what: str, part: float = 1.0) -> None:
        print(f"{time.perf_counter() - begun:7.1f} s  {what}", flush=True)

    if asked.study == "federations":
        small = replace(federations_runs.sizes("paper"), mnist=asked.mnist)
        federations_runs.compute(
            small,
            read_digits(small),
            seeds=range(asked.first, asked.first + asked.seeds),
            experiments=asked.experiments,
            progress=say,
            on_stage=lambda arrays: save(arrays, asked.out / "runs.npz"),
        )
        return
    settings = paper_size(
        asked.mnist,
        steps=asked.steps,
        rounds=asked.rounds,
        unseen=asked.unseen,
        precision=asked.precision,
    )
    if asked.study == "speed":
        digits = read_digits(settings)
        found = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "precision": settings.precision,
            **limits(settings),
            "measured": [speed(settings, digits, runs) for runs in (1, 2, 9)],
        }
        (asked.out / "speed.json").write_text(json.dumps(found, indent=1) + "\n")
        say(json.dumps(found))
        return
    arrays = compute(
        settings,
        read_digits(settings),
        seeds=range(asked.first, asked.first + asked.seeds),
        richer=asked.richer,
        progress=say,
        on_stage=lambda arrays: save(arrays, asked.out / "runs.npz"),
    )
    measured = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seconds": time.perf_counter() - begun,
        "seconds_an_episode": arrays["seconds_an_episode"].tolist(),
        **limits(settings),
    }
    (asked.out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
    say(json.dumps(measured))
    for name, curve in zip(arrays["methods"], arrays["tested"].mean((1, 2)), strict=True):
        say(f"{name}: mean {curve.mean():.4f}, last {curve[-1]:.4f}")
    for total, curve in zip(arrays["totals"], arrays["fixed"].mean((1, 2)), strict=True):
        say(f"fixed {total}: mean {curve.mean():.4f}, last {curve[-1]:.4f}")


if __name__ == "__main__":
    main()
