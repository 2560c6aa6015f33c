"""What strategies would have earned on a set of instruments over a period, net and gross.

Wealth is 1 and shares are equal at the close before the first period; costs are exact.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from apportion.composition import EqualShares, PartialTrading
from apportion.domains.portfolio import metrics
from apportion.domains.portfolio.cash import WithoutCash, everyone, relatives_of
from apportion.domains.portfolio.commissions import Commissions, describe, rates_of, settled
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.listings import tradable
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.rules import CASH, Rules
from apportion.domains.portfolio.walk import walk_policy, walk_targets
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.simplex import on_simplex
from apportion.statistics import Estimate, block_days, interval

Baseline = Callable[[Float[Array, "time entities"]], Float[Array, "time entities"]]
"""Relatives to target allocations; row n may use relatives of rows before n only."""

EQUAL, LAZY = "equal-crp", "lazy-crp"
"""Equal shares restored every day, and the same a tenth of the way each day."""
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
    """Which strategies keep to rules, and that the others do not."""

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

    def intervals(self, name: str, *, resamples: int = 1000) -> dict[str, Estimate]:
        """A strategy's net metrics with block-bootstrap intervals."""
        return metrics.intervals(
            self.net[name], self.turnover[name], self.net[EQUAL], resamples=resamples
        )

    def against(self, name: str, other: str = EQUAL, *, resamples: int = 1000) -> Estimate:
        """Difference of two strategies' net log growth a year, on the same resampled days."""
        gap = np.log1p(self.net[name]) - np.log1p(self.net[other])
        days = block_days(len(gap), resamples=resamples)
        ends = interval(gap[days].mean(-1) * metrics.TRADING_DAYS)
        return Estimate(float(gap.mean() * metrics.TRADING_DAYS), *ends, len(gap))

    def to_frame(self) -> pd.DataFrame:
        """A row for each strategy: net metrics, their interval ends, and gross wealth."""
        rows = []
        for name in self.net:
            row: dict[str, Any] = {"strategy": name}
            for metric, estimate in self.intervals(name).items():
                row[metric] = estimate.value
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
                f"{name:24}{values['wealth']:8.3f}{values['annual_return']:9.1%}"
                f"{values['volatility']:8.1%}{values['sharpe']:8.2f}{values['max_drawdown']:10.1%}"
                f"{values['turnover']:10.4f}   {ahead.value:+.4f} "
                f"[{ahead.low:+.4f}, {ahead.high:+.4f}]"
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
            label = f"{name} ({self.measures['net'][name]['wealth']:.2f})"
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


def lazy_rebalancing(eta: float = 0.1) -> Policy:
    """Equal shares that learn nothing and trade little: each day the fraction `eta` of the way back."""
    return PartialTrading(EqualShares(), eta)


def backtest(
    prices: Prices,
    policies: Mapping[str, Policy],
    *,
    baselines: Mapping[str, Baseline] | None = None,
    hindsight: Mapping[str, Baseline] | None = None,
    start: str | np.datetime64 | None = None,
    end: str | np.datetime64 | None = None,
    window: int = 31,
    cost: Commissions = 0.0025,
    rules: Mapping[str, Rules] | None = None,
) -> Backtest:
    """Backtest strategies on all instruments of a table, with exact costs.

    Parameters
    ----------
    prices
        The instruments, and history before `start`.
    policies
        Strategies that see windows of prices and what is held.
    baselines
        Strategies as functions of all price relatives up to `end`; row n sees rows before n only.
    hindsight
        Strategies that are shown the tested periods' relatives, all of them, such as best CRP.
    start, end
        First and last day; the first period ends on the first trading day on or after `start`.
    cost
        Commission on what is bought and sold: one fraction, or each ticker's two.
    rules
        What the policies of these names were trained to keep to; every other strategy is free, and
        holds no cash where one of these may.

    Examples
    --------
    >>> from apportion.domains.portfolio import SimulatedMarket
    >>> result = backtest(SimulatedMarket.draw(universe=4, days=80).prices, {}, window=8)
    >>> list(result.net)
    ['equal-crp']
    """
    rules, cost = rules or {}, settled(cost)
    cash = any(kept.cash for kept in rules.values())
    costs = Costs.of(cost, prices.tickers, exact=True, cash=cash)
    market = Market.of(prices, start=start, end=end, window=window, costs=costs)
    first = int(market.first)
    task = everyone(len(prices.tickers), cash=cash)
    walks = {}
    for name, policy in {**policies, EQUAL: EqualShares()}.items():
        own = rules.get(name)
        invested = cash and not (own is not None and own.cash)
        strategy = WithoutCash(policy) if invested else policy
        walks[name] = _walk_one(strategy, _ruled(market, prices, own), task)
    y = jnp.asarray(prices.relatives()[: first + market.horizon], jnp.float32)
    for shown, strategies in ((y, baselines or {}), (y[first:], hindsight or {})):
        for name, strategy in strategies.items():
            targets = strategy(shown)[-market.horizon :]
            _check_targets(name, np.asarray(targets))
            if cash:
                targets = jnp.pad(targets, ((0, 0), (1, 0)))
            walks[name] = _walk_targets(targets, market, task)
    allocations = {name: np.asarray(walk.allocations) for name, walk in walks.items()}
    return accounted(prices, first, allocations, cost, rules)


