"""The schedulers that garages use, from what is seen of each station to the kW it is offered.

Sorted ones serve cars at full rate in their order until the feeder is exhausted: first come first
served, earliest deadline first, least laxity first, largest remaining first. Ties are broken by the
time of arrival to the second, and only then by the place of the station. Full cars are skipped. Days are
simulated by `simulate_all`; `best_energies` is the most that could have been served.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from apportion.domains.charging.garage import (
    PERIOD_HOURS,
    PERIODS,
    Flags,
    Garage,
    PerSession,
    PerStation,
    State,
    StationView,
    draw,
    empty,
    look,
    plugged_in,
    see,
    visit,
)
from apportion.domains.charging.problem import observation
from apportion.domains.charging.sessions import RATE_KW
from apportion.errors import InputError
from apportion.policy import Policy

Schedule = Callable[[StationView], Float[Array, " entities"]]
"""From what is seen to the kW offered to each station, within their limits and the capacity."""

_ROWS = 2400
"""Stations of all days in a group: few enough that what a policy computes of them stays in the cache,
many enough that a period is worth its calls."""
_STRETCH = 4
"""Periods between two looks at which stations can draw at all."""
_FEW = 24
"""Below so many stations, all are worked on where any can draw."""
_TOGETHER = 16
"""Days in one linear programme: calling the solver costs more than a day's solution."""


def equal(seen: StationView) -> PerStation:
    """The same to every car that can draw; what exceeds one's limit goes to the others."""
    return pour(seen.limit_kw, seen.capacity_kw)


def in_order(key: Callable[[StationView], PerStation]) -> Schedule:
    """The scheduler that serves the smallest of these keys first."""
    return lambda seen: serve_in_order(seen, key(seen))


def clairvoyant(seen: StationView) -> PerStation:
    """Least laxity first by true needs and departures; nothing is offered beyond the need."""
    useful = jnp.minimum(seen.limit_kw, seen.truth.open_kwh / PERIOD_HOURS)
    return serve_in_order(eqx.tree_at(lambda s: s.limit_kw, seen, useful), seen.truth.laxity)


fcfs = in_order(lambda seen: seen.arrived)
"""First come, first served."""
edf = in_order(lambda seen: seen.said.hours_left)
"""Earliest stated departure first."""
llf = in_order(lambda seen: seen.said.laxity)
"""Least laxity first, by statements."""
SCHEDULERS: dict[str, Schedule] = {
    "equal": equal,
    "fcfs": fcfs,
    "edf": edf,
    "llf": llf,
    "edf-predicted": in_order(lambda seen: seen.predicted.hours_left),
    "llf-predicted": in_order(lambda seen: seen.predicted.laxity),
    # By predictions that recall earlier days where the days do.
    "llf-recalled": in_order(lambda seen: seen.recalled.laxity),
    # The car with the most of its request still open first.
    "largest-remaining": in_order(lambda seen: -seen.said.open_kwh),
    "clairvoyant": clairvoyant,
}
"""Every scheduler by the name that the command line and the reports use."""
CLAIRVOYANT, OPTIMUM = "clairvoyant", "optimum"
HINDSIGHT = (CLAIRVOYANT, OPTIMUM)
"""What no scheduler can know at the time."""


class PolicySchedule(eqx.Module):
    """A policy as a scheduler."""

    policy: Policy

    def __call__(self, seen: StationView) -> PerStation:
        everyone = jnp.ones(seen.can_draw.shape[0], bool)
        return self.policy(observation(seen, everyone), everyone) * seen.capacity_kw


def pour(limits: PerStation, capacity: Float[Array, ""]) -> PerStation:
    """Pour `capacity` evenly over stations until each is at its limit (water-filling, exactly).

    >>> pour(jnp.array([1.0, 9.0, 9.0]), jnp.float32(7.0)).tolist()
    [1.0, 3.0, 3.0]
    """
    # With the level at station i's limit this much is poured; the level lies above every limit that
    # pours no more than there is.
    poured = jnp.minimum(limits[:, None], limits[None, :]).sum(-1)
    below = poured <= capacity
    left = capacity - jnp.where(below, limits, 0.0).sum()
    level = left / jnp.maximum((~below).sum(), 1)
    return jnp.where(below, limits, jnp.minimum(level, limits))


def serve_in_order(seen: StationView, key: PerStation) -> PerStation:
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


@eqx.filter_jit
def walk_day(
    day: Garage, schedule: Schedule, capacity_kw: Float[Array, ""]
) -> tuple[StationView, Float[Array, "periods entities"], Float[Array, "periods entities"]]:
    """What a scheduler sees in each period of a day, the kW it offers, and the kWh that are drawn."""

    def period(state, n):
        seen = see(day, state, n, capacity_kw)
        offered = schedule(seen)
        state, drawn = draw(seen, offered)
        return state, (seen, offered, drawn)

    start = empty(day.arrival.shape[0])
    return jax.lax.scan(period, start, jnp.arange(PERIODS, dtype=jnp.int32))[1]


