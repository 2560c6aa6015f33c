"""Charging as an allocation problem: m stations behind one feeder; an episode is one day.

The universe contains all stations of all sites; the stations of a task belong to one site. An
episode is a training day of that site with a feeder of phi times the stations' full rate; both are
sampled. Each station's share of the feeder is limited by what its car can take; the rest is unused.
Shares are rounded to set-points, with a straight-through gradient. The reward is the objective, by
default the kWh drawn, divided by the site's mean need, so that no site dominates. If the objective
is cost, the last entity of a task is the unused power (`_add_spare`).
"""

from collections.abc import Sequence
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.policy import Policy
from apportion.problem import Observation, Problem, Step
from apportion.tasks import Task
from apportion_charging.days import Days
from apportion_charging.garage import (
    Garage,
    GarageState,
    Outlook,
    PerStation,
    Physics,
    Stations,
    StationView,
    draw,
    initial_state,
    see,
)
from apportion_charging.objectives import Energy, Objective

CHANNELS = 24
"""Number of features of a station in the observation, each of about unit size."""
_SHARED = np.isin(np.arange(CHANNELS), (18, 19, 20, 21, 23))
"""Mask of the channels whose value is the same at all stations."""
_USUAL_KW = 7.0
"""Unit of a station's full rate in the observation."""


class _DayState(eqx.Module):
    """Day, period, feeder capacity, highest power so far, and knowledge of the stations."""

    day: Int[Array, "*stack"]
    n: Int[Array, "*stack"]
    capacity_kw: Float[Array, "*stack"]
    peak_kw: Float[Array, "*stack"]
    garage: GarageState


class Charging(Problem):
    """The training days of one or several sites, as a family of tasks.

    Examples
    --------
    >>> from apportion_charging.sessions import read_sessions
    >>> from apportion_charging.forecasts import Predictor, add_forecasts
    >>> from apportion_charging.site import embedded_site
    >>> days = Days.of(read_sessions(), "jpl", embedded_site("jpl"))
    >>> days = days.between("2019-05-01", "2019-06-30")
    >>> Charging.of([add_forecasts(days, Predictor.fit(days))]).universe
    52
    """

    garage: Garage
    """Arrays (days, universe, sessions); sites with fewer days are padded with empty ones."""
    stations: Stations
    days_of: Int[Array, " universe"]
    """Number of days of each station's site."""
    worth: Float[Array, " universe"]
    """Weight of a kWh at each station: the mean daily need per station over all sites, divided by
    that of its own site; 1 for a single site."""
    capacity: Float[Array, " 2"]
    """Range of phi, the feeder's capacity relative to its stations' full rate."""
    objective: Objective
    spare: bool = eqx.field(static=True)
    """Whether the last entity of a task is the unused power."""
    physics: Physics = eqx.field(static=True)
    universe: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        sites: Sequence[Days],
        capacity: tuple[float, float] = (0.05, 0.3),
        objective: Objective | None = None,
    ) -> "Charging":
        """Create the problem of these sites, whose days must have forecasts (`add_forecasts`)."""
        counts = [len(days.stations) for days in sites]
        physics = sites[0].physics
        garages = [_at_midnight(days) for days in sites]

        def joined(*arrays: np.ndarray) -> Array:
            most = np.max([x.shape for x in arrays], 0)
            wide = []
            for x in arrays:
                # Pad days, and sessions or quarters, to the longest; concatenate stations.
                short = [(0, longest - own) for longest, own in zip(most, x.shape, strict=True)]
                wide.append(np.pad(x, [short[0], (0, 0), *short[2:]]))
            return jnp.asarray(np.concatenate(wide, 1))

        stations = Stations(
            *(
                jnp.asarray(np.concatenate([getattr(days.wiring, name) for days in sites]))
                for name in ("max_a", "min_a", "phases", "kw_per_a")
            ),
            # Sampled garages have their own feeder, and no branches.
            load=jnp.zeros((0, sum(counts))),
            limit_a=jnp.zeros(0),
        )
        needs = np.array([(g.need_kwh * g.begins).sum() / g.arrival[..., 0].size for g in garages])
        return cls(
            garage=jax.tree.map(joined, *garages),
            stations=stations,
            days_of=jnp.asarray(np.repeat([len(days) for days in sites], counts), jnp.int32),
            worth=jnp.asarray(np.repeat(np.mean(needs) / needs, counts), jnp.float32),
            capacity=jnp.asarray(capacity, jnp.float32),
            objective=Energy() if objective is None else objective,
            spare=not physics.fill,
            physics=physics,
            universe=sum(counts) + (not physics.fill),
            horizon=physics.periods,
        )

    def reset(self, task: Task, *, key: PRNGKeyArray) -> _DayState:
        day_key, capacity_key = jax.random.split(key)
        day = jax.random.randint(day_key, (), 0, self.days_of[task.members[0]])
        low, high = self.capacity
        phi = jax.random.uniform(capacity_key, (), minval=low, maxval=high)
        members, mask = self._stations(task)
        full = jnp.where(mask, self.stations.max_kw[members], 0.0).sum()
        return self.midnight(task, day, phi * full)

    def _stations(self, task: Task) -> tuple[Int[Array, " entities"], Bool[Array, " entities"]]:
        """Return the task's stations and their mask."""
        return (task.members[:-1], task.mask[:-1]) if self.spare else (task.members, task.mask)

    def midnight(self, task: Task, day: Int[Array, ""], capacity_kw: Float[Array, ""]) -> _DayState:
        """Return the first state of a day with a given feeder capacity."""
        start = jnp.zeros((), jnp.int32)
        known = initial_state(self.stations.at(self._stations(task)[0]))
        return _DayState(day.astype(jnp.int32), start, capacity_kw, jnp.zeros(()), known)

    def see(self, task: Task, state: _DayState) -> StationView:
        """Return the controller's view of the task's stations."""
        members, _ = self._stations(task)
        here = self.garage.at(state.day, members)
        stations = self.stations.at(members)
        return see(here, stations, state.garage, state.n, state.capacity_kw, self.physics)

    def observe(self, task: Task, state: _DayState) -> Observation:
        seen = observation(self.see(task, state), self._stations(task)[1])
        return _add_spare(seen) if self.spare else seen

    def step(
        self,
        task: Task,
        state: _DayState,
        allocation: Float[Array, " entities"],
        *,
        key: PRNGKeyArray,
    ) -> Step:
        seen = self.see(task, state)
        members, mask = self._stations(task)
        garage, drawn = draw(seen, allocation[: len(members)] * state.capacity_kw, self.physics)
        drawn, first = jnp.where(mask, drawn, 0.0), members[0]
        n, power = state.n + 1, drawn.sum() / self.physics.period_hours
        peak = jnp.maximum(state.peak_kw, power)
        following = _DayState(state.day, n, state.capacity_kw, peak, garage)
        reward = self.worth[first] * self.objective.at(first)(seen, drawn, state.peak_kw)
        return Step(following, reward, n >= self.horizon, jnp.array(False))


