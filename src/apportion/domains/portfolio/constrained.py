"""A policy that keeps to a portfolio's rules: every piece inside it is told the same bounds.

Limits stand in static fields, so that training moves no limit along with the parameters. Cash stands in
front of every task, at a price that stands still; in the universe it comes last (see `Market.of`).
"""

from typing import Any, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from apportion.composition import LimitedTurnover, PolicyWrapper
from apportion.domains.portfolio.rules import Rules
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.recurrence import History
from apportion.simplex import Allocation, Bounds, Head, Mask
from apportion.tasks import Task


class Constrained(PolicyWrapper):
    """A policy within floor and cap, the limits of groups, and a cap on turnover.

    The instruments of a task, or those listed on a day, may be too few for the rules: then cap and
    floor give way to 1/m, and the groups take what is left over in proportion to their room. What
    the bounds themselves force is traded even where it exceeds the cap on turnover.

    Examples
    --------
    >>> from apportion.composition import EqualShares
    >>> from apportion.problem import Observation
    >>> policy = Constrained(EqualShares(), group_limits=(0.5,))
    >>> groups = jnp.array([0, 0, 0, -1])
    >>> observation = Observation(jnp.ones((4, 3, 1)), jnp.full(4, 0.25), groups=groups)
    >>> [round(share, 4) for share in policy(observation, jnp.ones(4, bool)).tolist()]
    [0.1667, 0.1667, 0.1667, 0.5]
    """

    policy: Policy
    head: Head = eqx.field(default_factory=Head)
    group_limits: tuple[float, ...] = eqx.field(static=True, converter=tuple, default=())
    turnover: float = eqx.field(static=True, default=2.0)

    def __check_init__(self):
        if not 0 < self.turnover <= 2 or not all(0 <= limit <= 1 for limit in self.group_limits):
            raise InputError(
                f"turnover {self.turnover} and group_limits {self.group_limits}: turnover must be "
                "above 0 and at most 2, and a group's limit between 0 and 1"
            )

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        free = self.turnover >= 2
        policy = self.policy if free else LimitedTurnover(self.policy, self.turnover)
        return policy.allocate(features, held, mask, self._bounds(mask, bounds, held.dtype))

    def _bounds(self, mask: Mask, period: Bounds | None, dtype: Any) -> Bounds | None:
        if (self.head.floor, self.head.cap) == (0, 1) and not self.group_limits:
            return period
        own = self.head.bounds(mask, period, dtype)
        if not self.group_limits:
            return Bounds(own.limits, own.floors)
        if own.groups is None or own.limits is None:
            raise InputError(
                "Constrained: the observation names no groups; build the market with the same rules"
            )
        limits = jnp.asarray(self.group_limits, dtype)
        return Bounds(own.limits, own.floors, own.groups, _enough(own.limits, own.groups, limits))


def _enough(
    most: Allocation, groups: Array, limits: Float[Array, " groups"]
) -> Float[Array, " groups"]:
    """Limits of the groups, raised just as far as is needed to hold everything."""
    inside = groups[None, :] == jnp.arange(limits.shape[0])[:, None]
    able = jnp.where(inside, most[None, :], 0.0).sum(-1)
    alone = jnp.where(inside.any(0), 0.0, most).sum()
    taken = jnp.minimum(limits, able)
    missing = jnp.maximum(1 - alone - taken.sum(), 0.0)
    room = able - taken
    return limits + missing * room / jnp.where(room.sum() > 0, room.sum(), 1.0)


def constrain(policy: Policy, rules: Rules) -> Policy:
    """The policy within the rules; itself where they rule nothing out."""
    if not rules.bind_shares:
        return policy
    head = Head(rules.min_weight, rules.max_weight, rules.cash)
    return Constrained(policy, head, rules.limits, rules.max_turnover)


def unconstrained(policy: Policy, rules: Rules) -> Policy:
    """What `constrain` was given."""
    return cast(Constrained, policy).policy if rules.bind_shares else policy


def everyone(universe: int, *, cash: bool) -> Task:
    """The task of all instruments, with cash in front where there is any."""
    tasks = Task.of([range(universe)])
    return (tasks.with_entity(universe) if cash else tasks)[0]


class WithoutCash(Policy):
    """A strategy of instruments where there is cash in front of them: it holds none for good."""

    policy: Policy

    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        return self.policy.encode(history[1:], mask[1:])

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        shares = self.policy.allocate(features, held[1:], mask[1:], _behind_cash(bounds))
        # What it does not hold yet, on the first days of one that trades part of the way.
        return jnp.concatenate([1 - shares.sum(keepdims=True), shares])


def _behind_cash(bounds: Bounds | None) -> Bounds | None:
    if bounds is None:
        return None
    limits, floors, groups = (
        None if each is None else each[1:] for each in (bounds.limits, bounds.floors, bounds.groups)
    )
    return Bounds(limits, floors, groups, bounds.group_limits)