def simulate_days(
    days: Garage, schedule: Schedule, capacity_kw: Float[Array, ""]
) -> Float[Array, "days entities sessions"]:
    """The kWh each session draws in each day, in one scan over stretches of periods.

    In a stretch only those stations are worked on where a car can draw at some time, in as few rows as
    the busiest of the days needs: the schedule is not shown the others, to whom it could give nothing.
    """
    count, entities, _ = days.arrival.shape
    sizes = (entities,)
    if entities >= _FEW and jax.default_backend() == "cpu":
        # Few choices, since each is compiled.
        sizes = (-(-entities // 4), -(-entities // 2), entities)

    def stretch(carry, start):
        state, energy = carry
        arrives = (days.arrival >= start) & (days.arrival < start + _STRETCH) & days.there
        is_here = (days.arrival < start) & (start < days.departure)
        awaits = arrives.any(-1) | (is_here.any(-1) & ~state.full)

        def in_rows(size: int):
            one_day = partial(_stretch, size, schedule, capacity_kw, start)
            return lambda: jax.vmap(one_day)(days, awaits, state, energy)

        branches = [lambda: carry, *map(in_rows, sizes)]
        most = awaits.sum(-1).max()
        return jax.lax.switch((most > jnp.array((0, *sizes))).sum(), branches), None

    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), empty(entities))
    starts = jnp.arange(0, PERIODS, _STRETCH, dtype=jnp.int32)
    begun = state, jnp.zeros(days.arrival.shape, jnp.float32)
    (_, energy), _ = jax.lax.scan(stretch, begun, starts)
    return energy


def _stretch(
    size: int,
    schedule: Schedule,
    capacity_kw: Float[Array, ""],
    start: Int[Array, ""],
    day: Garage,
    awaits: Flags,
    state: State,
    energy: PerSession,
) -> tuple[State, PerSession]:
    """A stretch of one day in `size` rows, enough for all who await power; the others' state stays."""
    rank = jnp.cumsum(awaits.astype(jnp.int32))
    packed_day, packed = day, state
    if size < len(rank):
        # The station of each row, in their order; past the last one for rows that nobody needs.
        station = (rank <= jnp.arange(size)[:, None]).sum(-1)
        rows = partial(jnp.take, indices=station, axis=0, mode="fill", fill_value=0)
        # What is to come is the same at every station, so that none need be looked up.
        to_come: Any = day.to_come_kwh
        packed_day, packed = jax.tree.map(rows, (replace(day, to_come_kwh=None), state))
        packed_day = replace(packed_day, to_come_kwh=to_come[:size])
    periods = start + jnp.arange(_STRETCH, dtype=jnp.int32)
    # What no offer changes is worked out for all periods at once.
    fresh = jax.vmap(lambda n: visit(packed_day, n, capacity_kw))(periods)

    def period(state, fresh):
        seen = look(fresh, state)
        return draw(seen, schedule(seen))

    packed, drawn = jax.lax.scan(period, packed, fresh)
    here = jax.vmap(lambda n: plugged_in(packed_day, n))(periods)
    added = jnp.where(here, drawn[..., None], 0.0).sum(0)
    if size == len(rank):
        return packed, energy + added

    def back(values: Array) -> Array:
        return values[jnp.maximum(rank - 1, 0)]

    state = jax.tree.map(lambda new, old: jnp.where(awaits, back(new), old), packed, state)
    return state, energy + jnp.where(awaits[:, None], back(added), 0.0)


