"""A garage period by period: who is plugged in, what is known of them, and what they draw.

A day has 24 hours and begins at midnight; periods last 5 or 15 minutes. A session fills whole periods
[arrival, departure), which may begin before the day and end after it: its car stays, and so does what is
known of it. Hidden are its need, when it leaves, and what the car itself can take: its own current, the
phases it uses, and that from 80 % of the need on the current falls. Known is what a meter shows, and the
meter is silent at times. `see` and `draw` are pure, written for one day and m stations, and are mapped over
days and tasks by `vmap`; `learn` is what a live controller does with its meters, too.
"""

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from apportion_charging.setpoints import (
    Numbers,
    PerStation,
    Stations,
    set_points,
    straight_through,
)

QUARTERS = 96
"""Quarters of an hour in a day: how finely it is told what is still to come."""
_TAKEN_SHARE = 0.9
"""A car that draws less than this share of its offer cannot take all of it."""
_IDLE_A = 0.5
"""A car that draws less has stopped."""
_DONE_PERIODS = 2
"""Periods in which a car leaves its offer before it counts as done."""
_PROBE_HOURS = 0.5
"""A car that is done is offered power again after so long, where some is free."""
_MIN_ON_HOURS = 1 / 6
"""An offer is not taken back before."""
_MOMENT = 1e-3
"""Hours by which sums of periods may miss what they add up to."""
TAPER_START_SHARE, TAPER_END_A = 0.8, 2.0
"""From this share of its need on a car's current falls, to this at the end."""

PerSession = Float[Numbers, "*stack entities sessions"]
Flags = Bool[Numbers, "*stack entities"]
_Counts = Int[Numbers, "*stack entities"]


@dataclass(frozen=True)
class Physics:
    """How a garage behaves; the defaults are those of a real one."""

    period_hours: float = 0.25
    set_points: bool = True
    """Offers are what stations can be told; otherwise any power."""
    taper: bool = True
    gaps: float = 0.02
    """How often a meter is silent."""
    fill: bool = True
    """Power that nobody wished for goes to those who can take it; otherwise it stays unused."""

    @property
    def periods(self) -> int:
        """Periods of a day."""
        return round(24 / self.period_hours)


REAL = Physics()


def make_physics(
    period_minutes: int = 15, *, ideal: bool = False, objective: str = "energy"
) -> Physics:
    """A real garage, or for comparison one of any power, where no car tapers and no meter is silent.

    Where energy has a price, what nobody wishes for is not drawn.
    """
    real = Physics(period_minutes / 60, fill=objective != "cost")
    return replace(real, set_points=False, taper=False, gaps=0.0) if ideal else real


class Garage(eqx.Module):
    """The sessions that each station has in one day, in order; an absent one has arrival = departure = 0.

    Stacks of days, or of tasks and days, have leading axes; tables on their way in are NumPy's. What is
    expected of cars is added to them (`add_forecasts`) before anything is seen.
    """

    arrival: Int[Numbers, "*stack entities sessions"]
    """First whole period of the day; below 0 where the car came on a day before."""
    departure: Int[Numbers, "*stack entities sessions"]
    """The period after the last whole one; it may be of a later day."""
    arrived: PerSession
    """When the car was plugged in, in hours since midnight: it breaks ties of the whole periods."""
    need_kwh: PerSession
    """What the car takes in the end. Never seen."""
    car_a: PerSession
    """The current that the car itself can take. Never seen."""
    car_share: PerSession
    """The share of the station's phases that the car uses. Never seen."""
    requested_kwh: PerSession
    """What the driver asked for; where nothing was stated 0 and, with forecasts, the median."""
    stated_departure: PerSession
    """When the driver meant to leave, in hours since midnight; where nothing was stated likewise."""
    said_energy: Bool[Numbers, "*stack entities sessions"]
    """Whether the driver asked for an energy."""
    said_departure: Bool[Numbers, "*stack entities sessions"]
    """Whether the driver said when to leave."""
    number: Int[Numbers, "*stack entities sessions"]
    """Of the session among all: the same on each of its days."""
    stay_hours: PerSession
    """From when the car was plugged in until it leaves. Never seen."""
    clock_hours: Float[Numbers, "*stack entities"]
    """What the clock on the wall is ahead, in summer."""
    predicted_need_kwh: PerSession | None = None
    """What a regression on the statements expects the car to take."""
    predicted_departure: PerSession | None = None
    """When a regression on the statements expects it to leave, in hours since midnight."""
    recalled_need_kwh: PerSession | None = None
    """The same, corrected by what cars of earlier days took whose drivers made similar requests; as
    predicted where no days are recalled."""
    recalled_departure: PerSession | None = None
    """The same, corrected by how long they stayed."""
    familiarity: PerSession | None = None
    """How much is known of similar requests, from 0, nothing, to below 1."""
    to_come_kwh: Float[Numbers, "*stack entities quarters"] | None = None
    """What cars that came after each quarter of an hour needed on earlier days, in the mean of the site's
    stations, the same at each of them; 0 where no days are recalled."""

    @property
    def there(self) -> Bool[Numbers, "*stack entities sessions"]:
        """Which sessions are not absent."""
        return self.departure > self.arrival

    @property
    def begins(self) -> Bool[Numbers, "*stack entities sessions"]:
        """Which sessions begin on this day: on the first one they count."""
        return self.there & (self.arrival >= 0)

    def at(self, day: Int[Array, ""], members: Int[Array, " entities"]) -> "Garage":
        """One day at these stations, from arrays of (days, stations, sessions)."""
        return jax.tree.map(lambda x: x[day, members], self)


