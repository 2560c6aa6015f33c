"""Convert wishes in kW to set-points in whole amperes, for policies, schedulers and controller.

A car charges with at least 6 A on each of its phases or not at all, charge points accept whole
amperes, and feeder, phases, branches and cables have limits. Wishes are served in this order:

1. a station that has been on for less than the minimum time stays on;
2. stations are served by decreasing wish, among equal wishes those that are on first; each gets
   its wish rounded up, at least its minimum, as far as all limits allow, or is skipped;
3. remaining power raises the stations that are on, in the same order, and then switches on others.

The result exceeds no limit, is never between 0 and a station's minimum, and leaves no power that a station
could use. The rounding has no gradient; training uses `straight_through`.
"""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

_SLACK_A = 1e-3
"""Tolerance for rounding errors of single precision."""
_EQUAL_A = 1e-2
"""Resolution for comparing wishes, so that rounding errors do not order equal ones."""
_UNROLLED = 16
"""Loop iterations unrolled on a GPU; on a CPU the compilation would take too long."""

if TYPE_CHECKING:
    Numbers = Any
else:
    # NumPy while sessions are read and forecast, JAX in compiled programs; checked in tests.
    Numbers = Array | np.ndarray
PerStation = Float[Numbers, "*stack entities"]
_Amperes = Float[Array, " entities"]


class Stations(eqx.Module):
    """A site's cables and limits as arrays."""

    max_a: PerStation
    min_a: PerStation
    phases: PerStation
    """Number of phases of each station."""
    kw_per_a: PerStation
    """Power in kW of one ampere on all phases of a station."""
    load: Float[Numbers, "limits entities"]
    """Load of one ampere at each station on each limit except the feeder's power."""
    limit_a: Float[Numbers, " limits"]

    @property
    def max_kw(self) -> PerStation:
        """Maximum power of each station in kW."""
        return self.max_a * self.kw_per_a

    def at(self, members: Int[Numbers, " entities"]) -> "Stations":
        """Select stations by position."""
        own = (self.max_a, self.min_a, self.phases, self.kw_per_a)
        return Stations(
            *(x[members] for x in own), load=self.load[:, members], limit_a=self.limit_a
        )


def set_points(
    wishes_kw: Float[Array, " entities"],
    most_a: _Amperes,
    stations: Stations,
    capacity_kw: Float[Array, ""],
    *,
    on: Bool[Array, " entities"],
    held: Bool[Array, " entities"],
) -> _Amperes:
    """Compute whole amperes for each station.

    Parameters
    ----------
    wishes_kw
        The power that a policy or a scheduler wants to offer.
    most_a
        The largest current that cable and car can take now; 0 if no car can draw.
    stations, capacity_kw
        The limits, and the feeder's present power.
    on
        Stations with an offer in the period before.
    held
        Stations that must not be switched off yet.
    """
    unrolled = 1 if jax.default_backend() == "cpu" else _UNROLLED
    wish = wishes_kw / stations.kw_per_a
    most = jnp.floor(most_a + _SLACK_A)
    able = most >= stations.min_a
    rank = _rank(held & able, jnp.round(wish / _EQUAL_A), on)
    order = jnp.argsort(rank)
    # Sort by order of service, so that each step of the scan reads one station's row.
    wish, most, able, held, least = (x[order] for x in (wish, most, able, held, stations.min_a))
    loads = jnp.concatenate([stations.kw_per_a[None], stations.load]).T[order]
    limits = jnp.append(capacity_kw, stations.limit_a)

    def serve(given: _Amperes, wanted: _Amperes, willing: Bool[Array, " entities"]) -> _Amperes:
        """Raise the willing stations in order towards their wanted current, within all limits."""

        def one(used, station):
            has, wanted, willing, least, load = station
            room = jnp.where(load > 0, (limits - used) / jnp.where(load > 0, load, 1.0), jnp.inf)
            target = jnp.floor(jnp.minimum(wanted, has + room.min() + _SLACK_A))
            fits = willing & (target >= least) & (target > has)
            more = jnp.where(fits, target - has, 0.0)
            return used + load * more, has + more

        used = (loads * given[:, None]).sum(0)
        stations = (given, wanted, willing & able, least, loads)
        return jax.lax.scan(one, used, stations, unroll=unrolled)[1]

    wanted = jnp.clip(jnp.ceil(wish - _SLACK_A), least, most)
    given = serve(jnp.zeros_like(wish), wanted, held | (wish > 0))
    given = serve(given, most, given > 0)
    return serve(given, most, jnp.ones_like(able))[rank]


def _rank(held: Array, wish: Array, on: Array) -> Int[Array, " entities"]:
    """Return each station's position in the order of service; ties go to the first."""
    keys = [-key.astype(wish.dtype) for key in (on, wish, held)]
    return comes_before(*keys).sum(0)


def comes_before(*keys: Array) -> Bool[Array, "entities entities"]:
    """Compare all pairs: by the last key, then by the one before it, and finally by position.

    For a garage's number of stations this is faster than sorting, above all on a GPU.
    """
    place = jnp.arange(len(keys[0]), dtype=jnp.int32)
    before = place[:, None] < place[None, :]
    for key in keys:
        mine, other = key[:, None], key[None, :]
        before = (mine < other) | ((mine == other) & before)
    return before


def straight_through(wished: Array, rounded: Array) -> Array:
    """Return the rounded values with the gradient of the wished ones."""
    return wished + jax.lax.stop_gradient(rounded - wished)
