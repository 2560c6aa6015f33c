"""The simulated garage, period by period: which cars are plugged in, what is known of them, what they draw.

A day has 24 hours and begins at midnight; periods last 5 or 15 minutes. A session fills whole periods
[arrival, departure), and may begin before the day or end after it. A car's need, its departure and its own
limit are hidden: its current, the phases it uses, and a taper from 80 % of the need on. A controller knows
only the meter, which is silent at times. `see` and `draw` are pure functions of one day and m stations,
mapped over days and tasks by `vmap`; the live controller uses `see`, `offer` and `learn` too.
"""

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from apportion_charging.setpoints import Numbers, PerStation, Stations, set_points, straight_through

QUARTERS = 96
"""Quarters of an hour in a day: the resolution of forecasts of later arrivals."""
_TAKEN_SHARE = 0.9
"""A car that draws less than this share of its offer is at its own limit."""
_IDLE_A = 0.5
"""A car that draws less has stopped."""
_DONE_PERIODS = 2
"""Periods without drawing after which a car counts as done."""
_PROBE_HOURS = 0.5
"""Hours after which a car that is done is offered free power again."""
_MIN_ON_HOURS = 1 / 6
"""Hours for which an offer lasts at least."""
_MOMENT = 1e-3
"""Tolerance, in hours, for rounding errors of summed periods."""
TAPER_START_SHARE, TAPER_END_A = 0.8, 2.0
"""From this share of its need on, a car's current falls linearly to this current."""

PerSession = Float[Numbers, "*stack entities sessions"]
Flags = Bool[Numbers, "*stack entities"]
_Counts = Int[Numbers, "*stack entities"]


@dataclass(frozen=True)
class Physics:
    """How a garage behaves; the defaults are those of a real one."""

    period_hours: float = 0.25
    set_points: bool = True
    """Offers are set-points in whole amperes; otherwise any power."""
    taper: bool = True
    gaps: float = 0.02
    """The chance that a meter is silent in a period."""
    fill: bool = True
    """Unwished power goes to cars that can take it; otherwise it stays unused."""

    @property
    def periods(self) -> int:
        """Periods of a day."""
        return round(24 / self.period_hours)


REAL = Physics()


def make_physics(
    period_minutes: int = 15, *, ideal: bool = False, objective: str = "energy"
) -> Physics:
    """Create a real garage's physics, or ideal ones: any power, no taper, no silent meter.

    With the objective cost, unwished power stays unused.
    """
    real = Physics(period_minutes / 60, fill=objective != "cost")
    return replace(real, set_points=False, taper=False, gaps=0.0) if ideal else real


class Garage(eqx.Module):
    """The sessions that each station has in one day, in order; an absent one has arrival = departure = 0.

    Stacks of days, or of tasks and days, have leading axes. `add_forecasts` fills the optional fields,
    which `see` needs.
    """

    arrival: Int[Numbers, "*stack entities sessions"]
    """First whole period of the day; negative if the car came on an earlier day."""
    departure: Int[Numbers, "*stack entities sessions"]
    """The period after the last whole one; it may be on a later day."""
    arrived: PerSession
    """When the car was plugged in, in hours since midnight; breaks ties between equal periods."""
    need_kwh: PerSession
    """The energy that the car takes in the end. Hidden."""
    car_a: PerSession
    """The car's own maximum current. Hidden."""
    car_share: PerSession
    """The share of the station's phases that the car uses. Hidden."""
    requested_kwh: PerSession
    """The driver's requested energy; if none, 0 and, with forecasts, the median."""
    stated_departure: PerSession
    """The driver's stated departure, in hours since midnight; if none, likewise."""
    said_energy: Bool[Numbers, "*stack entities sessions"]
    """Whether the driver requested an energy."""
    said_departure: Bool[Numbers, "*stack entities sessions"]
    """Whether the driver stated a departure."""
    number: Int[Numbers, "*stack entities sessions"]
    """Identifies the session: the same on each of its days."""
    stay_hours: PerSession
    """From plugging in to the departure. Hidden."""
    clock_hours: Float[Numbers, "*stack entities"]
    """Hours of daylight saving time."""
    predicted_need_kwh: PerSession | None = None
    """Need by regression on the statements."""
    predicted_departure: PerSession | None = None
    """Departure by regression on the statements, in hours since midnight."""
    recalled_need_kwh: PerSession | None = None
    """Predicted need, corrected by earlier sessions with similar requests; without recall, as predicted."""
    recalled_departure: PerSession | None = None
    """Predicted departure, corrected likewise."""
    familiarity: PerSession | None = None
    """The weight of similar requests in the correction, from 0 to below 1."""
    to_come_kwh: Float[Numbers, "*stack entities quarters"] | None = None
    """Mean need per station of cars that came after each quarter of an hour on earlier days; the same at
    all stations of a site, 0 without recall."""

    @property
    def there(self) -> Bool[Numbers, "*stack entities sessions"]:
        """Which sessions are not absent."""
        return self.departure > self.arrival

    @property
    def begins(self) -> Bool[Numbers, "*stack entities sessions"]:
        """Which sessions begin on this day, the day on which they count."""
        return self.there & (self.arrival >= 0)

    def at(self, day: Int[Array, ""], members: Int[Array, " entities"]) -> "Garage":
        """Select one day at these stations from arrays (days, stations, sessions)."""
        return jax.tree.map(lambda x: x[day, members], self)


class GarageState(eqx.Module):
    """What meters and offers have shown of the car at each station."""

    got_kwh: PerStation
    offered_a: PerStation
    """In the period before."""
    current_a: PerStation
    """The last meter value."""
    limit_a: PerStation
    """The car's estimated maximum current."""
    single: Flags
    """Whether the car uses one phase of several."""
    on_hours: PerStation
    """Hours since it has had an offer."""
    idle_hours: PerStation
    """Hours since it has drawn nothing of its offer."""
    off_hours: PerStation
    """Hours since it has had no offer."""


