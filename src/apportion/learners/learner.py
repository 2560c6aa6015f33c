"""Interface of a learner, the paper's "chosen RL approach": it updates the policy with a weighted batch."""

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
    """Convert a hyper-parameter to an array, so that it can differ by run."""
    return jnp.asarray(value, float)


def as_rate(value: float | Array) -> Array:
    """Convert a learning rate to an array and check it unless it is traced."""
    for rate in () if isinstance(value, Tracer) else np.ravel(value).tolist():
        check_positive(learning_rate=rate)
    return as_leaf(value)


class Update(eqx.Module):
    """Result of `Learner.update`."""

    policy: Policy
    state: PyTree[Array]
    evidence: Evidence
    new_states: State | None = None
    """States that the current policy reaches; they replace the batch's states in memory."""


class Learner(eqx.Module):
    """Abstract base class of learners, which update a policy with a batch of one task.

    `periods` is the number of consecutive states in a batch. A learner that makes its own rollouts (PPO)
    sets it to 0 and gets no batch.
    """

    periods: eqx.AbstractVar[int]

    @abstractmethod
    def start(self, policy: Policy) -> PyTree[Array]:
        """Return the initial state of the learner, such as the optimiser's."""

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
        """Update the policy on one task."""
