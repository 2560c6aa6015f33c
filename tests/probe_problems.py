"""Probes beside `ShownBest`: each isolates one more thing that a learner must be able to do."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from apportion.domains.probes import ShownBest, Signal
from apportion.simplex import Mask, Scalar
from apportion.tasks import Task


class ConstantBest(ShownBest):
    """One entity of each task is best for good, and shows it: can the learner learn at all?"""

    def signal(self, task: Task, *, key: PRNGKeyArray) -> Signal:
        quality = jnp.linspace(0.0, 1.0, self.universe)[task.members]
        return jnp.where(task.mask, quality, 0.0)

    def best(self, task: Task) -> Scalar:
        return jnp.max(self.signal(task, key=jax.random.key(0)))


class HeldPays(ConstantBest):
    """Only what was held before and is kept now pays: is the effect on the next period seen?

    Whoever takes the held share as given gets no gradient to raise a share, and stays at equal
    shares for ever.
    """

    def reward(self, task, state, allocation, *, key) -> Scalar:
        return (jnp.minimum(state.held, allocation) * state.signal).sum()

    def best(self, task: Task) -> Scalar:
        """All on the best entity, paid in full from the second period on."""
        quality = self.signal(task, key=jax.random.key(0))
        return quality.max() * (1 - (1 - 1 / task.mask.sum()) / self.horizon)


class SomeCarrySignal(ShownBest):
    """Only the first `carriers` entities mean what they show; the rest show little and pay noise.

    Tasks of carriers are worth learning from, the others only disturb: does prioritisation find
    the former?
    """

    universe: int = eqx.field(static=True, default=64)
    carriers: int = eqx.field(static=True, default=8)
    quiet: float = eqx.field(static=True, default=0.1)
    noise: float = eqx.field(static=True, default=1.0)

    def carries(self, task: Task) -> Mask:
        """Which of the task's entities carry signal."""
        return task.members < self.carriers

    def signal(self, task: Task, *, key: PRNGKeyArray) -> Signal:
        shown = jax.random.uniform(key, (task.width,), minval=-1.0, maxval=1.0)
        return jnp.where(self.carries(task), shown, self.quiet * shown)

    def reward(self, task, state, allocation, *, key) -> Scalar:
        luck = self.noise * jax.random.normal(key, (task.width,))
        return (allocation * jnp.where(self.carries(task), state.signal, luck)).sum()

    def best(self, task: Task) -> Scalar:
        """The mean of the largest of k uniform numbers on [-1, 1], k carriers in the task."""
        k = (self.carries(task) & task.mask).sum()
        return jnp.where(k > 0, (k - 1) / (k + 1), 0.0)
