"""The schedulers that garages use, the simulation of days, and the optimum in hindsight.

A scheduler maps the view of the stations to the kW wished for each. Sorted schedulers serve cars at
full rate in their order until the feeder is exhausted: first come first served, earliest deadline
first, least laxity first, largest remaining first. Ties are broken by the time of arrival, then by
the station's position; cars that are done are skipped. `simulate` runs days, in sequence if a
car stays over midnight; `best_energies` computes the largest possible energy by linear programming.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from apportion.errors import InputError
from apportion.runs.settings import suggest
from apportion_charging.days import Days
from apportion_charging.garage import (
    Garage,
    GarageState,
    PerSession,
    PerStation,
    Physics,
    Stations,
    StationView,
    draw,
    initial_state,
    match_sessions,
    see,
    see_sessions,
    see_state,
)
from apportion_charging.setpoints import comes_before

Schedule = Callable[[StationView], Float[Array, " entities"]]
"""Function from a view to the kW wished for each station, within its limit and the capacity."""

_ROWS, _ROWS_OF_A_GPU = 2**12, 2**16
"""Stations per batch: intermediate values fit into a CPU's cache, and calls are few."""
_STRETCH = 4
"""Number of periods that are skipped together if no garage has a car."""
_TOGETHER = 16
"""Days in one linear programme: calling the solver costs more than solving a day."""


def _equal(seen: StationView) -> PerStation:
    """Give equal power to all cars that can draw; power above a car's limit goes to the others."""
    return _pour(seen.limit_kw, seen.capacity_kw)


def _serve_by(key: Callable[[StationView], PerStation]) -> Schedule:
    """Create the scheduler that serves the smallest key first."""
    return lambda seen: _serve_in_order(seen, key(seen))


def _clairvoyant(seen: StationView) -> PerStation:
    """Serve the least laxity first by true needs and departures; offer nothing beyond the need."""
    useful = jnp.minimum(seen.limit_kw, 4 * seen.truth.open_kwh)
    return _serve_in_order(eqx.tree_at(lambda s: s.limit_kw, seen, useful), seen.truth.laxity)


SCHEDULERS: dict[str, Schedule] = {
    "equal": _equal,
    "fcfs": _serve_by(lambda seen: seen.arrived),
    "edf": _serve_by(lambda seen: seen.said.hours_left),
    "llf": _serve_by(lambda seen: seen.said.laxity),
    "edf-predicted": _serve_by(lambda seen: seen.predicted.hours_left),
    "llf-predicted": _serve_by(lambda seen: seen.predicted.laxity),
    # Uses predictions that are corrected by earlier days, if the days have recall.
    "llf-recalled": _serve_by(lambda seen: seen.recalled.laxity),
    # Serves the car with the largest remaining request first.
    "largest-remaining": _serve_by(lambda seen: -seen.said.open_kwh),
    "clairvoyant": _clairvoyant,
}
"""Schedulers by their names in the command line and in reports."""
CLAIRVOYANT, OPTIMUM = "clairvoyant", "optimum"
HINDSIGHT = (CLAIRVOYANT, OPTIMUM)
"""Names of the schedules that use hidden values."""


def find_scheduler(name: str, purpose: str = "", alternative: str = "") -> Schedule:
    """Look up a scheduler without hidden values by name; raise InputError if there is none."""
    known = {own: schedule for own, schedule in SCHEDULERS.items() if own not in HINDSIGHT}
    if name not in known:
        raise InputError(
            f"there is no scheduler {name!r}{purpose}; choose {', '.join(known)}{alternative}"
            f"{suggest(name, list(known))}"
        )
    return known[name]


def _pour(limits: PerStation, capacity: Float[Array, ""]) -> PerStation:
    """Distribute `capacity` evenly over stations up to their limits, by exact water-filling.

    >>> _pour(jnp.array([1.0, 9.0, 9.0]), jnp.float32(7.0)).tolist()
    [1.0, 3.0, 3.0]
    """
    # poured[i] is the total at water level limits[i]; the final level is above every limit with
    # poured <= capacity.
    poured = jnp.minimum(limits[:, None], limits[None, :]).sum(-1)
    below = poured <= capacity
    left = capacity - jnp.where(below, limits, 0.0).sum()
    level = left / jnp.maximum((~below).sum(), 1)
    return jnp.where(below, limits, jnp.minimum(level, limits))


def _serve_in_order(seen: StationView, key: PerStation) -> PerStation:
    """Serve stations at full rate by increasing key until the capacity is exhausted."""
    # The barrier prevents XLA from recomputing a key for every pair.
    key, arrived, limit = jax.lax.optimization_barrier((key, seen.arrived, seen.limit_kw))
    taken = jnp.where(comes_before(arrived, key), limit[:, None], 0.0).sum(0)
    return jnp.clip(seen.capacity_kw - taken, 0.0, limit)


