"""How to explore around a policy's scores: noise with exact log-probability.

Bounds act after the noise, on the allocation; the density is that of the action before them, which is
what ratios of probabilities need.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from apportion.simplex import Allocation, Bounds, Head, Mask, Scalar, Scores


class GaussianScores(eqx.Module):
    """Noise on the scores, any head afterwards; the action is the noisy scores themselves.

    Entities that are absent, their limit 0, are left out by the mask (`Observation.present`): they get
    no noise and no part of the density.
    """

    log_noise_std: Scalar
    head: Head

    def __init__(self, noise_std: float = 0.5, head: Head | None = None):
        self.log_noise_std = jnp.log(jnp.asarray(noise_std, float))
        self.head = Head() if head is None else head

    def sample(self, scores: Scores, mask: Mask, *, key: PRNGKeyArray) -> Scores:
        """Draw an action."""
        noise = jax.random.normal(key, scores.shape, scores.dtype)
        return _real(scores + jnp.exp(self.log_noise_std) * noise, mask)

    def log_prob(self, scores: Scores, mask: Mask, action: Scores) -> Scalar:
        """Exact log-density of an action."""
        z = _real((action - scores) / jnp.exp(self.log_noise_std), mask)
        return -0.5 * (z**2).sum() - mask.sum() * (self.log_noise_std + 0.5 * math.log(2 * math.pi))

    def share(self, action: Scores, mask: Mask, bounds: Bounds | None = None) -> Allocation:
        """The allocation an action stands for, within the bounds."""
        return self.head(action, mask, bounds)


def _real(values: Array, mask: Mask) -> Array:
    """Zero where padded."""
    return jnp.where(mask, values, 0.0)
