"""Simulation of a garage by periods: the cars plugged in, the controller's view, the energy drawn.

A day has 24 hours and begins at midnight; periods last 5 or 15 minutes. A session fills whole
periods [arrival, departure), and may begin before the day or end after it. A car's need, departure
and limits (current, phases, taper above 80 % of the need) are hidden; a controller only knows the
meter, which sometimes reports nothing. `see` and `draw` are pure functions of one day and m
stations; `vmap` maps them over days and tasks. The live controller uses `see`, `offer` and `learn`.
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
"""Current in A below which a car counts as idle."""
_DONE_PERIODS = 2
"""Number of idle periods after which a car counts as done."""
_PROBE_HOURS = 0.5
"""Hours without an offer after which a done car may be offered unused power again."""
_MIN_ON_HOURS = 1 / 6
"""Minimum time in hours for which a station stays on."""
_MOMENT = 1e-3
"""Tolerance, in hours, for rounding errors of summed periods."""
TAPER_START_SHARE, TAPER_END_A = 0.8, 2.0
"""Share of its need above which a car's current falls linearly, and the final current in A."""

PerSession = Float[Numbers, "*stack entities sessions"]
Flags = Bool[Numbers, "*stack entities"]
_Counts = Int[Numbers, "*stack entities"]


@dataclass(frozen=True)
class Physics:
    """Parameters of the simulation; the defaults model a real garage."""

    period_hours: float = 0.25
    set_points: bool = True
    """Whether offers are set-points in whole amperes; otherwise any power is possible."""
    taper: bool = True
    gaps: float = 0.02
    """Probability that a meter reports nothing in a period."""
    fill: bool = True
    """Whether power beyond the wishes goes to cars that can take it; otherwise it stays unused."""

    @property
    def periods(self) -> int:
        """Number of periods in a day."""
        return round(24 / self.period_hours)


REAL = Physics()


def make_physics(
    period_minutes: int = 15, *, ideal: bool = False, objective: str = "energy"
) -> Physics:
    """Create realistic physics, or ideal ones: any power, no taper, no missing meter values.

    With the objective cost, power beyond the wishes stays unused.
    """
    real = Physics(period_minutes / 60, fill=objective != "cost")
    return replace(real, set_points=False, taper=False, gaps=0.0) if ideal else real


class Garage(eqx.Module):
    """Sessions of each station on one day, in order; padding has arrival = departure = 0.

    Stacks of days, or of tasks and days, have leading axes. `add_forecasts` fills the optional
    fields, which `see` needs.
    """

    arrival: Int[Numbers, "*stack entities sessions"]
    """First whole period of the session; negative if the car came on an earlier day."""
    departure: Int[Numbers, "*stack entities sessions"]
    """Period after the last whole one; it may be on a later day."""
    arrived: PerSession
    """Time of plugging in, in hours since midnight; it breaks ties between equal periods."""
    need_kwh: PerSession
    """Energy that the car takes if it is fully served. Hidden."""
    car_a: PerSession
    """The car's own maximum current. Hidden."""
    car_share: PerSession
    """The share of the station's phases that the car uses. Hidden."""
    requested_kwh: PerSession
    """Energy requested by the driver; without a request 0, or with forecasts the median."""
    stated_departure: PerSession
    """Departure stated by the driver, in hours since midnight; if none, 0 or by the median stay."""
    said_energy: Bool[Numbers, "*stack entities sessions"]
    """Whether the driver requested an energy."""
    said_departure: Bool[Numbers, "*stack entities sessions"]
    """Whether the driver stated a departure."""
    number: Int[Numbers, "*stack entities sessions"]
    """Identifier of the session, the same on each of its days."""
    stay_hours: PerSession
    """Hours from plugging in to the departure. Hidden."""
    clock_hours: Float[Numbers, "*stack entities"]
    """Hours by which daylight saving time is ahead of standard time."""
    predicted_need_kwh: PerSession | None = None
    """Need by regression on the statements."""
    predicted_departure: PerSession | None = None
    """Departure by regression on the statements, in hours since midnight."""
    recalled_need_kwh: PerSession | None = None
    """Predicted need, corrected by earlier sessions with similar requests if recall is on."""
    recalled_departure: PerSession | None = None
    """Predicted departure, corrected in the same way."""
    familiarity: PerSession | None = None
    """The weight of similar requests in the correction, from 0 to below 1."""
    to_come_kwh: Float[Numbers, "*stack entities quarters"] | None = None
    """Mean need per station of cars that came after each quarter of an hour on earlier days; the
    same at all stations of a site, 0 without recall."""

    @property
    def there(self) -> Bool[Numbers, "*stack entities sessions"]:
        """Mask of the sessions that are not padding."""
        return self.departure > self.arrival

    @property
    def begins(self) -> Bool[Numbers, "*stack entities sessions"]:
        """Mask of the sessions that begin on this day; each session counts on its first day."""
        return self.there & (self.arrival >= 0)

    def at(self, day: Int[Array, ""], members: Int[Array, " entities"]) -> "Garage":
        """Select one day at these stations from arrays (days, stations, sessions)."""
        return jax.tree.map(lambda x: x[day, members], self)


