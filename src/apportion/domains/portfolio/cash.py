"""Cash among the instruments: in front of every task, at a price that stands still.

In the universe it comes last (see `Market.of`); what a strategy holds, and what is reported, has it first.
"""

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from apportion.policy import Policy
from apportion.recurrence import History
from apportion.simplex import Allocation, Bounds, Mask
from apportion.tasks import Task


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
