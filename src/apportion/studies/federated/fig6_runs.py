"""The runs behind Figure 6, as arrays: train every method, then try all of them on unseen tasks.

It needs neither plotting nor tables, so that it can run on a bare machine with a GPU; `fig6` makes
the study of what `save` wrote.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apportion.domains.federated.digits import Digits
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.training import (
    build,
    draw,
    stack,
    train_policies,
    try_policies,
    try_shares,
)

METHODS = ("stl", "mtl", "pmtl")
TOTALS = (0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.6, 0.8)
"""Fixed shares on the minority; .2 of 10 clients is FedAvg, .45 the informed yardstick."""

Progress = Callable[[str, float], None]
Arrays = dict[str, np.ndarray]


def compute(
    settings: FederatedSettings,
    digits: Digits,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    richer: Sequence[str] = ("rich",),
    totals: Sequence[float] = TOTALS,
    progress: Progress | None = None,
    on_stage: Callable[[Arrays], None] | None = None,
) -> Arrays:
    """STL, MTL and P-MTL on the settings' state, MTL on each richer one, and fixed shares.

    Accuracies are (methods, seeds, tasks, rounds), shares have the clients behind; a method's
    `reward` is the mean reward of every update, (methods, seeds, steps). `on_stage` is handed what
    there is after every part of the work.
    """
    federation, partition = build(settings, digits)
    drawn = [draw(settings, partition, seed) for seed in seeds]
    unseen = stack([tasks for _, tasks in drawn])
    keys = stack([jax.random.split(jax.random.key(1000 + s), settings.unseen) for s in seeds])
    plan = [(settings.state, METHODS), *((state, ("mtl",)) for state in richer)]
    stages = len(plan) + 1

    def say(what: str, part: float) -> None:
        if progress is not None:
            progress(what, part / stages)

    every = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), unseen)
    fixed = try_shares(federation, jnp.array(totals), every, keys.reshape(-1))
    arrays: Arrays = {
        "totals": np.array(totals),
        "fixed": np.asarray(fixed.tested).reshape(len(totals), *keys.shape, settings.rounds),
        "seeds": np.array(seeds),
        "settings": np.array(json.dumps(settings.to_dict())),
        "device": np.array(jax.devices()[0].device_kind),
    }
    say("fixed shares tried", 1)
    parts: list[Arrays] = []
    for state, methods in plan:
        done = len(parts) + 1
        here = replace(settings, state=state)
        federation, _ = build(here, digits, partition)
        runs = [(method, place) for method in methods for place in range(len(seeds))]
        clock = _Clock(lambda what, part, done=done: say(what, done + part), state)
        trained = train_policies(
            here,
            federation,
            [drawn[place][0] for _, place in runs],
            [method for method, _ in runs],
            [seeds[place] for _, place in runs],
            progress=clock,
        )
        places = jnp.array([place for _, place in runs])
        tasks = jax.tree.map(lambda leaf, at=places: leaf[at], unseen)
        course = try_policies(federation, trained.policies, tasks, keys[places])
        suffix = "" if state == settings.state else f"-{state}"
        found = {
            "tested": course.tested,
            "evaluated": course.evaluated,
            "shares": course.shares,
            "reward": trained.reward,
        }
        grid = (len(methods), len(seeds))
        parts.append(
            {name: np.asarray(a).reshape(*grid, *a.shape[1:]) for name, a in found.items()}
            | {
                "methods": np.array([method + suffix for method in methods]),
                "seconds_an_episode": np.array(
                    [clock.seconds_a_step / (len(runs) * settings.rollouts)]
                ),
            }
        )
        arrays |= {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        say(f"{state}: tried on unseen tasks", len(parts) + 1)
        if on_stage is not None:
            on_stage(arrays)
    return arrays


class _Clock:
    """Tells how training goes, and what a step costs once it is compiled."""

    def __init__(self, say: Progress, state: str):
        self.say, self.state = say, state
        self.times: list[tuple[int, float]] = []

    def __call__(self, done: int, steps: int) -> None:
        self.times.append((done, time.perf_counter()))
        self.say(f"{self.state}: {done} of {steps} updates", done / steps)

    @property
    def seconds_a_step(self) -> float:
        (first, begin), (last, end) = self.times[0], self.times[-1]
        return (end - begin) / (last - first) if last > first else float("nan")


def save(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Write the arrays as one npz without any pickle."""
    np.savez_compressed(path, allow_pickle=False, **arrays)


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