class GarageState(eqx.Module):
    """Knowledge of the car at each station from earlier offers and meter values."""

    got_kwh: PerStation
    offered_a: PerStation
    """Offer of the previous period."""
    current_a: PerStation
    """Current by the last meter value."""
    limit_a: PerStation
    """The car's estimated maximum current."""
    single: Flags
    """Whether the car uses one phase of several."""
    on_hours: PerStation
    """Hours since the station was switched on; 0 without an offer."""
    idle_hours: PerStation
    """Hours for which the car has not drawn from its offer."""
    off_hours: PerStation
    """Hours without an offer."""


class Outlook(eqx.Module):
    """Remaining need and stay of a car: stated, predicted or true."""

    open_kwh: PerStation
    hours_left: PerStation
    rate_kw: PerStation
    """Estimated maximum power of the car."""

    @property
    def laxity(self) -> PerStation:
        """Hours to spare if the car charged at its full rate from now on."""
        return self.hours_left - self.open_kwh / self.rate_kw


class StationView(eqx.Module):
    """What a controller sees of each station at the start of a period; 0 if no car is plugged in.

    `truth` and `car_*` are hidden: only `draw`, rewards and the clairvoyant scheduler read them.
    """

    hour: Float[Array, "*stack"]
    """Local time in hours, with daylight saving time."""
    capacity_kw: Float[Array, "*stack"]
    stations: Stations
    plugged: Flags
    stays: Flags
    """Whether the car was plugged in during the previous period."""
    can_draw: Flags
    """Whether a car is plugged in and not known to be done."""
    most_a: PerStation
    """Largest useful offer in A."""
    limit_kw: PerStation
    """Largest useful offer in kW; 0 for cars that cannot draw."""
    said_energy: Flags
    said_departure: Flags
    requested_kwh: PerStation
    known: GarageState
    arrived: PerStation
    """Arrival of the car, in hours since midnight."""
    hours_here: PerStation
    said: Outlook
    """Outlook by the driver's statements, or by the medians without statements."""
    predicted: Outlook
    """Outlook by the regression."""
    recalled: Outlook
    """Outlook by the regression and, with recall, by earlier days."""
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
    """Return the view of period n as if all cars were new: the part that offers do not change."""
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
    """Add the knowledge of earlier periods to a view."""
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
    """Convert wishes in kW to the amperes offered to stations."""
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
    """Simulate a period: offer power, and return the next state and the kWh of each station."""
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
    # Not `maximum`, whose tie at need = got would pass half of the gradient to `got_kwh`.
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
    """Update the state after a period with these offers and meter values.

    A car that draws less than the minimum of all phases uses a single phase. A car that does not
    use its whole offer is at its own limit; the estimated limit of a car that reaches it is raised.
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
    """Decide if the meter reports, by a hash of session and period that all simulations share."""
    mixed = number.astype(jnp.uint32) * np.uint32(2654435761)
    mixed = (mixed ^ (mixed >> 15)) + periods_here.astype(jnp.uint32) * np.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(3266489917)
    return ((mixed ^ (mixed >> 16)) >> 8).astype(jnp.float32) / 2**24 >= gaps
