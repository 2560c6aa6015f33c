"""Made-up garages for tests: random days of a few stations, simulated days and a policy."""

import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.policy import Policy, Pooled
from apportion.tasks import Task
from apportion_charging.days import Days, make_stations
from apportion_charging.forecasts import Predictor, add_forecasts
from apportion_charging.garage import QUARTERS, REAL, Garage, Physics, make_physics
from apportion_charging.problem import CHANNELS, Charging, PolicySchedule
from apportion_charging.schedulers import SCHEDULERS, walk_day
from apportion_charging.sessions import _inspect_frame
from apportion_charging.site import Site, Station

SITE = Site(
    {
        **{f"big {i}": Station(32.0) for i in range(2)},
        **{f"usual {i}": Station(16.0) for i in range(2)},
        **{f"small {i}": Station(16.0, (1 + i,)) for i in range(2)},
    },
    feeder_kw=40.0,
)
"""Two stations of 22 kW, two of 11 and two of 3.7."""
WIRING = make_stations(SITE)
STATIONS, SESSIONS = len(SITE.stations), 3
FULL_KW = float(WIRING.max_kw.sum())
IDEAL = make_physics(ideal=True)


def random_garage(seed: int, stations: int = STATIONS, sessions: int = SESSIONS) -> Garage:
    """Draw a day of sessions without overlap; a quarter are absent, some began the day before."""
    rng = np.random.default_rng(seed)
    shape, kinds = (stations, sessions), np.arange(stations) % STATIONS
    cuts = np.sort(rng.integers(-12, REAL.periods + 12, (stations, 2 * sessions)), -1)
    arrival, departure = cuts[:, 0::2], cuts[:, 1::2]
    there = (departure > np.maximum(arrival, 0)) & (arrival < 96) & (rng.random(shape) < 0.75)
    stay = (departure - arrival) / 4
    need = np.minimum(rng.exponential(8.0, shape), 0.7 * stay * WIRING.max_kw[kinds, None])
    said_energy, said_departure = rng.random((2, *shape)) < 0.8
    arrived, leaves = arrival / 4 - rng.random(shape) / 4, departure / 4
    arrays = {
        "arrived": arrived,
        "need_kwh": need,
        "car_a": rng.uniform(7.1, 32, shape),
        "car_share": np.where(rng.random(shape) < 0.7, 1, 1 / WIRING.phases[kinds, None]),
        "requested_kwh": np.where(said_energy, need * rng.uniform(0.5, 3, shape), 9.0),
        "stated_departure": np.where(
            said_departure, leaves + rng.normal(0, 2, shape), arrived + 5.0
        ),
        "stay_hours": leaves - arrived,
        "predicted_need_kwh": need * rng.uniform(0.5, 2, shape),
        "predicted_departure": leaves + rng.normal(0, 1.5, shape),
        "recalled_need_kwh": need * rng.uniform(0.7, 1.5, shape),
        "recalled_departure": leaves + rng.normal(0, 1, shape),
        "familiarity": rng.random(shape),
    }
    return Garage(
        arrival=jnp.asarray(np.where(there, arrival, 0), jnp.int32),
        departure=jnp.asarray(np.where(there, departure, 0), jnp.int32),
        said_energy=jnp.asarray(said_energy & there),
        said_departure=jnp.asarray(said_departure & there),
        number=jnp.asarray(rng.integers(1, 10**6, shape), jnp.int32),
        clock_hours=jnp.zeros(stations),
        to_come_kwh=jnp.tile(jnp.linspace(9.0, 0.0, QUARTERS), (stations, 1)),
        **{name: jnp.asarray(np.where(there, x, 0), jnp.float32) for name, x in arrays.items()},
    )


def cars_of(arrival, departure, need) -> Days:
    """Make a day with one car at every station (6.9 kW), with exact predictions for each car."""
    shape, many = (1, len(need), 1), np.zeros(len(need), int)
    came, leaves = (np.reshape(x, shape).astype(np.int32) for x in (arrival, departure))
    needs = np.reshape(need, shape).astype(np.float32)
    arrived, left = ((x / 4).astype(np.float32) for x in (came, leaves))
    zeros = np.zeros_like(needs)
    garage = Garage(
        arrival=came,
        departure=leaves,
        arrived=arrived,
        need_kwh=needs,
        car_a=zeros + 10,
        car_share=zeros + 1,
        requested_kwh=needs,
        stated_departure=left,
        said_energy=zeros > 1,
        said_departure=zeros > 1,
        number=np.arange(len(need), dtype=np.int32).reshape(shape),
        stay_hours=left - arrived,
        clock_hours=zeros[..., 0],
        predicted_need_kwh=needs,
        predicted_departure=left,
        recalled_need_kwh=needs,
        recalled_departure=left,
        familiarity=zeros,
        to_come_kwh=np.zeros((1, len(need), QUARTERS), np.float32),
    )
    wiring = replace(WIRING.at(many), max_a=np.full(len(need), 10, np.float32))
    names = tuple(map(str, range(len(need))))
    return Days("here", np.array(["2019-05-01"], "datetime64[D]"), names, wiring, garage, IDEAL)


