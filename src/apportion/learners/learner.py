"""The interface of a learner, the paper's "chosen RL approach": a batch of one task in, a better
policy out, the loss weighted by the task's importance weight w_t.
"""

from abc import abstractmethod

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from apportion.errors import check_positive
from apportion.memory import Batch
from apportion.policy import Policy
from apportion.problem import Problem, State
from apportion.scorers import Evidence
from apportion.tasks import Task


def as_leaf(value: float | Array) -> Array:
    """A hyper-parameter as an array, so that runs can differ in it."""
    return jnp.asarray(value, float)


def as_rate(value: float | Array) -> Array:
    """A learning rate as an array, checked unless it is traced."""
    for rate in () if isinstance(value, Tracer) else np.ravel(value).tolist():
        check_positive(learning_rate=rate)
    return as_leaf(value)


class Update(eqx.Module):
    """What a learner hands back after one step."""

    policy: Policy
    state: PyTree[Array]
    evidence: Evidence
    new_states: State | None = None
    """The states that today's policy arrives at in place of the batch's, to refresh memory with."""


class Learner(eqx.Module):
    """Turns one task's batch into a better policy.

    `periods` is how many consecutive remembered states a batch holds. A learner that makes its own
    rollouts (PPO) sets it to 0 and is handed no batch.
    """

    periods: eqx.AbstractVar[int]

    @abstractmethod
    def start(self, policy: Policy) -> PyTree[Array]:
        """The learner's own state, such as the optimiser's."""

    @abstractmethod
    def update(
        self,
        problem: Problem,
        task: Task,
        batch: Batch | None,
        policy: Policy,
        state: PyTree[Array],
        weight: Float[Array, ""],
        *,
        key: PRNGKeyArray,
    ) -> Update:
        """One improvement of the policy, from one task."""
