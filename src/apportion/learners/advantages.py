"""What a return is held against: the mean of paired rollouts, or a learned value.

Without a baseline V the luck of the task drowns that of the action. From rewards and V come the
advantages A_n, by generalised advantage estimation; `terminated` and `truncated` are kept apart.
"""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from apportion.precision import largest
from apportion.problem import Observation
from apportion.recurrence import Recurrence

Scalar = Float[Array, ""]
Mask = Bool[Array, " entities"]


class Experience(eqx.Module):
    """Paired rollouts of one task; the observations end with that of the last state arrived at."""

    observations: Observation
    actions: Float[Array, "rollouts time entities"]
    log_probs: Float[Array, "rollouts time"]
    allocations: Float[Array, "rollouts time entities"]
    equal: Float[Array, "rollouts time entities"]
    rewards: Float[Array, "rollouts time"]
    equal_rewards: Float[Array, "rollouts time"]
    terminated: Bool[Array, "rollouts time"]
    truncated: Bool[Array, "rollouts time"]
    alive: Bool[Array, "rollouts time"]


class Baseline(eqx.Module):
    """What a return is held against, V: without it the noise of the task drowns the action's."""

    @abstractmethod
    def start(self) -> PyTree[Array]:
        """Parameters to be trained along with the policy."""

    @abstractmethod
    def values(
        self, parameters: PyTree[Array], seen: Experience, mask: Mask, gamma: Scalar
    ) -> Float[Array, "rollouts after"]:
        """V at every period and after the last: time + 1 of them."""

    @abstractmethod
    def scale(
        self, advantages: Float[Array, "rollouts time"], alive: Bool[Array, "rollouts time"]
    ) -> Float[Array, "rollouts time"]:
        """Advantages made comparable between periods."""

    @abstractmethod
    def loss(
        self, parameters: PyTree[Array], observation: Observation, mask: Mask, target: Scalar
    ) -> Scalar:
        """How far V is from the return it should have foretold."""


class PairedMean(Baseline):
    """The mean return from the same period on over the paired rollouts; nothing to learn.

    Advantages are divided by their spread at each period, so that late periods, where accuracies
    or wealth hardly differ, teach as much as early ones. It knows no value of what lies behind a
    truncation, which all rollouts share and which therefore cancels.
    """

    def start(self) -> PyTree[Array]:
        return ()

    def values(self, parameters, seen, mask, gamma) -> Float[Array, "rollouts after"]:
        def back(later, period):
            reward, ended = period
            here = reward + gamma * jnp.where(ended, 0.0, later)
            return here, here

        ended = seen.terminated | seen.truncated | ~seen.alive
        rewards = jnp.where(seen.alive, seen.rewards, 0.0)
        _, returns = jax.lax.scan(
            back, jnp.zeros_like(rewards[:, 0]), (rewards.T, ended.T), reverse=True
        )
        mean = mean_over(returns.T, seen.alive, axis=0)
        return jnp.broadcast_to(jnp.append(mean, 0.0), (rewards.shape[0], mean.shape[0] + 1))

    def scale(self, advantages, alive) -> Float[Array, "rollouts time"]:
        spread = jnp.sqrt(mean_over(advantages**2, alive, axis=0))
        return advantages / (spread + 1e-8)[None, :]

    def loss(self, parameters, observation, mask, target) -> Scalar:
        return jnp.zeros(())


class Value(eqx.Module):
    """Reads each entity's window and share, pools over entities, values the whole: invariant."""

    recurrence: Recurrence
    of_held: Float[Array, " hidden"]
    mix: Float[Array, "pooled hidden"]
    out: Float[Array, " hidden"]
    level: Scalar

    def __call__(self, observation: Observation, mask: Mask) -> Scalar:
        mask = observation.scored(mask)
        read = self.recurrence(observation.history) + observation.held[:, None] * self.of_held
        mean = mean_over(read, mask[:, None], axis=0)
        most = largest(jnp.where(mask[:, None], read, -jnp.inf).T)
        return jnp.tanh(jnp.concatenate([mean, most]) @ self.mix) @ self.out + self.level


class Critic(Baseline):
    """A learned, permutation-invariant value; it sees past a truncation, and needs no pairing."""

    channels: int = eqx.field(static=True)
    hidden: int = eqx.field(static=True, default=16)
    seed: int = eqx.field(static=True, default=0)

    def start(self) -> Value:
        recurrence_key, mix_key = jax.random.split(jax.random.key(self.seed))
        return Value(
            Recurrence(self.channels, self.hidden, key=recurrence_key),
            jnp.zeros(self.hidden),
            jax.nn.initializers.glorot_uniform()(mix_key, (2 * self.hidden, self.hidden)),
            jnp.zeros(self.hidden),
            jnp.zeros(()),
        )

    def values(self, parameters, seen, mask, gamma) -> Float[Array, "rollouts after"]:
        return jax.vmap(jax.vmap(lambda o: parameters(o, mask)))(seen.observations)

    def scale(self, advantages, alive) -> Float[Array, "rollouts time"]:
        return advantages

    def loss(self, parameters, observation, mask, target) -> Scalar:
        return 0.5 * (parameters(observation, mask) - target) ** 2


def generalised_advantages(
    seen: Experience, values: Float[Array, "rollouts after"], gamma: Scalar, gae_lambda: Scalar
) -> Float[Array, "rollouts time"]:
    """GAE; a truncated episode is worth what V says of the state it was cut at, a terminated one 0."""

    def back(later, period):
        reward, value, following, terminated, ended = period
        surprise = reward + gamma * jnp.where(terminated, 0.0, following) - value
        here = surprise + gamma * gae_lambda * jnp.where(ended, 0.0, later)
        return here, here

    ended = seen.terminated | seen.truncated
    columns = (seen.rewards, values[:, :-1], values[:, 1:], seen.terminated, ended)
    _, advantages = jax.lax.scan(
        back,
        jnp.zeros_like(values[:, 0]),
        jax.tree.map(lambda column: column.T, columns),
        reverse=True,
    )
    return jnp.where(seen.alive, advantages.T, 0.0)


def mean_over(values: Array, included: Array, axis: int | None = None) -> Array:
    """Mean over the included places; 0 where there are none."""
    kept = jnp.where(included, values, 0.0).sum(axis)
    return kept / jnp.maximum(included.sum(axis), 1)
