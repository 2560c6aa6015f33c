"""One day in a garage: who is plugged in, what is seen of them, and what they draw when offered power.

The day has 96 periods of 15 minutes. A session fills whole periods [arrival, departure); its need is
what the car takes in the end. Nobody sees the need or the departure before they show: a car that
draws clearly less than it was offered is full, and a car that has left is gone. Both functions, `see`
and `draw`, are pure, written for one day and m stations, and are mapped over days and tasks by `vmap`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from apportion.domains.charging.sessions import RATE_KW

PERIODS = 96
"""Periods in a day."""
PERIOD_HOURS = 0.25
"""Hours in a period, dt."""
NOTICEABLE_KW = 0.3
"""An offer at or below this tells nothing about a car that does not take it."""
TAKEN = 0.9
"""A car that draws less than this share of a noticeable offer is full."""

if TYPE_CHECKING:
    Numbers = Any
else:
    # NumPy's where sessions are read and forecast, JAX's in a program: checked when the tests run.
    Numbers = Array | np.ndarray
PerSession = Float[Numbers, "*stack entities sessions"]
PerStation = Float[Array, "*stack entities"]
Flags = Bool[Array, "*stack entities"]


class Garage(eqx.Module):
    """The sessions of every station in one day, in order; an absent one has arrival = departure = 0.

    Stacks of days, or of tasks and days, have leading axes; tables on their way in are NumPy's. What is
    expected of cars is added to them (`add_forecasts`) before anything is seen.
    """

    arrival: Int[Numbers, "*stack entities sessions"]
    """First whole period."""
    departure: Int[Numbers, "*stack entities sessions"]
    """The period after the last whole one."""
    arrived: PerSession
    """When the car was plugged in, in periods since midnight: it breaks ties of the whole ones."""
    need_kwh: PerSession
    """What the car takes in the end. Never seen."""
    requested_kwh: PerSession
    """What the driver asked for; where nothing was stated 0 and, with forecasts, the median."""
    stated_departure: PerSession
    """When the driver meant to leave, in periods since midnight; where nothing was stated likewise."""
    stated: Bool[Numbers, "*stack entities sessions"]
    """Whether the driver stated anything."""
    predicted_need_kwh: PerSession | None = None
    """What a regression on the statements expects the car to take."""
    predicted_departure: PerSession | None = None
    """When a regression on the statements expects it to leave, in periods since midnight."""
    recalled_need_kwh: PerSession | None = None
    """The same, corrected by what cars of earlier days took whose drivers made similar requests; as
    predicted where no days are recalled."""
    recalled_departure: PerSession | None = None
    """The same, corrected by how long they stayed."""
    familiarity: PerSession | None = None
    """How much is known of similar requests, from 0, nothing, to below 1."""
    to_come_kwh: Float[Numbers, "*stack entities periods"] | None = None
    """What cars that came after each period needed on earlier days, in the mean of the site's stations, the
    same at each of them; 0 where no days are recalled."""

    @property
    def there(self) -> Bool[Numbers, "*stack entities sessions"]:
        """Which sessions are not absent."""
        return self.departure > self.arrival

    def at(self, day: Int[Array, ""], members: Int[Array, " entities"]) -> "Garage":
        """One day at these stations, from arrays of (days, stations, sessions)."""
        return jax.tree.map(lambda x: x[day, members], self)


class State(eqx.Module):
    """What a garage remembers of each station: the car's energy, the last offer, and whether it is full."""

    got_kwh: PerStation
    offered_kw: PerStation
    drawn_kw: PerStation
    full: Flags


class Outlook(eqx.Module):
    """What a car still has to take and how long it stays: as stated, as predicted, or in truth."""

    open_kwh: PerStation
    hours_left: PerStation

    @property
    def laxity(self) -> PerStation:
        """Hours to spare if the car charged at full rate from now on."""
        return self.hours_left - self.open_kwh / RATE_KW


class StationView(eqx.Module):
    """What a controller sees of each station at the start of a period; 0 where no car is plugged in.

    Only `truth` looks ahead: it is for `draw` and the clairvoyant scheduler, and no policy may read it.
    """

    period: Int[Array, "*stack"]
    capacity_kw: Float[Array, "*stack"]
    plugged: Flags
    stays: Flags
    """Whether the car was there in the period before."""
    can_draw: Flags
    """Plugged in and not known to be full."""
    limit_kw: PerStation
    """The most the station can take now."""
    stated: Flags
    requested_kwh: PerStation
    got_kwh: PerStation
    offered_kw: PerStation
    """In the period before."""
    drawn_kw: PerStation
    """In the period before."""
    arrived: PerStation
    """When the car came, in periods since midnight."""
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


