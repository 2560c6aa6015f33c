"""From the rows of cells to tables, and from the table of experiments by years to verdicts and notes."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from apportion.statistics import over_rows_and_columns
from apportion.studies.engine import Cell, Rows
from apportion.studies.study import Verdict

GAINS = ["gain", "log_gain", "sharpe_gain"]
COLOURS = {"stl": "0.5", "mtl": "C0", "pmtl": "C1"}


def by_cell(cells: Sequence[Cell], table: pd.DataFrame) -> Rows:
    """A batch's table taken apart: each cell with what it is and its rows.

    `table` has a column `place`, the number of the cell in the batch.
    """
    for place, rows in table.groupby("place"):
        cell = cells[int(place)]  # pyright: ignore[reportArgumentType]
        own = rows.drop(columns="place").reset_index(drop=True)
        yield cell, pd.DataFrame(cell.values, index=own.index).join(own)


def by_experiment_and_year(
    table: pd.DataFrame,
    method: str,
    tasks: int | None,
    tested: str,
    *,
    step: int | None = None,
    column: str = "gain",
) -> pd.DataFrame:
    """One method's values as experiments by years, at a step (default: its last)."""
    rows: Any = table[(table.method == method) & (table.tested == tested) & (table.task == -1)]
    if tasks is not None:
        rows = rows[rows.tasks == tasks]
    step = rows.step.max() if step is None else step
    return rows[rows.step == step].pivot(index="experiment", columns="year", values=column)


def first_tasks(table: pd.DataFrame, count: int) -> pd.DataFrame:
    """The rows of means anew, over the first `count` own tasks alone, where these stand by themselves.

    Methods that were tested on more tasks are then compared on the same ones.
    """
    rows: Any = table[(table.tested == "own") & (table.task >= 0) & (table.task < count)]
    keys = ["method", "tasks", "experiment", "year", "tested", "step"]
    return rows.groupby(keys)[GAINS].mean().reset_index().assign(task=-1)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each method, number of tasks, kind of task and step: mean gains, the gain's interval."""
    rows: Any = table[table.task == -1]
    found = []
    for key, own in rows.groupby(["method", "tasks", "tested", "step"]):
        method, tasks, tested, step = key
        gains = by_experiment_and_year(own, method, tasks, tested, step=step)
        e = over_rows_and_columns(gains.to_numpy())
        found.append(
            {"method": method, "tasks": tasks, "tested": tested, "step": step}
            | {"experiments": gains.shape[0], "years": gains.shape[1]}
            | {"gain": e.value, "low": e.low, "high": e.high}
            | {name: float(own[name].mean()) for name in GAINS[1:]}
        )
    return pd.DataFrame(found)


def verdict_above_zero(claim: str, gap: pd.DataFrame, *, paper: bool) -> Verdict:
    """Whether a gap, experiments by years, is positive: it is where its whole interval is."""
    estimate = over_rows_and_columns(gap.to_numpy())
    positive = int((gap.mean(axis=0) > 0).sum())
    full = f"{claim} ({positive} of {gap.shape[1]} years positive)"
    return Verdict.of(full, estimate, paper=paper)


def note(name: str, values: pd.DataFrame, unit: str = "points a year") -> str:
    """A value with its interval as a plain sentence."""
    e = over_rows_and_columns(values.to_numpy())
    return f"{name}: {e.value:+.2f} {unit} [{e.low:+.2f}, {e.high:+.2f}]"


def interquartile(curves: pd.DataFrame, column: str = "gain") -> pd.DataFrame:
    """Mean and quartiles over experiments and years for each step."""
    grouped = curves.groupby("step")[column]
    return pd.DataFrame(
        {"mean": grouped.mean(), "low": grouped.quantile(0.25), "high": grouped.quantile(0.75)}
    )


def task_counts(table: pd.DataFrame) -> list[int]:
    """The numbers of tasks multi-task policies were trained on."""
    return sorted(int(t) for t in table[table.method == "mtl"].tasks.unique())


def few_and_many(table: pd.DataFrame) -> tuple[int, int]:
    """The fewest tasks, and the number that is compared: the most, or the second of three."""
    counts = task_counts(table)
    return counts[0], counts[-2] if len(counts) > 2 else counts[-1]