def _over_days(
    run: Callable[[Garage], Float[Array, "*others days entities sessions"]],
    days: Garage,
    entities: int,
) -> np.ndarray:
    """What `run` makes of all days; on a processor in groups that stay in its cache, a group a core.

    Every group has the same number of days, the last one with empty ones, so that `run` is compiled
    once.
    """
    count = days.arrival.shape[0]
    groups = -(-count // max(_ROWS // entities, 1))
    if groups < 2 or jax.default_backend() != "cpu":
        return np.asarray(run(days))
    size = -(-count // groups)
    # Days as busy as each other together, so that a quiet day does not wait for a busy one.
    order = np.argsort((np.asarray(days.departure) > np.asarray(days.arrival)).sum((1, 2)))[::-1]

    def part(start: int) -> Garage:
        def cut(values: Array | np.ndarray) -> np.ndarray:
            here = np.asarray(values)[order[start : start + size]]
            return np.pad(here, [(0, size - len(here))] + [(0, 0)] * (here.ndim - 1))

        return jax.tree.map(cut, days)

    parts = [part(start) for start in range(0, count, size)]
    # The first is begun alone, since that compiles.
    first = run(parts[0])
    with ThreadPoolExecutor(os.cpu_count()) as cores:
        rest = list(cores.map(lambda days: np.asarray(run(days)), parts[1:]))
    together = np.concatenate([np.asarray(first), *rest], -3)
    return together[..., np.argsort(order), :, :]


@eqx.filter_jit
def _simulate(
    days: Garage,
    schedules: tuple[Schedule, ...],
    capacity_kw: Float[Array, ""],
    members: Int[Array, "tasks entities"],
) -> Float[Array, "schedules tasks days entities sessions"]:
    """The kWh of every session under each schedule: one program, and one to compile."""

    def under(schedule: Schedule) -> Float[Array, "tasks days entities sessions"]:
        def task(stations):
            garage = jax.tree.map(lambda x: x[:, stations], days)
            return simulate_days(garage, schedule, capacity_kw)

        # One after another: tasks at once would not fit into the cache.
        return jax.lax.map(task, members)

    if len(schedules) == 1:
        return under(schedules[0])[None]
    # Functions, since a policy with traced parameters has no hash.
    branches = [lambda seen, schedule=schedule: schedule(seen) for schedule in schedules]
    return jax.lax.map(
        lambda number: under(lambda seen: jax.lax.switch(number, branches, seen)),
        jnp.arange(len(schedules)),
    )


def simulate_all(
    days: Garage,
    schedules: Sequence[Schedule],
    capacity_kw: Float[Array, ""] | float,
    members: Int[Array, "tasks entities"] | np.ndarray | None = None,
) -> np.ndarray:
    """The kWh each session draws, (schedules, tasks, days, entities, sessions), for tasks of stations.

    Days are arrays (days, stations, sessions) with forecasts (`add_forecasts`); schedules some of
    `SCHEDULERS`, or any others; members the stations of each task, by default one task of all.
    """
    if days.predicted_need_kwh is None:
        raise InputError("charging: the days have no forecasts; see add_forecasts")
    tasks = np.arange(days.arrival.shape[1])[None] if members is None else np.asarray(members)
    program = partial(
        _simulate,
        schedules=tuple(schedules),
        capacity_kw=jnp.float32(capacity_kw),
        members=jnp.asarray(tasks, jnp.int32),
    )
    return _over_days(program, days, tasks.shape[1])


def best_energies(
    garage: Garage, capacity_kw: float, members: np.ndarray | None = None
) -> np.ndarray:
    """The most kWh that the sessions of each task and day can be served together, (tasks, days).

    What no scheduler can exceed, had everything been known: maximise the kWh x_{s,i} of session s in
    interval i, over the intervals it fills, with x_{s,i} at most what the station gives in it, the
    sum over i at most the session's need, and the sum over s at most what the feeder gives. Between two
    arrivals or departures all periods are alike, so that they count as one interval. Solved by HiGHS.
    """
    arrays = [np.asarray(x) for x in (garage.arrival, garage.departure, garage.need_kwh)]
    tasks = np.arange(arrays[0].shape[1])[None] if members is None else np.asarray(members)
    # A row for each task and day.
    days = [np.concatenate([x[:, task] for task in tasks]) for x in arrays]
    served = [
        _solve(capacity_kw, *(x[first : first + _TOGETHER] for x in days))
        for first in range(0, len(days[0]), _TOGETHER)
    ]
    return np.concatenate(served).reshape(len(tasks), -1)


def _solve(
    capacity_kw: float, arrival: np.ndarray, departure: np.ndarray, need_kwh: np.ndarray
) -> np.ndarray:
    """The most kWh of each day; the days do not touch one another."""
    there = (departure > arrival) & (need_kwh > 0)
    day, needs = np.nonzero(there)[0], need_kwh[there].astype(float)
    if not len(day):
        return np.zeros(len(arrival))
    # One day after another on one clock.
    begins = day * (int(departure.max()) + 1)
    first, last = arrival[there] + begins, departure[there] + begins
    cuts = np.unique(np.concatenate([first, last]))
    inside = (first[:, None] <= cuts[:-1]) & (cuts[1:] <= last[:, None])
    filled = inside.any(0)
    hours = np.diff(cuts)[filled] * PERIOD_HOURS
    session, interval = np.nonzero(inside[:, filled])
    ones, columns = np.ones(len(session)), np.arange(len(session))
    by_session = csr_array((ones, (session, columns)), shape=(len(needs), len(session)))
    by_interval = csr_array((ones, (interval, columns)), shape=(len(hours), len(session)))
    most = RATE_KW * hours[interval]
    solution = linprog(
        -ones,
        A_ub=vstack([by_session, by_interval]),
        b_ub=np.concatenate([needs, capacity_kw * hours]),
        bounds=np.stack([np.zeros_like(most), most], 1),
        method="highs",
    )
    if not solution.success:
        raise RuntimeError(
            f"the linear programme of {len(arrival)} days failed: {solution.message}"
        )
    return np.bincount(day[session], solution.x, minlength=len(arrival))
