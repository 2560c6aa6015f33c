"""Probe problem with a known optimum, on which a learner can be tried in seconds.

`best` returns the mean reward of the best policy on a task, so that the result of a learner can be
expressed as a fraction of it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.problem import Observation, Problem, Step
from apportion.simplex import Allocation, Scalar, equal_shares
from apportion.tasks import Task

Signal = Float[Array, " entities"]


class ProbeState(eqx.Module):
    """Period, signal of each entity, and previous allocation."""

    n: Int[Array, ""]
    signal: Signal
    held: Allocation


class ShownBest(Problem):
    """The best entity changes in every period and is observed; tests that the policy reads the state."""

    universe: int = eqx.field(static=True, default=12)
    horizon: int = eqx.field(static=True, default=16)

    def signal(self, task: Task, *, key: PRNGKeyArray) -> Signal:
        """Sample the signal of each entity for one period: 1 for the best, 0 for the others."""
        chosen = jax.random.categorical(key, jnp.where(task.mask, 0.0, -jnp.inf))
        return jax.nn.one_hot(chosen, task.width)

    def reward(
        self, task: Task, state: ProbeState, allocation: Allocation, *, key: PRNGKeyArray
    ) -> Scalar:
        """Return the reward of an allocation."""
        return (allocation * state.signal).sum()

    def best(self, task: Task) -> Scalar:
        """Return the mean reward per period of the best policy."""
        return jnp.ones(())

    def reset(self, task: Task, *, key: PRNGKeyArray) -> ProbeState:
        held = equal_shares(task.mask)
        return ProbeState(jnp.zeros((), jnp.int32), self.signal(task, key=key), held)

    def observe(self, task: Task, state: ProbeState) -> Observation:
        return Observation(state.signal[:, None, None], state.held)

    def step(
        self, task: Task, state: ProbeState, allocation: Allocation, *, key: PRNGKeyArray
    ) -> Step:
        signal_key, reward_key = jax.random.split(key)
        n = state.n + 1
        following = ProbeState(n, self.signal(task, key=signal_key), allocation)
        reward = self.reward(task, state, allocation, key=reward_key)
        return Step(following, reward, jnp.array(False), n >= self.horizon)
