"""How to explore around a policy's scores: noise with exact log-probability.

Bounds act after the noise, on the allocation; the density is that of the action before them, which is
what ratios of probabilities need.
"""

import math
from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from apportion.simplex import Allocation, Bounds, Head, Mask, Scalar, Scores, masked_softmax, within


class Exploration(eqx.Module):
    """A distribution over allocations around a policy's scores.

    An `action` is what the density is exact for; `share` turns it into the allocation to execute.
    Entities that are absent, their limit 0, are left out by the mask (`Observation.present`): they get
    no noise and no part of the density.
    """

    @abstractmethod
    def sample(self, scores: Scores, mask: Mask, *, key: PRNGKeyArray) -> Scores:
        """Draw an action."""

    @abstractmethod
    def log_prob(self, scores: Scores, mask: Mask, action: Scores) -> Scalar:
        """Exact log-density of an action."""

    @abstractmethod
    def share(self, action: Scores, mask: Mask, bounds: Bounds | None = None) -> Allocation:
        """The allocation an action stands for, within the bounds."""


def _real(values: Array, mask: Mask) -> Array:
    """Zero where padded."""
    return jnp.where(mask, values, 0.0)


class GaussianScores(Exploration):
    """Noise on the scores, any head afterwards; the action is the noisy scores themselves."""

    log_noise_std: Scalar
    head: Head

    def __init__(self, noise_std: float = 0.5, head: Head | None = None):
        self.log_noise_std = jnp.log(jnp.asarray(noise_std, float))
        self.head = Head() if head is None else head

    def sample(self, scores: Scores, mask: Mask, *, key: PRNGKeyArray) -> Scores:
        noise = jax.random.normal(key, scores.shape, scores.dtype)
        return _real(scores + jnp.exp(self.log_noise_std) * noise, mask)

    def log_prob(self, scores: Scores, mask: Mask, action: Scores) -> Scalar:
        z = _real((action - scores) / jnp.exp(self.log_noise_std), mask)
        return -0.5 * (z**2).sum() - mask.sum() * (self.log_noise_std + 0.5 * math.log(2 * math.pi))

    def share(self, action: Scores, mask: Mask, bounds: Bounds | None = None) -> Allocation:
        return self.head(action, mask, bounds)


class LogisticNormal(Exploration):
    """The same noise seen on the simplex; the action is the log of the allocation.

    Densities are with respect to the first m - 1 shares. The scores' common level leaves no trace
    on the simplex, so the density is that of the m - 1 centred log-shares.
    """

    log_noise_std: Scalar

    def __init__(self, noise_std: float = 0.5):
        self.log_noise_std = jnp.log(jnp.asarray(noise_std, float))

    def sample(self, scores: Scores, mask: Mask, *, key: PRNGKeyArray) -> Scores:
        noise = jax.random.normal(key, scores.shape, scores.dtype)
        noisy = jnp.where(mask, scores + jnp.exp(self.log_noise_std) * noise, -jnp.inf)
        return _real(noisy - jax.nn.logsumexp(noisy), mask)

    def log_prob(self, scores: Scores, mask: Mask, action: Scores) -> Scalar:
        m = mask.sum()
        gap = _real(action - scores, mask)
        gap = _real(gap - gap.sum() / m, mask)
        z = (gap / jnp.exp(self.log_noise_std)) ** 2
        constant = -(m - 1) * (self.log_noise_std + 0.5 * math.log(2 * math.pi))
        constant -= 0.5 * jnp.log(m.astype(self.log_noise_std.dtype))
        return constant - 0.5 * z.sum() - _real(action, mask).sum()

    def share(self, action: Scores, mask: Mask, bounds: Bounds | None = None) -> Allocation:
        return within(_real(jnp.exp(action), mask), mask, bounds)


class Dirichlet(Exploration):
    """Dirichlet whose mean is the softmax of the scores; the action is the log of the allocation."""

    log_concentration: Scalar

    def __init__(self, concentration: float = 5.0):
        self.log_concentration = jnp.log(jnp.asarray(concentration, float))

    def _alpha(self, scores: Scores, mask: Mask) -> Scores:
        """Concentration a share, floored so that a starved entity keeps a finite density."""
        alpha = jnp.exp(self.log_concentration) * mask.sum() * masked_softmax(scores, mask)
        return jnp.where(mask, jnp.maximum(alpha, 1e-3), 1.0)

    def sample(self, scores: Scores, mask: Mask, *, key: PRNGKeyArray) -> Scores:
        gammas = jax.random.loggamma(key, self._alpha(scores, mask))
        return _real(gammas - jax.nn.logsumexp(jnp.where(mask, gammas, -jnp.inf)), mask)

    def log_prob(self, scores: Scores, mask: Mask, action: Scores) -> Scalar:
        alpha = self._alpha(scores, mask)
        return -self._log_beta(alpha, mask) + _real((alpha - 1) * action, mask).sum()

    def share(self, action: Scores, mask: Mask, bounds: Bounds | None = None) -> Allocation:
        return within(_real(jnp.exp(action), mask), mask, bounds)

    @staticmethod
    def _log_beta(alpha: Scores, mask: Mask) -> Scalar:
        gammaln = jax.scipy.special.gammaln
        return _real(gammaln(alpha), mask).sum() - gammaln(_real(alpha, mask).sum())