class Outlook(eqx.Module):
    """A car's remaining need and stay: as stated, as predicted, or the truth."""

    open_kwh: PerStation
    hours_left: PerStation
    rate_kw: PerStation
    """Its estimated maximum power."""

    @property
    def laxity(self) -> PerStation:
        """Hours to spare if the car charged at its full rate from now on."""
        return self.hours_left - self.open_kwh / self.rate_kw


class StationView(eqx.Module):
    """What a controller sees of each station at the start of a period; 0 if no car is plugged in.

    `truth` and the fields `car_*` are hidden: only `draw` and the clairvoyant scheduler may read them.
    """

    hour: Float[Array, "*stack"]
    """Local time, with daylight saving."""
    capacity_kw: Float[Array, "*stack"]
    stations: Stations
    plugged: Flags
    stays: Flags
    """Whether the car was there in the period before."""
    can_draw: Flags
    """Plugged in and not known to be done."""
    most_a: PerStation
    """The largest useful offer."""
    limit_kw: PerStation
    """The same in kW; 0 for cars that cannot draw."""
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
    """By the regression and, with recall, earlier days."""
    familiarity: PerStation
    to_come_kwh: PerStation
    truth: Outlook
    car_need_kwh: PerStation
    car_a: PerStation
    car_share: PerStation
    car_metered: Flags


def initial_state(stations: Stations) -> GarageState:
    """Return the state of cars that have just arrived."""
    zeros = jnp.zeros_like(stations.max_a)
    return GarageState(zeros, zeros, zeros, stations.max_a, zeros > 0, zeros, zeros, zeros)


def match_sessions(day: Garage, n: Int[Array, ""]) -> Bool[Array, "entities sessions"]:
    """Mark the session that fills period n, at most one per station."""
    return (day.arrival <= n) & (n < day.departure)


def see_sessions(
    day: Garage,
    stations: Stations,
    n: Int[Array, ""],
    capacity_kw: Float[Array, ""],
    physics: Physics = REAL,
) -> StationView:
    """View the cars of period n with the state of new arrivals: the part that no offer changes."""
    here, hour = match_sessions(day, n), n * jnp.float32(physics.period_hours)
    plugged = here.any(-1)

    def pick(values: Any) -> Array:
        """Select the value of the present session; 0 if there is none."""
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
    """Add to a view what is known of the cars from earlier periods."""
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
    """Return what a controller sees at the start of period n."""
    return see_state(see_sessions(day, stations, n, capacity_kw, physics), state, physics)


def offer(
    seen: StationView, wishes_kw: Float[Array, " entities"], physics: Physics = REAL
) -> Float[Array, " entities"]:
    """Turn wishes into the amperes offered to stations."""
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
    """Simulate a period: offer power, and return the next state and the kWh drawn at each station."""
    stations, left = seen.stations, seen.truth.open_kwh
    offered_a = offer(seen, jax.lax.stop_gradient(wishes_kw), physics)
    # A car that is done is at most probed, which does not depend on wishes.
    able_a = jnp.where(seen.can_draw, seen.most_a, 0.0)
    wished_a = jnp.clip(wishes_kw / stations.kw_per_a, 0.0, able_a)
    offered_kw = straight_through(wished_a, offered_a) * stations.kw_per_a * seen.car_share
    current = seen.car_a
    if physics.taper:
        done = 1 - left / jnp.maximum(seen.car_need_kwh, 1e-6)
        past = jnp.clip((done - TAPER_START_SHARE) / (1 - TAPER_START_SHARE), 0.0, 1.0)
        current = jnp.where(past > 0, current + (TAPER_END_A - current) * past, current)
    most = jnp.minimum(current * stations.kw_per_a * seen.car_share, left / physics.period_hours)
    # `where`, not `maximum`: at need = got a tie of `maximum` would leak half a gradient into `got_kwh`.
    takes = seen.plugged & (left > 0)
    drawn = jnp.where(takes, jnp.minimum(offered_kw, most), 0.0)
    state = learn(
        seen.known, stations, offered_a, drawn, seen.car_metered, jnp.float32(physics.period_hours)
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
    """Update the state after some hours with these offers and meter values.

    A car that draws less than the minimum over all phases uses a single phase. A car that does not use its
    whole offer is at its own limit; one that reaches its estimated limit is offered more.
    """
    known, offered, kw = jax.lax.stop_gradient((known, offered_a, metered_kw))
    on = offered > 0
    shown = on & metered
    evenly = kw / stations.kw_per_a
    too_little = (evenly > _IDLE_A) & (evenly < _TAKEN_SHARE * stations.min_a)
    asked = offered >= stations.min_a
    single = known.single | (shown & asked & (stations.phases > 1) & too_little)
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
        jnp.where(shown, limit, known.limit_a),
        single,
        jnp.where(on, known.on_hours + hours, 0.0),
        jnp.where(shown, idle, known.idle_hours),
        jnp.where(on, 0.0, known.off_hours + hours),
    )


def _is_metered(number: _Counts, periods_here: _Counts, gaps: float) -> Flags:
    """Hash session and period to decide if the meter reports: the same in every simulation."""
    mixed = number.astype(jnp.uint32) * np.uint32(2654435761)
    mixed = (mixed ^ (mixed >> 15)) + periods_here.astype(jnp.uint32) * np.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(3266489917)
    return ((mixed ^ (mixed >> 16)) >> 8).astype(jnp.float32) / 2**24 >= gaps
