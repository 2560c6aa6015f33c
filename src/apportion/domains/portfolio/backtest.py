"""Backtests of strategies on a set of instruments, net and gross of costs.

Wealth is 1 and shares are equal at the close before the first period; costs are exact. A trained
policy is compared with baselines on days after its training. Its weekly gains over a baseline are
the input of a certificate.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.certify.certificate import Gains
from apportion.composition import EqualShares, PartialTrading
from apportion.domains.portfolio.allocation import TrainedPolicy
from apportion.domains.portfolio.baselines import BASELINES, WITHOUT_HISTORY, Baseline
from apportion.domains.portfolio.market import Costs, Market, walk_policy
from apportion.domains.portfolio.prices import Day, Prices, day_after
from apportion.domains.portfolio.record import EQUAL, HINDSIGHT, LAZY, Backtest
from apportion.domains.portfolio.settings import CASH
from apportion.domains.tables import as_day
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.runs.policy_file import load_about, load_policy
from apportion.runs.settings import suggest
from apportion.simplex import Allocation, Head, on_simplex


def lazy_rebalancing() -> Policy:
    """Return the policy that trades a tenth of the way to equal shares each day."""
    return PartialTrading(EqualShares(), 0.1)


def backtest_strategies(
    prices: Prices,
    policies: Mapping[str, Policy],
    *,
    baselines: Mapping[str, Baseline] | None = None,
    start: Day = None,
    end: Day = None,
    window: int = 31,
    cost: float = 0.0025,
    heads: Mapping[str, Head] | None = None,
    on_strategy: Callable[[str, float], None] = lambda name, done: None,
) -> Backtest:
    """Backtest strategies on all instruments of a table, with exact costs.

    Parameters
    ----------
    prices : Prices
        The instruments, with history before `start`.
    policies : mapping of str to Policy
        Policies, which observe windows of prices and the shares held.
    baselines : mapping of str to callable
        Functions of all price relatives up to `end`; row n uses only rows before n. Those in
        `WITHOUT_HISTORY`, such as best CRP, receive only the relatives of the test period.
    start, end : day
        First and last day. The first period ends on the first trading day on or after `start`.
    cost : float
        Commission, a fraction of the value traded.
    heads : mapping of str to Head
        Floor, cap and cash by policy. Other strategies are unconstrained and hold no cash.
    on_strategy : callable
        Called before each strategy with its name and the completed fraction.

    Examples
    --------
    >>> from apportion.domains.portfolio import SimulatedMarket
    >>> result = backtest_strategies(SimulatedMarket.draw(universe=4, days=80).prices, {}, window=8)
    >>> list(result.net)
    ['equal-crp']
    """
    heads, baselines = heads or {}, baselines or {}
    cash = any(head.cash for head in heads.values())

    def market_with(head: Head) -> Market:
        costs = Costs(cost, exact=True, cash=head.cash)
        return Market.of(prices, start=start, end=end, window=window, costs=costs, head=head)

    market = market_with(Head())
    first = int(market.first)
    policies = {**policies, EQUAL: EqualShares()}
    count = len(policies) + len(baselines)
    allocations: dict[str, np.ndarray] = {}
    held: dict[str, np.ndarray] = {}

    def require_shares(name: str, shares: Allocation) -> None:
        sound = np.asarray(on_simplex(shares, tolerance=1e-3))
        if not sound.all():
            row = int(np.argmin(sound))
            raise InputError(
                f"{name}: its allocation in period {row} is "
                f"{np.asarray(shares[row]).round(4).tolist()}; shares must be >= 0 and sum to 1"
            )

    def record(name: str, shares: Allocation, market: Market) -> None:
        require_shares(name, shares)
        # Cash is the first column; it is 0 for a strategy without cash.
        missing = int(cash and not market.costs.cash)
        before = np.asarray(market.equal(market.everything()), float)
        held[name] = np.pad(before / before.sum(), (missing, 0))
        allocations[name] = np.pad(np.asarray(shares), ((0, 0), (missing, 0)))

    for name, policy in policies.items():
        on_strategy(name, len(allocations) / count)
        bounded = market_with(heads[name]) if name in heads else market
        record(name, _walk_one(policy, bounded, bounded.everything()).allocations, bounded)
    relatives = prices.relatives()[: first + market.horizon]
    y = jnp.asarray(relatives, jnp.float32)
    for name, baseline in baselines.items():
        on_strategy(name, len(allocations) / count)
        targets = jnp.asarray(baseline(y[first:] if name in WITHOUT_HISTORY else y))
        targets = targets[-market.horizon :]
        require_shares(name, targets)
        record(name, _held_shares(market, targets), market)
    relatives = np.pad(relatives[first:], ((0, 0), (int(cash), 0)), constant_values=1.0)
    accounts = {
        name: _account(shares, relatives, cost, held[name], cash=cash)
        for name, shares in allocations.items()
    }
    return Backtest(
        prices.dates[first : first + market.horizon],
        (CASH, *prices.tickers) if cash else prices.tickers,
        cost,
        {name: growth - 1 for name, (growth, _, _) in accounts.items()},
        {name: growth * factor - 1 for name, (growth, factor, _) in accounts.items()},
        {name: turnover for name, (_, _, turnover) in accounts.items()},
        allocations,
    )


def _account(
    allocations: np.ndarray,
    relatives: np.ndarray,
    cost: float,
    held: np.ndarray,
    *,
    cash: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute growth, cost factor and turnover of each period in double precision with exact costs.

    Parameters
    ----------
    allocations, relatives
        a_n and y_n, (time, entities).
    held
        Shares held before the first period.
    cash
        Whether the first entity is cash, which is free of commission.
    """
    a = np.asarray(allocations, float)
    a = a / a.sum(-1, keepdims=True)
    grown = a * np.asarray(relatives, float)[: len(a)]
    growth = grown.sum(-1)
    w = np.concatenate([held[None], (grown / growth[:, None])[:-1]])
    with jax.enable_x64(True):
        costs = Costs(cost, exact=True, cash=cash)
        factor = np.asarray(_cost_factor(costs, jnp.asarray(w), jnp.asarray(a)))
    return growth, factor, np.abs(a - w).sum(-1)


