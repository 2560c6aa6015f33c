"""The market as an allocation problem: wealth shared out among the instruments of a task, daily.

State of a task: the period n and the drifted allocation w_{n-1}; windows of prices are gathered
when asked for. R(x_n, a_n) = ln[cost_factor(w_{n-1}, a_n) a_n . y_n], w_n = a_n y_n / (a_n . y_n).
Between rebalancing days a_n = w_{n-1}; who is not listed has the limit 0.
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.listings import fill, tradable
from apportion.domains.portfolio.prices import Day, Prices
from apportion.domains.portfolio.rules import Rules, rebalancing_days
from apportion.domains.tables import as_day
from apportion.errors import InputError
from apportion.problem import Observation, Problem, Step
from apportion.simplex import Allocation, Bounds, Scalar, equal_shares, equal_within
from apportion.tasks import Task

WINDOW = 31
SCALE = 10.0
"""Windows enter the network as 10 (v / v_last_close - 1): centred, and of order 1."""


class Holding(eqx.Module):
    """A task's state: period n of the episode, and the shares held as it begins."""

    n: Int[Array, ""]
    held: Allocation


class Market(Problem):
    """Prices and commissions of a universe; an episode runs over `horizon` trading days.

    Examples
    --------
    >>> from apportion.domains.portfolio import SimulatedMarket
    >>> market = Market.of(SimulatedMarket.draw(universe=6, days=60).prices, window=8)
    >>> market.universe, market.horizon
    (6, 52)
    """

    prices: Float[Array, "time universe channels"]
    first: Int[Array, ""]
    """Row of the close that ends the episode's first period."""
    length: Int[Array, ""]
    """Periods of an episode, at most `horizon`; a leaf, so that runs over different years share one
    program."""
    costs: Costs
    tracking: Scalar
    """Penalty on the squared difference of log growth from equal shares (0: the paper's reward)."""
    window: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    universe: int = eqx.field(static=True)
    groups: Int[Array, " universe"] | None = None
    """The number of each entity's group, -1 for none."""
    listed: Bool[Array, "periods universe"] | None = None
    """Whether each entity can be held over the period that ends on each row; None: all can."""
    rebalanced: Bool[Array, " periods"] | None = None
    """Whether the period that ends on each row begins with a trade; None: all do."""

    @classmethod
    def of(
        cls,
        prices: Prices,
        *,
        start: Day = None,
        end: Day = None,
        window: int = WINDOW,
        costs: Costs | None = None,
        tracking: float = 0.0,
        rules: Rules | None = None,
    ) -> "Market":
        """The market over the periods that end between `start` and `end`, both days included.

        Without `start` the first period is the first with a full window of history. With a cash
        entity (`costs.cash`) a constant price is added as the universe's last entity: put it in
        front of every task with `tasks.with_entity(market.universe - 1)`. Of the rules it keeps who
        is in which group and when a strategy trades; the rest is the strategy's own.
        """
        costs = Costs() if costs is None else costs
        first, last = rows_between(prices, start, end, window=window)
        values = fill(prices.values())[: last + 1]
        if costs.cash:
            values = np.concatenate([values, np.ones_like(values[:, :1])], 1)
        return cls(
            prices=jnp.asarray(values, jnp.float32),
            first=jnp.asarray(first, jnp.int32),
            length=jnp.asarray(last - first + 1, jnp.int32),
            costs=costs,
            tracking=jnp.asarray(tracking, float),
            window=window,
            horizon=last - first + 1,
            universe=values.shape[1],
            **_ruled(prices, rules, slice(0, last + 1), cash=costs.cash),
        )

    @classmethod
    def ending(
        cls,
        prices: Prices,
        *,
        window: int = WINDOW,
        costs: Costs | None = None,
        rules: Rules | None = None,
    ) -> "Market":
        """The market at the close of the last row: what is known before the period to come.

        Its one period has no prices yet, so only what is decided in period 0 means anything.
        """
        costs = Costs() if costs is None else costs
        values = fill(prices.values())[-window:]
        if costs.cash:
            values = np.concatenate([values, np.ones_like(values[:, :1])], 1)
        return cls(
            prices=jnp.asarray(values, jnp.float32),
            first=jnp.asarray(window, jnp.int32),
            length=jnp.asarray(1, jnp.int32),
            costs=costs,
            tracking=jnp.zeros(()),
            window=window,
            horizon=1,
            universe=values.shape[1],
            **_ruled(prices, rules, slice(-window - 1, None), cash=costs.cash),
        )

    def ruled(self, prices: Prices, rules: Rules) -> "Market":
        """The same market, of the same prices, for strategies with these rules."""
        rows = slice(0, self.prices.shape[0])
        return replace(self, **_ruled(prices, rules, rows, cash=self.costs.cash))

    def reset(self, task: Task, *, key: PRNGKeyArray) -> Holding:
        """Equal shares at the close before the first period."""
        return Holding(jnp.zeros((), jnp.int32), self.start(task))

    def start(self, task: Task) -> Allocation:
        """Equal shares of those listed when the first period begins."""
        return self.equal(task, jnp.zeros((), jnp.int32))

    def equal(self, task: Task, n: Int[Array, ""]) -> Allocation:
        """Equal shares of those listed in period n."""
        return equal_within(task.mask, self._presence(task, n))

    def observe(self, task: Task, state: Holding) -> Observation:
        groups = None if self.groups is None else self.groups[task.members]
        presence = self._presence(task, state.n)
        limits = None if presence is None else presence.limits
        return Observation(self.windows(task, state.n), state.held, limits=limits, groups=groups)

    def _presence(self, task: Task, n: Int[Array, ""]) -> Bounds | None:
        if self.listed is None:
            return None
        return Bounds(limits=self.listed[self.first + n, task.members].astype(float))

    def windows(self, task: Task, n: Int[Array, ""]) -> Float[Array, "entities window channels"]:
        """What is known of each entity when period n begins: its last `window` days, scaled."""
        rows = self.first + n - self.window + jnp.arange(self.window)
        history = self.prices[rows[None, :], task.members[:, None]]
        return SCALE * (history / history[:, -1:, :1] - 1)

    def relatives(self, task: Task, n: Int[Array, ""]) -> Float[Array, " entities"]:
        """Price relatives y_n of period n."""
        row = self.first + n
        return self.prices[row, task.members, 0] / self.prices[row - 1, task.members, 0]

    def traded(
        self,
        task: Task,
        n: Int[Array, ""],
        held: Allocation,
        wanted: Allocation,
        *,
        enter: bool = True,
    ) -> Allocation:
        """What is wanted, or between rebalancing days what is held; who is not listed is sold, and
        the others share what it was worth in proportion.

        With `enter` the first period is traded whatever its day: a portfolio is set up then.
        """
        chosen = wanted
        if self.rebalanced is not None:
            today = self.rebalanced[self.first + n] | (enter & (n == 0))
            chosen = jnp.where(today, wanted, held)
        if self.listed is None:
            return chosen
        kept = jnp.where(self.listed[self.first + n, task.members], chosen, 0.0)
        total = kept.sum()
        return jnp.where(total > 0, kept / jnp.where(total > 0, total, 1.0), self.equal(task, n))

    def grow(
        self, task: Task, n: Int[Array, ""], allocation: Allocation
    ) -> tuple[Scalar, Allocation]:
        """Growth a_n . y_n and drifted shares w_n.

        Where nobody of a task is listed wealth stands still and counts as equally shared.
        """
        grown = allocation * self.relatives(task, n)
        growth = grown.sum()
        if self.listed is None:
            return growth, grown / growth
        growth = jnp.where(growth > 0, growth, 1.0)
        return growth, jnp.where(allocation.sum() > 0, grown / growth, equal_shares(task.mask))

    def cost_factor(self, task: Task, held: Allocation, allocation: Allocation) -> Scalar:
        """The fraction of wealth left after trading; nobody trades where nobody is listed."""
        factor = self.costs.among(task.members).cost_factor(held, allocation)
        return factor if self.listed is None else jnp.where(allocation.sum() > 0, factor, 1.0)

    def step(
        self, task: Task, state: Holding, allocation: Allocation, *, key: PRNGKeyArray
    ) -> Step:
        allocation = self.traded(task, state.n, state.held, allocation)
        growth, drifted = self.grow(task, state.n, allocation)
        equal, _ = self.grow(task, state.n, self.equal(task, state.n))
        ahead = jnp.log(growth) - jnp.log(equal)
        reward = jnp.log(self.cost_factor(task, state.held, allocation) * growth)
        reward = reward - self.tracking.astype(reward.dtype) * ahead**2
        after = Holding(state.n + 1, drifted)
        return Step(after, reward, jnp.array(False), state.n + 1 >= self.length)