class GarageState(eqx.Module):
    """What is known of the car at each station, beyond its driver's words."""

    got_kwh: PerStation
    offered_a: PerStation
    """In the period before."""
    current_a: PerStation
    """What the meter showed last."""
    limit_a: PerStation
    """What the car is believed to be able to take."""
    single: Flags
    """Whether it was seen to use one phase of several."""
    on_hours: PerStation
    """How long it has had an offer."""
    idle_hours: PerStation
    """How long it has left its offer."""
    off_hours: PerStation
    """How long it has had none."""


class Outlook(eqx.Module):
    """What a car still has to take and how long it stays: as stated, as predicted, or in truth."""

    open_kwh: PerStation
    hours_left: PerStation
    rate_kw: PerStation
    """The most it is believed to take."""

    @property
    def laxity(self) -> PerStation:
        """Hours to spare if the car charged at its full rate from now on."""
        return self.hours_left - self.open_kwh / self.rate_kw


class StationView(eqx.Module):
    """What a controller sees of each station at the start of a period; 0 where no car is plugged in.

    Only `truth` and what begins with `car_` are hidden: they are for `draw` and the clairvoyant scheduler,
    and no policy may read them.
    """

    hour: Float[Array, "*stack"]
    """Of the clock on the wall."""
    capacity_kw: Float[Array, "*stack"]
    stations: Stations
    plugged: Flags
    stays: Flags
    """Whether the car was there in the period before."""
    can_draw: Flags
    """Plugged in and not known to be done."""
    most_a: PerStation
    """The most that it makes sense to offer now."""
    limit_kw: PerStation
    """The same in kW, for those who can draw."""
    said_energy: Flags
    said_departure: Flags
    requested_kwh: PerStation
    known: GarageState
    arrived: PerStation
    """When the car came, in hours since midnight."""
    hours_here: PerStation
    said: Outlook
    """By the driver's statements, or the medians."""
    predicted: Outlook
    """By the regression."""
    recalled: Outlook
    """By the regression and earlier days, where these are recalled."""
    familiarity: PerStation
    to_come_kwh: PerStation
    truth: Outlook
    car_need_kwh: PerStation
    car_a: PerStation
    car_share: PerStation
    car_metered: Flags


def initial_state(stations: Stations) -> GarageState:
    """What is known of cars that have just come."""
    zeros = jnp.zeros_like(stations.max_a)
    return GarageState(zeros, zeros, zeros, stations.max_a, zeros > 0, zeros, zeros, zeros)


def match_sessions(day: Garage, n: Int[Array, ""]) -> Bool[Array, "entities sessions"]:
    """Which session fills period n, at most one a station."""
    return (day.arrival <= n) & (n < day.departure)


