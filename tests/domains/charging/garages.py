"""Garages made up for tests: random days of a few stations, walks that keep what was seen, a policy."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from apportion.domains.charging.garage import PERIODS, RATE_KW, Garage
from apportion.domains.charging.problem import CHANNELS, Charging
from apportion.domains.charging.schedulers import SCHEDULERS, PolicySchedule, walk_day
from apportion.policy import Policy, Pooled
from apportion.tasks import Task

STATIONS, SESSIONS = 6, 3


def random_garage(seed: int, stations: int = STATIONS, sessions: int = SESSIONS) -> Garage:
    """One day of sessions that do not overlap; about a quarter are absent."""
    rng = np.random.default_rng(seed)
    shape = (stations, sessions)
    cuts = np.sort(rng.integers(0, PERIODS + 1, (stations, 2 * sessions)), -1)
    arrival, departure = cuts[:, 0::2], cuts[:, 1::2]
    there = (departure > arrival) & (rng.random(shape) < 0.75)
    stay = departure - arrival
    need = np.minimum(rng.exponential(8.0, shape), stay * RATE_KW / 4)
    stated = rng.random(shape) < 0.8
    arrived = arrival - rng.random(shape)
    arrays = {
        "arrived": arrived,
        "need_kwh": need,
        "requested_kwh": np.where(stated, need * rng.uniform(0.5, 3, shape), 9.0),
        "stated_departure": np.where(stated, departure + rng.normal(0, 8, shape), arrived + 20.0),
        "predicted_need_kwh": need * rng.uniform(0.5, 2, shape),
        "predicted_departure": departure + rng.normal(0, 6, shape),
        "recalled_need_kwh": need * rng.uniform(0.7, 1.5, shape),
        "recalled_departure": departure + rng.normal(0, 4, shape),
        "familiarity": rng.random(shape),
    }
    return Garage(
        arrival=jnp.asarray(np.where(there, arrival, 0), jnp.int32),
        departure=jnp.asarray(np.where(there, departure, 0), jnp.int32),
        stated=jnp.asarray(stated & there),
        to_come_kwh=jnp.tile(jnp.linspace(9.0, 0.0, PERIODS), (stations, 1)),
        **{name: jnp.asarray(np.where(there, x, 0), jnp.float32) for name, x in arrays.items()},
    )


@cache
def opinionated(volume: float = 3.0) -> Pooled:
    """An untrained policy to whom everything it sees matters."""
    policy = Pooled(CHANNELS, 8, key=jax.random.key(1))
    loud = volume * jax.random.normal(jax.random.key(2), (8,))
    return eqx.tree_at(lambda p: p.score.of_features, policy, loud)


SCHEDULES = SCHEDULERS | {"policy": PolicySchedule(opinionated())}


def walk(name: str, day: Garage, capacity_kw):
    """A scheduler, or a policy, through a day: what it saw, offered and what was drawn in each period."""
    return jax.device_get(walk_day(day, SCHEDULES[name], capacity_kw))


@eqx.filter_jit
def walk_problem(problem: Charging, task: Task, policy: Policy, day, capacity_kw):
    """Allocations and kWh drawn in every period of a day, as in training."""

    def period(state, _):
        shares = policy(problem.observe(task, state), task.mask)
        step = problem.step(task, state, shares, key=jax.random.key(0))
        return step.state, (shares, step.reward)

    start = problem.midnight(task, day, capacity_kw)
    return jax.lax.scan(period, start, None, PERIODS)[1]


def stack(*days: Garage) -> Garage:
    """Days on a first axis."""
    return jax.tree.map(lambda *x: np.stack(x), *days)
