"""Probe problems: each isolates one thing a learner must be able to do, and knows its optimum.

If a learner fails one of these, the name says what is broken. All rewards are at most about 1, and
every probe tells the reward of the best policy and of equal shares on a task.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.problem import Observation, Problem, Step
from apportion.simplex import masked_softmax
from apportion.tasks import Tasks


class ProbeState(eqx.Module):
    """The period, what each entity shows now, and the allocation last executed."""

    n: Int[Array, ""]
    signal: Float[Array, " entities"]
    held: Float[Array, " entities"]


class _Probe(Problem):
    """What the probes share: a signal is shown for one period, the allocation is remembered."""

    def reset(self, task: Tasks, *, key: PRNGKeyArray) -> ProbeState:
        held = task.mask / task.mask.sum()
        return ProbeState(jnp.zeros((), jnp.int32), self._signal(task, key), held)

    def observe(self, task: Tasks, state: ProbeState) -> Observation:
        return Observation(state.signal[:, None, None], state.held)

    def step(self, task: Tasks, state: ProbeState, allocation, *, key: PRNGKeyArray) -> Step:
        n = state.n + 1
        following = ProbeState(n, self._signal(task, key), allocation)
        reward = self._reward(task, state, allocation)
        return Step(following, reward, jnp.array(False), n >= self.horizon)

    def _signal(self, task: Tasks, key: PRNGKeyArray) -> Float[Array, " entities"]:
        raise NotImplementedError

    def _reward(self, task: Tasks, state: ProbeState, allocation) -> Float[Array, ""]:
        raise NotImplementedError
