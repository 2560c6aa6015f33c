"""How much better than its paired rollouts an action did: advantages A_n from rewards and a baseline V.

Without V the luck of the task drowns that of the action. V is the mean return from the same period on
over the paired rollouts: nothing to learn. `terminated` and `truncated` are kept apart.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from apportion.problem import Observation
from apportion.simplex import Scalar


class Experience(eqx.Module):
    """Paired rollouts of one task."""

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


def paired_values(seen: Experience, gamma: Scalar) -> Float[Array, "rollouts after"]:
    """V at every period and after the last, time + 1 of them: the mean return of the rollouts alive.

    It knows no value of what lies behind a truncation, which all rollouts share and which therefore
    cancels.
    """

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


def scaled_by_period(
    advantages: Float[Array, "rollouts time"], alive: Bool[Array, "rollouts time"]
) -> Float[Array, "rollouts time"]:
    """Advantages over their spread at each period, so that late periods, where accuracies or wealth
    hardly differ, teach as much as early ones.
    """
    spread = jnp.sqrt(mean_over(advantages**2, alive, axis=0))
    return advantages / (spread + 1e-8)[None, :]


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
