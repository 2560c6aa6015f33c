"""From the rows of cells to tables, and from the table of experiments by years to verdicts and notes."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from apportion.statistics import over_rows_and_columns
from apportion.studies.cells import Cell, Rows
from apportion.studies.study import Verdict

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
