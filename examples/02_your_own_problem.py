"""Your own allocation problem in 60 lines: services share the memory of one machine."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from apportion import Direct, Problem, Recurrent, draw_tasks, split_entities, train
from apportion.certify.statistics import compare
from apportion.composition import EqualShares
from apportion.problem import Observation, Step, evaluate

WINDOW = 6


class Now(eqx.Module):  # the state: the hour and the last shares
    hour: jax.Array
    held: jax.Array


class Cache(Problem):
    """A service with share a answers traffic * (1 - exp(-a / size)) requests from memory."""

    traffic: jax.Array
    size: jax.Array
    universe: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)

    def reset(self, task, *, key):
        return Now(jnp.zeros((), jnp.int32), task.mask / task.mask.sum())

    def observe(self, task, state):
        """Return each service's own traffic in the last hours."""
        hours = state.hour + jnp.arange(WINDOW)
        history = jnp.log(self.traffic[task.members[:, None], hours[None, :]])
        return Observation(history[..., None], state.held)

    def step(self, task, state, allocation, *, key):
        requests = self.traffic[task.members, state.hour + WINDOW]
        answered = requests * (1 - jnp.exp(-allocation / self.size[task.members]))
        reward = jnp.where(task.mask, answered, 0.0).sum() / requests.sum()
        hour = state.hour + 1
        return Step(Now(hour, allocation), reward, jnp.array(False), hour >= self.horizon)


steps = np.random.default_rng(0).normal(0, 0.3, (40, 120))
traffic = np.exp(np.cumsum(steps - 0.02 * np.cumsum(steps, axis=1), axis=1))
problem = Cache(jnp.asarray(traffic, jnp.float32), jnp.full(40, 0.15), 40, 120 - WINDOW)

key = jax.random.key(0)
seen, unseen = split_entities(40, held_out=10)
policy = Recurrent(channels=1, hidden=8, key=key)
tasks = draw_tasks(seen, 4, 32)
result = train(problem, tasks, policy, Direct(16, 1e-2), steps=400, key=key)

fresh = draw_tasks(unseen, 4, 20, seed=1)
learned = evaluate(problem, result.policy, fresh, key=key).mean_reward[:, 0]
equal = evaluate(problem, EqualShares(), fresh, key=key).mean_reward[:, 0]
gain = compare(learned, equal)
print(f"answered from memory: {learned.mean():.1%}, equal shares {equal.mean():.1%}, gain {gain}")
