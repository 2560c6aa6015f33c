"""The most energy a feeder could have served, had everything been known: a linear programme a day.

Maximise the kWh x_{s,i} of session s in interval i, over the intervals it fills, with x_{s,i} at most
what the station gives in the interval, the sum over i at most the session's need, and the sum over s at
most what the feeder gives. Between two arrivals or departures all periods are alike, so that they count
as one interval. Solved by HiGHS, several days in one programme; no scheduler can be better.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from apportion.domains.charging.garage import PERIOD_HOURS
from apportion.domains.charging.sessions import RATE_KW

_TOGETHER = 16
"""Days in one programme: calling the solver costs more than a day's solution."""


def best_energies(
    arrival: np.ndarray,
    departure: np.ndarray,
    need_kwh: np.ndarray,
    capacity_kw: float,
    members: np.ndarray | None = None,
) -> np.ndarray:
    """The most kWh that the sessions of each task and day can be served together, (tasks, days).

    Arrays are (days, stations, sessions); a session with departure <= arrival is absent.

    Examples
    --------
    >>> arrays = [np.reshape(x, (1, 2, 1)) for x in ([0, 0], [2, 1], [2.0, 1.0])]
    >>> best_energies(*arrays, 4.0).tolist()
    [[2.0]]
    """
    tasks = np.arange(arrival.shape[1])[None] if members is None else np.asarray(members)
    days = [
        _Day.of(*(x[day, task] for x in (arrival, departure, need_kwh)))
        for task in tasks
        for day in range(len(arrival))
    ]
    batches = [days[first : first + _TOGETHER] for first in range(0, len(days), _TOGETHER)]
    served = np.concatenate([_solve(batch, capacity_kw) for batch in batches])
    return served.reshape(len(tasks), len(arrival))


@dataclass(frozen=True, eq=False)
class _Day:
    """A day's variables: which session and interval each belongs to."""

    need_kwh: np.ndarray
    hours: np.ndarray
    """Of each interval."""
    session: np.ndarray
    interval: np.ndarray

    @classmethod
    def of(cls, arrival: np.ndarray, departure: np.ndarray, need_kwh: np.ndarray) -> "_Day":
        arrival, departure, need = (np.ravel(x) for x in (arrival, departure, need_kwh))
        there = (departure > arrival) & (need > 0)
        arrival, departure = arrival[there], departure[there]
        cuts = np.unique(np.concatenate([arrival, departure]))
        inside = (arrival[:, None] <= cuts[:-1]) & (cuts[1:] <= departure[:, None])
        return cls(need[there].astype(float), np.diff(cuts) * PERIOD_HOURS, *np.nonzero(inside))


def _solve(days: list[_Day], capacity_kw: float) -> np.ndarray:
    """The most kWh of each day; the days do not touch one another."""
    sessions = np.cumsum([0, *(len(day.need_kwh) for day in days)])
    intervals = np.cumsum([0, *(len(day.hours) for day in days)])
    session = np.concatenate([d.session + s for d, s in zip(days, sessions[:-1], strict=True)])
    interval = np.concatenate([d.interval + i for d, i in zip(days, intervals[:-1], strict=True)])
    if not len(session):
        return np.zeros(len(days))
    hours = np.concatenate([day.hours for day in days])
    needs = np.concatenate([day.need_kwh for day in days])
    ones, columns = np.ones(len(session)), np.arange(len(session))
    by_session = csr_array((ones, (session, columns)), shape=(len(needs), len(session)))
    by_interval = csr_array((ones, (interval, columns)), shape=(len(hours), len(session)))
    most = RATE_KW * hours[interval]
    solution = linprog(
        -ones,
        A_ub=vstack([by_session, by_interval]),
        b_ub=np.concatenate([needs, capacity_kw * hours]),
        bounds=np.stack([np.zeros_like(most), most], 1),
        method="highs",
    )
    if not solution.success:
        raise RuntimeError(f"the linear programme of {len(days)} days failed: {solution.message}")
    day_of = np.repeat(np.arange(len(days)), [len(day.session) for day in days])
    return np.bincount(day_of, solution.x, minlength=len(days))