@eqx.filter_jit
def walk_day(
    day: Garage,
    stations: Stations,
    schedule: Schedule,
    capacity_kw: Float[Array, ""],
    physics: Physics,
) -> tuple[StationView, Float[Array, "periods entities"]]:
    """Simulate a day; return the scheduler's view of each period, and the kWh drawn."""

    def period(state, n):
        seen = see(day, stations, state, n, capacity_kw, physics)
        state, drawn = draw(seen, schedule(seen), physics)
        return state, (seen, drawn)

    periods = jnp.arange(physics.periods, dtype=jnp.int32)
    return jax.lax.scan(period, initial_state(stations), periods)[1]


@eqx.filter_jit
def walk_rows(
    today: Garage,
    stations: Stations,
    state: GarageState,
    capacity_kw: Float[Array, " rows"],
    schedules: tuple[Schedule, ...],
    number: Int[Array, ""],
    physics: Physics,
) -> tuple[GarageState, Float[Array, "rows entities sessions"], Float[Array, "rows periods"]]:
    """Simulate a day of several garages under one schedule; return kWh by session and period.

    A stretch of periods in which no garage has a car is skipped.
    """
    # Wrap schedules in functions, because a policy with traced parameters has no hash.
    branches = [lambda seen, schedule=schedule: schedule(seen) for schedule in schedules]

    def chosen(seen: StationView) -> PerStation:
        return jax.lax.switch(number, branches, seen)

    def stretch(carry, start):
        def walk():
            one = partial(_walk_stretch, chosen, physics, start)
            return jax.vmap(one)(today, stations, capacity_kw, *carry)

        nothing = jnp.zeros((len(capacity_kw), _STRETCH), jnp.float32)
        awaits = ((today.arrival < start + _STRETCH) & (start < today.departure)).any()
        *carry, drawn = jax.lax.cond(awaits, walk, lambda: (*carry, nothing))
        return tuple(carry), drawn

    starts = jnp.arange(0, physics.periods, _STRETCH, dtype=jnp.int32)
    begun = state, jnp.zeros(today.arrival.shape, jnp.float32)
    (state, energy), drawn = jax.lax.scan(stretch, begun, starts)
    return state, energy, jnp.swapaxes(drawn, 0, 1).reshape(-1, physics.periods)


def _walk_stretch(
    schedule: Schedule,
    physics: Physics,
    start: Int[Array, ""],
    day: Garage,
    stations: Stations,
    capacity_kw: Float[Array, ""],
    state: GarageState,
    energy: PerSession,
) -> tuple[GarageState, PerSession, Float[Array, " periods"]]:
    """Simulate a stretch of periods in one garage."""
    periods = start + jnp.arange(_STRETCH, dtype=jnp.int32)
    # The part that no offer changes is computed for all periods at once.
    fresh = jax.vmap(lambda n: see_sessions(day, stations, n, capacity_kw, physics))(periods)

    def period(state, fresh):
        seen = see_state(fresh, state, physics)
        return draw(seen, schedule(seen), physics)

    state, drawn = jax.lax.scan(period, state, fresh)
    here = jax.vmap(lambda n: match_sessions(day, n))(periods)
    added = jnp.where(here, drawn[..., None], 0.0).sum(0)
    return state, energy + added, drawn.sum(-1)


@jax.jit
def gather(
    garage: Garage,
    stations: Stations,
    day: Int[Array, " rows"],
    members: Int[Array, "rows entities"],
) -> tuple[Garage, Stations]:
    """Select the day and the stations of each row."""
    today = jax.tree.map(lambda x: x[day[:, None], members], garage)
    return today, jax.vmap(stations.at)(members)


def make_lanes(joins: np.ndarray) -> np.ndarray:
    """Arrange days in lanes that are simulated in parallel, (lanes, days); -1 is padding.

    A day that joins the previous one follows it in its lane. Other days fill the lanes up to the
    length of the longest. Days without overnight cars share lanes, because empty hours are skipped.

    >>> make_lanes(np.array([False, False, True, True, False, False, True])).tolist()
    [[1, 2, 3], [5, 6, 0], [4, -1, -1]]
    """
    together = np.split(np.arange(len(joins)), np.flatnonzero(~joins)[1:])
    longest = max(map(len, together))
    lanes: list[list[int]] = [[]]
    for days in sorted(together, key=len, reverse=True):
        if len(lanes[-1]) + len(days) > longest:
            lanes.append([])
        lanes[-1].extend(days)
    return np.array([lane + [-1] * (longest - len(lane)) for lane in lanes])


