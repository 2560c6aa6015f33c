"""Scorers: the difficulty of a task, computed from the batch B_t of its last update.

The paper's formula is the maximum deviation from equal shares over the batch; its text describes the
mean. Both are here, with the reward variance that the paper also proposes, the gradient norm of its
Figure 2, and the realised gain over equal shares.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Evidence(eqx.Module):
    """Results of an update on a batch B_t, as scorers and metrics read them."""

    allocations: Float[Array, "batch entities"]
    equal: Float[Array, "batch entities"]
    """Equal shares within the bounds of each state."""
    rewards: Float[Array, " batch"]
    equal_rewards: Float[Array, " batch"]
    """Rewards of equal shares in the same states."""
    valid: Bool[Array, " batch"]
    mask: Bool[Array, " entities"]
    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    """Norm of the gradient before the importance weight."""

    def mean(self, values: Float[Array, " batch"]) -> Float[Array, ""]:
        """Return the mean over the valid periods."""
        return jnp.where(self.valid, values, 0.0).sum() / jnp.maximum(self.valid.sum(), 1)


Scorer = Callable[[Evidence], Float[Array, ""]]


def deviations(evidence: Evidence) -> Float[Array, " batch"]:
    """Return the sup-norm distance of each allocation from equal shares."""
    gaps = jnp.abs(evidence.allocations - evidence.equal).max(-1)
    return jnp.where(evidence.valid, gaps, 0.0)


def max_deviation(evidence: Evidence) -> Float[Array, ""]:
    """Return the maximum over the batch of ||pi(x_n) - 1/m||_inf (the paper's formula)."""
    return deviations(evidence).max()


def mean_deviation(evidence: Evidence) -> Float[Array, ""]:
    """Return the mean over the batch of ||pi(x_n) - 1/m||_inf (the paper's text)."""
    return evidence.mean(deviations(evidence))


def reward_variance(evidence: Evidence) -> Float[Array, ""]:
    """Return the variance of the rewards in the batch."""
    gap = evidence.rewards - evidence.mean(evidence.rewards)
    return evidence.mean(gap**2)


def gradient_norm(evidence: Evidence) -> Float[Array, ""]:
    """Return the norm of the gradient of the batch."""
    return evidence.gradient_norm


def realised_gain(evidence: Evidence) -> Float[Array, ""]:
    """Return the positive part of the mean reward above equal shares, plus 1e-5."""
    gain = evidence.mean(evidence.rewards - evidence.equal_rewards)
    return jnp.maximum(gain, 0.0) + 1e-5


SCORERS: dict[str, Scorer] = {
    "max-deviation": max_deviation,
    "mean-deviation": mean_deviation,
    "reward-variance": reward_variance,
    "gradient-norm": gradient_norm,
    "realised-gain": realised_gain,
}
