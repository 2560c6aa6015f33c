"""Charging as a problem: m stations behind one feeder, an episode of one day, rewarded by energy drawn.

The universe is all stations of all sites; a task's stations are of one site. An episode is a training
day of that site and a feeder of capacity phi x m x 6.656 kW, both drawn at midnight. A share is of the
feeder's capacity, its limit is what the plugged-in car can draw, and what nobody can draw stays unused.
The reward is kWh drawn, each worth as much less as its site needs more: by plain kWh a policy of several
sites learns from the thirstiest alone.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.domains.charging.days import Days
from apportion.domains.charging.garage import (
    PERIODS,
    Garage,
    Outlook,
    StationView,
    draw,
    see,
)
from apportion.domains.charging.garage import State as GarageState
from apportion.domains.charging.garage import empty as empty_garage
from apportion.domains.charging.sessions import RATE_KW
from apportion.problem import Observation, Problem, Step
from apportion.tasks import Task

CHANNELS = 20
"""What is seen of a station, as numbers of about unit size."""


class DayState(eqx.Module):
    """Which day it is, the period, the feeder, and what each station has got so far."""

    day: Int[Array, "*stack"]
    n: Int[Array, "*stack"]
    capacity_kw: Float[Array, "*stack"]
    garage: GarageState


class Charging(Problem):
    """The training days of one or several sites, as a family of tasks.

    Examples
    --------
    >>> from apportion.domains.charging.sessions import read_sessions
    >>> from apportion.domains.charging.forecasts import Predictor, add_forecasts
    >>> days = Days.of(read_sessions(), "jpl").between("2019-05-01", "2019-06-30")
    >>> Charging.of([add_forecasts(days, Predictor.fit(days))]).universe
    52
    """

    garage: Garage
    """(days, universe, sessions); sites of fewer days are empty in the last ones."""
    days_of: Int[Array, " universe"]
    """Days that each station's site has."""
    worth: Float[Array, " universe"]
    """What a kWh counts at each station: the mean daily need of a station over all sites, over that of
    its own site; 1 where there is one site."""
    capacity: Float[Array, " 2"]
    """The least and the most that a feeder is to its stations' full rate, phi."""
    universe: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        sites: Sequence[Days],
        capacity: tuple[float, float] = (0.05, 0.3),
    ) -> "Charging":
        """All stations of these sites; days must have predictions (`add_forecasts`)."""
        stations = [len(days.stations) for days in sites]
        garages = [days.garage for days in sites]

        def joined(*arrays: np.ndarray) -> Array:
            longest, _, most = np.max([x.shape for x in arrays], 0)
            wide = [
                np.pad(x, ((0, longest - len(x)), (0, 0), (0, most - x.shape[2]))) for x in arrays
            ]
            return jnp.asarray(np.concatenate(wide, 1))

        needs = np.array([g.need_kwh.sum() / g.arrival[..., 0].size for g in garages])
        return cls(
            garage=jax.tree.map(joined, *garages),
            days_of=jnp.asarray(np.repeat([len(days) for days in sites], stations), jnp.int32),
            worth=jnp.asarray(np.repeat(np.mean(needs) / needs, stations), jnp.float32),
            capacity=jnp.asarray(capacity, jnp.float32),
            universe=sum(stations),
            horizon=PERIODS,
        )

    def reset(self, task: Task, *, key: PRNGKeyArray) -> DayState:
        day_key, capacity_key = jax.random.split(key)
        day = jax.random.randint(day_key, (), 0, self.days_of[task.members[0]])
        low, high = self.capacity
        phi = jax.random.uniform(capacity_key, (), minval=low, maxval=high)
        return self.midnight(task, day, phi * RATE_KW * task.mask.sum())

    def midnight(self, task: Task, day: Int[Array, ""], capacity_kw: Float[Array, ""]) -> DayState:
        """The first state of a day behind a given feeder."""
        start = jnp.zeros((), jnp.int32)
        return DayState(
            day.astype(jnp.int32), start, capacity_kw, empty_garage(task.members.shape[0])
        )

    def see(self, task: Task, state: DayState) -> StationView:
        """What a controller sees of the task's stations."""
        here = self.garage.at(state.day, task.members)
        return see(here, state.garage, state.n, state.capacity_kw)

    def observe(self, task: Task, state: DayState) -> Observation:
        return observation(self.see(task, state), task.mask)

    def step(
        self,
        task: Task,
        state: DayState,
        allocation: Float[Array, " entities"],
        *,
        key: PRNGKeyArray,
    ) -> Step:
        garage, drawn = draw(self.see(task, state), allocation * state.capacity_kw)
        n = state.n + 1
        following = DayState(state.day, n, state.capacity_kw, garage)
        reward = jnp.where(task.mask, drawn * self.worth[task.members], 0.0).sum()
        return Step(following, reward, n >= PERIODS, jnp.array(False))


def observation(seen: StationView, mask: Bool[Array, " entities"]) -> Observation:
    """What a policy is shown: logarithms of energies, hours in thirds of a day, powers in full rates."""
    can_draw = seen.can_draw & mask
    angle = 2 * jnp.pi * seen.period.astype(jnp.float32) / PERIODS
    drawing = jnp.maximum(can_draw.sum(), 1)
    per_car = jnp.log(jnp.clip(seen.capacity_kw / (drawing * RATE_KW), 1e-3, 1e3))
    own = (
        *(seen.plugged, can_draw, seen.stated, jnp.log1p(seen.requested_kwh) / 3),
        *_outlook(seen.said),
        *_outlook(seen.recalled),
        *(_hours(seen.hours_here), jnp.log1p(seen.got_kwh) / 3),
        *(seen.offered_kw / RATE_KW, seen.drawn_kw / RATE_KW),
    )
    shared = (jnp.sin(angle), jnp.cos(angle), per_car, jnp.log1p(drawing) / 3)
    earlier = (seen.familiarity, jnp.log1p(seen.to_come_kwh))
    columns = jnp.broadcast_arrays(*(jnp.asarray(x, jnp.float32) for x in own + shared + earlier))
    return Observation(
        jnp.stack(columns, -1)[:, None, :],
        seen.offered_kw / seen.capacity_kw,
        jnp.where(mask, jnp.minimum(seen.limit_kw / seen.capacity_kw, 1.0), 0.0),
    )


def _outlook(outlook: Outlook) -> tuple[Array, ...]:
    return (
        jnp.log1p(outlook.open_kwh) / 3,
        _hours(outlook.hours_left),
        _hours(outlook.laxity),
    )


def _hours(hours: Float[Array, " entities"]) -> Float[Array, " entities"]:
    # Statements can be days off; beyond a day they say no more.
    return jnp.clip(hours, -24.0, 24.0) / 8
