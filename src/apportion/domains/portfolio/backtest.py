"""What strategies would have earned on a set of instruments over a period, net and gross.

Wealth is 1 and shares are equal at the close before the first period; costs are exact.
"""

from collections.abc import Callable, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from apportion.composition import EqualShares, PartialTrading
from apportion.domains.portfolio.cash import WithoutCash, everyone
from apportion.domains.portfolio.commissions import Commissions, rates_of, settled
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.listings import tradable
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.prices import Day, Prices
from apportion.domains.portfolio.record import EQUAL, Backtest
from apportion.domains.portfolio.rules import CASH, Rules
from apportion.domains.portfolio.walk import Walk, walk_policy, walk_targets
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.simplex import on_simplex
from apportion.tasks import Task

Baseline = Callable[[Float[Array, "time entities"]], Float[Array, "time entities"]]
"""Relatives to target allocations; row n may use relatives of rows before n only."""


def lazy_rebalancing(eta: float = 0.1) -> Policy:
    """Equal shares that learn nothing and trade little: each day the fraction `eta` of the way back."""
    return PartialTrading(EqualShares(), eta)


def backtest(
    prices: Prices,
    policies: Mapping[str, Policy],
    *,
    baselines: Mapping[str, Baseline] | None = None,
    hindsight: Mapping[str, Baseline] | None = None,
    start: Day = None,
    end: Day = None,
    window: int = 31,
    cost: Commissions = 0.0025,
    rules: Mapping[str, Rules] | None = None,
    on_strategy: Callable[[str, float], None] = lambda name, done: None,
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
    on_strategy
        Told the name of each strategy as its turn comes, and what part is done.

    Examples
    --------
    >>> from apportion.domains.portfolio import SimulatedMarket
    >>> result = backtest(SimulatedMarket.draw(universe=4, days=80).prices, {}, window=8)
    >>> list(result.net)
    ['equal-crp']
    """
    rules, cost = rules or {}, settled(cost)
    costs = Costs.of(cost, prices.tickers, exact=True, cash=_any_cash(rules))
    market = Market.of(prices, start=start, end=end, window=window, costs=costs)
    first, task = int(market.first), everyone(len(prices.tickers), cash=costs.cash)
    baselines, hindsight = baselines or {}, hindsight or {}
    policies = {**policies, EQUAL: EqualShares()}
    count = len(policies) + len(baselines) + len(hindsight)
    walks = {}
    for name, policy in policies.items():
        on_strategy(name, len(walks) / count)
        walks[name] = _walk_within(policy, rules.get(name, Rules()), market, prices, task)
    y = jnp.asarray(prices.relatives()[: first + market.horizon], jnp.float32)
    for shown, strategies in ((y, baselines), (y[first:], hindsight)):
        for name, strategy in strategies.items():
            on_strategy(name, len(walks) / count)
            walks[name] = _walk_baseline(name, strategy(shown), market, task)
    allocations = {name: np.asarray(walk.allocations) for name, walk in walks.items()}
    return accounted(prices, first, allocations, cost, rules)


def _any_cash(rules: Mapping[str, Rules]) -> bool:
    return any(kept.cash for kept in rules.values())


def _walk_within(policy: Policy, rules: Rules, market: Market, prices: Prices, task: Task) -> Walk:
    """A policy's way within its rules; it holds no cash where they do not say it may."""
    rules.check(prices.tickers)
    invested = market.costs.cash and not rules.cash
    strategy = WithoutCash(policy) if invested else policy
    return _walk_one(strategy, market.ruled(prices, rules), task)


def _walk_baseline(
    name: str, targets: Float[Array, "time entities"], market: Market, task: Task
) -> Walk:
    targets = targets[-market.horizon :]
    _check_targets(name, np.asarray(targets))
    if market.costs.cash:
        targets = jnp.pad(targets, ((0, 0), (1, 0)))
    return _walk_targets(targets, market, task)


def accounted(
    prices: Prices,
    first: int,
    allocations: Mapping[str, np.ndarray],
    cost: Commissions,
    rules: Mapping[str, Rules],
) -> Backtest:
    """The records of strategies that held these allocations from row `first` on."""
    (days,) = {len(shares) for shares in allocations.values()}
    cash = _any_cash(rules)
    relatives, held = prices.relatives()[first:], opening_shares(prices, first, cash)
    rates = rates_of(cost, prices.tickers)
    if cash:
        # It stands in front, still, and is free of commission.
        relatives = np.pad(relatives, ((0, 0), (1, 0)), constant_values=1.0)
        each = np.broadcast_to(np.asarray(rates), (len(prices.tickers), 2))
        rates = np.pad(each, ((1, 0), (0, 0)))
    accounts = {
        name: account(shares, relatives, rates, held) for name, shares in allocations.items()
    }
    kept = [f"{name} keeps to {r.describe()}" for name, r in rules.items() if not r.none]
    return Backtest(
        prices.dates[first : first + days],
        (CASH, *prices.tickers) if cash else prices.tickers,
        cost,
        {name: growth - 1 for name, (growth, _, _) in accounts.items()},
        {name: growth * factor - 1 for name, (growth, factor, _) in accounts.items()},
        {name: turnover for name, (_, _, turnover) in accounts.items()},
        allocations,
        f"{'; '.join(kept)}; all other strategies are unconstrained" if kept else "",
    )


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
