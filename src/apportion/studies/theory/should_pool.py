"""Should these tasks be pooled? The question a practitioner has, answered on their own samples.

Data: a CSV of transitions (task, state, action, reward, next_state; labels or discretised states), or
a demonstration family at a known distance. Table: each task's distance with its interval, estimation
errors alone and pooled, and the number of samples from which the task does better alone. It is one
cell, for the tasks are resampled together; a row is a task.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.errors import InputError, reading
from apportion.statistics import Estimate
from apportion.studies.engine import Cell, Plan, Progress, Rows
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes
from apportion.theory.mdp import random_family
from apportion.theory.pooling import Pooling, TaskAnswer, should_pool
from apportion.theory.samples import Transitions, draw_transitions

COLUMNS = ("task", "state", "action", "reward", "next_state")


def read_transitions(file: Path) -> tuple[Transitions, list[str]]:
    """Transitions of a CSV, and the tasks' names; labels may be numbers or words."""
    if not file.exists():
        raise InputError(f"{file}: there is no such file")
    with reading(file, "save it as a plain CSV"):
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


def plan(
    *,
    scale: Scale = "quick",
    seed: int = 0,
    file: Path | None = None,
    gamma: float = 0.7,
    spread: float = 0.1,
    samples: int = 300,
) -> Plan:
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
    if file is None:
        family = random_family(states=6, actions=3, tasks=8, spread=spread, gamma=gamma, seed=seed)
        transitions, names = draw_transitions(family, samples, seed=seed), None
        data = "a random family of 8 tasks"
    else:
        transitions, names = read_transitions(file)
        data = f"{file.name}, fingerprint {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    options = {"gamma": gamma, "seed": seed, "resamples": {"quick": 400, "paper": 2000}[scale]}
    settings = {"data": data, "file": None if file is None else file.name, "gamma": gamma}
    settings |= {"spread": spread, "samples": samples, "scale": scale, "seed": seed}
    computing = partial(compute, transitions=transitions, names=names, **options)
    return Plan("should-pool", (Cell("all-tasks", {}),), computing, conclude, settings)


def compute(
    cells: Sequence[Cell], progress: Progress, *, transitions: Transitions, **options: Any
) -> Rows:
    """The answer for every task, and for all together in every row."""
    for cell in cells:
        progress("estimating the tasks' distances", 0.0)
        pooling = should_pool(transitions, **options)
        together = {f"together_{name}": v for name, v in pooling.distance.to_dict().items()}
        yield (
            cell,
            pd.DataFrame(
                {
                    "task": task.task,
                    "samples": task.samples,
                    "single_error": task.single_error,
                    "pool_error": task.pool_error,
                    **task.distance.to_dict(),
                    **together,
                    "covered": pooling.covered,
                }
                for task in pooling.tasks
            ),
        )


@concludes("should-pool", "Should these tasks be pooled?")
def conclude(rows: pd.DataFrame, settings: dict[str, Any]) -> Conclusion:
    """The answer as table, figure and verdict."""
    pooling = _pooling_in(rows, settings["gamma"])
    table = pooling.to_frame()
    verdicts = (_verdict(pooling),)
    return table, verdicts, pooling.plot, (line.strip() for line in pooling.summary().splitlines())


def _pooling_in(rows: pd.DataFrame, gamma: float) -> Pooling:
    """The answer that rows were made from."""

    def estimate(row: dict[Any, Any], prefix: str = "") -> Estimate:
        value, low, high = (float(row[prefix + name]) for name in ("value", "low", "high"))
        return Estimate(value, low, high, int(row[f"{prefix}n"]))

    records = rows.to_dict("records")
    tasks = tuple(
        TaskAnswer(
            str(row["task"]),
            int(row["samples"]),
            estimate(row),
            float(row["single_error"]),
            float(row["pool_error"]),
        )
        for row in records
    )
    return Pooling(tasks, estimate(records[0], "together_"), gamma, float(records[0]["covered"]))


def _verdict(pooling: Pooling) -> Verdict:
    room, distance = pooling.room, pooling.distance
    saved = Estimate(
        room - distance.value**2,
        room - distance.high**2,
        room - distance.low**2,
        len(pooling.tasks),
    )
    claim = "pooling is expected to help (mean squared error of a backup that it saves)"
    return Verdict.of(claim, saved, paper=False)
