"""Forecasts for cars use what is known on arrival and earlier days, and nothing later."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from garages import cars_of, opinionated, walk_problem
from hypothesis import given
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.tasks import Task
from apportion_charging import forecasts
from apportion_charging.days import Days
from apportion_charging.forecasts import EarlierDays, Predictor, _sum_later_needs, add_forecasts
from apportion_charging.garage import QUARTERS, Garage
from apportion_charging.problem import Charging, PolicySchedule
from apportion_charging.schedulers import simulate
from apportion_charging.sessions import read_sessions
from apportion_charging.site import embedded_site

FRAME = read_sessions()
ALL = {name: Days.of(FRAME, name, embedded_site(name)) for name in ("caltech", "jpl")}
SITES = [days.between("2019-05-01", "2019-06-30") for days in ALL.values()]
DAYS = SITES[0]
FITTED = Predictor.fit(*SITES)
KNOWN = add_forecasts(DAYS, FITTED, recall=True).garage


def pair(garage: Garage) -> tuple[np.ndarray, np.ndarray]:
    """Return expected needs and departures."""
    return np.asarray(garage.recalled_need_kwh), np.asarray(garage.recalled_departure)


def test_regressed_needs_and_stays_are_nearer_the_truth_and_rest_on_what_is_known_on_arrival():
    days = ALL["jpl"].between("2019-05-01", "2019-12-31")
    predictor = Predictor.fit(days.between(None, "2019-09-30"))
    later = days.between("2019-10-01").garage
    garage, said = predictor.apply(later), later.begins & later.said_energy & later.said_departure
    need, departure = pair(garage)
    for predicted, stated, truth in (
        (need, later.requested_kwh, later.need_kwh),
        (departure, later.stated_departure, later.arrived + later.stay_hours),
    ):
        error, as_stated = (np.abs(x - truth)[said].mean() for x in (predicted, stated))
        assert error < as_stated
    blind = replace(
        later,
        need_kwh=later.need_kwh * 0,
        departure=np.where(later.there, 96, 0).astype(np.int32),
        stay_hours=later.stay_hours * 0,
    )
    for known, then in zip(pair(garage), pair(predictor.apply(blind)), strict=True):
        assert np.array_equal(known, then)


def test_a_predictor_survives_being_saved():
    saved = FITTED.to_dict()
    again = Predictor.from_dict(saved)
    np.testing.assert_array_equal(again.need, FITTED.need)
    np.testing.assert_array_equal(again.to_come_kwh, FITTED.to_come_kwh)
    for broken in ({}, saved | {"need": [float("nan")] * 9}, saved | {"stay": [1.0]}):
        with pytest.raises(InputError, match="no valid predictions .* train it again"):
            Predictor.from_dict(broken)


@given(st.integers(0, 2**31), st.integers(1, len(DAYS) - 1))
def test_nothing_of_a_day_or_after_it_is_recalled_on_it(seed, day):
    rng, garage = np.random.default_rng(seed), DAYS.garage
    later = (np.arange(len(DAYS))[:, None, None] >= day) & garage.begins
    changed = replace(
        garage,
        need_kwh=np.where(later, rng.exponential(9.0, later.shape), garage.need_kwh),
        stay_hours=np.where(later, rng.exponential(4.0, later.shape), garage.stay_hours),
    )
    other = add_forecasts(replace(DAYS, garage=changed), FITTED, recall=True).garage
    before, after = (
        (*pair(g), np.asarray(g.familiarity), np.asarray(g.to_come_kwh)) for g in (KNOWN, other)
    )
    for one, then in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[: day + 1], then[: day + 1])
    if day + 1 < len(DAYS):
        for place in (0, 3):
            assert (before[place][day + 1 :] != after[place][day + 1 :]).any()


def two_drivers(requests: tuple[float, float], needs: tuple[float, float], days: int = 12) -> Days:
    """Make days with a car at each of two stations: the drivers' requests and the cars' needs."""
    one = cars_of((32, 32), (64, 64), needs)
    told = replace(
        one.garage,
        requested_kwh=np.reshape(requests, (1, 2, 1)).astype(np.float32),
        stated_departure=one.garage.stated_departure - 1,
        said_energy=one.garage.there,
        said_departure=one.garage.there,
    )
    garage = jax.tree.map(lambda x: np.repeat(x, days, 0), told)
    return replace(one, dates=one.dates[0] + np.arange(days), garage=garage)


def recalled(*arguments: Any) -> Garage:
    return add_forecasts(two_drivers(*arguments), FITTED, recall=True).garage


def test_a_driver_who_comes_again_is_expected_to_take_and_to_stay_as_before():
    days = two_drivers((10.0, 20.0), (9.0, 4.0))
    garage = add_forecasts(days, FITTED, recall=True).garage
    (need, departure), (plain, _) = pair(garage), pair(FITTED.apply(days.garage))
    assert need[0] == pytest.approx(plain[0])
    assert need[-1, :, 0] == pytest.approx([9.0, 4.0], rel=0.08)
    assert departure[-1, :, 0] == pytest.approx([16.0, 16.0], abs=0.5)
    miss = np.abs(np.log(need / days.garage.need_kwh))
    assert (np.diff(miss, axis=0) < 0).all()
    # Familiarity grows with each visit and stays below 1.
    known = np.asarray(garage.familiarity)
    assert (known[0] == 0).all()
    assert (np.diff(known, axis=0) > 0).all()
    # One similar request the day before, with that day's weight against a prior weight of 0.5.
    weight = np.exp(-1 / 60)
    assert known[1] == pytest.approx(weight / (weight + 0.5), rel=1e-5)
    assert (known < 1).all()


def test_only_drivers_who_make_similar_requests_count():
    one, other = (pair(recalled((10.0, 20.0), (9.0, needs)))[0] for needs in (4.0, 18.0))
    np.testing.assert_allclose(one[:, 0], other[:, 0], rtol=1e-4)
    alike = pair(recalled((10.0, 10.0), (9.0, 4.0)))[0][-1, :, 0]
    assert alike == pytest.approx([6.0, 6.0], rel=0.1)


def test_a_garage_without_a_past_and_cars_of_which_nothing_was_stated_are_as_predicted():
    predicted = add_forecasts(DAYS, FITTED).garage
    fresh = EarlierDays.of(None, FITTED).apply(DAYS.garage, DAYS.dates)
    silent = DAYS.garage.there & ~DAYS.garage.said_energy & ~DAYS.garage.said_departure
    assert silent.any()
    # Medians replace missing statements.
    requested, stay = FITTED.medians
    assert predicted.requested_kwh[silent] == pytest.approx(requested)
    stays = (predicted.stated_departure - predicted.arrived)[silent]
    assert stays == pytest.approx(stay, rel=1e-4)
    said = DAYS.garage.said_energy
    np.testing.assert_array_equal(predicted.requested_kwh[said], DAYS.garage.requested_kwh[said])
    for without, known, plain in zip(pair(fresh), pair(KNOWN), pair(predicted), strict=True):
        np.testing.assert_allclose(without, plain, rtol=1e-5)
        np.testing.assert_allclose(known[silent], plain[silent], rtol=1e-5)
    familiarity = np.asarray(KNOWN.familiarity)
    assert ((familiarity >= 0) & (familiarity < 1)).all()
    assert familiarity.max() > 0.5
    assert (familiarity[silent] == 0).all()
    assert (np.asarray(fresh.familiarity) == 0).all()


def counted(days: Days, day: int, n: int) -> float:
    """Sum car by car the need of cars that came after quarter n, per station."""
    garage = days.garage
    begins = garage.begins[day]
    cars = zip(garage.arrived[day][begins], garage.need_kwh[day][begins], strict=True)
    return sum(float(need) for arrived, need in cars if np.ceil(4 * arrived) > n) / len(
        days.stations
    )


@given(st.integers(1, len(DAYS) - 1), st.integers(0, QUARTERS - 1))
def test_what_is_to_come_is_the_mean_over_the_last_twenty_days_of_a_kind_car_by_car(day, n):
    weekend = np.is_busday(DAYS.dates)
    alike = [earlier for earlier in range(day) if weekend[earlier] == weekend[day]][-20:]
    expected = (
        np.mean([counted(DAYS, earlier, n) for earlier in alike])
        if alike
        else FITTED.to_come_kwh[n]
    )
    assert KNOWN.to_come_kwh[day, 0, n] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_without_a_past_it_is_the_mean_of_the_training_days_and_the_last_period_has_none():
    means = [
        [np.mean([counted(days, day, n) for day in range(len(days))]) for days in SITES]
        for n in (0, 30, 60)
    ]
    usual, expected = FITTED.to_come_kwh, np.asarray(KNOWN.to_come_kwh)[:, 0]
    assert usual[[0, 30, 60]] == pytest.approx(np.mean(means, 1), rel=1e-5)
    np.testing.assert_allclose(expected[0], usual, rtol=1e-6)
    fresh = EarlierDays.of(None, FITTED).apply(DAYS.garage, DAYS.dates).to_come_kwh
    np.testing.assert_allclose(fresh, np.broadcast_to(usual, fresh.shape), rtol=1e-6)
    assert (expected[:, -1] == 0).all()
    assert (np.diff(expected) <= 0).all()
    # The order of the stations does not matter, and a part of them sees the whole site's value.
    order = np.random.default_rng(0).permutation(len(DAYS.stations))
    turned = add_forecasts(DAYS.at(order), FITTED, recall=True).garage
    np.testing.assert_allclose(turned.to_come_kwh[:, 7], expected, rtol=1e-5, atol=1e-6)
    some = replace(DAYS, garage=KNOWN).at(order[:5]).garage
    np.testing.assert_array_equal(some.to_come_kwh[:, 4], expected)


def test_days_long_past_are_forgotten():
    days = ALL["jpl"]
    later, last = (
        days.between("2021-01-01", "2021-05-14"),
        days.between(None, "2020-12-31").dates[-1],
    )
    assert later.dates[0] - last > np.timedelta64(300, "D")
    found = add_forecasts(days, FITTED, recall=True, only=later).garage.to_come_kwh[:, 0]
    np.testing.assert_allclose(found[0], FITTED.to_come_kwh, rtol=1e-6)
    one, other = np.flatnonzero(np.is_busday(later.dates))[:2]
    np.testing.assert_allclose(found[other], _sum_later_needs(later.garage)[one], rtol=1e-6)


def test_a_backtest_shows_a_policy_what_training_does_and_it_matters():
    days = replace(DAYS, garage=KNOWN).between("2019-06-03", "2019-06-07")
    # Training sees only one day of a car that stays over midnight, so leave such cars out.
    garage = days.garage
    within = garage.begins & (garage.departure <= 96)
    cut = {name: np.where(within, getattr(garage, name), 0) for name in ("arrival", "departure")}
    days = replace(days, garage=replace(garage, **cut))
    problem, task = Charging.of([days]), Task.of([list(range(20))])[0]
    feeder = jnp.float32(7.0)

    def simulated(garage: Garage) -> np.ndarray:
        schedule = PolicySchedule(opinionated())
        own = replace(days, garage=garage)
        return simulate(own, [schedule], 7.0, np.arange(20)[None]).energy_kwh[0, 0].sum((1, 2))

    trained = [
        float(walk_problem(problem, task, opinionated(), jnp.int32(day), feeder)[1].sum())
        for day in range(len(days))
    ]
    # Amperes are whole, so a difference in the last bit may become one ampere.
    assert simulated(days.garage) == pytest.approx(trained, rel=2e-3)
    for name in ("familiarity", "to_come_kwh"):
        blind = simulated(replace(days.garage, **{name: np.zeros_like(getattr(days.garage, name))}))
        assert np.abs(blind - trained).max() > 5e-3 * max(trained)


def test_requests_are_recalled_where_they_are_asked_for_and_of_the_newest_alone(monkeypatch):
    some, dates = np.array([3, 8, 20]), DAYS.dates
    earlier = EarlierDays.of(DAYS, FITTED)
    garage = earlier.apply(DAYS.garage, dates, some)
    others = np.setdiff1d(np.arange(len(DAYS.stations)), some)
    predicted = pair(FITTED.apply(DAYS.garage))
    for now, everywhere, alone in zip(pair(garage), pair(KNOWN), predicted, strict=True):
        assert now[:, some] == pytest.approx(everywhere[:, some], rel=1e-5)
        assert now[:, others] == pytest.approx(alone[:, others], abs=1e-5)
    only = add_forecasts(DAYS, FITTED, recall=True, only=DAYS.between(dates[20]), stations=some)
    np.testing.assert_array_equal(pair(only.garage)[0], pair(garage)[0][20:])
    # The work of a day is bounded for any number of requests.
    monkeypatch.setattr(forecasts, "_RECALLED", 50)
    names = ("request_day", "requests", "remainders")
    newest = replace(earlier, **{name: getattr(earlier, name)[-50:] for name in names})
    tomorrow, asked = earlier.request_day[-1] + 1, earlier.requests[-3:]
    found = earlier._similar(tomorrow, asked)
    np.testing.assert_array_equal(found, newest._similar(tomorrow, asked))
