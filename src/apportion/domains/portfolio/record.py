"""Daily returns of strategies: metrics, block intervals, table, JSON and plot.

Every metric is a function of simple returns over the last axis. Intervals come from a jackknife over
blocks of a month (docs/results/coverage reports their coverage).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from apportion.certify.statistics import Estimate, over_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRADING_DAYS = 252
"""Trading days per year."""
EQUAL, LAZY = "equal-crp", "lazy-crp"
"""Names of equal shares that are restored every day, fully or a tenth of the way."""
HINDSIGHT = frozenset({"best-crp"})
"""Strategies chosen with knowledge of the test period; tables and plots mark them."""


def wealth(returns: np.ndarray) -> np.ndarray:
    """Return the final wealth for an initial wealth of 1."""
    return np.prod(1 + returns, -1)


def annual_return(returns: np.ndarray) -> np.ndarray:
    """Annual return, compounded over 252 days.

    >>> round(float(annual_return(np.full(126, 0.0))), 3)
    0.0
    """
    return np.exp(log_growth(returns)) - 1


def log_growth(returns: np.ndarray) -> np.ndarray:
    """Annual log growth, which is additive over periods like the reward."""
    return np.log1p(returns).mean(-1) * TRADING_DAYS


def volatility(returns: np.ndarray) -> np.ndarray:
    """Annualised standard deviation of returns."""
    return (
        returns.std(-1, ddof=1) * np.sqrt(TRADING_DAYS)
        if returns.shape[-1] > 1
        else np.nan * wealth(returns)
    )


def sharpe(returns: np.ndarray) -> np.ndarray:
    """Annualised Sharpe ratio with a risk-free rate of 0; NaN if the volatility is 0."""
    risk = np.asarray(volatility(returns), float)
    mean = returns.mean(-1) * TRADING_DAYS
    return np.where(risk > 0, mean / np.where(risk > 0, risk, 1.0), np.nan)


def max_drawdown(returns: np.ndarray) -> np.ndarray:
    """Largest drawdown, as a positive fraction of the peak.

    >>> float(max_drawdown(np.array([0.5, -0.5, 0.1])))
    0.5
    """
    start = np.ones((*returns.shape[:-1], 1))
    path = np.concatenate([start, np.cumprod(1 + returns, -1)], -1)
    return 1 - (path / np.maximum.accumulate(path, -1)).min(-1)


_METRICS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "wealth": wealth,
    "annual_return": annual_return,
    "log_growth": log_growth,
    "volatility": volatility,
    "sharpe": sharpe,
    "max_drawdown": max_drawdown,
}


@dataclass(frozen=True, eq=False)
class Backtest:
    """Results of several strategies on the same days and instruments.

    `backtest_strategies` returns it; `equal-crp` is always included.
    """

    dates: np.ndarray
    """Last day of each period."""
    tickers: tuple[str, ...]
    """Names of the instruments."""
    cost: float
    """Commission, a fraction of the value traded."""
    gross: Mapping[str, np.ndarray]
    """Simple returns of each strategy before costs, (time,)."""
    net: Mapping[str, np.ndarray]
    """Simple returns of each strategy after costs, (time,)."""
    turnover: Mapping[str, np.ndarray]
    """sum |a_n - w_{n-1}| of each period, purchases plus sales."""
    allocations: Mapping[str, np.ndarray]
    """Allocations of each strategy, (time, entities)."""
    trained_until: str | None = None
    """Last training day of the policy."""

    @property
    def in_sample(self) -> int:
        """Number of periods that the policy was trained on."""
        if self.trained_until is None:
            return 0
        return int((self.dates <= np.datetime64(self.trained_until)).sum())

    @cached_property
    def measures(self) -> dict[str, dict[str, dict[str, float]]]:
        """Metrics by side ("net", "gross"), strategy and name; turnover is the mean over periods."""

        def measured(name: str, returns: np.ndarray) -> dict[str, float]:
            values = {metric: float(of(returns)) for metric, of in _METRICS.items()}
            return values | {"turnover": float(self.turnover[name].mean())}

        return {
            side: {name: measured(name, returns) for name, returns in records.items()}
            for side, records in (("net", self.net), ("gross", self.gross))
        }

    def intervals(self, name: str) -> dict[str, Estimate]:
        """Return net metrics with 95 % intervals by blocks of days.

        Volatility and drawdown have no interval: volatility clusters last longer than a block, so that the
        interval would be too narrow, and the largest drawdown grows with the number of days.
        """
        returns = self.net[name]
        years = len(returns) / TRADING_DAYS
        growth = over_blocks(log_growth, returns)
        ends = np.array([growth.value, growth.low, growth.high])
        with np.errstate(over="ignore"):  # compounding a few days to a year can overflow
            in_all, a_year = np.exp(ends * years), np.expm1(ends)
        return {
            "wealth": Estimate(*map(float, in_all), n=growth.n),
            "annual_return": Estimate(*map(float, a_year), n=growth.n),
            "log_growth": growth,
            "sharpe": over_blocks(sharpe, returns),
            "turnover": over_blocks(np.mean, self.turnover[name]),
        }

    def against(self, name: str, other: str = EQUAL) -> Estimate:
        """Return the difference in annual net log growth, with its interval by blocks of days."""
        gap = np.log1p(self.net[name]) - np.log1p(self.net[other])
        return over_blocks(lambda days: days.mean() * TRADING_DAYS, gap)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per strategy: net metrics, their interval ends, and gross wealth."""
        rows = []
        for name in self.net:
            row: dict[str, Any] = {"strategy": name, **self.measures["net"][name]}
            for metric, estimate in self.intervals(name).items():
                row[f"{metric}_low"], row[f"{metric}_high"] = estimate.low, estimate.high
            rows.append({**row, "gross_wealth": self.measures["gross"][name]["wealth"]})
        return pd.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `apportion backtest --json`; a metric that is not finite is null."""

        def side(name: str) -> dict[str, dict[str, float | None]]:
            reported = [*(metric for metric in _METRICS if metric != "log_growth"), "turnover"]
            return {
                strategy: {m: values[m] if np.isfinite(values[m]) else None for m in reported}
                for strategy, values in self.measures[name].items()
            }

        return {
            "start": str(self.dates[0]),
            "end": str(self.dates[-1]),
            "periods": len(self.dates),
            "trained_until": self.trained_until,
            "in_sample_periods": self.in_sample,
            "hindsight": sorted(HINDSIGHT & set(self.net)),
            "net": side("net"),
            "gross": side("gross"),
        }

    def summary(self) -> str:
        """Return a text table of net metrics, with the interval of the gain over Equal CRP."""
        lines = [
            f"{self.dates[0]} to {self.dates[-1]}, {len(self.dates)} periods, "
            f"{len(self.tickers)} instruments, commission {self.cost:.2%}",
            f"{'':24}{'wealth':>8}{'a year':>9}{'vol':>8}{'Sharpe':>8}{'drawdown':>10}"
            f"{'turnover':>10}   log growth a year over Equal CRP",
        ]
        for name, values in self.measures["net"].items():
            ahead = self.against(name)
            lines.append(
                f"{labelled(name):24}{values['wealth']:8.3f}{values['annual_return']:9.1%}"
                f"{values['volatility']:8.1%}{values['sharpe']:8.2f}{values['max_drawdown']:10.1%}"
                f"{values['turnover']:10.4f}   {ahead.value:+.4f} "
                f"[{ahead.low:+.4f}, {ahead.high:+.4f}]"
            )
        if self.in_sample:
            lines.append(
                f"{self.in_sample} of {len(self.dates)} periods are days the policy was trained on; "
                "results on them do not predict later days"
            )
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Plot net wealth of every strategy, and its lead over Equal CRP."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 6.5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        equal = np.cumsum(np.log1p(self.net[EQUAL]))
        for name, returns in self.net.items():
            style = {"linewidth": 1.8 if name in ("policy", EQUAL) else 0.9}
            growth = np.cumsum(np.log1p(returns))
            label = f"{labelled(name)} ({self.measures['net'][name]['wealth']:.2f})"
            above.plot(self.dates, np.exp(growth), label=label, **style)
            below.plot(self.dates, 100 * np.expm1(growth - equal), **style)
        above.set_yscale("log")
        above.set_ylabel(f"wealth, net of {self.cost:.2%}")
        below.set_ylabel("% over Equal CRP")
        for axes in (above, below):
            axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
        return figure


def labelled(name: str) -> str:
    """Return the name of a strategy in tables and plots."""
    return f"{name} (hindsight)" if name in HINDSIGHT else name