def nights(seed: int, days: int = 6) -> Days:
    """Draw consecutive days with cars that stay over midnight, some of them for days."""
    rng = np.random.default_rng(seed)
    rows = []
    for station in SITE.stations:
        hour = rng.uniform(0, 20)
        while hour < 24 * days - 2:
            stay = rng.choice([rng.uniform(1, 6), rng.uniform(8, 30)])
            arrival = pd.Timestamp("2021-03-12") + pd.Timedelta(hours=hour)
            rows.append((station, arrival.floor("s"), stay, rng.uniform(1, 40)))
            hour += stay + rng.uniform(0.5, 14)
    frame = pd.DataFrame(rows, columns=["station", "arrival", "stay", "delivered_kwh"])
    frame["departure"] = (frame.arrival + pd.to_timedelta(frame.stay, unit="h")).dt.floor("s")
    frame["stated_departure"] = frame.departure
    frame["requested_kwh"] = frame.delivered_kwh
    frame = _inspect_frame(frame.drop(columns="stay").assign(site="here"), "nights").frame
    found = Days.of(frame, "here", SITE)
    return add_forecasts(found, Predictor.fit(found))


def days_of(*garages: Garage, physics: Physics = REAL) -> Days:
    """Make days of these garages, with a gap after each, so that no day joins the next."""
    dates = np.datetime64("2019-05-01") + 2 * np.arange(len(garages))
    return Days("here", dates, tuple(SITE.stations), WIRING, stack(*garages), physics)


@cache
def opinionated(volume: float = 3.0) -> Pooled:
    """Return an untrained policy whose output depends strongly on all of its input."""
    policy = Pooled(CHANNELS, 8, key=jax.random.key(1))
    loud = volume * jax.random.normal(jax.random.key(2), (8,))
    return eqx.tree_at(lambda p: p.score.of_features, policy, loud)


SCHEDULES = SCHEDULERS | {"policy": PolicySchedule(opinionated())}


def walk(name: str, day: Garage, capacity_kw, physics: Physics = REAL):
    """Simulate a day; return what the schedule sees and the kWh drawn in each period."""
    return jax.device_get(walk_day(day, WIRING, SCHEDULES[name], capacity_kw, physics))


def by_session(day: Garage, drawn) -> np.ndarray:
    """Return the kWh of each session of a day from the kWh that stations drew in each period."""
    periods = np.arange(len(drawn))[:, None, None]
    here = (np.asarray(day.arrival) <= periods) & (periods < np.asarray(day.departure))
    return np.where(here, np.asarray(drawn)[..., None], 0).sum(0)


@eqx.filter_jit
def walk_problem(problem: Charging, task: Task, policy: Policy, day, capacity_kw):
    """Return allocations and drawn kWh in every period of a day, as in training."""

    def period(state, _):
        shares = policy(problem.observe(task, state), task.mask)
        step = problem.step(task, state, shares, key=jax.random.key(0))
        return step.state, (shares, step.reward)

    start = problem.midnight(task, day, capacity_kw)
    return jax.lax.scan(period, start, None, problem.horizon)[1]


def stack(*days: Garage) -> Garage:
    """Stack days on a new first axis."""
    return jax.tree.map(lambda *x: np.stack(x), *days)


def acnportal_days(python: str, days: Days, capacity: float, folder: Path) -> dict[str, np.ndarray]:
    """Simulate these days with acnportal, in the environment of `python`. Return the energy of each
    session by scheduler, and the seconds under `NAME/seconds`.
    """
    garage, periods = days.garage, days.physics.periods
    where = np.nonzero(garage.begins)
    midnight = (days.dates - days.dates[0]).astype(int)[where[0]] * periods
    np.savez(
        folder / "days.npz",
        station=where[1],
        arrival=midnight + garage.arrival[where],
        departure=midnight + garage.departure[where],
        need=garage.need_kwh[where],
        requested=garage.requested_kwh[where],
        leaves=midnight + garage.stated_departure[where] / days.physics.period_hours,
        capacity=capacity,
    )
    program = Path(__file__).with_name("acnportal_days.py")
    command = [python, str(program), str(folder / "days.npz"), str(folder / "energy.npz")]
    subprocess.run(command, check=True)
    return dict(np.load(folder / "energy.npz"))
