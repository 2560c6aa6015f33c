"""From wishes to set-points: what a station can really be told, the same for policies and schedulers.

A car charges with at least 6 A on each of its phases or not at all, a charge point takes whole amperes,
and feeder, phases, branches and cables have limits. Wishes, in kW, are served in their order:

1. who has been on for less than the minimum time stays on, whatever is wished for it;
2. then the largest wish first, and of equal ones who is on already; each gets its wish, but at least the
   least that charges, as far as every limit above it leaves room; who does not fit is passed over;
3. what is left raises those who are on, in the same order, and then switches on others.

So nobody is above any limit, nobody is between 0 and the least, and no power is left that somebody could
take. A schedule that serves cars one after another stays what it is. The rounding has no gradient: learning
sees through it (`straight_through`).
"""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

_SLACK_A = 1e-3
"""What single precision may lose of an ampere."""
_ALIKE_A = 1e-2
"""Wishes are told apart in such steps: equal ones are not put in order by their rounding errors."""
_UNROLLED = 16
"""Stations in a step of the loop on a GPU, where kernels are many; on a processor it compiles too long."""

MAX_COMPARED = 512
"""Stations that are put in order by comparing all with all; more are sorted."""

if TYPE_CHECKING:
    Numbers = Any
else:
    # NumPy's where sessions are read and forecast, JAX's in a program: checked when the tests run.
    Numbers = Array | np.ndarray
PerStation = Float[Numbers, "*stack entities"]
_Amperes = Float[Array, " entities"]


class Stations(eqx.Module):
    """Cables and the limits above them, as a program reads a site's wiring."""

    max_a: PerStation
    min_a: PerStation
    phases: PerStation
    """How many a station has."""
    kw_per_a: PerStation
    """What an ampere on all its phases is in kW."""
    load: Float[Numbers, "limits entities"]
    """What an ampere at a station takes of each limit but the feeder's power."""
    limit_a: Float[Numbers, " limits"]

    @property
    def max_kw(self) -> PerStation:
        """The most each station gives."""
        return self.max_a * self.kw_per_a

    def at(self, members: Int[Numbers, " entities"]) -> "Stations":
        """Some of the stations, behind a feeder of their own."""
        return Stations(
            self.max_a[members],
            self.min_a[members],
            self.phases[members],
            self.kw_per_a[members],
            self.load[:, members],
            self.limit_a,
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
    """Whole amperes for each station.

    Parameters
    ----------
    wishes_kw
        What a policy or a scheduler would offer.
    most_a
        The most each station can take now: its cable's and its car's; 0 where nobody can draw.
    stations, capacity_kw
        The limits, and the feeder's power of the moment.
    on
        Who was offered something in the period before.
    held
        Who must not be switched off yet.
    """
    unrolled = 1 if jax.default_backend() == "cpu" else _UNROLLED
    wish = wishes_kw / stations.kw_per_a
    most = jnp.floor(most_a + _SLACK_A)
    able = most >= stations.min_a
    rank = _rank(held & able, jnp.round(wish / _ALIKE_A), on)
    order = jnp.argsort(rank)
    # In the order of service, limits side by side: a step then works with one station's numbers alone.
    wish, most, able, held, least = (x[order] for x in (wish, most, able, held, stations.min_a))
    loads = jnp.concatenate([stations.kw_per_a[None], stations.load]).T[order]
    limits = jnp.append(capacity_kw, stations.limit_a)

    def serve(given: _Amperes, wanted: _Amperes, willing: Bool[Array, " entities"]) -> _Amperes:
        """Raise the willing, one after the other, towards what they want, as far as there is room."""

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
    """Each station's place in the order of service; of equal ones the first is served first."""
    keys = [-key.astype(wish.dtype) for key in (on, wish, held)]
    if len(wish) > MAX_COMPARED:
        return restore_order(jnp.arange(len(wish), dtype=jnp.int32), jnp.lexsort(keys))
    return comes_before(*keys).sum(0)


def comes_before(*keys: Array) -> Bool[Array, "entities entities"]:
    """Whether each comes before each other: by the last key, of equal ones by the one before it, and in
    the end by their places.

    Comparing all pairs costs less than sorting at the sizes of a garage, and on a GPU far less.
    """
    place = jnp.arange(len(keys[0]), dtype=jnp.int32)
    before = place[:, None] < place[None, :]
    for key in keys:
        mine, other = key[:, None], key[None, :]
        before = (mine < other) | ((mine == other) & before)
    return before


def restore_order(values: Array, order: Int[Array, " entities"]) -> Array:
    """Values that stand in an order, each where it was before."""
    return values[jnp.argsort(order)]


def straight_through(wished: Array, told: Array) -> Array:
    """What is told, with the gradient of what was wished."""
    return wished + jax.lax.stop_gradient(told - wished)