def see_sessions(
    day: Garage,
    stations: Stations,
    n: Int[Array, ""],
    capacity_kw: Float[Array, ""],
    physics: Physics = REAL,
) -> StationView:
    """Who is there in period n, as if all had just come: what no offer changes, and nothing drawn yet."""
    here, hour = match_sessions(day, n), n * jnp.float32(physics.period_hours)
    plugged = here.any(-1)

    def pick(values: Any) -> Array:
        """The value of the session that is there; 0 where none is."""
        return jnp.where(here, values, 0).sum(-1, dtype=values.dtype)

    def outlook(energy: Any, departure: Any) -> Outlook:
        left = jnp.where(plugged, pick(departure) - hour, 0.0)
        return Outlook(pick(energy), left, stations.max_kw)

    arrived, said = pick(day.arrived), outlook(day.requested_kwh, day.stated_departure)
    quarter = jnp.clip((hour * 4).astype(jnp.int32), 0, QUARTERS - 1)
    to_come: Any = day.to_come_kwh
    leaves = day.departure * jnp.float32(physics.period_hours)
    return StationView(
        hour=hour + day.clock_hours.max(),
        capacity_kw=capacity_kw,
        stations=stations,
        plugged=plugged,
        stays=(here & (day.arrival < n)).any(-1),
        can_draw=plugged,
        most_a=jnp.where(plugged, stations.max_a, 0.0),
        limit_kw=jnp.where(plugged, stations.max_kw, 0.0),
        said_energy=(here & day.said_energy).any(-1),
        said_departure=(here & day.said_departure).any(-1),
        requested_kwh=said.open_kwh,
        known=initial_state(stations),
        arrived=arrived,
        hours_here=jnp.where(plugged, hour - arrived, 0.0),
        said=said,
        predicted=outlook(day.predicted_need_kwh, day.predicted_departure),
        recalled=outlook(day.recalled_need_kwh, day.recalled_departure),
        familiarity=pick(day.familiarity),
        to_come_kwh=to_come[:, quarter],
        truth=outlook(day.need_kwh, leaves),
        car_need_kwh=pick(day.need_kwh),
        car_a=pick(day.car_a),
        car_share=pick(day.car_share),
        car_metered=_is_metered(pick(day.number), n - pick(day.arrival), physics.gaps),
    )


def see_state(fresh: StationView, state: GarageState, physics: Physics = REAL) -> StationView:
    """What is seen of those who are there, once they have been offered something."""
    stations = fresh.stations
    known = jax.tree.map(lambda kept, new: jnp.where(fresh.stays, kept, new), state, fresh.known)
    done = known.idle_hours > _DONE_PERIODS * physics.period_hours - _MOMENT
    can_draw = fresh.plugged & ~done
    probed = fresh.plugged & (known.off_hours > _PROBE_HOURS - _MOMENT)
    rate = known.limit_a * stations.kw_per_a
    usable = jnp.where(known.single, rate / stations.phases, rate)

    def still(outlook: Outlook) -> Outlook:
        open_kwh = jnp.maximum(outlook.open_kwh - known.got_kwh, 0.0)
        return Outlook(open_kwh, outlook.hours_left, usable)

    return replace(
        fresh,
        can_draw=can_draw,
        most_a=jnp.where(can_draw, known.limit_a, jnp.where(probed, stations.min_a, 0.0)),
        limit_kw=jnp.where(can_draw, rate, 0.0),
        known=known,
        said=still(fresh.said),
        predicted=still(fresh.predicted),
        recalled=still(fresh.recalled),
        truth=still(fresh.truth),
    )


def see(
    day: Garage,
    stations: Stations,
    state: GarageState,
    n: Int[Array, ""],
    capacity_kw: Float[Array, ""],
    physics: Physics = REAL,
) -> StationView:
    """What is known at the start of period n."""
    return see_state(see_sessions(day, stations, n, capacity_kw, physics), state, physics)


def offer(
    seen: StationView, wishes_kw: Float[Array, " entities"], physics: Physics = REAL
) -> Float[Array, " entities"]:
    """The amperes that stations are told where this is wished, whoever wishes it."""
    known, stations = seen.known, seen.stations
    if not physics.set_points:
        able_a = jnp.where(seen.can_draw, seen.most_a, 0.0)
        return jnp.clip(wishes_kw / stations.kw_per_a, 0.0, able_a)
    on = known.on_hours > 0
    held = on & (known.on_hours < _MIN_ON_HOURS - _MOMENT)
    capacity_kw = seen.capacity_kw
    if not physics.fill:
        kept_on = jnp.where(held, stations.min_a * stations.kw_per_a, 0.0).sum()
        capacity_kw = jnp.minimum(capacity_kw, jnp.maximum(wishes_kw.sum(), kept_on))
    return set_points(wishes_kw, seen.most_a, stations, capacity_kw, on=on, held=held)