def _ruled(prices: Prices, rules: Rules | None, rows: slice, *, cash: bool) -> dict[str, Any]:
    """Groups, listings and rebalancing days of these rows; nothing where there is nothing to keep to."""
    rules = Rules() if rules is None else rules
    groups, listed, rebalanced = rules.numbers(prices.tickers), tradable(prices.close), None
    if rules.rebalance != "daily":
        # A period is decided at the close before the row on which it ends.
        rebalanced = np.append(True, rebalancing_days(prices.dates, rules.rebalance))
    if cash:
        groups = None if groups is None else np.append(groups, np.int32(-1))
        listed = None if listed is None else np.pad(listed, ((0, 0), (0, 1)), constant_values=True)
    return {
        "groups": None if groups is None else jnp.asarray(groups),
        "listed": None if listed is None else jnp.asarray(listed[rows]),
        "rebalanced": None if rebalanced is None else jnp.asarray(rebalanced[rows]),
    }


def rows_between(prices: Prices, start: Day, end: Day, *, window: int) -> tuple[int, int]:
    """Rows of the first and last period that end between two days, both included.

    A period's row is the day of its closing price; its decision is made at the close before.
    """
    days = len(prices.dates)
    if days <= window:
        raise InputError(
            f"prices: {days} days leave no period after a window of {window}; give more days or "
            "a shorter window"
        )
    first = window if start is None else prices.row(start)
    last = days - 1
    if end is not None:
        last = prices.row(as_day(end) + 1) - 1
    if first >= days:
        raise InputError(
            f"start {start} is after the last day of the prices, {prices.dates[-1]}; choose an "
            "earlier start"
        )
    if first < window:
        raise InputError(
            f"start {start} has {first} days of history before it, but the window is {window}; "
            f"choose {prices.dates[window]} or later"
        )
    if last < first:
        raise InputError(
            f"no trading day lies between {start or prices.dates[first]} and {end}; the prices run "
            f"from {prices.dates[0]} to {prices.dates[-1]}"
        )
    return first, last
