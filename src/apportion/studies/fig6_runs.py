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

from apportion.jobs.federated import (
    METHODS,
    FederatedSettings,
    build,
    draw,
    stack,
    train_policies,
    try_policies,
    try_shares,
)
from apportion.problems.federated.digits import Digits

TOTALS = (0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.6, 0.8)
"""Fixed shares on the minority; .2 of 10 clients is FedAvg, .45 the informed yardstick."""

Progress = Callable[[str], None]


def compute(
    settings: FederatedSettings,
    digits: Digits,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    richer: Sequence[str] = ("rich",),
    totals: Sequence[float] = TOTALS,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """STL, MTL and P-MTL on the settings' state, MTL on each richer one, and fixed shares.

    Accuracies are (methods, seeds, tasks, rounds), shares have the clients behind; a method's
    `reward` is the mean reward of every update, (methods, seeds, steps).
    """
    say = print if progress is None else progress
    _, partition = build(settings, digits)
    drawn = [draw(settings, partition, seed) for seed in seeds]
    unseen = [tasks for _, tasks in drawn]
    keys = stack([jax.random.split(jax.random.key(1000 + s), settings.unseen) for s in seeds])
    plan = [(settings.state, METHODS), *((state, ("mtl",)) for state in richer)]
    names, tested, evaluated, shares, rewards, seconds = [], [], [], [], [], []
    for state, methods in plan:
        here = replace(settings, state=state)
        federation, _ = build(here, digits, partition)
        runs = [(method, place) for method in methods for place in range(len(seeds))]
        clock = _Clock(say, f"{state}: {', '.join(methods)}")
        trained = train_policies(
            here,
            federation,
            [drawn[place][0] for _, place in runs],
            [method for method, _ in runs],
            [seeds[place] for _, place in runs],
            progress=clock,
        )
        seconds.append(clock.seconds_a_step / (len(runs) * settings.rollouts))
        places = jnp.array([place for _, place in runs])
        tasks = jax.tree.map(lambda leaf, at=places: leaf[at], stack(unseen))
        course = try_policies(federation, trained.policies, tasks, keys[places])
        say(f"{state}: tried on unseen tasks, {seconds[-1]:.4f} s an episode of training")
        shape = (len(methods), len(seeds))
        names += [method if state == settings.state else f"{method}-{state}" for method in methods]
        for store, array in (
            (tested, course.tested),
            (evaluated, course.evaluated),
            (shares, course.shares),
            (rewards, trained.reward),
        ):
            store.append(np.asarray(array).reshape(*shape, *array.shape[1:]))
    federation, _ = build(settings, digits, partition)
    every = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), stack(unseen))
    fixed = try_shares(federation, jnp.array(totals), every, keys.reshape(-1))
    say("fixed shares tried")
    return {
        "methods": np.array(names),
        "tested": np.concatenate(tested),
        "evaluated": np.concatenate(evaluated),
        "shares": np.concatenate(shares),
        "reward": np.concatenate(rewards),
        "totals": np.array(totals),
        "fixed": np.asarray(fixed.tested).reshape(
            len(totals), len(seeds), settings.unseen, settings.rounds
        ),
        "seeds": np.array(seeds),
        "seconds_an_episode": np.array(seconds),
        "settings": np.array(json.dumps(settings.to_dict())),
        "device": np.array(jax.devices()[0].device_kind),
    }


class _Clock:
    """Tells how training goes, and what a step costs once it is compiled."""

    def __init__(self, say: Progress, what: str):
        self.say, self.what = say, what
        self.times: list[tuple[int, float]] = []

    def __call__(self, done: int, steps: int) -> None:
        self.times.append((done, time.perf_counter()))
        self.say(f"{self.what}: {done} of {steps} updates")

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
