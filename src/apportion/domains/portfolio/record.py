"""The records of several strategies over one period: measures, intervals, table, JSON and picture."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.portfolio import metrics
from apportion.domains.portfolio.commissions import Commissions, describe
from apportion.statistics import Estimate, over_blocks

EQUAL, LAZY = "equal-crp", "lazy-crp"
"""Equal shares restored every day, and the same a tenth of the way each day."""
HINDSIGHT = frozenset({"best-crp"})
"""Strategies chosen when all is known: no rivals, and marked wherever they stand."""
CONTRACT = ("wealth", "annual_return", "volatility", "sharpe", "max_drawdown", "turnover")


@dataclass(frozen=True, eq=False)
class Backtest:
    """The records of several strategies over one period on one set of instruments.

    Made by `backtest`; `equal-crp` is always among them.
    """

    dates: np.ndarray
    """The day on which each period ends."""
    tickers: tuple[str, ...]
    cost: Commissions
    gross: Mapping[str, np.ndarray]
    """Simple returns of each strategy before costs, (time,)."""
    net: Mapping[str, np.ndarray]
    turnover: Mapping[str, np.ndarray]
    allocations: Mapping[str, np.ndarray]
    """Allocations of each strategy, (time, entities)."""
    note: str = ""
    """Which strategies keep to rules, and that the others do not; which were left out."""
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
        """Side -> strategy -> metric -> value."""
        return {
            side: {
                name: metrics.measure(returns, self.turnover[name], records[EQUAL])
                for name, returns in records.items()
            }
            for side, records in (("net", self.net), ("gross", self.gross))
        }

    def intervals(self, name: str) -> dict[str, Estimate]:
        """A strategy's net metrics with intervals by blocks of days; drawdowns have none."""
        return metrics.intervals(self.net[name], self.turnover[name], self.net[EQUAL])

    def against(self, name: str, other: str = EQUAL) -> Estimate:
        """Difference of two strategies' net log growth a year, with its interval by blocks of days."""
        gap = np.log1p(self.net[name]) - np.log1p(self.net[other])
        return over_blocks(lambda days: days.mean() * metrics.TRADING_DAYS, gap)

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
            return {
                strategy: {m: values[m] if np.isfinite(values[m]) else None for m in CONTRACT}
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
            f"{len(self.tickers)} instruments, commission {describe(self.cost)}",
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
        return "\n".join([*lines, self.note] if self.note else lines)

    def plot(self) -> Figure:
        """Wealth of every strategy net of costs, and its lead over Equal CRP."""
        figure = Figure(figsize=(9, 6.5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        equal = np.cumsum(np.log1p(self.net[EQUAL]))
        for name, returns in self.net.items():
            strong = name in ("policy", EQUAL)
            style = {"linewidth": 1.8 if strong else 0.9, "zorder": 3 if strong else 2}
            growth = np.cumsum(np.log1p(returns))
            label = f"{labelled(name)} ({self.measures['net'][name]['wealth']:.2f})"
            above.plot(self.dates, np.exp(growth), label=label, **style)
            below.plot(self.dates, 100 * np.expm1(growth - equal), **style)
        above.set_yscale("log")
        above.yaxis.set_major_formatter("{x:g}")
        above.yaxis.set_minor_formatter("{x:g}")
        above.set_ylabel(f"wealth, net of {describe(self.cost)}")
        below.set_ylabel("% over Equal CRP")
        for axes in (above, below):
            axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
        return figure


def labelled(name: str) -> str:
    """A strategy's name as it stands in tables and pictures."""
    return f"{name} (hindsight)" if name in HINDSIGHT else name