def draw(
    seen: StationView, wishes_kw: Float[Array, " entities"], physics: Physics = REAL
) -> tuple[GarageState, Float[Array, " entities"]]:
    """Offer power to those who are seen; what is known after the period, and the kWh each station drew."""
    stations, left = seen.stations, seen.truth.open_kwh
    told_a = offer(seen, jax.lax.stop_gradient(wishes_kw), physics)
    # Who is done is at most probed, which no wish decides.
    able_a = jnp.where(seen.can_draw, seen.most_a, 0.0)
    wished_a = jnp.clip(wishes_kw / stations.kw_per_a, 0.0, able_a)
    offered_kw = straight_through(wished_a, told_a) * stations.kw_per_a * seen.car_share
    current = seen.car_a
    if physics.taper:
        done = 1 - left / jnp.maximum(seen.car_need_kwh, 1e-6)
        past = jnp.clip((done - TAPER_START_SHARE) / (1 - TAPER_START_SHARE), 0.0, 1.0)
        current = jnp.where(past > 0, current + (TAPER_END_A - current) * past, current)
    most = jnp.minimum(current * stations.kw_per_a * seen.car_share, left / physics.period_hours)
    # By `where`: a car that has all it needs is at a tie of `maximum`, where half a gradient would leak
    # into what it had got.
    takes = seen.plugged & (left > 0)
    drawn = jnp.where(takes, jnp.minimum(offered_kw, most), 0.0)
    state = learn(
        seen.known, stations, told_a, drawn, seen.car_metered, jnp.float32(physics.period_hours)
    )
    kwh = drawn * physics.period_hours
    return replace(state, got_kwh=seen.known.got_kwh + kwh), kwh


def learn(
    known: GarageState,
    stations: Stations,
    offered_a: PerStation,
    metered_kw: PerStation,
    metered: Flags,
    hours: Float[Numbers | np.floating, ""],
) -> GarageState:
    """What is known of the cars after hours in which they were offered this, where a meter spoke.

    A car at a station of several phases that draws, and less than any car can on all of them, uses one.
    What a car leaves of its offer it cannot take; once it takes all that it was believed to, more is tried.
    """
    known, offered, kw = jax.lax.stop_gradient((known, offered_a, metered_kw))
    on = offered > 0
    heard = on & metered
    evenly = kw / stations.kw_per_a
    too_little = (evenly > _IDLE_A) & (evenly < _TAKEN_SHARE * stations.min_a)
    asked = offered >= stations.min_a
    single = known.single | (heard & asked & (stations.phases > 1) & too_little)
    current = jnp.where(single, evenly * stations.phases, evenly)
    raised = jnp.minimum(stations.max_a, 1.5 * known.limit_a)
    raised = jnp.where(offered > known.limit_a - 1, raised, known.limit_a)
    lowered = jnp.clip(jnp.ceil(current) + 1, stations.min_a, stations.max_a)
    taken = current >= _TAKEN_SHARE * offered
    limit = jnp.where(taken, raised, lowered)
    idle = jnp.where((current < _IDLE_A) & ~taken, known.idle_hours + hours, 0.0)
    return GarageState(
        known.got_kwh,
        offered,
        jnp.where(metered, jnp.where(on, evenly, 0.0), known.current_a),
        jnp.where(heard, limit, known.limit_a),
        single,
        jnp.where(on, known.on_hours + hours, 0.0),
        jnp.where(heard, idle, known.idle_hours),
        jnp.where(on, 0.0, known.off_hours + hours),
    )


def _is_metered(number: _Counts, periods_here: _Counts, gaps: float) -> Flags:
    """Whether a session's meter speaks in a period: chance that every simulation of it agrees on."""
    mixed = number.astype(jnp.uint32) * np.uint32(2654435761)
    mixed = (mixed ^ (mixed >> 15)) + periods_here.astype(jnp.uint32) * np.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(3266489917)
    return ((mixed ^ (mixed >> 16)) >> 8).astype(jnp.float32) / 2**24 >= gaps
