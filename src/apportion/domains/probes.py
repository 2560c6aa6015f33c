"""Probe problems: each isolates one thing a learner must be able to do, and knows its optimum.

If a learner fails a probe, its name says what is broken. It tells the mean reward of the best policy on
a task (`best`), so that success is a fraction of it.
"""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.problem import Observation, Problem, Step
from apportion.simplex import Allocation, Scalar, equal_shares
from apportion.tasks import Task

Signal = Float[Array, " entities"]


class ProbeState(eqx.Module):
    """The period, what each entity shows in it, and the allocation executed before."""

    n: Int[Array, ""]
    signal: Signal
    held: Allocation


class Probe(Problem):
    """What all probes share: a signal for each period, and the last allocation held."""

    @abstractmethod
    def signal(self, task: Task, *, key: PRNGKeyArray) -> Signal:
        """What each entity shows for one period."""

    @abstractmethod
    def reward(
        self, task: Task, state: ProbeState, allocation: Allocation, *, key: PRNGKeyArray
    ) -> Scalar:
        """What an allocation earns."""

    @abstractmethod
    def best(self, task: Task) -> Scalar:
        """Mean reward a period of the best policy."""

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


class ShownBest(Probe):
    """The best entity changes every period, and the state shows which it is: is the state read?"""

    universe: int = eqx.field(static=True, default=12)
    horizon: int = eqx.field(static=True, default=16)

    def signal(self, task: Task, *, key: PRNGKeyArray) -> Signal:
        chosen = jax.random.categorical(key, jnp.where(task.mask, 0.0, -jnp.inf))
        return jax.nn.one_hot(chosen, task.width)

    def reward(self, task, state, allocation, *, key) -> Scalar:
        return (allocation * state.signal).sum()

    def best(self, task: Task) -> Scalar:
        return jnp.ones(())
