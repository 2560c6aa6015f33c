"""Baseline strategies: functions from price relatives y_n to target allocations.

Row n of the allocations uses only rows before n of the relatives, and row 0 is equal shares. The exception
is best CRP, which is chosen in hindsight. Relatives before the first row are taken as 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from optax.projections import projection_simplex
from scipy.optimize import minimize

_Relatives = Float[Array, "time entities"]
_Allocations = Float[Array, "time entities"]
_Shares = Float[Array, " entities"]
Baseline = Callable[[_Relatives], _Allocations]
"""Function from relatives to target allocations; row n uses only relatives of rows before n."""


def follow(
    update: Callable[[_Shares, Any, _Shares], tuple[_Shares, Any]],
    memory: Any,
    relatives: _Relatives,
) -> _Allocations:
    """Start from equal shares and compute the next shares with `update(shares, memory, relatives)`.

    Each row is written before its own relatives are read, which excludes look-ahead.
    """

    def period(carry, y):
        shares, memory = carry
        return update(shares, memory, y), shares

    m = relatives.shape[1]
    start = jnp.full(m, 1 / m, relatives.dtype)
    return jax.lax.scan(period, (start, memory), relatives)[1]


def buy_and_hold(relatives: _Relatives) -> _Allocations:
    """Equal shares in the first period, then no trades: shares drift with prices.

    Examples
    --------
    >>> buy_and_hold(jnp.array([[3.0, 1.0], [1.0, 1.0]])).tolist()
    [[0.5, 0.5], [0.75, 0.25]]
    """

    def update(shares, memory, y):
        return shares * y / (shares @ y), memory

    return follow(update, None, relatives)


def best_crp(relatives: _Relatives) -> _Allocations:
    """Return the constant shares with the largest growth over all rows, chosen in hindsight.

    Examples
    --------
    >>> best_crp(jnp.array([[2.0, 1.0], [0.5, 1.0]])).round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    y = np.asarray(relatives, float)
    m = y.shape[1]

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        # At the minimum the shares sum to 1, because x.sum() replaces the constraint.
        growth = y @ x
        return x.sum() - np.log(growth).mean(), 1 - (y / growth[:, None]).mean(0)

    exactly = {"ftol": 0.0, "gtol": 1e-10, "maxiter": 5000, "maxfun": 20_000}
    start = np.full(m, 1 / m)
    best = minimize(loss, start, jac=True, bounds=[(0, None)] * m, options=exactly).x
    return jnp.broadcast_to(jnp.asarray(best / best.sum(), relatives.dtype), relatives.shape)


def exponentiated_gradient(relatives: _Relatives, rate: float = 0.05) -> _Allocations:
    """Multiplicative updates by the gradient of log wealth (Helmbold et al. 1998).

    Examples
    --------
    >>> bought = exponentiated_gradient(jnp.array([[2.0, 1.0], [1.0, 1.0]]))[1]
    >>> [round(float(share), 3) for share in bought]
    [0.508, 0.492]
    """

    def update(shares, memory, y):
        return jax.nn.softmax(jnp.log(shares) + rate * y / (shares @ y)), memory

    return follow(update, None, relatives)


def olmar(relatives: _Relatives, epsilon: float = 10.0, window: int = 5) -> _Allocations:
    """Moving-average reversion (Li & Hoi 2012, OLMAR-1).

    The predicted price is the mean of the last `window` prices. The shares move by the smallest step that
    earns `epsilon` on the prediction. As in the authors' programs, the last relatives are the prediction
    until more than `window` of them are available.
    """
    m, rounding = relatives.shape[1], 8 * jnp.finfo(relatives.dtype).eps

    def update(shares, memory, y):
        recent, seen = memory
        recent = jnp.concatenate([recent[1:], y[None]])
        # p_{n-i} / p_n is the product of the last i inverse relatives.
        back = jnp.cumprod(1 / recent[::-1], axis=0)
        expected = jnp.where(seen >= window, (1 + back.sum(0)) / window, y)
        # The smallest step along the centred prediction that earns epsilon on it.
        mean = expected.mean()
        direction = expected - mean
        norm = direction @ direction
        short = jnp.maximum(epsilon - shares @ expected, 0.0)
        # Ignore a direction below the rounding error of the mean.
        apart = norm > m * (rounding * mean) ** 2
        step = jnp.where(apart, short / jnp.where(apart, norm, 1.0), 0.0)
        nearest = projection_simplex(shares + step * direction)
        return nearest / nearest.sum(), (recent, seen + 1)

    return follow(update, (jnp.ones((window - 1, m), relatives.dtype), 0), relatives)


def momentum(relatives: _Relatives, window: int = 252, skip: int = 21) -> _Allocations:
    """Equal shares of entities with median or higher growth from `window` to `skip` periods ago."""
    growth = jnp.cumsum(jnp.log(relatives), axis=0)
    before = jnp.concatenate([jnp.zeros((window + 1, relatives.shape[1]), growth.dtype), growth])
    rows = jnp.arange(relatives.shape[0])
    trailing = before[rows + window - skip] - before[rows]
    chosen = (trailing >= jnp.median(trailing, axis=1, keepdims=True)).astype(growth.dtype)
    return chosen / chosen.sum(1, keepdims=True)


def volatility_tilt(relatives: _Relatives, window: int = 31) -> _Allocations:
    """Shares proportional to the volatility of the last `window` periods.

    A policy that only learns to favour volatile instruments allocates in this way.
    """
    m = relatives.shape[1]

    def update(shares, memory, y):
        recent, seen = memory
        recent, seen = jnp.concatenate([recent[1:], jnp.log(y)[None]]), seen + 1
        known = (jnp.arange(window) >= window - seen)[:, None].astype(recent.dtype)
        count = known.sum()
        off = known * (recent - (known * recent).sum(0) / count)
        deviation = jnp.sqrt((off**2).sum(0) / jnp.maximum(count - 1, 1)) + 1e-6
        return jnp.where(seen > 1, deviation / deviation.sum(), shares), (recent, seen)

    return follow(update, (jnp.zeros((window, m), relatives.dtype), 0), relatives)


BASELINES: dict[str, Baseline] = {
    "buy-and-hold": jax.jit(buy_and_hold),
    "best-crp": best_crp,
    "exponentiated-gradient": jax.jit(exponentiated_gradient),
    "olmar": jax.jit(olmar),
    "momentum": jax.jit(momentum),
    "volatility-tilt": jax.jit(volatility_tilt),
}
"""Baselines by name; equal shares are part of every backtest."""

WITHOUT_HISTORY = frozenset({"buy-and-hold", "best-crp"})
"""Baselines that start with the test period and receive no earlier relatives."""
