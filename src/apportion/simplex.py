"""Map logits to the simplex: a softmax, followed by water-filling within bounds.

`Head` is the softmax of the paper with optional bounds. `Bounds` are the largest and the smallest share
of each entity in a period; the part of the resource that no entity can take stays unused.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from apportion.errors import InputError

Logits = Float[Array, " entities"]
Mask = Bool[Array, " entities"]
Allocation = Float[Array, " entities"]
Scalar = Float[Array, ""]

# Shares below e^-30 of the largest are clipped, which keeps the water-filling in the range of float32.
_LOGIT_RANGE = 30.0
_LEAST_SHARE = float(np.exp(-_LOGIT_RANGE))

TOLERANCE = 1e-4
"""Tolerated rounding error of a sum of float32 shares in the compiled loop."""


class Bounds(eqx.Module):
    """Upper and lower bounds of the shares in one period; both are optional.

    If they cannot all be met, limits take precedence and floors are scaled down.
    """

    limits: Float[Array, "*batch entities"] | None = None
    """Largest share of each entity; 0 means that it is absent."""
    floors: Float[Array, "*batch entities"] | None = None
    """Smallest share of each entity."""


def present(mask: Mask, bounds: Bounds | None) -> Mask:
    """Return the entities that are no padding and have a positive limit."""
    if bounds is None or bounds.limits is None:
        return mask
    return mask & (bounds.limits > 0)


def masked_softmax(logits: Logits, mask: Mask) -> Allocation:
    """Softmax over the entities in the mask; the others get exactly 0."""
    return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), where=mask)


def equal_shares(
    mask: Bool[Array, "*stack entities"], dtype: Any = float
) -> Float[Array, "*stack entities"]:
    """Return the share 1/m for each entity in the mask.

    >>> equal_shares(jnp.array([True, True, False])).tolist()
    [0.5, 0.5, 0.0]
    """
    real = mask.astype(dtype)
    return real / real.sum(-1, keepdims=True)


def equal_within(mask: Mask, bounds: Bounds | None, dtype: Any = float) -> Allocation:
    """Return equal shares within the bounds; the others share equally what one cannot take.

    >>> equal_within(jnp.ones(3, bool), Bounds(limits=jnp.array([0.2, 1.0, 0.0]))).tolist()
    [0.20000000298023224, 0.800000011920929, 0.0]
    """
    if bounds is None:
        return equal_shares(mask, dtype)
    return within(present(mask, bounds).astype(dtype), mask, bounds)


def on_simplex(
    shares: Float[Array, "*stack entities"],
    mask: Bool[Array, " entities"] | None = None,
    *,
    total: float | Float[Array, "*stack"] = 1.0,
    tolerance: float = TOLERANCE,
) -> Bool[Array, "*stack"]:
    """Whether shares are finite, >= 0, sum to `total` and are 0 outside the mask, up to rounding.

    The tolerance of the sum is `tolerance`; that of a single share is a tenth of it.
    """
    padding = 0.0 if mask is None else jnp.where(mask, 0.0, jnp.abs(shares)).sum(-1)
    fits = (jnp.abs(shares.sum(-1) - total) <= tolerance) & (shares >= -tolerance / 10).all(-1)
    return jnp.isfinite(shares).all(-1) & fits & (padding <= tolerance / 10)


def within(shares: Allocation, mask: Mask, bounds: Bounds | None) -> Allocation:
    """Water-filling: clip(tau * shares, floors, limits) with the tau that makes the sum 1.

    If the limits sum to less than 1, so does the allocation. An entity whose share is 0 gets something
    only after the others have reached their limits. Without bounds, `shares` is returned.

    Examples
    --------
    >>> shares = jnp.array([0.5, 0.25, 0.25])
    >>> within(shares, jnp.ones(3, bool), Bounds(limits=jnp.array([0.4, 0.5, 0.0]))).tolist()
    [0.4000000059604645, 0.5, 0.0]
    """
    if bounds is None:
        return shares
    here = present(mask, bounds)
    top = jnp.max(shares)
    least = _LEAST_SHARE * jnp.where(top > 0, top, 1.0)
    shares = jnp.where(here, jnp.maximum(shares, least), 0.0)
    highest = here.astype(shares.dtype)
    if bounds.limits is not None:
        highest = jnp.where(here, jnp.minimum(bounds.limits.astype(shares.dtype), 1.0), 0.0)
    lowest = None
    if bounds.floors is not None:
        lowest = jnp.where(here, jnp.minimum(bounds.floors.astype(shares.dtype), highest), 0.0)
        lowest = lowest / jnp.maximum(lowest.sum(), 1.0)
    return _fill(shares, lowest, highest, jnp.minimum(highest.sum(), 1.0))


def _fill(
    shares: Allocation, lowest: Allocation | None, highest: Allocation, total: Scalar
) -> Allocation:
    """Return clip(tau * shares, lowest, highest) with the tau that makes the sum `total`, exactly.

    The sum is increasing and piecewise linear in tau, with a corner where an entity reaches a bound
    (at most m corners per bound). `start` is the last corner whose sum is at most `total`. On the piece
    after it, entities at a bound are fixed and the others are proportional to `shares`, so that tau is
    (total - fixed) / mass. Only this last division is differentiated.
    """
    safe = jnp.where(shares > 0, shares, 1.0)
    leaves = jnp.where(shares > 0, highest / safe, jnp.inf)
    known = jax.lax.stop_gradient((shares, highest, leaves, total))
    free, least = jnp.array(True), 0.0
    if lowest is None:
        # All pairs of entities are one kernel on a GPU but dominate the cost on a CPU.
        start = jax.lax.platform_dependent(*known, cpu=_rise, default=_last_corner)
    else:
        enters, least = jnp.where(shares > 0, lowest / safe, jnp.inf), lowest
        start = jax.lax.stop_gradient(
            _last_corner(shares, highest, jnp.concatenate([enters, leaves]), total, lowest)
        )
        free = enters <= start
    free = free & (leaves > start)
    fixed = jnp.where(free, 0.0, jnp.where(leaves <= start, highest, least)).sum()
    mass = jnp.where(free, shares, 0.0).sum()
    tau = jnp.where(mass > 0, (total - fixed) / jnp.where(mass > 0, mass, 1.0), start)
    # tau < start is a rounding error; with a small mass it would move entities away from their bounds.
    tau = jnp.where(tau < start, start, tau)
    return jnp.clip(tau * shares, lowest, highest)


def _last_corner(
    shares: Allocation,
    highest: Allocation,
    corners: Float[Array, " corners"],
    total: Scalar,
    lowest: Allocation | None = None,
) -> Scalar:
    """Return the last corner whose sum is at most `total`, or 0; it computes the sums of all corners."""
    real = jnp.isfinite(corners)
    at = jnp.where(real, corners, 0.0)
    # Without the barrier, XLA recomputes the shares for every pair.
    at, shares, lowest, highest = jax.lax.optimization_barrier((at, shares, lowest, highest))
    low = None if lowest is None else lowest[:, None]
    reach = jnp.clip(at[None, :] * shares[:, None], low, highest[:, None]).sum(0)
    return jnp.max(jnp.where(real & (reach <= total), corners, 0.0), initial=0.0)


def _rise(shares: Allocation, highest: Allocation, leaves: Allocation, total: Scalar) -> Scalar:
    """Return the last corner as `_last_corner` does, without floors, by Newton's method on tau.

    An entity that is at its limit stays there for every larger tau. Each iteration sets tau so that the
    other entities take the rest, until no further entity reaches its limit. The product of the rest and
    the mass of the free entities falls by a factor of 4 per iteration; with shares above e^-30 in float32
    this takes at most min(m, 34 + log2(m) / 2) iterations.
    """

    def level(full: Mask) -> Scalar:
        mass = jnp.where(full, 0.0, shares).sum()
        rest = total - jnp.where(full, highest, 0.0).sum()
        return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), jnp.inf)

    def again(carry: tuple[Scalar, Bool[Array, ""]]) -> tuple[Scalar, Bool[Array, ""]]:
        risen = jnp.maximum(level(leaves <= carry[0]), carry[0])
        return risen, risen > carry[0]

    none_full = jnp.zeros_like(shares, bool)
    tau, _ = jax.lax.while_loop(lambda carry: carry[1], again, (level(none_full), jnp.array(True)))
    # If all entities are at their limits, tau is above every corner, whatever its rounding error.
    tau = jnp.where(total >= highest.sum(), jnp.inf, tau)
    return jnp.max(jnp.where(jnp.isfinite(leaves) & (leaves <= tau), leaves, 0.0), initial=0.0)


class Head(eqx.Module):
    """Map from logits to shares: a softmax, with at least `floor` and at most `cap` for each entity.

    Shares that are at no bound are proportional to the softmax. If a task is too small for the bounds
    (floor > 1/m, or cap < 1/m without cash), 1/m replaces the bound. The bounds of a period (`Bounds`)
    take precedence and are always kept.

    Parameters
    ----------
    floor : float
        Smallest share of each entity.
    cap : float
        Largest share of each entity.
    cash : bool
        Whether the first entity of every task is cash, which has no floor or cap and takes what the
        others cannot.

    Examples
    --------
    >>> head = Head(cap=0.5)
    >>> head(jnp.array([9.0, 0.0, 0.0]), jnp.ones(3, bool)).tolist()
    [0.5, 0.25, 0.25]
    >>> head(jnp.array([9.0, 0.0, 0.0]), jnp.ones(3, bool), Bounds(jnp.array([0.25, 0.25, 0.25]))).sum()
    Array(0.75, dtype=float32)
    """

    floor: float = eqx.field(static=True, default=0.0)
    cap: float = eqx.field(static=True, default=1.0)
    cash: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        if not 0 <= self.floor < self.cap <= 1:
            raise InputError(
                f"floor {self.floor} and cap {self.cap}: they must satisfy 0 <= floor < cap <= 1"
            )

    def __call__(self, logits: Logits, mask: Mask, bounds: Bounds | None = None) -> Allocation:
        if bounds is None and self.floor == 0 and self.cap == 1:
            return masked_softmax(logits, mask)
        bounds = self.bounds(mask, bounds, logits.dtype)
        here = present(mask, bounds)
        # If no entity is present, all shares are 0; the softmax only has to be finite.
        scored = here | ~here.any()
        top = jnp.max(jnp.where(scored, logits, -jnp.inf))
        shares = masked_softmax(jnp.maximum(logits, top - _LOGIT_RANGE), scored)
        return within(shares, mask, bounds)

    def bounds(self, mask: Mask, period: Bounds | None, dtype: Any = float) -> Bounds:
        """Combine the bounds of the head with those of a period."""
        period = Bounds() if period is None else period
        here = present(mask, period)
        bounded = here.at[0].set(False) if self.cash else here
        even = 1 / jnp.maximum(bounded.sum(), 1).astype(dtype)
        cap = jnp.asarray(self.cap, dtype) if self.cash else jnp.maximum(self.cap, even)
        limits = jnp.where(bounded, cap, 0.0)
        floors = None
        if self.floor > 0 or period.floors is not None:
            floors = jnp.where(bounded, jnp.minimum(self.floor, even), 0.0)
        if period.limits is not None:
            limits = jnp.minimum(limits, period.limits)
        if floors is not None and period.floors is not None:
            floors = jnp.where(bounded, jnp.maximum(floors, period.floors), 0.0)
        if self.cash:
            limits = limits.at[0].set(1.0 if period.limits is None else period.limits[0])
        return Bounds(limits, floors)
