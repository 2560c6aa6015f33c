"""What the studies of random families share: how LSPI errs on them, and whether a bound was broken.

Everything is measured under the uniform distribution over the states.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from apportion.statistics import mean_over
from apportion.studies.engine import Cell, Progress, Rows
from apportion.studies.study import Verdict
from apportion.theory.concentrability import concentrability
from apportion.theory.distance import distance_by_enumeration
from apportion.theory.lspi import PathResult
from apportion.theory.mdp import MDP, norm
from apportion.theory.theorem import TransferConstants


def one_by_one(doing: str, measure: Callable[..., pd.DataFrame], **options: Any):
    """How a plan computes cells by themselves: `measure` is given a cell's values and the options.

    `doing` says what is being measured, with the values' names in braces.
    """
    return partial(_one_by_one, doing=doing, measure=partial(measure, **options))


def _one_by_one(
    cells: Sequence[Cell], progress: Progress, doing: str, measure: Callable[..., pd.DataFrame]
) -> Rows:
    for done, cell in enumerate(cells):
        progress(doing.format(**cell.values), done / len(cells))
        yield cell, measure(**cell.values)


def uniform(mdp: MDP) -> np.ndarray:
    """Where errors and performance are measured."""
    return np.full(mdp.states, 1 / mdp.states)


def errors_of(family: MDP, learned: PathResult) -> tuple[np.ndarray, np.ndarray]:
    """Of LSPI on the average MDP: e = max_k ||e_k||_mu, (runs, 1), and what each task loses by it."""
    alone, mu = family.average()[:, None], uniform(family)
    residual = learned.values - alone.operator(learned.policies[:, :-1], learned.values)
    error = norm(residual, mu).max(-1)[:, None]
    return error, norm(family.suboptimality(learned.policies[:, -1:]), mu)


def transfer_constants(family: MDP) -> TransferConstants:
    """What carries errors and distances to suboptimality; eps over all policies."""
    alone, mu = family.average()[:, None], uniform(family)
    own, trained = (
        concentrability(mdp.kernel, mdp.gamma, sigma=mu, mu=mu) for mdp in (family, alone)
    )
    distance = distance_by_enumeration(family, alone, mu)
    return TransferConstants(family.gamma, alone.reward_bound, own.first, trained.second, distance)


def never_broken(
    rows: Any, column: str, claim: str, paper: bool = True, *, by: Sequence[str] = ("spread", "run")
) -> Verdict:
    """Whether no family exceeds 1 in any row; those of one distance and number are one.

    Exact: a theorem is broken by one of them, whatever the interval of their share, which is shown.
    """
    worst = rows.groupby(list(by))[column].max().to_numpy()
    broken = int((worst > 1 + 1e-9).sum())
    low, high = map(float, stats.binomtest(broken, len(worst)).proportion_ci())
    share, ends = broken / len(worst), (low, high)
    return Verdict(claim, not broken, share, ends, len(worst), paper, broken > 0, exact=True)


def log_slope(curves: np.ndarray, against: np.ndarray) -> np.ndarray:
    """Least-squares slope of the log of curves against the log of something.

    >>> sizes = np.array([1.0, 2.0, 4.0])
    >>> float(log_slope(3 / sizes, sizes).round(6))
    -1.0
    """
    x = np.log(against)
    x = x - x.mean(-1, keepdims=True)
    return np.asarray((np.log(curves) * x).sum(-1) / (x**2).sum(-1))


def means_by(rows: Any, by: list[str], column: str, counted: str) -> pd.DataFrame:
    """The mean of a column with its interval, and of how many, in each group of rows."""
    found = ((*key, mean_over(own[column].to_numpy())) for key, own in rows.groupby(by, sort=False))
    records = [(*key, mean.value, mean.low, mean.high, mean.n) for *key, mean in found]
    return pd.DataFrame(records, columns=[*by, column, "low", "high", counted])
