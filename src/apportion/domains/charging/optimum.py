"""The most energy a feeder could have served, had everything been known: a linear programme a day.

Maximise the kWh x_{s,n} of session s in period n, over the periods it fills, with x_{s,n} at most what
the station gives in a period, the sum over n at most the session's need, and the sum over s at most
what the feeder gives in a period. Solved by HiGHS; no scheduler can be better.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from apportion.domains.charging.garage import PERIOD_HOURS, PERIODS
from apportion.domains.charging.sessions import RATE_KW


def best_energy(
    arrival: np.ndarray, departure: np.ndarray, need_kwh: np.ndarray, capacity_kw: float
) -> float:
    """The most kWh that sessions of one day can be served together.

    Parameters
    ----------
    arrival, departure, need_kwh
        Of each session, in any shape; a session with departure <= arrival is absent.
    capacity_kw
        What the feeder gives.

    Examples
    --------
    >>> best_energy(np.array([0, 0]), np.array([2, 1]), np.array([2.0, 1.0]), 4.0)
    2.0
    """
    arrival, departure = np.ravel(arrival), np.ravel(departure)
    need_kwh = np.ravel(need_kwh)
    there = (departure > arrival) & (need_kwh > 0)
    arrival, departure, need = arrival[there], departure[there], need_kwh[there].astype(float)
    if not len(need):
        return 0.0
    stay = departure - arrival
    session = np.repeat(np.arange(len(need)), stay)
    start = np.repeat(np.cumsum(stay) - stay, stay)
    period = np.arange(len(session)) - start + np.repeat(arrival, stay)
    ones, columns = np.ones(len(session)), np.arange(len(session))
    by_session = csr_array((ones, (session, columns)), shape=(len(need), len(session)))
    by_period = csr_array((ones, (period, columns)), shape=(PERIODS, len(session)))
    solution = linprog(
        -ones,
        A_ub=vstack([by_session, by_period]),
        b_ub=np.concatenate([need, np.full(PERIODS, capacity_kw * PERIOD_HOURS)]),
        bounds=(0, RATE_KW * PERIOD_HOURS),
        method="highs",
    )
    if not solution.success:
        raise RuntimeError(f"the linear programme of a day failed: {solution.message}")
    return float(-solution.fun)


def best_energies(
    arrival: np.ndarray,
    departure: np.ndarray,
    need_kwh: np.ndarray,
    capacity_kw: float,
    members: np.ndarray | None = None,
) -> np.ndarray:
    """`best_energy` of every task and day, (tasks, days), from arrays (days, stations, sessions)."""
    if members is None:
        members = np.arange(arrival.shape[1])[None]
    return np.array(
        [
            [
                best_energy(
                    arrival[day, task], departure[day, task], need_kwh[day, task], capacity_kw
                )
                for day in range(len(arrival))
            ]
            for task in np.asarray(members)
        ]
    )
