"""Shares fitted to the covariance of the last periods, as funds do: least variance, and equal risk.

Same shape as `online`: relatives (time, entities) to target allocations, row n having seen rows
before n only. A fit is renewed every so many rows, and is compiled like everything else.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from apportion.domains.portfolio.baselines.interior import minimise_on_simplex
from apportion.domains.portfolio.baselines.online import Allocations, Relatives, Shares

Covariance = Float[Array, "entities entities"]

# A full Newton step is safe once the decrement is below a quarter (self-concordance).
_NEAR, _MOST_STEPS = 0.25, 100


def minimum_variance(relatives: Relatives, window: int = 126, every: int = 21) -> Allocations:
    """The shares that would have varied least over the last `window` periods, renewed every `every`."""

    def fit(covariance: Covariance) -> Shares:
        m = covariance.shape[0]
        scaled = covariance * m / jnp.trace(covariance)
        # More entities than periods leave directions without any variance: any little decides there.
        scaled += 100 * jnp.finfo(scaled.dtype).eps * jnp.eye(m, dtype=scaled.dtype)
        start = jnp.full(m, 1 / m, scaled.dtype)
        return minimise_on_simplex(lambda x: (scaled @ x, scaled), start)

    return _refitted(relatives, fit, window, every)


def risk_parity(relatives: Relatives, window: int = 126, every: int = 21) -> Allocations:
    """Shares that each contribute equally to the variance of the last `window` periods."""

    def fit(covariance: Covariance) -> Shares:
        deviation = jnp.sqrt(jnp.diagonal(covariance))
        shares = _equal_risk(covariance / deviation[:, None] / deviation) / deviation
        return shares / shares.sum()

    return _refitted(relatives, fit, window, every)


def _equal_risk(correlation: Covariance) -> Shares:
    """Every x (C x) is 1 / m: the minimum of m x'Cx / 2 - sum log x, by Newton's method."""
    m = correlation.shape[0]
    scaled = m * correlation
    tolerance = jnp.finfo(scaled.dtype).eps ** 0.5

    def unfinished(carry) -> Bool[Array, ""]:
        _, decrement, steps = carry
        return (steps < _MOST_STEPS) & (decrement > tolerance)

    def newton(carry):
        x, _, steps = carry
        gradient = scaled @ x - 1 / x
        factor = jax.scipy.linalg.cho_factor(scaled + jnp.diag(1 / x**2))
        change = -jax.scipy.linalg.cho_solve(factor, gradient)
        decrement = jnp.sqrt(jnp.maximum(-(gradient @ change), 0.0))
        length = jnp.where(decrement < _NEAR, 1.0, 1 / (1 + decrement))
        return x + length * change, decrement, steps + 1

    # All alike and uncorrelated would be 1 / sqrt(m) in every place.
    start = jnp.full(m, m**-0.5, scaled.dtype)
    return jax.lax.while_loop(unfinished, newton, (start, jnp.asarray(jnp.inf, scaled.dtype), 0))[0]


def _refitted(
    relatives: Relatives, fit: Callable[[Covariance], Shares], window: int, every: int
) -> Allocations:
    """Equal shares for half a window, then the fit to the last rows, renewed every `every` rows."""
    rows, m = relatives.shape
    first = max(window // 2, 2)
    padded = jnp.concatenate([jnp.zeros((window, m), relatives.dtype), relatives - 1])

    def renew(shares, row):
        recent = jax.lax.dynamic_slice_in_dim(padded, row, window)
        seen = (jnp.arange(window) >= window - row)[:, None].astype(recent.dtype)
        off = seen * (recent - (seen * recent).sum(0) / seen.sum())
        covariance = off.T @ off / (seen.sum() - 1)
        # A price that stood still has no variance and the fit no answer: keep the last one.
        moved = (jnp.diagonal(covariance) > 0).all()
        shares = jnp.where(moved, fit(jnp.where(moved, covariance, jnp.eye(m))), shares)
        return shares, shares

    start = jnp.full(m, 1 / m, relatives.dtype)
    fits = jax.lax.scan(renew, start, jnp.arange(first, rows, every))[1]
    held = jnp.concatenate([start[None], fits])
    return held[(jnp.arange(rows) - first) // every + 1].at[:first].set(start)