@jax.jit
def start_day(
    state: GarageState | None, stations: Stations, joins: Bool[Array, " rows"]
) -> GarageState:
    """Return the state at midnight: kept if a day joins the previous one, else initial."""
    nothing = jax.vmap(initial_state)(stations)
    if state is None:
        return nothing
    return jax.tree.map(lambda was, new: jnp.where(joins[:, None], was, new), state, nothing)


class Delivered(NamedTuple):
    """Energy drawn under each schedule."""

    energy_kwh: np.ndarray
    """Energy of each session on its first day, (schedules, tasks, days, entities, sessions)."""
    by_period_kwh: np.ndarray
    """Energy of all stations in each period, (schedules, tasks, days, periods)."""


def resolve_tasks(
    days: Days, capacity_kw: np.ndarray | float, members: Array | np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return each task's stations, by default one task with all, and its feeder capacity in kW."""
    if days.garage.predicted_need_kwh is None:
        raise InputError("charging: the days have no forecasts; see add_forecasts")
    tasks = np.arange(len(days.stations))[None] if members is None else np.asarray(members)
    return tasks, np.broadcast_to(np.asarray(capacity_kw, np.float32), len(tasks))


def simulate(
    days: Days,
    schedules: Sequence[Schedule],
    capacity_kw: np.ndarray | float,
    members: Int[Array, "tasks entities"] | np.ndarray | None = None,
) -> Delivered:
    """Simulate days under each schedule.

    Energy that a car draws after its first day counts on the first.

    Parameters
    ----------
    days
        Days with forecasts (`add_forecasts`).
    schedules
        Schedulers, from `SCHEDULERS` or others.
    capacity_kw
        Feeder capacity, one for all tasks or one for each.
    members
        Stations of each task; by default one task with all stations.
    """
    garage, physics = days.garage, days.physics
    tasks, capacity = resolve_tasks(days, capacity_kw, members)
    lanes, joins = make_lanes(days.joins), np.append(days.joins, False)
    # A row for each lane and task.
    lane, task = np.divmod(np.arange(lanes.shape[0] * len(tasks)), len(tasks))
    on_cpu = jax.default_backend() == "cpu"
    cores = (os.cpu_count() or 1) if on_cpu else 1
    room = max((_ROWS if on_cpu else _ROWS_OF_A_GPU) // tasks.shape[1], 1)
    size = _batch_size(-(-len(lane) // cores), room, 2 if on_cpu else 8)
    parts = np.array_split(np.arange(len(lane)), range(size, len(lane), size))
    table = jax.tree.map(jnp.asarray, pad_days(garage))
    wiring = jax.tree.map(jnp.asarray, days.wiring)
    whole = (len(schedules), len(tasks), len(days))
    sessions = garage.arrival.shape[2]
    energy = np.zeros((*whole, tasks.shape[1], sessions), np.float32)
    by_period = np.zeros((*whole, physics.periods), np.float32)

    def walk(job: tuple[int, np.ndarray], most: int = lanes.shape[1]) -> None:
        number, rows = job
        # Pad with rows of empty days.
        own = np.pad(task[rows], (0, size - len(rows)))
        days_of = np.pad(lanes[lane[rows]], ((0, size - len(rows)), (0, 0)), constant_values=-1)
        state = None
        for today in days_of.T[: min(most, (days_of >= 0).sum(1).max())]:
            here, stations = gather(table, wiring, today, tasks[own].astype(np.int32))
            state = start_day(state, stations, joins[today])
            feeder = jnp.asarray(capacity[own])
            state, *found = walk_rows(
                here, stations, state, feeder, tuple(schedules), jnp.int32(number), physics
            )
            there = today >= 0
            drawn, together = (np.asarray(x)[there] for x in found)
            energy[number, own[there], today[there]] = drawn[..., :sessions]
            by_period[number, own[there], today[there]] = together

    jobs = [(number, part) for number in range(len(schedules)) for part in parts]
    if min(cores, len(jobs)) > 1:
        # Compile with the first day; otherwise several threads would compile the same program.
        walk(jobs[0], most=1)
    with ThreadPoolExecutor(cores) as threads:
        list(threads.map(walk, jobs))
    return Delivered(move_to_first_days(energy, garage, tasks), by_period)


def _batch_size(rows: int, room: int, step: int) -> int:
    """Choose the number of garages in a batch: a power of `step`, or as many as there is room for.

    Sizes are few because each one is compiled; on a GPU, compiling costs more than unused rows.

    >>> _batch_size(100, 409, 2), _batch_size(10_000, 409, 2)
    (128, 256)
    """
    size, most = 1, 2 ** (room.bit_length() - 1)
    while size < min(rows, most):
        size *= step
    return min(size, most)


def pad_days(garage: Garage) -> Garage:
    """Append an empty day, and pad sessions to multiples of four to share compiled programs."""
    shape = garage.arrival.shape

    def padded(values: Any) -> np.ndarray:
        values = np.asarray(values)
        more = -shape[2] % 4 if values.shape == shape else 0
        return np.pad(values, [(0, 1), (0, 0), (0, more)][: values.ndim])

    return jax.tree.map(padded, garage)


def move_to_first_days(drawn: np.ndarray, garage: Garage, tasks: np.ndarray) -> np.ndarray:
    """Move the energy of sessions to their first day; drop it if that day is missing."""
    begins, number = np.asarray(garage.begins), np.asarray(garage.number)
    goes_on = np.asarray(garage.there) & ~begins
    if not goes_on.any():
        return drawn
    day, _, place = np.nonzero(begins)
    first_day, first_place = np.full((2, int(number.max()) + 1), -1)
    first_day[number[begins]], first_place[number[begins]] = day, place
    moved = np.where(goes_on[:, tasks].swapaxes(0, 1), 0, drawn)
    for task, members in enumerate(tasks):
        days, entities, places = np.nonzero(goes_on[:, members])
        own = number[days, members[entities], places]
        known = first_day[own] >= 0
        goal = (first_day[own][known], entities[known], first_place[own][known])
        for schedule in range(len(drawn)):
            energy = drawn[schedule, task, days, entities, places][known]
            np.add.at(moved[schedule, task], goal, energy)
    return moved


def best_energies(
    days: Days, capacity_kw: np.ndarray | float, members: np.ndarray | None = None
) -> np.ndarray:
    """Compute the largest energy of each task and day in hindsight, (tasks, days).

    HiGHS maximises the sum of x_{s,i}, the kWh of session s in interval i of its stay. Each x_{s,i}
    is at most what station and car can take, its sum over i at most the session's need, and its sum
    over s at most the feeder's energy. Periods between two arrivals or departures are one interval.
    The energy of a session counts on its first day.
    """
    garage, wiring = days.garage, days.wiring
    tasks = np.arange(len(days.stations))[None] if members is None else np.asarray(members)
    capacity = np.broadcast_to(np.asarray(capacity_kw, float), len(tasks))
    day, station, _ = where = np.nonzero(garage.begins & (garage.need_kwh > 0))
    start = day * days.physics.periods
    first, last = start + garage.arrival[where], start + garage.departure[where]
    rate = garage.car_a[where] * garage.car_share[where] * wiring.kw_per_a[station]
    # Solve several runs of joined days in one call.
    stretch = np.cumsum(~days.joins) // _TOGETHER
    best, need = np.zeros((len(tasks), len(days))), garage.need_kwh[where]
    for task, chosen in enumerate(tasks):
        here = np.flatnonzero(np.isin(station, chosen))
        # Days ascend, so the sessions of each stretch are contiguous.
        ends = np.searchsorted(stretch[day[here]], np.arange(1, stretch.max() + 1))
        for own in np.split(here, ends):
            sessions = (first[own], last[own], need[own], rate[own])
            energy = _solve(capacity[task], days.physics.period_hours, *sessions)
            np.add.at(best[task], day[own], energy)
    return best


def _solve(
    capacity_kw: float,
    period_hours: float,
    first: np.ndarray,
    last: np.ndarray,
    need_kwh: np.ndarray,
    rate_kw: np.ndarray,
) -> np.ndarray:
    """Solve one linear programme; return the kWh of each session."""
    if not len(first):
        return np.zeros(0)
    cuts = np.unique(np.concatenate([first, last]))
    inside = (first[:, None] <= cuts[:-1]) & (cuts[1:] <= last[:, None])
    filled = inside.any(0)
    hours = np.diff(cuts)[filled] * period_hours
    session, interval = np.nonzero(inside[:, filled])
    ones, columns = np.ones(len(session)), np.arange(len(session))
    by_session = csr_array((ones, (session, columns)), shape=(len(first), len(session)))
    by_interval = csr_array((ones, (interval, columns)), shape=(len(hours), len(session)))
    most = rate_kw[session] * hours[interval]
    solution = linprog(
        -ones,
        A_ub=vstack([by_session, by_interval]),
        b_ub=np.concatenate([need_kwh.astype(float), capacity_kw * hours]),
        bounds=np.stack([np.zeros_like(most), most], 1),
        method="highs",
    )
    if not solution.success:
        raise RuntimeError(
            f"the linear programme of {len(first)} sessions failed: {solution.message}"
        )
    return np.bincount(session, solution.x, minlength=len(first))
