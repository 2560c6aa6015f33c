"""What is recalled of earlier days: their like, of nobody later, and nothing where there is nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.domains.charging.controller import Controller
from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import (
    Predictor,
    SimilarSessions,
    add_forecasts,
    forecasters,
)
from apportion.domains.charging.sessions import read_sessions
from apportion.errors import InputError
from domains.charging.test_controller import ABOUT, PREDICTOR, opinionated, simulated
from domains.charging.test_controller import DAYS as JPL

FRAME = read_sessions()
DAYS = Days.of(FRAME, "caltech").between("2019-05-01", "2019-06-15")
FITTED = Predictor.fit(DAYS)
PREDICTED = FITTED.apply(DAYS)


def pair(days: Days) -> tuple[np.ndarray, np.ndarray]:
    """Needs and departures as the days foresee them."""
    recalled = days.recalled_need_kwh, days.recalled_departure
    need, departure = (
        (days.predicted_need_kwh, days.predicted_departure) if recalled[0] is None else recalled
    )
    assert need is not None
    assert departure is not None
    return need, departure


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, len(DAYS) - 1))
def test_nothing_of_a_day_or_after_it_is_recalled_on_it(seed, day):
    rng = np.random.default_rng(seed)
    later = (np.arange(len(DAYS))[:, None, None] >= day) & (DAYS.departure > DAYS.arrival)
    changed = replace(
        DAYS,
        need_kwh=np.where(later, rng.exponential(9.0, later.shape), DAYS.need_kwh),
        departure=np.where(later, DAYS.arrival + rng.integers(1, 9), DAYS.departure),
    )
    before, after = (
        (*pair(known := add_forecasts(days, FITTED, True)), known.familiarity, known.to_come_kwh)
        for days in (DAYS, changed)
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[: day + 1], other[: day + 1])
    if day + 1 < len(DAYS):
        assert (before[0][day + 1 :] != after[0][day + 1 :]).any()


def two_drivers(requests: tuple[float, float], needs: tuple[float, float], days: int = 12) -> Days:
    """Two stations, a car each day at each: what their drivers request, and what the cars take."""

    def every(values: Any, dtype: Any = np.float32) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, dtype)[None, :, None], (days, 2, 1)).copy()

    return Days(
        "here",
        np.datetime64("2019-05-01") + np.arange(days),
        ("a", "b"),
        arrival=every((32, 32), np.int32),
        departure=every((64, 64), np.int32),
        arrived=every((32, 32)),
        need_kwh=every(needs),
        requested_kwh=every(requests),
        stated_departure=every((60, 60)),
        stated=every((True, True), np.bool_),
    )


def test_a_driver_who_comes_again_is_expected_to_take_and_to_stay_as_before():
    days = two_drivers((10.0, 20.0), (9.0, 4.0))
    (need, departure), (plain, _) = (
        pair(add_forecasts(days, FITTED, True)),
        pair(FITTED.apply(days)),
    )
    assert need[0] == pytest.approx(plain[0])
    assert need[-1, :, 0] == pytest.approx([9.0, 4.0], rel=0.08)
    assert departure[-1, :, 0] == pytest.approx([64.0, 64.0], abs=2.0)
    miss = np.abs(np.log(need / days.need_kwh))
    assert (np.diff(miss, axis=0) < 0).all()


def test_a_driver_is_the_more_familiar_the_oftener_he_came_and_never_quite():
    known = add_forecasts(two_drivers((10.0, 20.0), (9.0, 4.0)), FITTED, True).familiarity
    assert known is not None
    assert (known[0] == 0).all()
    assert (np.diff(known, axis=0) > 0).all()
    # One like him the day before, at the weight of that day beside the prior's half.
    weight = np.exp(-1 / 60)
    assert known[1] == pytest.approx(weight / (weight + 0.5), rel=1e-5)
    assert (known < 1).all()


def test_familiarity_is_a_share_of_those_who_stated_something_and_0_without_a_past():
    known = add_forecasts(DAYS, FITTED, True).familiarity
    assert known is not None
    assert ((known >= 0) & (known < 1)).all()
    assert known.max() > 0.5
    assert (known[~DAYS.stated] == 0).all()
    assert (SimilarSessions.nothing().recall(PREDICTED).familiarity == 0).all()


def test_only_drivers_who_state_the_like_count():
    apart = [two_drivers((10.0, 20.0), (9.0, other)) for other in (4.0, 18.0)]
    one, other = (pair(add_forecasts(days, FITTED, True))[0] for days in apart)
    np.testing.assert_allclose(one[:, 0], other[:, 0], rtol=1e-4)
    alike = pair(add_forecasts(two_drivers((10.0, 10.0), (9.0, 4.0)), FITTED, True))[0][-1, :, 0]
    assert alike == pytest.approx([6.0, 6.0], rel=0.1)


def test_a_garage_without_a_past_and_cars_of_which_nothing_was_stated_are_as_predicted():
    for fresh, plain in zip(
        pair(SimilarSessions.nothing().recall(PREDICTED)), pair(PREDICTED), strict=True
    ):
        np.testing.assert_allclose(fresh, plain, rtol=1e-5)
    silent = (DAYS.departure > DAYS.arrival) & ~DAYS.stated
    assert silent.any()
    for known, plain in zip(pair(add_forecasts(DAYS, FITTED, True)), pair(PREDICTED), strict=True):
        np.testing.assert_allclose(known[silent], plain[silent], rtol=1e-5)


@pytest.mark.parametrize("site", ["caltech", "jpl"])
def test_a_tenth_of_what_the_regression_misses_is_recalled_on_later_days(site):
    """Of 2019, where the widths were chosen."""
    year = Days.of(FRAME, site).between("2019-05-01", "2019-12-31")
    predictor = Predictor.fit(year.between(None, "2019-09-30"))

    def misses(recall: bool) -> np.ndarray:
        days = add_forecasts(year, predictor, recall).between("2019-10-01")
        there = days.departure > days.arrival
        need, departure = pair(days)
        needs = np.log(np.maximum(need, 0.5) / np.maximum(days.need_kwh, 0.5))[there]
        stays = np.log((departure - days.arrived)[there] / (days.departure - days.arrived)[there])
        return np.array([(needs**2).mean(), (stays**2).mean()])

    assert (misses(True) < 0.9 * misses(False)).all()


def test_a_controller_recalls_the_sessions_it_is_given_and_works_without():
    volume = 10.0
    days = Days.of(FRAME, "jpl").between(None, JPL.dates[-1])
    day = len(days) - 1
    past: Any = FRAME[(FRAME.site == "jpl") & (FRAME.arrival < str(days.dates[day]))]
    fresh = PREDICTOR.apply(days)
    for memory in forecasters(None, PREDICTOR):
        fresh = memory.recall(fresh)
    (now, recalled), (_, forgetful) = (
        simulated(known.at(range(8)), day, volume)
        for known in (add_forecasts(days, PREDICTOR, True), fresh)
    )
    apart = np.abs(np.subtract(recalled, forgetful)).max()
    assert apart > 0.05
    for earlier, expected in ((past, recalled), (None, forgetful)):
        about = ABOUT | {"recall": True}
        controller = Controller(opinionated(volume), about, stations=8, earlier=earlier)
        kw = list(controller.allocate(now)["allocation_kw"].values())
        assert kw == pytest.approx(expected, abs=0.02 * apart)


def test_earlier_sessions_are_refused_where_they_cannot_help():
    with pytest.raises(InputError, match="of 2 sites"):
        Controller(opinionated(), ABOUT | {"recall": True}, stations=4, earlier=FRAME)
    with pytest.raises(InputError, match="recalls no earlier days"):
        Controller(opinionated(), ABOUT, stations=4, earlier=FRAME)
    with pytest.raises(InputError, match="without predictions"):
        SimilarSessions.of(DAYS)