def _at_midnight(days: Days) -> Garage:
    """Make days independent: assume that cars from the previous day have charged at full rate."""
    garage = days.garage
    hours = np.maximum(-garage.arrival, 0) * days.physics.period_hours
    had = np.asarray(days.wiring.max_kw)[:, None] * garage.car_share * hours
    return replace(garage, need_kwh=np.maximum(garage.need_kwh - had, 0).astype(np.float32))


def observation(seen: StationView, mask: Bool[Array, " entities"]) -> Observation:
    """Compute the features: log energies, hours divided by 8, powers relative to the full rate."""
    can_draw = seen.can_draw & mask
    stations, known = seen.stations, seen.known
    angle = 2 * jnp.pi * seen.hour / 24
    drawing = jnp.maximum(can_draw.sum(), 1)
    wanted = jnp.where(can_draw, stations.max_kw, 0.0).sum()
    per_car = jnp.log(jnp.clip(seen.capacity_kw / jnp.maximum(wanted, 1e-3), 1e-3, 1e3))
    own = (
        *(seen.plugged, can_draw, seen.said_energy, seen.said_departure),
        jnp.log1p(seen.requested_kwh) / 3,
        *_outlook(seen.said),
        *_outlook(seen.recalled),
        *(_hours(seen.hours_here), jnp.log1p(known.got_kwh) / 3),
        *(known.offered_a / stations.max_a, known.current_a / stations.max_a),
        *(known.limit_a / stations.max_a, known.on_hours > 0),
        jnp.log(stations.max_kw / _USUAL_KW),
    )
    shared = (jnp.sin(angle), jnp.cos(angle), per_car, jnp.log1p(drawing) / 3)
    earlier = (seen.familiarity, jnp.log1p(seen.to_come_kwh))
    columns = jnp.broadcast_arrays(*(jnp.asarray(x, jnp.float32) for x in own + shared + earlier))
    capacity = jnp.maximum(seen.capacity_kw, 1e-6)
    return Observation(
        jnp.stack(columns, -1)[:, None, :],
        known.offered_a * stations.kw_per_a / capacity,
        jnp.where(mask, jnp.minimum(seen.limit_kw / capacity, 1.0), 0.0),
    )


def _add_spare(seen: Observation) -> Observation:
    """Add an entity without a limit for the unused power; it has the shared channels only."""
    assert seen.limits is not None
    row = jnp.where(_SHARED, seen.history[:1], 0.0)
    return Observation(
        jnp.concatenate([seen.history, row]),
        jnp.append(seen.held, jnp.maximum(1 - seen.held.sum(), 0.0)),
        jnp.append(seen.limits, 1.0),
    )


class PolicySchedule(eqx.Module):
    """Scheduler that applies a policy: it maps a view to the kW wished for each station."""

    policy: Policy
    spare: bool = eqx.field(static=True, default=False)
    """Whether the policy may leave power unused."""

    def __call__(self, seen: StationView) -> PerStation:
        count = seen.can_draw.shape[0]
        shown = observation(seen, jnp.ones(count, bool))
        shown = _add_spare(shown) if self.spare else shown
        everyone = jnp.ones(count + self.spare, bool)
        return self.policy(shown, everyone)[:count] * seen.capacity_kw


def _outlook(outlook: Outlook) -> tuple[Array, ...]:
    return (
        jnp.log1p(outlook.open_kwh) / 3,
        _hours(outlook.hours_left),
        _hours(outlook.laxity),
    )


def _hours(hours: Float[Array, " entities"]) -> Float[Array, " entities"]:
    # Stated departures can be wrong by days; beyond a day they carry no information.
    return jnp.clip(hours, -24.0, 24.0) / 8
