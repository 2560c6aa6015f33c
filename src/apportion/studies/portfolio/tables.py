"""Reading the table of portfolio experiments: paired gaps with intervals over experiments and years."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from apportion.statistics import Estimate
from apportion.studies.study import Verdict


def cells(
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


def over_experiments_and_years(
    values: pd.DataFrame | np.ndarray, *, resamples: int = 4000, seed: int = 0
) -> Estimate:
    """The mean over a table of experiments by years, both resampled (crossed bootstrap)."""
    array = np.asarray(values, float)
    experiments, years = array.shape
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, experiments, (resamples, experiments, 1))
    columns = rng.integers(0, years, (resamples, 1, years))
    drawn = array[rows, columns].mean((1, 2))
    low, high = np.quantile(drawn, [0.025, 0.975])
    if array.size == 1:
        low, high = -np.inf, np.inf
    return Estimate(float(array.mean()), float(low), float(high), array.size)


def judge(claim: str, gap: pd.DataFrame, *, paper: bool) -> Verdict:
    """Hold "the gap is positive" against the data: it holds when the interval lies above 0."""
    estimate = over_experiments_and_years(gap)
    positive = int((gap.mean(axis=0) > 0).sum())
    full = f"{claim} ({positive} of {gap.shape[1]} years positive)"
    return Verdict.of(full, estimate, holds=estimate.above_zero, paper=paper)


def reading(name: str, values: pd.DataFrame, unit: str = "points a year") -> str:
    """A value with its interval as a plain sentence."""
    e = over_experiments_and_years(values)
    return f"{name}: {e.value:+.2f} {unit} [{e.low:+.2f}, {e.high:+.2f}]"


def interquartile(curves: pd.DataFrame, column: str = "gain") -> pd.DataFrame:
    """Mean and quartiles over experiments and years for each step."""
    grouped = curves.groupby("step")[column]
    return pd.DataFrame(
        {"mean": grouped.mean(), "low": grouped.quantile(0.25), "high": grouped.quantile(0.75)}
    )


def task_counts(table: pd.DataFrame) -> Sequence[int]:
    """The numbers of tasks multi-task policies were trained on."""
    return sorted(int(t) for t in table[table.method == "mtl"].tasks.unique())