def empty(entities: int) -> State:
    """The state at midnight: nobody is there."""
    zeros = jnp.zeros(entities, jnp.float32)
    return State(zeros, zeros, zeros, jnp.zeros(entities, bool))


def plugged_in(day: Garage, n: Int[Array, ""]) -> Bool[Array, "entities sessions"]:
    """Which session fills period n, at most one a station."""
    return (day.arrival <= n) & (n < day.departure)


def visit(day: Garage, n: Int[Array, ""], capacity_kw: Float[Array, ""]) -> StationView:
    """Who is there in period n, as if all had just come: what no offer changes, and nothing drawn yet."""
    here, now = plugged_in(day, n), n.astype(jnp.float32)
    plugged, nothing = here.any(-1), jnp.zeros(here.shape[:1], jnp.float32)

    def pick(values: Any) -> Array:
        """The value of the session that is there; 0 where none is."""
        return jnp.where(here, values, 0).sum(-1, dtype=values.dtype)

    def outlook(energy: Any, departure: Any) -> Outlook:
        left = (pick(departure).astype(jnp.float32) - now) * PERIOD_HOURS
        return Outlook(pick(energy), jnp.where(plugged, left, 0.0))

    arrived, said = pick(day.arrived), outlook(day.requested_kwh, day.stated_departure)
    to_come: Any = day.to_come_kwh
    return StationView(
        period=n,
        capacity_kw=capacity_kw,
        plugged=plugged,
        stays=(here & (day.arrival < n)).any(-1),
        can_draw=plugged,
        limit_kw=jnp.where(plugged, RATE_KW, 0.0),
        stated=(here & day.stated).any(-1),
        requested_kwh=said.open_kwh,
        got_kwh=nothing,
        offered_kw=nothing,
        drawn_kw=nothing,
        arrived=arrived,
        hours_here=jnp.where(plugged, (now - arrived) * PERIOD_HOURS, 0.0),
        said=said,
        predicted=outlook(day.predicted_need_kwh, day.predicted_departure),
        recalled=outlook(day.recalled_need_kwh, day.recalled_departure),
        familiarity=pick(day.familiarity),
        to_come_kwh=to_come[:, n],
        truth=outlook(day.need_kwh, day.departure),
    )


def look(fresh: StationView, state: State) -> StationView:
    """What is seen of those who are there, once they have been offered something."""
    kept = (state.got_kwh, state.offered_kw, state.drawn_kw)
    got, offered, drawn = (jnp.where(fresh.stays, x, 0.0) for x in kept)
    can_draw = fresh.plugged & ~(state.full & fresh.stays)

    def still(outlook: Outlook) -> Outlook:
        return Outlook(jnp.maximum(outlook.open_kwh - got, 0.0), outlook.hours_left)

    return replace(
        fresh,
        can_draw=can_draw,
        limit_kw=jnp.where(can_draw, RATE_KW, 0.0),
        got_kwh=got,
        offered_kw=offered,
        drawn_kw=drawn,
        said=still(fresh.said),
        predicted=still(fresh.predicted),
        recalled=still(fresh.recalled),
        truth=still(fresh.truth),
    )


def see(day: Garage, state: State, n: Int[Array, ""], capacity_kw: Float[Array, ""]) -> StationView:
    """What is known at the start of period n."""
    return look(visit(day, n, capacity_kw), state)


def draw(
    seen: StationView, offered_kw: Float[Array, " entities"]
) -> tuple[State, Float[Array, " entities"]]:
    """Offer power to those who are seen; the state after the period, and the kWh that each station drew.

    What is offered beyond a station's limit is lost, so a schedule should not do so.
    """
    offered = jnp.where(seen.can_draw, jnp.clip(offered_kw, 0.0, RATE_KW), 0.0)
    left = seen.truth.open_kwh
    # By `where`: a car that has all it needs is at a tie of `maximum`, where half a gradient would leak
    # into what it had got.
    takes = seen.can_draw & (left > 0)
    drawn = jnp.where(takes, jnp.minimum(offered, left / PERIOD_HOURS), 0.0)
    was_full = seen.plugged & ~seen.can_draw
    full = was_full | ((offered > NOTICEABLE_KW) & (drawn < TAKEN * offered))
    drawn_kwh = drawn * PERIOD_HOURS
    return State(seen.got_kwh + drawn_kwh, offered, drawn, full), drawn_kwh
