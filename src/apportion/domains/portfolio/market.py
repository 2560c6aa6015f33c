"""Market problem: daily allocation of wealth to the instruments of a task.

The state of a task is the period n and the drifted allocation w_{n-1}; windows of prices are gathered on
demand. R(x_n, a_n) = ln[cost_factor(w_{n-1}, a_n) a_n . y_n], w_n = a_n y_n / (a_n . y_n). The limit of an
unlisted instrument is 0; `head` bounds the others.

After a rebalance the fraction `cost_factor` of wealth remains, approximately 1 - c sum|w - a|. The exact
factor mu (Jiang et al. 2017) solves
mu (1 - c a_0) = 1 - c w_0 - (2c - c^2) sum_{i>=1} (w_i - mu a_i)^+, where entity 0 is cash and pays
no commission; without cash, w_0 = a_0 = 0. The two differ by less than 2c^2.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.domains.portfolio.prices import Day, Prices, day_after
from apportion.domains.portfolio.record import TRADING_DAYS
from apportion.domains.portfolio.settings import CASH, check_cost, check_weights
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.problem import Observation, Problem, Step
from apportion.simplex import Allocation, Bounds, Head, Scalar, equal_shares, equal_within
from apportion.tasks import Task

# Newton's method on a concave piecewise-linear function ends after finitely many steps. At
# realistic commissions the initial value is on the piece of the root or on the one next to it.
_NEWTON_STEPS = 6


def _fraction(rate: float | Array) -> Array:
    if not isinstance(rate, Tracer):
        check_cost(float(rate))
    return jnp.asarray(rate, float)


class Costs(eqx.Module):
    """Proportional transaction costs.

    Parameters
    ----------
    rate : float or array
        Commission c, a fraction of the value traded, in [0, 0.5).
    exact : bool
        Solve for the exact cost factor instead of using the first-order approximation.
    cash : bool
        Whether the first entity of every task is cash, which is free of commission.

    Raises
    ------
    InputError
        If `rate` is outside [0, 0.5).

    Examples
    --------
    >>> both = Costs(0.0025), Costs(0.0025, exact=True)
    >>> held, wanted = jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])
    >>> [round(float(costs.cost_factor(held, wanted)), 6) for costs in both]
    [0.995, 0.995006]
    """

    rate: Scalar = eqx.field(converter=_fraction, default=0.0025)
    exact: bool = eqx.field(static=True, default=False, kw_only=True)
    cash: bool = eqx.field(static=True, default=False, kw_only=True)

    def cost_factor(self, held: Allocation, allocation: Allocation) -> Scalar:
        """Compute the fraction of wealth that remains after trading from `held` to `allocation`.

        The exact factor is the root of a concave, decreasing, piecewise-linear function of mu, found by
        Newton's method. Only the last step is differentiated, which gives the gradient of the implicit
        function.

        Parameters
        ----------
        held, allocation : array of shape (entities,)
            Shares before and after trading.

        Returns
        -------
        array of shape ()
            The cost factor, at most 1.
        """
        c = self.rate.astype(held.dtype)
        w0, a0 = (held[0], allocation[0]) if self.cash else (0.0, 0.0)
        w, a = (held[1:], allocation[1:]) if self.cash else (held, allocation)
        mu = 1 - c * jnp.abs(w - a).sum()
        both = 2 * c - c**2
        for _ in range(_NEWTON_STEPS if self.exact else 0):
            mu = jax.lax.stop_gradient(mu)
            sold = jnp.maximum(w - mu * a, 0.0).sum()
            excess = 1 - c * w0 - both * sold - mu * (1 - c * a0)
            selling = jnp.where(w > mu * a, a, 0.0).sum()
            mu = mu - excess / jax.lax.stop_gradient(both * selling - (1 - c * a0))
        return mu


class Holding(eqx.Module):
    """State of a task: period n of the episode, and the shares held at its start."""

    n: Int[Array, ""]
    held: Allocation


class Market(Problem):
    """Portfolio problem on the prices of a universe; use `Market.of` to build it.

    Parameters
    ----------
    prices : array of shape (time, universe, channels)
        Complete prices; the first channel is the close.
    first : int array of shape ()
        Row of the close that ends the first period of an episode.
    length : int array of shape ()
        Periods of an episode, at most `horizon`. An array, so that runs over different years share one
        compiled program.
    costs : Costs
        Transaction costs.
    tracking : array of shape ()
        Weight of the penalty on the squared log growth relative to equal shares; 0 in the paper.
    window : int
        Days of history in an observation.
    horizon, universe : int
        Largest number of periods, and number of entities.
    listed : bool array of shape (periods, universe), optional
        Whether each entity can be held over the period that ends on each row; by default all can.
    head : Head
        Floor and cap of allocations, which observations contain as floors and limits.
    centre, scale : float
        Observations are scale (v / v_last_close - centre), of order 1; the paper's raw ratios have
        centre 0 and scale 1.

    Examples
    --------
    >>> from apportion.domains.portfolio import SimulatedMarket
    >>> market = Market.of(SimulatedMarket.draw(universe=6, days=60).prices, window=8)
    >>> market.universe, market.horizon
    (6, 52)
    """

    prices: Float[Array, "time universe channels"]
    first: Int[Array, ""]
    length: Int[Array, ""]
    costs: Costs
    tracking: Scalar
    window: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    universe: int = eqx.field(static=True)
    listed: Bool[Array, "periods universe"] | None = None
    head: Head = eqx.field(default_factory=Head)
    centre: float = eqx.field(static=True, default=1.0)
    scale: float = eqx.field(static=True, default=10.0)

    @classmethod
    def of(
        cls,
        prices: Prices,
        *,
        start: Day = None,
        end: Day = None,
        window: int = 31,
        costs: Costs | None = None,
        tracking: float = 0.0,
        head: Head | None = None,
    ) -> "Market":
        """Build the market of the periods that end between two days.

        With cash (`costs.cash`) a constant price is added as the last entity of the universe. Put it in
        front of every task with `tasks.with_entity(market.universe - 1)`.

        Parameters
        ----------
        prices : Prices
            Daily prices.
        start, end : str or datetime64, optional
            First and last day, both included; by default all days with a full window before them.
        window : int
            Days of history in an observation.
        costs : Costs, optional
            Transaction costs; 0.25 % by default.
        tracking : float
            Weight of the penalty on tracking error.
        head : Head, optional
            Floor, cap and cash of allocations.

        Returns
        -------
        Market
            The market.

        Raises
        ------
        InputError
            If no period remains, or the instruments cannot meet the bounds.
        """
        costs = Costs() if costs is None else costs
        head = Head(cash=costs.cash) if head is None else head
        if head.cash and not costs.cash:
            raise InputError(
                "head: cash is True, but no entity is cash; also give Costs(cash=True)"
            )
        check_weights(head.floor, head.cap, len(prices.tickers), cash=costs.cash)
        if costs.cash and CASH in prices.tickers:
            raise InputError(f'ticker "{CASH}" is among the prices; rename or drop it')
        first, last = _rows_between(prices, start, end, window=window)
        values, listed = prices.filled()[: last + 1], prices.tradable()
        if costs.cash:
            values = np.pad(values, ((0, 0), (0, 1), (0, 0)), constant_values=1.0)
        if costs.cash and listed is not None:
            listed = np.pad(listed, ((0, 0), (0, 1)), constant_values=True)
        return cls(
            prices=jnp.asarray(values, jnp.float32),
            first=jnp.asarray(first, jnp.int32),
            length=jnp.asarray(last - first + 1, jnp.int32),
            costs=costs,
            tracking=jnp.asarray(tracking, float),
            window=window,
            horizon=last - first + 1,
            universe=values.shape[1],
            listed=None if listed is None else jnp.asarray(listed[: last + 1]),
            head=head,
        )

    def reset(self, task: Task, *, key: PRNGKeyArray) -> Holding:
        """Start from equal shares at the close before the first period."""
        return Holding(jnp.zeros((), jnp.int32), self.equal(task))

    def equal(self, task: Task, n: Int[Array, ""] | int = 0) -> Allocation:
        """Return equal shares of the entities listed in period n."""
        return equal_within(task.mask, self._presence(task, n))

    def everything(self) -> Task:
        """Return the task of all instruments, with cash first if there is any."""
        if not self.costs.cash:
            return Task.of([range(self.universe)])[0]
        return Task.of([range(self.universe - 1)]).with_entity(self.universe - 1)[0]

    def observe(self, task: Task, state: Holding) -> Observation:
        bounds = self._presence(task, state.n)
        if (self.head.floor, self.head.cap) != (0, 1):
            bounds = self.head.bounds(task.mask, bounds, state.held.dtype)
        bounds = Bounds() if bounds is None else bounds
        return Observation(self.windows(task, state.n), state.held, bounds.limits, bounds.floors)

    def _presence(self, task: Task, n: Int[Array, ""] | int) -> Bounds | None:
        if self.listed is None:
            return None
        return Bounds(limits=self.listed[self.first + n, task.members].astype(float))

    def windows(self, task: Task, n: Int[Array, ""]) -> Float[Array, "entities window channels"]:
        """Return the scaled prices of the last `window` days before period n."""
        rows = self.first + n - self.window + jnp.arange(self.window)
        history = self.prices[rows[None, :], task.members[:, None]]
        return self.scale * (history / history[:, -1:, :1] - self.centre)

    def relatives(self, task: Task, n: Int[Array, ""]) -> Float[Array, " entities"]:
        """Return the price relatives y_n."""
        row = self.first + n
        return self.prices[row, task.members, 0] / self.prices[row - 1, task.members, 0]

    def tradable(self, task: Task, n: Int[Array, ""], wanted: Allocation) -> Allocation:
        """Move the shares of unlisted instruments to the others, in proportion."""
        if self.listed is None:
            return wanted
        kept = jnp.where(self.listed[self.first + n, task.members], wanted, 0.0)
        total = kept.sum()
        return jnp.where(total > 0, kept / jnp.where(total > 0, total, 1.0), self.equal(task, n))

    def grow(
        self, task: Task, n: Int[Array, ""], allocation: Allocation
    ) -> tuple[Scalar, Allocation]:
        """Compute growth a_n . y_n and drifted shares w_n.

        If no entity of a task is listed, growth is 1 and the drifted shares are equal.
        """
        grown = allocation * self.relatives(task, n)
        growth = grown.sum()
        if self.listed is None:
            return growth, grown / growth
        growth = jnp.where(growth > 0, growth, 1.0)
        return growth, jnp.where(allocation.sum() > 0, grown / growth, equal_shares(task.mask))

    def cost_factor(self, task: Task, held: Allocation, allocation: Allocation) -> Scalar:
        """Compute the fraction of wealth left after trading; 1 if no entity is listed."""
        factor = self.costs.cost_factor(held, allocation)
        return factor if self.listed is None else jnp.where(allocation.sum() > 0, factor, 1.0)

    def step(
        self, task: Task, state: Holding, allocation: Allocation, *, key: PRNGKeyArray
    ) -> Step:
        allocation = self.tradable(task, state.n, allocation)
        growth, drifted = self.grow(task, state.n, allocation)
        equal, _ = self.grow(task, state.n, self.equal(task, state.n))
        ahead = jnp.log(growth) - jnp.log(equal)
        reward = jnp.log(self.cost_factor(task, state.held, allocation) * growth)
        reward = reward - self.tracking.astype(reward.dtype) * ahead**2
        after = Holding(state.n + 1, drifted)
        return Step(after, reward, jnp.array(False), state.n + 1 >= self.length)


def _rows_between(prices: Prices, start: Day, end: Day, *, window: int) -> tuple[int, int]:
    """Return the rows of the first and last period that end between two days, both included.

    A period has the row of its closing price; its decision is made at the previous close.
    """
    days = len(prices.dates)
    first = window if start is None else prices.row(start)
    last = days - 1 if end is None else prices.row(day_after(end)) - 1
    if not window <= first <= last:
        possible = f"; the first can end on {prices.dates[window]}" if days > window else ""
        raise InputError(
            f"prices: no period between {start or prices.dates[0]} and {end or prices.dates[-1]} has a "
            f"window of {window} days before it{possible}; give more days than these {days}, other dates "
            "or a shorter window"
        )
    return first, last


class Walk(eqx.Module):
    """Allocations and growth of a strategy on one task, or on a stack of tasks."""

    allocations: Float[Array, "*batch time entities"]
    growth: Float[Array, "*batch time"]
    """a_n . y_n, before costs."""
    cost_factor: Float[Array, "*batch time"]
    turnover: Float[Array, "*batch time"]
    """sum |a_n - w_{n-1}|, purchases plus sales."""

    @property
    def log_return(self) -> Float[Array, "*batch time"]:
        """Net log return of each period."""
        return jnp.log(self.growth * self.cost_factor)


def walk_policy(policy: Policy, market: Market, task: Task, *, chunk: int = 64) -> Walk:
    """Follow a policy over the whole horizon; `vmap` over tasks, policies or markets.

    Features are computed in parallel for `chunk` days at a time, which bounds memory; then a_n and w_n are
    scanned. Decisions of period n use closes up to n - 1. Initial shares are equal. The drift does not
    depend on costs, so one walk gives net and gross results.
    """
    days = jnp.arange(market.horizon)

    def encode(n):
        seen = market.observe(task, Holding(n, market.equal(task)))
        return policy.encode(seen.history, seen.scored(task.mask))

    def period(before, day):
        n, features = day
        seen = market.observe(task, Holding(n, before))
        wanted = policy.allocate(features, before, seen.scored(task.mask), seen.bounds)
        allocation = market.tradable(task, n, wanted)
        growth, after = market.grow(task, n, allocation)
        factor = market.cost_factor(task, before, allocation)
        turnover = jnp.abs(allocation - before).sum()
        return after, (allocation, growth, factor, turnover)

    features = jax.lax.map(encode, days, batch_size=min(chunk, market.horizon))
    return Walk(*jax.lax.scan(period, market.equal(task), (days, features))[1])


def growth_and_sharpe(
    log_return: Float[Array, "*batch time"], days: Int[Array, ""]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Compute annual log growth and Sharpe ratio of `days` periods; later ones are padding."""
    real = jnp.arange(log_return.shape[-1]) < days
    growth = jnp.where(real, log_return, 0.0).sum(-1) / days
    simple = jnp.where(real, jnp.expm1(log_return), 0.0)
    mean = simple.sum(-1) / days
    variance = jnp.where(real, (simple - mean[..., None]) ** 2, 0.0).sum(-1) / (days - 1)
    return growth * TRADING_DAYS, mean / jnp.sqrt(variance) * TRADING_DAYS**0.5


@eqx.filter_jit
def walk_tasks(policy: Policy, market: Market, tasks: Task) -> Walk:
    """Follow a policy on a stack of tasks."""
    return jax.vmap(lambda task: walk_policy(policy, market, task))(tasks)
