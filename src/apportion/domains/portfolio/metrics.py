"""What a strategy's daily record is worth, with intervals that respect its dependence in time.

Every metric is a function of simple returns over the last axis. Intervals are those of a jackknife over
blocks of a month: percentiles of resampled blocks, which earlier versions gave, hold the truth in
docs/results/coverage less often than they say.
"""

from collections.abc import Callable, Mapping

import numpy as np

from apportion.statistics import Estimate, over_blocks

TRADING_DAYS = 252
"""Trading days a year."""


def wealth(returns: np.ndarray) -> np.ndarray:
    """Final wealth from 1."""
    return np.prod(1 + returns, -1)


def annual_return(returns: np.ndarray) -> np.ndarray:
    """Growth compounded to a year of 252 days.

    >>> round(float(annual_return(np.full(126, 0.0))), 3)
    0.0
    """
    return np.exp(log_growth(returns)) - 1


def log_growth(returns: np.ndarray) -> np.ndarray:
    """Log growth a year: additive over periods, as the reward is."""
    return np.log1p(returns).mean(-1) * TRADING_DAYS


def volatility(returns: np.ndarray) -> np.ndarray:
    """Standard deviation of returns, a year's."""
    return (
        returns.std(-1, ddof=1) * np.sqrt(TRADING_DAYS)
        if returns.shape[-1] > 1
        else np.nan * wealth(returns)
    )


def sharpe(returns: np.ndarray) -> np.ndarray:
    """Mean return over its standard deviation, a year's, with no interest on cash."""
    return _ratio(returns.mean(-1) * TRADING_DAYS, volatility(returns))


def sortino(returns: np.ndarray) -> np.ndarray:
    """Mean return over the root mean square of the losses, a year's."""
    downside = np.sqrt((np.minimum(returns, 0) ** 2).mean(-1) * TRADING_DAYS)
    return _ratio(returns.mean(-1) * TRADING_DAYS, downside)


def max_drawdown(returns: np.ndarray) -> np.ndarray:
    """Largest fall from a peak, as a positive fraction of the peak.

    >>> float(max_drawdown(np.array([0.5, -0.5, 0.1])))
    0.5
    """
    start = np.ones((*returns.shape[:-1], 1))
    path = np.concatenate([start, np.cumprod(1 + returns, -1)], -1)
    return 1 - (path / np.maximum.accumulate(path, -1)).min(-1)


def calmar(returns: np.ndarray) -> np.ndarray:
    """Annual return over the maximal drawdown."""
    return _ratio(annual_return(returns), max_drawdown(returns))


METRICS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "wealth": wealth,
    "annual_return": annual_return,
    "log_growth": log_growth,
    "volatility": volatility,
    "sharpe": sharpe,
    "sortino": sortino,
    "max_drawdown": max_drawdown,
    "calmar": calmar,
}


def measure(returns: np.ndarray, turnover: np.ndarray, benchmark: np.ndarray) -> dict[str, float]:
    """All metrics of one strategy; `benchmark` are Equal CRP's returns, for the hit rate.

    `turnover` is sum |a_n - w_{n-1}| of each period, bought and sold counted both; the metric is
    its mean over periods.
    """
    values = {name: float(metric(returns)) for name, metric in METRICS.items()}
    hits = float((returns > benchmark).mean())
    return {**values, "turnover": float(turnover.mean()), "hit_rate": hits}


def intervals(
    returns: np.ndarray, turnover: np.ndarray, benchmark: np.ndarray
) -> dict[str, Estimate]:
    """The metrics that estimate what days to come are drawn from, each with its 95 % interval.

    Volatility and drawdowns are not among them: calm and wild times last longer than a block, so that
    an interval of the one would be too narrow, and the largest fall so far grows with every day.
    """
    years = len(returns) / TRADING_DAYS
    growth = over_blocks(log_growth, returns)
    return {
        "wealth": _ends(growth, lambda end: np.exp(end * years)),
        "annual_return": _ends(growth, np.expm1),
        "log_growth": growth,
        "sharpe": over_blocks(sharpe, returns),
        "sortino": over_blocks(sortino, returns),
        "turnover": over_blocks(np.mean, turnover),
        "hit_rate": over_blocks(np.mean, returns > benchmark),
    }


def _ends(found: Estimate, turned: Callable[[float], float]) -> Estimate:
    """An interval in other units: an increasing function of its ends."""
    with np.errstate(over="ignore"):  # what a few days compound to
        value, low, high = (float(turned(end)) for end in (found.value, found.low, found.high))
    return Estimate(value, low, high, found.n)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """A quotient that is not a number where nothing varies."""
    below = np.asarray(below, float)
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)
