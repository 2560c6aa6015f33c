"""From scores to a point on the simplex, and how to explore around it.

`Head` is the softmax of the paper, with masks and, as options, floors, caps and a cash entity.
The three explorations sample around it and know their exact log-probability and entropy.
"""

import math
from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from apportion.errors import InputError

Scores = Float[Array, " entities"]
Mask = Bool[Array, " entities"]
Allocation = Float[Array, " entities"]
Scalar = Float[Array, ""]

# Beyond e^-30 of the leader a score says only "last"; the clip keeps cap filling in float32's range.
_SCORE_RANGE = 30.0

TOLERANCE = 1e-4
"""How far float32 may carry a sum of shares from 1 inside the compiled loop."""


def masked_softmax(scores: Scores, mask: Mask) -> Allocation:
    """Softmax over the real entities; padding gets exactly 0."""
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), where=mask)


def equal_shares(
    mask: Bool[Array, "*stack entities"], dtype: Any = float
) -> Float[Array, "*stack entities"]:
    """The allocation that knows nothing: 1/m to each real entity.

    >>> equal_shares(jnp.array([True, True, False])).tolist()
    [0.5, 0.5, 0.0]
    """
    real = mask.astype(dtype)
    return real / real.sum(-1, keepdims=True)


def on_simplex(
    shares: Float[Array, "*stack entities"],
    mask: Bool[Array, " entities"] | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> Bool[Array, "*stack"]:
    """Whether shares are finite, >= 0, sum to 1 and are 0 where the mask is False, to rounding.

    The sum may be off by `tolerance`; a single share, which adds up no others' rounding, by a tenth.
    """
    padding = 0.0 if mask is None else jnp.where(mask, 0.0, jnp.abs(shares)).sum(-1)
    fits = (jnp.abs(shares.sum(-1) - 1) <= tolerance) & (shares >= -tolerance / 10).all(-1)
    return jnp.isfinite(shares).all(-1) & fits & (padding <= tolerance / 10)


class Head(eqx.Module):
    """Scores to shares: softmax, then at least `floor` and at most `cap` for each entity.

    With bounds, shares are proportional to the softmax wherever no bound holds them. With `cash`,
    the first entity of every task is cash: it is free of both bounds. Where a task is too small
    for its bounds (floor > 1/m or cap < 1/m without cash), the bound gives way to 1/m.

    Examples
    --------
    >>> head = Head(cap=0.5)
    >>> head(jnp.array([9.0, 0.0, 0.0]), jnp.ones(3, bool)).tolist()
    [0.5, 0.25, 0.25]
    """

    floor: float = eqx.field(static=True, default=0.0)
    cap: float = eqx.field(static=True, default=1.0)
    cash: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        if not 0 <= self.floor < self.cap <= 1:
            raise InputError(
                f"floor {self.floor} and cap {self.cap}: they must satisfy 0 <= floor < cap <= 1"
            )

    def __call__(self, scores: Scores, mask: Mask) -> Allocation:
        if self.floor == 0 and self.cap == 1:
            return masked_softmax(scores, mask)
        top = jnp.max(jnp.where(mask, scores, -jnp.inf))
        shares = masked_softmax(jnp.maximum(scores, top - _SCORE_RANGE), mask)
        lowest, highest = self._bounds(mask, shares.dtype)
        return _fill(shares, lowest, highest)

    def _bounds(self, mask: Mask, dtype) -> tuple[Allocation, Allocation]:
        bounded = mask.at[0].set(False) if self.cash else mask
        even = 1 / jnp.maximum(bounded.sum(), 1).astype(dtype)
        floor = jnp.minimum(self.floor, even)
        cap = jnp.asarray(self.cap, dtype) if self.cash else jnp.maximum(self.cap, even)
        free = mask & ~bounded
        return jnp.where(bounded, floor, 0.0), jnp.where(bounded, cap, jnp.where(free, 1.0, 0.0))


def _fill(shares: Allocation, lowest: Allocation, highest: Allocation) -> Allocation:
    """clip(tau * shares, lowest, highest) with the tau that makes the sum 1, found exactly.

    The sum is piecewise linear and increasing in tau with a corner wherever an entity meets a
    bound, so the right piece is found among the 2m corners and solved in closed form.
    """
    safe = jnp.where(shares > 0, shares, 1.0)
    enters = jnp.where(shares > 0, lowest / safe, jnp.inf)
    leaves = jnp.where(shares > 0, highest / safe, jnp.inf)
    corners = jax.lax.stop_gradient(jnp.concatenate([jnp.zeros(1, shares.dtype), enters, leaves]))
    real = jnp.isfinite(corners)
    reach = jnp.clip(jnp.where(real, corners, 0.0)[:, None] * shares, lowest, highest).sum(-1)
    start = jnp.max(jnp.where(real & (reach <= 1), corners, 0.0))
    free = (enters <= start) & (leaves > start)
    fixed = jnp.where(free, 0.0, jnp.where(leaves <= start, highest, lowest)).sum()
    mass = jnp.where(free, shares, 0.0).sum()
    tau = jnp.where(mass > 0, (1 - fixed) / jnp.where(mass > 0, mass, 1.0), start)
    return jnp.clip(tau * shares, lowest, highest)


class Exploration(eqx.Module):
    """A distribution over allocations around a policy's scores.

    An `action` is what the density is exact for; `share` turns it into the allocation to execute.
    """

    @abstractmethod
    def sample(self, scores: Scores, mask: Mask, *, key: PRNGKeyArray) -> Scores:
        """Draw an action."""

    @abstractmethod
    def log_prob(self, scores: Scores, mask: Mask, action: Scores) -> Scalar:
        """Exact log-density of an action."""

    @abstractmethod
    def entropy(self, scores: Scores, mask: Mask) -> Scalar:
        """Exact differential entropy of the action."""

    @abstractmethod
    def share(self, action: Scores, mask: Mask) -> Allocation:
        """The allocation an action stands for."""


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

    def entropy(self, scores: Scores, mask: Mask) -> Scalar:
        return mask.sum() * (self.log_noise_std + 0.5 * math.log(2 * math.pi * math.e))

    def share(self, action: Scores, mask: Mask) -> Allocation:
        return self.head(action, mask)


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
        return self._constant(m) - 0.5 * z.sum() - _real(action, mask).sum()

    def entropy(self, scores: Scores, mask: Mask) -> Scalar:
        m = mask.sum()
        level = _mean_logsumexp(scores, jnp.exp(self.log_noise_std), mask)
        mean_log_shares = _real(scores, mask).sum() - m * level
        return 0.5 * (m - 1) - self._constant(m) + mean_log_shares

    def share(self, action: Scores, mask: Mask) -> Allocation:
        return _real(jnp.exp(action), mask)

    def _constant(self, m: Array) -> Scalar:
        return -(m - 1) * (self.log_noise_std + 0.5 * math.log(2 * math.pi)) - 0.5 * jnp.log(
            m.astype(self.log_noise_std.dtype)
        )


def _mean_logsumexp(scores: Scores, noise_std: Scalar, mask: Mask) -> Scalar:
    """E[log sum exp(s_i)] for independent s_i ~ N(scores_i, noise_std^2), by quadrature.

    Frullani: log Z = integral over t of exp(-e^t) - exp(-Z e^t); the expectation of the second term
    is a product over entities of one-dimensional integrals, and the trapezoid rule converges
    geometrically on the line.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(48)
    top = jnp.max(jnp.where(mask, scores, -jnp.inf))
    t = jnp.linspace(-40.0, 12.0, 1041, dtype=scores.dtype)
    s = (scores - top)[:, None] + noise_std * jnp.asarray(nodes, scores.dtype)
    laplace = jnp.exp(-jnp.exp(t[:, None, None] + s)) @ jnp.asarray(
        weights / weights.sum(), scores.dtype
    )
    survive = jnp.where(mask, laplace, 1.0).prod(-1)
    return top + (jnp.exp(-jnp.exp(t)) - survive).sum() * (t[1] - t[0])


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

    def entropy(self, scores: Scores, mask: Mask) -> Scalar:
        alpha = self._alpha(scores, mask)
        total = _real(alpha, mask).sum()
        digamma = jax.scipy.special.digamma
        return (
            self._log_beta(alpha, mask)
            + (total - mask.sum()) * digamma(total)
            - _real((alpha - 1) * digamma(alpha), mask).sum()
        )

    def share(self, action: Scores, mask: Mask) -> Allocation:
        return _real(jnp.exp(action), mask)

    @staticmethod
    def _log_beta(alpha: Scores, mask: Mask) -> Scalar:
        gammaln = jax.scipy.special.gammaln
        return _real(gammaln(alpha), mask).sum() - gammaln(_real(alpha, mask).sum())
