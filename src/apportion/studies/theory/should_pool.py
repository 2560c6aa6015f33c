"""Should these tasks be pooled? The question a practitioner has, answered on their own samples.

Data: a CSV of transitions (task, state, action, reward, next_state; labels or discretised states), or
a demonstration family at a known distance. Table: each task's distance with its interval, estimation
errors alone and pooled, and the number of samples from which the task does better alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from apportion.errors import InputError
from apportion.studies.study import Study, Verdict
from apportion.theory.mdp import random_family
from apportion.theory.pooling import Pooling, should_pool
from apportion.theory.samples import Transitions, draw_transitions

COLUMNS = ("task", "state", "action", "reward", "next_state")


def read_transitions(file: Path) -> tuple[Transitions, list[str]]:
    """Transitions of a CSV, and the tasks' names; labels may be numbers or words."""
    if not file.exists():
        raise InputError(f"{file}: there is no such file")
    frame = pd.read_csv(file)
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise InputError(
            f'{file.name}: column "{missing[0]}" is missing; the columns are {", ".join(COLUMNS)}'
        )
    holes = frame[list(COLUMNS)].isna().to_numpy().any(axis=1)
    if holes.any():
        raise InputError(
            f"{file.name}: row {int(np.argmax(holes)) + 1} has an empty field; fill or drop it"
        )
    reward = np.asarray(pd.to_numeric(frame["reward"], errors="coerce"), float)
    if not np.isfinite(reward).all():
        place = int(np.argmax(~np.isfinite(reward)))
        raise InputError(
            f'{file.name}: column "reward" of row {place + 1} is '
            f"{frame['reward'].iloc[place]!r}; it must be a finite number"
        )
    task, names = pd.factorize(frame["task"].astype(str))
    action, _ = pd.factorize(frame["action"].astype(str))
    both, _ = pd.factorize(pd.concat([frame["state"], frame["next_state"]]).astype(str))
    state, next_state = np.split(both, 2)
    return Transitions(task, state, action, reward, next_state), [str(name) for name in names]


def run(
    *,
    file: Path | None = None,
    gamma: float = 0.7,
    spread: float = 0.1,
    samples: int = 300,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Study:
    """Answer for the file's tasks, or for a demonstration family of 8 tasks.

    Parameters
    ----------
    file
        A CSV of transitions.
    gamma
        The discount.
    spread, samples
        Of the demonstration family: how much of each task is its own, and its samples.
    """
    if progress is not None:
        progress("estimating the tasks' distances", 0.0)
    if file is None:
        family = random_family(states=6, actions=3, tasks=8, spread=spread, gamma=gamma, seed=seed)
        transitions, names = draw_transitions(family, samples, seed=seed), None
    else:
        transitions, names = read_transitions(file)
    resamples = {"quick": 400, "paper": 2000}[scale]
    pooling = should_pool(transitions, gamma=gamma, names=names, resamples=resamples, seed=seed)
    return Study(
        name="should-pool",
        title="Should these tasks be pooled?",
        table=pooling.to_frame(),
        verdicts=(_verdict(pooling),),
        draw=pooling.plot,
        readings=tuple(line.strip() for line in pooling.summary().splitlines()),
        settings={
            "file": None if file is None else file.name,
            "gamma": gamma,
            "spread": spread,
            "samples": samples,
            "scale": scale,
            "seed": seed,
        },
    )


def _verdict(pooling: Pooling) -> Verdict:
    room, distance = pooling.room, pooling.distance
    return Verdict(
        "pooling is expected to help (mean squared error of a backup that it saves)",
        pooling.answer == "pool",
        room - distance.value**2,
        (room - distance.high**2, room - distance.low**2),
        len(pooling.tasks),
        paper=False,
    )
