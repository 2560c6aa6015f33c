"""Shared by the studies of the theory: cells one by one, slopes, and broken bounds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from apportion.certify.statistics import mean_over
from apportion.studies.engine import Cell, OnProgress, Rows
from apportion.studies.study import Verdict, select


def one_by_one(
    measure: Callable[..., pd.DataFrame], cells: Sequence[Cell], progress: OnProgress
) -> Rows:
    """Call `measure` with the values of each cell; with `partial`, a plan's `compute`."""
    for done, cell in enumerate(cells):
        progress(cell.name, done / len(cells))
        yield cell, measure(**cell.values)


def by_run(rows: Any, column: str, **where: Any) -> np.ndarray:
    """A column of the rows with these values, ordered by run.

    >>> rows = pd.DataFrame({"arm": ["a", "b", "a"], "run": [1, 0, 0], "regret": [3.0, 4.0, 5.0]})
    >>> by_run(rows, "regret", arm="a").tolist()
    [5.0, 3.0]
    """
    return select(rows, **where).sort_values("run")[column].to_numpy()


def never_broken(
    rows: Any, column: str, claim: str, paper: bool = True, *, by: Sequence[str] = ("spread", "run")
) -> Verdict:
    """Whether no family exceeds 1 in any row; `by` identifies a family.

    The verdict is exact: one family breaks a theorem. The interval of the share is shown only.
    """
    worst = rows.groupby(list(by))[column].max().to_numpy()
    broken = int((worst > 1 + 1e-9).sum())
    low, high = map(float, stats.binomtest(broken, len(worst)).proportion_ci())
    share, ends = broken / len(worst), (low, high)
    return Verdict(claim, not broken, share, ends, len(worst), paper, broken > 0, exact=True)


def log_slope(curves: np.ndarray, against: np.ndarray) -> np.ndarray:
    """Least-squares slope of the log of curves against the log of `against`.

    >>> sizes = np.array([1.0, 2.0, 4.0])
    >>> float(log_slope(3 / sizes, sizes).round(6))
    -1.0
    """
    x = np.log(against)
    x = x - x.mean(-1, keepdims=True)
    return np.asarray((np.log(curves) * x).sum(-1) / (x**2).sum(-1))


def means_by(rows: Any, by: list[str], column: str, counted: str) -> pd.DataFrame:
    """Mean of a column, its interval and the number of rows in each group."""
    found = ((*key, mean_over(own[column].to_numpy())) for key, own in rows.groupby(by, sort=False))
    records = [(*key, mean.value, mean.low, mean.high, mean.n) for *key, mean in found]
    return pd.DataFrame(records, columns=[*by, column, "low", "high", counted])
