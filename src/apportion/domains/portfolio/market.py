"""The market as an allocation problem: wealth shared out among the instruments of a task, daily.

State of a task: the period n and the drifted allocation w_{n-1}; windows of prices are gathered
when asked for. R(x_n, a_n) = ln[cost_factor(w_{n-1}, a_n) a_n . y_n], w_n = a_n y_n / (a_n . y_n).
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.prices import Prices, as_day
from apportion.errors import InputError
from apportion.problem import Observation, Problem, Step
from apportion.simplex import equal_shares
from apportion.tasks import Task

WINDOW = 31
SCALE = 10.0
"""Windows enter the network as 10 (v / v_last_close - 1): centred, and of order 1."""


class Holding(eqx.Module):
    """A task's state: period n of the episode, and the shares held as it begins."""

    n: Int[Array, ""]
    held: Float[Array, " entities"]


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
    tracking: Float[Array, ""]
    """Penalty on the squared difference of log growth from equal shares (0: the paper's reward)."""
    window: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    universe: int = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        prices: Prices,
        *,
        start: str | np.datetime64 | None = None,
        end: str | np.datetime64 | None = None,
        window: int = WINDOW,
        costs: Costs | None = None,
        tracking: float = 0.0,
    ) -> "Market":
        """The market over the periods that end between `start` and `end`, both days included.

        Without `start` the first period is the first with a full window of history. With a cash
        entity (`costs.cash`) a constant price is added as the universe's last entity: put it in
        front of every task with `tasks.with_entity(market.universe - 1)`.
        """
        costs = Costs() if costs is None else costs
        first, last = rows_between(prices, start, end, window=window)
        values = prices.values()[: last + 1]
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
        )

    @classmethod
    def ending(
        cls, prices: Prices, *, window: int = WINDOW, costs: Costs | None = None
    ) -> "Market":
        """The market at the close of the last row: what is known before the period to come.

        Its one period has no prices yet, so only `windows` of period 0 means anything.
        """
        values = prices.values()[-window:]
        return cls(
            prices=jnp.asarray(values, jnp.float32),
            first=jnp.asarray(window, jnp.int32),
            length=jnp.asarray(1, jnp.int32),
            costs=Costs() if costs is None else costs,
            tracking=jnp.zeros(()),
            window=window,
            horizon=1,
            universe=values.shape[1],
        )

    def reset(self, task: Task, *, key: PRNGKeyArray) -> Holding:
        """Equal shares at the close before the first period."""
        return Holding(jnp.zeros((), jnp.int32), equal_shares(task.mask))

    def observe(self, task: Task, state: Holding) -> Observation:
        return Observation(self.windows(task, state.n), state.held)

    def windows(self, task: Task, n: Int[Array, ""]) -> Float[Array, "entities window channels"]:
        """What is known of each entity when period n begins: its last `window` days, scaled."""
        rows = self.first + n - self.window + jnp.arange(self.window)
        history = self.prices[rows[None, :], task.members[:, None]]
        return SCALE * (history / history[:, -1:, :1] - 1)

    def relatives(self, task: Task, n: Int[Array, ""]) -> Float[Array, " entities"]:
        """Price relatives y_n of period n."""
        row = self.first + n
        return self.prices[row, task.members, 0] / self.prices[row - 1, task.members, 0]

    def step(
        self,
        task: Task,
        state: Holding,
        allocation: Float[Array, " entities"],
        *,
        key: PRNGKeyArray,
    ) -> Step:
        y = self.relatives(task, state.n)
        grown = allocation * y
        growth = grown.sum()
        ahead = jnp.log(growth) - jnp.log((equal_shares(task.mask) * y).sum())
        reward = jnp.log(self.costs.cost_factor(state.held, allocation) * growth)
        reward = reward - self.tracking.astype(reward.dtype) * ahead**2
        after = Holding(state.n + 1, grown / growth)
        return Step(after, reward, jnp.array(False), state.n + 1 >= self.length)


def rows_between(
    prices: Prices,
    start: str | np.datetime64 | None,
    end: str | np.datetime64 | None,
    *,
    window: int,
) -> tuple[int, int]:
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
