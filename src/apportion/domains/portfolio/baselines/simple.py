"""Strategies to measure a policy against, all of one shape: price relatives to target allocations.

Row n of the allocations has seen rows before n of the relatives only; best CRP alone is chosen in
hindsight. `BASELINES` names them all, with those of `online` and `reversion`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from apportion.domains.portfolio.baselines.online import (
    Allocations,
    Relatives,
    exponentiated_gradient,
    follow,
    minimise_on_simplex,
    ons,
    universal,
)
from apportion.domains.portfolio.baselines.reversion import anticor, cwmr, olmar, pamr, rmr

Baseline = Callable[[Relatives], Allocations]
"""Relatives to target allocations; row n may use relatives of rows before n only."""


def equal_crp(relatives: Relatives) -> Allocations:
    """Equal shares, restored every period: the constant rebalanced portfolio of 1/m.

    Examples
    --------
    >>> equal_crp(jnp.ones((2, 4))).tolist()
    [[0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]
    """
    return jnp.full_like(relatives, 1 / relatives.shape[1])


def buy_and_hold(relatives: Relatives) -> Allocations:
    """Equal shares at the first period, then no trade: shares drift with prices.

    Examples
    --------
    >>> buy_and_hold(jnp.array([[3.0, 1.0], [1.0, 1.0]])).tolist()
    [[0.5, 0.5], [0.75, 0.25]]
    """

    def update(shares, memory, y):
        return shares * y / (shares @ y), memory

    return follow(update, None, relatives)


def best_crp(relatives: Relatives) -> Allocations:
    """The constant shares that would have earned most over all rows: chosen in hindsight.

    Examples
    --------
    >>> best_crp(jnp.array([[2.0, 1.0], [0.5, 1.0]])).round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    rows, m = relatives.shape

    def derivatives(x):
        slopes = relatives / (relatives @ x)[:, None]
        return -slopes.mean(0), slopes.T @ slopes / rows

    best = minimise_on_simplex(derivatives, jnp.full(m, 1 / m, relatives.dtype))
    return jnp.broadcast_to(best, relatives.shape)


def momentum(relatives: Relatives, window: int = 252, skip: int = 21) -> Allocations:
    """Equal shares of the half that grew most over the last `window` periods but the last `skip`.

    Entities that tie with the middle one are in; prices stood still before the first row.
    """
    growth = jnp.cumsum(jnp.log(relatives), axis=0)
    before = jnp.concatenate([jnp.zeros((window + 1, relatives.shape[1]), growth.dtype), growth])
    rows = jnp.arange(relatives.shape[0])
    trailing = before[rows + window - skip] - before[rows]
    chosen = (trailing >= jnp.median(trailing, axis=1, keepdims=True)).astype(growth.dtype)
    return chosen / chosen.sum(1, keepdims=True)


def inverse_volatility(relatives: Relatives, window: int = 31) -> Allocations:
    """Shares in inverse proportion to the volatility of the last `window` periods."""
    return _by_volatility(relatives, window, -1.0)


def volatility_tilt(relatives: Relatives, window: int = 31) -> Allocations:
    """Shares in proportion to the volatility of the last `window` periods.

    What a policy that has learned nothing but to favour what moves would do.
    """
    return _by_volatility(relatives, window, 1.0)


def _by_volatility(relatives: Relatives, window: int, power: float) -> Allocations:
    m = relatives.shape[1]

    def update(shares, memory, y):
        recent, seen = memory
        recent, seen = jnp.concatenate([recent[1:], jnp.log(y)[None]]), seen + 1
        known = (jnp.arange(window) >= window - seen)[:, None].astype(recent.dtype)
        count = known.sum()
        off = known * (recent - (known * recent).sum(0) / count)
        deviation = jnp.sqrt((off**2).sum(0) / jnp.maximum(count - 1, 1)) + 1e-6
        tilted = deviation**power
        return jnp.where(seen > 1, tilted / tilted.sum(), shares), (recent, seen)

    return follow(update, (jnp.zeros((window, m), relatives.dtype), 0), relatives)


_BASELINES: dict[str, Baseline] = {
    "equal-crp": equal_crp,
    "buy-and-hold": buy_and_hold,
    "best-crp": best_crp,
    "universal": universal,
    "exponentiated-gradient": exponentiated_gradient,
    "ons": ons,
    "pamr": pamr,
    "cwmr": cwmr,
    "olmar": olmar,
    "rmr": rmr,
    "anticor": anticor,
    "momentum": momentum,
    "inverse-volatility": inverse_volatility,
    "volatility-tilt": volatility_tilt,
}

BASELINES: dict[str, Baseline] = {name: jax.jit(baseline) for name, baseline in _BASELINES.items()}
"""Every baseline under the name it has in tables, as one program for each shape of a market."""

WITHOUT_HISTORY = frozenset({"buy-and-hold", "best-crp"})
"""Baselines that begin with the tested period: show them its rows alone, no earlier history."""