_cost_factor = eqx.filter_jit(lambda costs, w, a: jax.vmap(costs.cost_factor)(w, a))
_walk_one = eqx.filter_jit(walk_policy)


@eqx.filter_jit
def _held_shares(market: Market, targets: Allocation) -> Allocation:
    """Move the shares of unlisted instruments to the others in every period."""
    days = jnp.arange(market.horizon)
    return jax.vmap(market.tradable, in_axes=(None, 0, 0))(market.everything(), days, targets)


def backtest_with_baselines(
    trained: TrainedPolicy,
    prices: Prices,
    *,
    start: str | None = None,
    end: str | None = None,
    cost: float | None = None,
    baselines: Sequence[str] | None = None,
    on_strategy: Callable[[str, float], None] = lambda name, done: None,
) -> Backtest:
    """Compare a trained policy with baselines.

    Parameters
    ----------
    start, end
        First and last day; by default all days after the last training day.
    cost
        Commission; by default the one used in training.
    baselines
        Names of baselines; by default all.
    on_strategy
        As in `backtest_strategies`.
    """
    known = (EQUAL, LAZY, *BASELINES)
    chosen = known if baselines is None else baselines
    for name in chosen:
        if name not in known:
            raise InputError(
                f"baselines: {name!r} is not one of {', '.join(known)}{suggest(name, known)}"
            )
    after = day_after(trained.last)
    if start is None and prices.row(after) < len(prices.dates):
        start = str(after)
    if start is None or as_day(start) < after:
        warnings.warn(
            f"the policy was trained on days up to {trained.last}; results on these days are in-sample "
            "and do not predict later ones",
            stacklevel=2,
        )
    result = backtest_strategies(
        trained.series(prices),
        # Every backtest includes lazy and daily equal shares.
        {"policy": trained.policy, LAZY: lazy_rebalancing()},
        baselines={name: BASELINES[name] for name in chosen if name in BASELINES},
        start=start,
        end=end,
        window=trained.window,
        cost=trained.cost if cost is None else cost,
        heads={"policy": trained.head},
        on_strategy=on_strategy,
    )
    return replace(result, trained_until=trained.last)


def weekly_gains(
    trained: TrainedPolicy, prices: Prices, against: str, *, bound: float = 0.01
) -> Gains:
    """Compute the gains of a policy over a strategy in the weeks after training.

    Parameters
    ----------
    against
        Name of a baseline, or folder of another portfolio run.
    bound
        Largest absolute gain of a week; gains are clipped to it. Choose it before looking at the data.
    """
    known = [EQUAL, LAZY, *(name for name in BASELINES if name not in HINDSIGHT)]
    policies: dict[str, Policy] = {"policy": trained.policy}
    heads, last = {"policy": trained.head}, trained.last
    if against == LAZY:
        policies[LAZY] = lazy_rebalancing()
    elif against not in known:
        if not Path(against).is_dir():
            raise InputError(
                f"there is no baseline {against!r} to certify against; choose {', '.join(known)}, or "
                f"give the folder of another portfolio run{suggest(against, known)}"
            )
        other = TrainedPolicy.of(load_policy(against), load_about(against))
        if (other.window, other.channels) != (trained.window, trained.channels):
            raise InputError(
                f"{against}: its policy has another window or other price series than this one; give "
                "another baseline"
            )
        policies[against], heads[against] = other.policy, other.head
        last = max(last, other.last)
    start = day_after(last)
    if prices.row(start) >= len(prices.dates):
        raise InputError(
            f"the prices end on {prices.dates[-1]} and the policy was trained on days up to {last}; "
            "a certificate needs later days"
        )
    found = backtest_strategies(
        trained.series(prices),
        policies,
        baselines={against: BASELINES[against]} if against in BASELINES else {},
        start=start,
        window=trained.window,
        cost=trained.cost,
        heads=heads,
    )
    gap = np.log1p(found.net["policy"]) - np.log1p(found.net[against])
    # Weeks begin on Monday; day 0 of the calendar is a Thursday. The last week counts only if the prices
    # contain its Friday.
    week = (found.dates.astype("datetime64[D]").astype(int) + 3) // 7
    by_week = pd.DataFrame({"gap": gap, "day": found.dates}).groupby(week)
    weeks: Any = by_week.agg({"gap": "sum", "day": "last"})
    if pd.Timestamp(found.dates[-1]).weekday() < 4:
        weeks = weeks[:-1]
    return Gains.within(
        weeks["gap"].to_numpy(),
        bound,
        periods=weeks["day"].to_numpy().astype("datetime64[D]"),
        baseline=against,
        period="week",
        unit="log growth a week",
        block=13,
    )
