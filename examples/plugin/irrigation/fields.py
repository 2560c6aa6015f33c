"""Fields need more or less water from day to day; what one more drop adds to a crop falls."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from apportion.problem import Observation, Problem, Step
from apportion.simplex import equal_shares


class Fields(Problem):
    need: Float[Array, "universe time"]
    """What a well-watered field grows on each day."""
    universe: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)

    @classmethod
    def draw(cls, *, universe=12, days=30, seed):
        need = np.random.default_rng(seed).uniform(0.0, 2.0, (universe, days))
        return cls(jnp.asarray(need, jnp.float32), universe, days)

    def reset(self, task, *, key):
        return jnp.zeros((), jnp.int32), equal_shares(task.mask)

    def observe(self, task, state):
        day, held = state
        return Observation(self.need[task.members, day][:, None, None], held)

    def step(self, task, state, allocation, *, key):
        day = state[0]
        grown = self.need[task.members, day] * allocation / (allocation + 0.2)
        growth = jnp.where(task.mask, grown, 0.0).sum()
        following = (day + 1, allocation)
        return Step(following, growth, jnp.array(False), day + 1 >= self.horizon)
