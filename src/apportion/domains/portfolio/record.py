"""What strategies earned, day by day: measures, intervals that respect time, table, JSON and picture.

Every metric is a function of simple returns over the last axis. Intervals are those of a jackknife over
blocks of a month (how often they cover is in docs/results/coverage).
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
"""Trading days a year."""
EQUAL, LAZY = "equal-crp", "lazy-crp"
"""Equal shares restored every day, and the same a tenth of the way each day."""
HINDSIGHT = frozenset({"best-crp"})
"""Strategies chosen when all is known: no rivals, and marked wherever they stand."""


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
    """Mean return over its standard deviation, a year's, without interest on cash, or NaN."""
    risk = np.asarray(volatility(returns), float)
    mean = returns.mean(-1) * TRADING_DAYS
    return np.where(risk > 0, mean / np.where(risk > 0, risk, 1.0), np.nan)


def max_drawdown(returns: np.ndarray) -> np.ndarray:
    """Largest fall from a peak, as a positive fraction of the peak.

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
    """The records of several strategies over one period on one set of instruments.

    Made by `backtest_strategies`; `equal-crp` is always among them.
    """

    dates: np.ndarray
    """The day on which each period ends."""
    tickers: tuple[str, ...]
    cost: float
    gross: Mapping[str, np.ndarray]
    """Simple returns of each strategy before costs, (time,)."""
    net: Mapping[str, np.ndarray]
    turnover: Mapping[str, np.ndarray]
    """sum |a_n - w_{n-1}| of each period, bought and sold counted both."""
    allocations: Mapping[str, np.ndarray]
    """Allocations of each strategy, (time, entities)."""
    trained_until: str | None = None
    """The last day that the policy was trained on."""

    @property
    def in_sample(self) -> int:
        """Periods that the policy was trained on, which say nothing about days to come."""
        if self.trained_until is None:
            return 0
        return int((self.dates <= np.datetime64(self.trained_until)).sum())

    @cached_property
    def measures(self) -> dict[str, dict[str, dict[str, float]]]:
        """Side -> strategy -> metric -> value; turnover is the mean over periods."""

        def measured(name: str, returns: np.ndarray) -> dict[str, float]:
            values = {metric: float(of(returns)) for metric, of in _METRICS.items()}
            return values | {"turnover": float(self.turnover[name].mean())}

        return {
            side: {name: measured(name, returns) for name, returns in records.items()}
            for side, records in (("net", self.net), ("gross", self.gross))
        }

    def intervals(self, name: str) -> dict[str, Estimate]:
        """The net metrics that estimate what days to come are drawn from, with 95 % intervals by blocks.

        Volatility and drawdowns are not among them: calm and wild times last longer than a block, so that
        an interval of the one would be too narrow, and the largest fall so far grows with every day.
        """
        returns = self.net[name]
        years = len(returns) / TRADING_DAYS
        growth = over_blocks(log_growth, returns)
        ends = np.array([growth.value, growth.low, growth.high])
        with np.errstate(over="ignore"):  # what a few days compound to
            in_all, a_year = np.exp(ends * years), np.expm1(ends)
        return {
            "wealth": Estimate(*map(float, in_all), n=growth.n),
            "annual_return": Estimate(*map(float, a_year), n=growth.n),
            "log_growth": growth,
            "sharpe": over_blocks(sharpe, returns),
            "turnover": over_blocks(np.mean, self.turnover[name]),
        }

    def against(self, name: str, other: str = EQUAL) -> Estimate:
        """Difference of two strategies' net log growth a year, with its interval by blocks of days."""
        gap = np.log1p(self.net[name]) - np.log1p(self.net[other])
        return over_blocks(lambda days: days.mean() * TRADING_DAYS, gap)

    def to_frame(self) -> pd.DataFrame:
        """A row for each strategy: net metrics, their interval ends, and gross wealth."""
        rows = []
        for name in self.net:
            row: dict[str, Any] = {"strategy": name, **self.measures["net"][name]}
            for metric, estimate in self.intervals(name).items():
                row[f"{metric}_low"], row[f"{metric}_high"] = estimate.low, estimate.high
            rows.append({**row, "gross_wealth": self.measures["gross"][name]["wealth"]})
        return pd.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """The contract of `apportion backtest --json`; a metric that is not a number is null."""

        def side(name: str) -> dict[str, dict[str, float | None]]:
            told = [*(metric for metric in _METRICS if metric != "log_growth"), "turnover"]
            return {
                strategy: {m: values[m] if np.isfinite(values[m]) else None for m in told}
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
        """The strategies side by side, net of costs, each with its interval against Equal CRP."""
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
                f"{self.in_sample} of {len(self.dates)} periods are days the policy was trained on: "
                "they say nothing about days to come"
            )
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Wealth of every strategy net of costs, and its lead over Equal CRP."""
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
    """A strategy's name as it stands in tables and pictures."""
    return f"{name} (hindsight)" if name in HINDSIGHT else name
