"""The schedulers that garages use, from what is seen of each station to the kW it is offered.

Sorted ones serve cars at full rate in their order until the feeder is exhausted: first come first
served, earliest deadline first, least laxity first, largest remaining first. Ties are broken by the
time of arrival to the second, and only then by the place of the station. Full cars are skipped.
"""

from collections.abc import Callable
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from apportion.domains.charging.garage import (
    PERIOD_HOURS,
    PERIODS,
    Garage,
    Medians,
    Outlook,
    PerStation,
    Seen,
    draw,
    empty,
    plugged_in,
    see,
)
from apportion.errors import InputError

Schedule = Callable[[Seen], Float[Array, " entities"]]
"""From what is seen to the kW offered to each station, within their limits and the capacity."""

PeerName = Literal[
    "equal",
    "fcfs",
    "edf",
    "llf",
    "edf-predicted",
    "llf-predicted",
    "largest-remaining",
    "clairvoyant",
]


def equal(seen: Seen) -> PerStation:
    """The same to every car that can draw; what exceeds one's limit goes to the others."""
    return fill(seen.limit_kw, seen.capacity_kw)


def fcfs(seen: Seen) -> PerStation:
    """First come, first served."""
    return serve_in_order(seen, seen.arrived)


def edf(seen: Seen) -> PerStation:
    """Earliest stated departure first."""
    return serve_in_order(seen, seen.said.hours_left)


def llf(seen: Seen) -> PerStation:
    """Least laxity first, by statements."""
    return serve_in_order(seen, seen.said.laxity)


def edf_predicted(seen: Seen) -> PerStation:
    """Earliest predicted departure first."""
    return serve_in_order(seen, _forecast(seen).hours_left)


def llf_predicted(seen: Seen) -> PerStation:
    """Least laxity first, by predicted needs and departures."""
    return serve_in_order(seen, _forecast(seen).laxity)


def largest_remaining(seen: Seen) -> PerStation:
    """The car with the most of its request still open first."""
    return serve_in_order(seen, -seen.said.open_kwh)


def clairvoyant(seen: Seen) -> PerStation:
    """Least laxity first by true needs and departures; nothing is offered beyond the need."""
    useful = jnp.minimum(seen.limit_kw, seen.truth.open_kwh / PERIOD_HOURS)
    return serve_in_order(eqx.tree_at(lambda s: s.limit_kw, seen, useful), seen.truth.laxity)


PEERS: dict[str, Schedule] = dict(
    zip(
        get_args(PeerName),
        (
            equal,
            fcfs,
            edf,
            llf,
            edf_predicted,
            llf_predicted,
            largest_remaining,
            clairvoyant,
        ),
        strict=True,
    )
)
"""Every scheduler by the name that the command line and the reports use."""


def fill(limits: PerStation, capacity: Float[Array, ""]) -> PerStation:
    """Pour `capacity` evenly over stations until each is at its limit (water-filling, exactly).

    >>> fill(jnp.array([1.0, 9.0, 9.0]), jnp.float32(7.0)).tolist()
    [1.0, 3.0, 3.0]
    """
    # With the level at station i's limit this much is poured; the level lies above every limit that
    # pours no more than there is.
    poured = jnp.minimum(limits[:, None], limits[None, :]).sum(-1)
    below = poured <= capacity
    left = capacity - jnp.where(below, limits, 0.0).sum()
    level = left / jnp.maximum((~below).sum(), 1)
    return jnp.where(below, limits, jnp.minimum(level, limits))


def serve_in_order(seen: Seen, key: PerStation) -> PerStation:
    """Full rate to the station with the smallest key, then to the next, until nothing is left."""
    # Comparing all pairs costs less than sorting at the sizes of a garage, and on a GPU far less. The
    # barrier keeps a key from being computed anew for every pair.
    key, arrived, limit = jax.lax.optimization_barrier((key, seen.arrived, seen.limit_kw))
    place = jnp.arange(len(key), dtype=jnp.int32)

    def pairs(values: Array) -> tuple[Array, Array]:
        return values[:, None] < values[None, :], values[:, None] == values[None, :]

    sooner, tie = pairs(key)
    came, together = pairs(arrived)
    first, _ = pairs(place)
    before = sooner | (tie & (came | (together & first)))
    taken = jnp.where(before, limit[:, None], 0.0).sum(0)
    return jnp.clip(seen.capacity_kw - taken, 0.0, limit)


def _forecast(seen: Seen) -> Outlook:
    if seen.predicted is None:
        raise InputError(
            "charging: a scheduler by predictions needs some; fit a Predictor on the training days "
            "and apply it to these"
        )
    return seen.predicted


def simulate_day(
    day: Garage, schedule: Schedule, capacity_kw: Float[Array, ""], medians: Medians
) -> Float[Array, "entities sessions"]:
    """The kWh each session draws in one day, in one scan over its periods."""

    def period(carry, n):
        state, energy = carry
        offered = schedule(see(day, state, n, capacity_kw, medians))
        state, drawn = draw(day, state, n, offered)
        return (state, energy + jnp.where(plugged_in(day, n), drawn[:, None], 0.0)), None

    first = (empty(day.arrival.shape[0]), jnp.zeros_like(day.need_kwh))
    (_, energy), _ = jax.lax.scan(period, first, jnp.arange(PERIODS, dtype=jnp.int32))
    return energy


@eqx.filter_jit
def _simulate(days: Garage, members, schedule: Schedule, capacity_kw, medians: Medians):
    def task(inputs):
        members, capacity_kw = inputs
        garage = jax.tree.map(lambda x: x[:, members], days)
        return jax.vmap(lambda day: simulate_day(day, schedule, capacity_kw, medians))(garage)

    # A task's days together fit into the cache; all tasks at once do not.
    return jax.lax.map(task, (members, capacity_kw))


def simulate(
    days: Garage,
    schedule: Schedule,
    capacity_kw: Float[Array, "*tasks"] | np.ndarray | float,
    medians: Medians,
    members: Int[Array, "tasks entities"] | np.ndarray | None = None,
) -> np.ndarray:
    """The kWh each session draws, (tasks, days, entities, sessions), for tasks of stations.

    Parameters
    ----------
    days
        Arrays (days, stations, sessions).
    schedule
        One of `PEERS`, or any other.
    capacity_kw
        What the feeder gives, the same for every task or one for each.
    medians
        What stands in for what was not stated.
    members
        The stations of each task; by default one task of all.
    """
    if members is None:
        members = np.arange(days.arrival.shape[1])[None]
    members = jnp.asarray(members, jnp.int32)
    capacity = jnp.broadcast_to(jnp.asarray(capacity_kw, jnp.float32), members.shape[:1])
    return np.asarray(_simulate(days, members, schedule, capacity, medians))