def accounted(
    prices: Prices,
    first: int,
    allocations: Mapping[str, np.ndarray],
    cost: Commissions,
    rules: Mapping[str, Rules],
) -> Backtest:
    """The records of strategies that held these allocations from row `first` on."""
    (days,) = {len(shares) for shares in allocations.values()}
    cash = any(kept.cash for kept in rules.values())
    relatives, held = relatives_of(prices, cash=cash)[first:], opening_shares(prices, first, cash)
    rates = rates_of(cost, prices.tickers)
    if cash:
        # Free of commission, and in front.
        each = np.broadcast_to(np.asarray(rates), (len(prices.tickers), 2))
        rates = np.pad(each, ((1, 0), (0, 0)))
    accounts = {
        name: account(shares, relatives, rates, held) for name, shares in allocations.items()
    }
    return Backtest(
        prices.dates[first : first + days],
        (CASH, *prices.tickers) if cash else prices.tickers,
        cost,
        {name: growth - 1 for name, (growth, _, _) in accounts.items()},
        {name: growth * factor - 1 for name, (growth, factor, _) in accounts.items()},
        {name: turnover for name, (_, _, turnover) in accounts.items()},
        allocations,
        describe_rules(rules),
    )


def _ruled(market: Market, prices: Prices, rules: Rules | None) -> Market:
    """The market as a strategy with rules finds it."""
    if rules is None:
        return market
    rules.check(prices.tickers)
    return market.ruled(prices, rules)


def describe_rules(rules: Mapping[str, Rules]) -> str:
    """Who keeps to what, in a line; nothing where all strategies are free."""
    kept = [f"{name} keeps to {r.describe()}" for name, r in rules.items() if not r.none]
    return f"{'; '.join(kept)}; all other strategies are unconstrained" if kept else ""


def opening_shares(prices: Prices, row: int, cash: bool = False) -> np.ndarray | None:
    """Equal shares of those listed as the period that ends on `row` begins; None where all are."""
    listed = tradable(prices.close)
    if listed is None:
        return None
    there = np.append(True, listed[row]) if cash else listed[row]
    return there / there.sum()


def account(
    allocations: np.ndarray,
    relatives: np.ndarray,
    cost: float | np.ndarray,
    held: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Growth, cost factor and turnover of each period, in double precision with exact costs.

    Parameters
    ----------
    allocations, relatives
        a_n and y_n, (time, entities).
    cost
        One commission, or for each entity one on what is bought and one on what is sold.
    held
        Shares held before the first period; equal ones by default.
    """
    a = np.asarray(allocations, float)
    a = a / a.sum(-1, keepdims=True)
    grown = a * np.asarray(relatives, float)[: len(a)]
    growth = grown.sum(-1)
    before = np.full(a.shape[1], 1 / a.shape[1]) if held is None else np.asarray(held, float)
    w = np.concatenate([before[None], (grown / growth[:, None])[:-1]])
    with jax.enable_x64(True):
        factor = np.asarray(_cost_factor(Costs(cost, exact=True), jnp.asarray(w), jnp.asarray(a)))
    return growth, factor, np.abs(a - w).sum(-1)


_cost_factor = eqx.filter_jit(lambda costs, w, a: jax.vmap(costs.cost_factor)(w, a))
_walk_one = eqx.filter_jit(walk_policy)
_walk_targets = eqx.filter_jit(walk_targets)


def _check_targets(name: str, targets: np.ndarray) -> None:
    sound = np.asarray(on_simplex(jnp.asarray(targets), tolerance=1e-3))
    if not sound.all():
        row = int(np.argmin(sound))
        raise InputError(
            f"baseline {name}: its allocation in period {row} is {targets[row].round(4).tolist()}; "
            "shares must be >= 0 and sum to 1"
        )
