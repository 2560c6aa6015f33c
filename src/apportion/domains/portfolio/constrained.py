"""A policy that keeps to a portfolio's rules: every piece inside it is told the same bounds.

Limits stand in static fields, so that training moves no limit along with the parameters. Cash stands in
front of every task, at a price that stands still; in the universe it comes last (see `Market.of`).
"""

from typing import cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from apportion.composition import LimitedTurnover, PolicyWrapper
from apportion.domains.portfolio.rules import Rules
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.recurrence import History
from apportion.simplex import Allocation, Bounds, Head, Mask
from apportion.tasks import Task


class Constrained(PolicyWrapper):
    """A policy within floor and cap, and a cap on turnover.

    The instruments of a task, or those listed on a day, may be too few for the rules: then cap and
    floor give way to 1/m. What the bounds themselves force is traded even where it exceeds the cap on
    turnover.

    Examples
    --------
    >>> from apportion.composition import EqualShares
    >>> from apportion.problem import Observation
    >>> policy = Constrained(EqualShares(), turnover=0.1)
    >>> observation = Observation(jnp.ones((2, 3, 1)), jnp.array([0.75, 0.25]))
    >>> [round(share, 4) for share in policy(observation, jnp.ones(2, bool)).tolist()]
    [0.7, 0.3]
    """

    policy: Policy
    head: Head = eqx.field(default_factory=Head)
    turnover: float = eqx.field(static=True, default=2.0)

    def __check_init__(self):
        if not 0 < self.turnover <= 2:
            raise InputError(f"turnover {self.turnover}: it must be above 0 and at most 2")

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        if (self.head.floor, self.head.cap) != (0, 1):
            bounds = self.head.bounds(mask, bounds, held.dtype)
        free = self.turnover >= 2
        policy = self.policy if free else LimitedTurnover(self.policy, self.turnover)
        return policy.allocate(features, held, mask, bounds)


def constrain(policy: Policy, rules: Rules) -> Policy:
    """The policy within the rules; itself where they rule nothing out."""
    if not rules.bind_shares:
        return policy
    head = Head(rules.min_weight, rules.max_weight, rules.cash)
    return Constrained(policy, head, rules.max_turnover)


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
        if bounds is not None:
            both = (bounds.limits, bounds.floors)
            bounds = Bounds(*(None if each is None else each[1:] for each in both))
        shares = self.policy.allocate(features, held[1:], mask[1:], bounds)
        # What it does not hold yet, on the first days of one that trades part of the way.
        return jnp.concatenate([1 - shares.sum(keepdims=True), shares])
