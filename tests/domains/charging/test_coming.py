"""What is still to come: plain arithmetic on the days before, of nobody's day itself or after it."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.domains.charging.backtest import PolicySchedule
from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import (
    ArrivalForecast,
    Predictor,
    add_forecasts,
    still_to_come,
)
from apportion.domains.charging.garage import PERIODS, Garage
from apportion.domains.charging.problem import CHANNELS, Charging
from apportion.domains.charging.schedulers import simulate
from apportion.domains.charging.sessions import read_sessions
from apportion.policy import Pooled
from apportion.tasks import Task, Tasks

FRAME = read_sessions()
SITES = [Days.of(FRAME, name).between("2019-05-01", "2019-06-30") for name in ("caltech", "jpl")]
DAYS = SITES[0]
FITTED = Predictor.fit(*SITES)


def expected(days: Days) -> np.ndarray:
    found = ArrivalForecast.of(days, FITTED.to_come_kwh).recall(days).to_come_kwh
    assert found is not None
    return found


EXPECTED = expected(DAYS)


def counted(days: Days, day: int, n: int) -> float:
    """Car by car: what those that came after period n needed, for each station."""
    cars = zip(days.arrival[day].ravel(), days.need_kwh[day].ravel(), strict=True)
    return sum(float(need) for arrival, need in cars if arrival > n) / len(days.stations)


@settings(max_examples=20)
@given(st.integers(1, len(DAYS) - 1), st.integers(0, PERIODS - 1))
def test_it_is_the_mean_over_the_last_twenty_days_car_by_car(day, n):
    past = [counted(DAYS, earlier, n) for earlier in range(max(day - 20, 0), day)]
    assert EXPECTED[day, n] == pytest.approx(np.mean(past), rel=1e-5, abs=1e-6)


def test_without_a_past_it_is_the_mean_of_the_training_days_and_the_last_period_has_none():
    means = [
        [np.mean([counted(days, day, n) for day in range(len(days))]) for days in SITES]
        for n in (0, 30, 60)
    ]
    usual = FITTED.to_come_kwh
    assert usual[[0, 30, 60]] == pytest.approx(np.mean(means, 1), rel=1e-5)
    np.testing.assert_allclose(EXPECTED[0], usual, rtol=1e-6)
    fresh = ArrivalForecast.nothing(usual).recall(DAYS).to_come_kwh
    np.testing.assert_allclose(fresh, np.broadcast_to(usual, (len(DAYS), PERIODS)), rtol=1e-6)
    assert (EXPECTED[:, -1] == 0).all()
    assert (np.diff(EXPECTED) <= 0).all()


def test_days_long_past_are_forgotten():
    days = Days.of(FRAME, "jpl")
    first = int(np.searchsorted(days.dates, np.datetime64("2021-01-01")))
    assert days.dates[first] - days.dates[first - 1] > np.timedelta64(300, "D")
    found = expected(days)
    np.testing.assert_allclose(found[first], FITTED.to_come_kwh, rtol=1e-6)
    np.testing.assert_allclose(found[first + 1], still_to_come(days)[first], rtol=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, len(DAYS) - 1))
def test_nothing_from_a_day_on_changes_what_is_expected_on_it(seed, day):
    rng = np.random.default_rng(seed)
    later = np.arange(len(DAYS))[:, None, None] >= day
    shape = DAYS.arrival.shape
    changed = replace(
        DAYS,
        arrival=np.where(later, rng.integers(0, PERIODS - 1, shape), DAYS.arrival).astype(np.int32),
        departure=np.where(later, PERIODS, DAYS.departure).astype(np.int32),
        need_kwh=np.where(later, rng.exponential(9.0, shape), DAYS.need_kwh).astype(np.float32),
        stated=np.where(later, rng.random(shape) < 0.5, DAYS.stated),
    )
    before, after = EXPECTED, expected(changed)
    np.testing.assert_array_equal(before[: day + 1], after[: day + 1])
    if day + 1 < len(DAYS):
        assert (before[day + 1 :] != after[day + 1 :]).any()


@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_the_order_of_the_stations_does_not_matter_and_some_of_them_see_the_sites(seed):
    order = np.random.default_rng(seed).permutation(len(DAYS.stations))
    np.testing.assert_allclose(expected(DAYS.at(order)), EXPECTED, rtol=1e-5, atol=1e-6)
    some = replace(DAYS, to_come_kwh=EXPECTED).at(order[:5]).to_come_kwh
    np.testing.assert_array_equal(some, EXPECTED)


def opinionated() -> Pooled:
    """A policy to whom what earlier days tell matters."""
    policy = Pooled(CHANNELS, 8, key=jax.random.key(1))
    loud = 3 * jax.random.normal(jax.random.key(2), (8,))
    return eqx.tree_at(lambda p: p.score.of_features, policy, loud)


@eqx.filter_jit
def walked(problem: Charging, task: Task, day, capacity_kw):
    """The kWh that the policy delivers, period by period as in training."""
    policy = opinionated()

    def period(state, _):
        shares = policy(problem.observe(task, state), task.mask)
        step = problem.step(task, state, shares, key=jax.random.key(0))
        return step.state, step.reward

    start = problem.midnight(task, day, capacity_kw)
    return jax.lax.scan(period, start, None, PERIODS)[1].sum()


def test_a_backtest_shows_a_policy_what_training_does_and_it_matters():
    days = add_forecasts(DAYS, FITTED, True).between("2019-06-03", "2019-06-07")
    problem, task = Charging.of([days], FITTED.medians), Tasks.of([list(range(30))])[0]
    feeder = jnp.float32(20.0)

    def simulated(garage: Garage) -> np.ndarray:
        schedule = PolicySchedule(opinionated())
        energy = simulate(garage, schedule, feeder, FITTED.medians, np.arange(30)[None])
        return energy[0].sum((1, 2))

    trained = [float(walked(problem, task, jnp.int32(day), feeder)) for day in range(len(days))]
    assert simulated(days.garage()) == pytest.approx(trained, rel=1e-4)
    for name in ("familiarity", "to_come_kwh"):
        blind = simulated(replace(days, **{name: np.zeros_like(getattr(days, name))}).garage())
        assert np.abs(blind - trained).max() > 1e-3 * max(trained)


_observed = eqx.filter_jit(lambda problem, task, state: problem.observe(task, state))


def shown(problem: Charging, stations: range, day: int, n: int) -> np.ndarray:
    """What a policy is shown of these stations, in the last two channels."""
    task = Tasks.of([list(stations)])[0]
    start = problem.midnight(task, jnp.int32(day), jnp.float32(8.0))
    state = replace(start, n=jnp.int32(n))
    history = _observed(problem, task, state).history
    assert history.shape == (len(stations), 1, CHANNELS)
    return np.asarray(history[:, 0, -2:])


def test_a_policy_is_shown_its_own_sites_and_zeros_where_nothing_is_recalled():
    known = [add_forecasts(days, FITTED, True) for days in SITES]
    problem = Charging.of(known, FITTED.medians)
    day, n = 30, 44
    first = len(SITES[0].stations)
    places = range(first), range(first, problem.universe)
    for stations, days in zip(places, known, strict=True):
        familiarity, to_come = shown(problem, stations, day, n).T
        assert days.to_come_kwh is not None
        assert days.familiarity is not None
        assert to_come == pytest.approx(np.log1p(days.to_come_kwh[day, n]), rel=1e-5)
        here = (days.arrival[day] <= n) & (n < days.departure[day])
        of_cars = np.where(here, days.familiarity[day], 0.0).sum(-1)
        assert of_cars.max() > 0
        assert familiarity == pytest.approx(of_cars, rel=1e-5)
    plain = Charging.of([add_forecasts(days, FITTED, False) for days in SITES], FITTED.medians)
    assert (shown(plain, places[0], day, n) == 0).all()
