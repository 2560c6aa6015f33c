"""What a strategy's daily record is worth, with intervals that respect its dependence in time.

Every metric is a function of simple returns over the last axis, so that the circular block
bootstrap (blocks of a month) is one array operation.
"""

from collections.abc import Callable, Mapping

import numpy as np

from apportion.statistics import Estimate, block_days, interval

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
    returns: np.ndarray,
    turnover: np.ndarray,
    benchmark: np.ndarray,
    *,
    resamples: int = 1000,
    block: int = 21,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Every metric with a 95 % interval; all strategies share the resampled blocks of days."""
    points = measure(returns, turnover, benchmark)
    days = block_days(len(returns), resamples=resamples, block=block, seed=seed)
    drawn = {name: metric(returns[days]) for name, metric in METRICS.items()}
    drawn["turnover"] = turnover[days].mean(-1)
    drawn["hit_rate"] = (returns > benchmark)[days].mean(-1)
    return {
        name: Estimate(point, *interval(drawn[name]), len(returns))
        for name, point in points.items()
    }


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """A quotient that is not a number where nothing varies."""
    below = np.asarray(below, float)
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)
