"""Walking a strategy through a market: all features in parallel, then a scan of a_n and w_n.

Decisions of period n use closes up to n - 1. Shares start equal at the close before the first
period; drift does not depend on costs, so net and gross share one walk.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from apportion.domains.portfolio.market import Holding, Market
from apportion.domains.portfolio.metrics import TRADING_DAYS
from apportion.policy import Policy
from apportion.tasks import Task

_CHUNK = 64
"""Days encoded at a time: enough to fill the machine, few enough to bound its memory."""


class Walk(eqx.Module):
    """A strategy's way through the periods of one task, or of a stack of them."""

    allocations: Float[Array, "*batch time entities"]
    growth: Float[Array, "*batch time"]
    """a_n . y_n, before costs."""
    cost_factor: Float[Array, "*batch time"]
    turnover: Float[Array, "*batch time"]
    """sum |a_n - w_{n-1}|."""

    @property
    def log_return(self) -> Float[Array, "*batch time"]:
        """Net log return of each period."""
        return jnp.log(self.growth * self.cost_factor)


def walk_policy(policy: Policy, market: Market, task: Task, *, chunk: int = _CHUNK) -> Walk:
    """Follow a policy over a market's whole horizon; `vmap` over tasks, policies or markets."""
    days = jnp.arange(market.horizon)

    def encode(n):
        seen = market.observe(task, Holding(n, market.start(task)))
        return policy.encode(seen.history, seen.scored(task.mask))

    features = jax.lax.map(encode, days, batch_size=min(chunk, market.horizon))
    return _walk(policy.allocate, features, market, task)


def growth_and_sharpe(
    log_return: Float[Array, "*batch time"], days: Int[Array, ""]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Log growth a year and Sharpe ratio of the first `days` periods; what follows is padding."""
    real = jnp.arange(log_return.shape[-1]) < days
    growth = jnp.where(real, log_return, 0.0).sum(-1) / days
    simple = jnp.where(real, jnp.expm1(log_return), 0.0)
    mean = simple.sum(-1) / days
    variance = jnp.where(real, (simple - mean[..., None]) ** 2, 0.0).sum(-1) / (days - 1)
    return growth * TRADING_DAYS, mean / jnp.sqrt(variance) * TRADING_DAYS**0.5


def walk_targets(targets: Float[Array, "time entities"], market: Market, task: Task) -> Walk:
    """Follow given target allocations, a row for each period of the market's horizon.

    What a target gives to instruments that are not listed goes to the others in proportion.
    """
    return _walk(lambda target, held, mask, bounds: target, targets, market, task)


def _walk(allocate: Callable, features: PyTree, market: Market, task: Task) -> Walk:
    def period(before, day):
        n, features = day
        seen = market.observe(task, Holding(n, before))
        wanted = allocate(features, before, seen.scored(task.mask), seen.bounds)
        allocation = market.traded(task, n, before, wanted)
        growth, after = market.grow(task, n, allocation)
        factor = market.cost_factor(task, before, allocation)
        turnover = jnp.abs(allocation - before).sum()
        return after, (allocation, growth, factor, turnover)

    days = (jnp.arange(market.horizon), features)
    return Walk(*jax.lax.scan(period, market.start(task), days)[1])


@eqx.filter_jit
def walk_tasks(policy: Policy, market: Market, tasks: Task) -> Walk:
    """One policy over many tasks at once."""
    return jax.vmap(lambda task: walk_policy(policy, market, task))(tasks)
