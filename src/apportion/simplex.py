"""From logits to a point on the simplex: softmax, then the water level within every bound.

`Head` is the softmax of the paper. `Bounds` are what real problems add: the most and the least each
entity can take now; what no entity can take stays unused.
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

# Beyond e^-30 of the leader a score says only "last"; the clip keeps the filling in float32's range.
_LOGIT_RANGE = 30.0
_LEAST_SHARE = float(np.exp(-_LOGIT_RANGE))

TOLERANCE = 1e-4
"""How far float32 may carry a sum of shares from 1 inside the compiled loop."""


class Bounds(eqx.Module):
    """What an allocation keeps to in one period, beside the mask; each part may be missing.

    Where they cannot all be met, limits come before floors: floors that do not fit are scaled down.
    """

    limits: Float[Array, "*batch entities"] | None = None
    """The most each entity can take, as a share; 0 is absent."""
    floors: Float[Array, "*batch entities"] | None = None
    """The least each entity gets."""


def present(mask: Mask, bounds: Bounds | None) -> Mask:
    """The real entities that can take anything now."""
    if bounds is None or bounds.limits is None:
        return mask
    return mask & (bounds.limits > 0)


def masked_softmax(logits: Logits, mask: Mask) -> Allocation:
    """Softmax over the real entities; padding gets exactly 0."""
    return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), where=mask)


def equal_shares(
    mask: Bool[Array, "*stack entities"], dtype: Any = float
) -> Float[Array, "*stack entities"]:
    """The allocation that knows nothing: 1/m to each real entity.

    >>> equal_shares(jnp.array([True, True, False])).tolist()
    [0.5, 0.5, 0.0]
    """
    real = mask.astype(dtype)
    return real / real.sum(-1, keepdims=True)


def equal_within(mask: Mask, bounds: Bounds | None, dtype: Any = float) -> Allocation:
    """Equal shares as far as the bounds allow: what one cannot take goes to the others equally.

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
    """Whether shares are finite, >= 0, sum to `total` and are 0 where the mask is False, to rounding.

    The sum may be off by `tolerance`; a single share, which adds up no others' rounding, by a tenth.
    """
    padding = 0.0 if mask is None else jnp.where(mask, 0.0, jnp.abs(shares)).sum(-1)
    fits = (jnp.abs(shares.sum(-1) - total) <= tolerance) & (shares >= -tolerance / 10).all(-1)
    return jnp.isfinite(shares).all(-1) & fits & (padding <= tolerance / 10)


def within(shares: Allocation, mask: Mask, bounds: Bounds | None) -> Allocation:
    """The allocation in proportion to `shares` wherever no bound holds it; without bounds, `shares`.

    It sums to 1, or to what all can take together where that is less. An entity of no share gets
    something only after the others are full.

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
    """clip(tau * shares, lowest, highest) with the tau that makes the sum `total`, found exactly.

    The sum is piecewise linear and increasing in tau with a corner wherever an entity meets a
    bound, so the right piece is found among the corners, m for either bound, and solved in closed
    form. No `lowest` is 0, and has no corners.
    """
    safe = jnp.where(shares > 0, shares, 1.0)
    leaves = jnp.where(shares > 0, highest / safe, jnp.inf)
    known = jax.lax.stop_gradient((shares, highest, leaves, total))
    free, least = jnp.array(True), 0.0
    if lowest is None:
        # Pairs of all entities are one kernel on a GPU, and most of the work elsewhere.
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
    # Below its own piece only by rounding, where a small mass would let go of those at their bounds.
    tau = jnp.where(tau < start, start, tau)
    return jnp.clip(tau * shares, lowest, highest)


def _last_corner(
    shares: Allocation,
    highest: Allocation,
    corners: Float[Array, " corners"],
    total: Scalar,
    lowest: Allocation | None = None,
) -> Scalar:
    """The last corner whose sum is no more than `total`, by the sums of all; 0 where none is."""
    real = jnp.isfinite(corners)
    at = jnp.where(real, corners, 0.0)
    # The barrier keeps what leads to the shares from being recomputed for every pair.
    at, shares, lowest, highest = jax.lax.optimization_barrier((at, shares, lowest, highest))
    low = None if lowest is None else lowest[:, None]
    reach = jnp.clip(at[None, :] * shares[:, None], low, highest[:, None]).sum(0)
    return jnp.max(jnp.where(real & (reach <= total), corners, 0.0), initial=0.0)


def _rise(shares: Allocation, highest: Allocation, leaves: Allocation, total: Scalar) -> Scalar:
    """The same without floors, in few rounds: an entity that the level fills is full at every higher one,
    so it rises to where the others alone would take the rest, until no other is full. What is left
    times the shares not yet full falls fourfold in a round (Newton's method on a convex sum): with
    shares over e^-30 float32 tells at most 34 + log2(m) / 2 rounds apart, and m where that is less.
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
    # Where all are full the level is above every corner, whatever the last one rounded to.
    tau = jnp.where(total >= highest.sum(), jnp.inf, tau)
    return jnp.max(jnp.where(jnp.isfinite(leaves) & (leaves <= tau), leaves, 0.0), initial=0.0)


class Head(eqx.Module):
    """Logits to shares: softmax, then at least `floor` and at most `cap` for each entity.

    With bounds, shares are proportional to the softmax wherever no bound holds them. With `cash`,
    the first entity of every task is cash: it is free of floor and cap and takes what no other can.
    Where a task is too small for its bounds (floor > 1/m or cap < 1/m without cash), the bound gives
    way to 1/m. What a period itself allows (`Bounds`) comes first, and never gives way.

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
        # If no entity is present all shares are 0 whatever the softmax, but it must stay finite.
        scored = here | ~here.any()
        top = jnp.max(jnp.where(scored, logits, -jnp.inf))
        shares = masked_softmax(jnp.maximum(logits, top - _LOGIT_RANGE), scored)
        return within(shares, mask, bounds)

    def bounds(self, mask: Mask, period: Bounds | None, dtype: Any = float) -> Bounds:
        """The head's own bounds and the period's as one."""
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
