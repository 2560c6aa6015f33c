"""Sessions as days: whole periods, sessions over midnight, clock changes, statements."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion_charging.days import Days
from apportion_charging.forecasts import Predictor, _Medians
from apportion_charging.sessions import _LAYOUT, _inspect_frame, read_sessions
from apportion_charging.site import Site, Station, embedded_site

DAY = "2019-05-02 "
RATE_KW = 32 * 0.23


def site_of(names, zone=None):
    stations = {name: Station(32.0, (1,)) for name in names}
    return Site(stations, feeder_kw=30.0, timezone=zone)


def frame_of(*rows, zone=None):
    """Return rows (station, arrival, departure, delivered[, stated departure, requested])."""
    full = [(*row, None, None)[:6] for row in rows]
    names = "station arrival departure delivered_kwh stated_departure requested_kwh"
    frame = pd.DataFrame(full, columns=names.split()).assign(site="here")
    return _inspect_frame(frame[list(_LAYOUT)].astype(object), "made up", zone).frame


def days_of(*rows, zone=None, **options):
    frame = frame_of(*rows, zone=zone)
    return Days.of(frame, "here", site_of(sorted({row[0] for row in rows}), zone), **options)


def one(*row):
    return jax.tree.map(lambda x: x.ravel()[0], days_of(row).garage)


@pytest.fixture(scope="module")
def jpl():
    return Days.of(read_sessions(), "jpl", embedded_site("jpl"))


def test_a_session_fills_whole_periods_and_half_of_a_statement_is_kept():
    session = one("a", DAY + "07:31", DAY + "09:14", 3.0, DAY + "10:06", 20.0)
    assert (session.arrival, session.departure) == (31, 36)
    assert session.arrived == pytest.approx(7 + 31 / 60)
    assert session.stated_departure == pytest.approx(10.1)
    assert (session.requested_kwh, session.said_energy, session.said_departure) == (20, True, True)
    asked = one("a", DAY + "07:30", DAY + "09:15", 3.0, None, 20.0)
    assert (asked.arrival, asked.departure, asked.stated_departure) == (30, 37, 0)
    assert (asked.requested_kwh, asked.said_energy, asked.said_departure) == (20, True, False)
    told = one("a", DAY + "07:30", DAY + "09:15", 3.0, DAY + "09:00", None)
    assert (told.said_energy, told.said_departure, told.stated_departure) == (False, True, 9)


def test_a_session_over_midnight_is_whole_and_counts_on_its_first_day():
    days = days_of(("a", DAY + "23:00", "2019-05-04 12:00", 30.0))
    garage = days.garage
    assert days.dates.astype(str).tolist() == ["2019-05-02", "2019-05-03", "2019-05-04"]
    assert garage.arrival[:, 0, 0].tolist() == [92, -4, -100]
    assert garage.departure[:, 0, 0].tolist() == [240, 144, 48]
    assert garage.begins[:, 0, 0].tolist() == [True, False, False]
    assert garage.need_kwh[:, 0, 0] == pytest.approx(30.0)
    assert len(set(garage.number[:, 0, 0])) == 1
    assert days.joins.tolist() == [False, True, True]
    # A need above what the cable can deliver in that time, with the taper, is cut.
    short = one("a", DAY + "23:00", DAY + "23:59", 30.0)
    assert 0.5 * 0.75 * RATE_KW < short.need_kwh < 0.75 * RATE_KW


def test_of_two_cars_in_one_period_the_earlier_stays_and_one_without_a_period_is_left_out():
    garage = days_of(
        ("a", DAY + "07:01", DAY + "07:14", 1.0),
        ("a", DAY + "08:00", DAY + "10:00", 1.0),
        ("a", DAY + "09:00", DAY + "11:00", 50.0),
        ("a", DAY + "09:30", DAY + "10:30", 5.0),
    ).garage
    assert garage.arrival.tolist() == [[[32, 40]]]
    assert garage.departure.tolist() == [[[40, 44]]]
    assert garage.need_kwh[0, 0, 0] == pytest.approx(1.0)
    assert garage.need_kwh[0, 0, 1] < RATE_KW


ZONE = "America/Los_Angeles"


@settings(max_examples=4)
@given(st.integers(0, 10**6), st.sampled_from(["2021-03-13", "2021-11-06"]))
def test_a_clock_change_is_nothing(seed, first):
    """Give the same moments with offsets across a clock change, and in a zone without changes."""
    rng = np.random.default_rng(seed)
    start = pd.Timestamp(first, tz="UTC") + pd.Timedelta(hours=8)
    rows = []
    for station in "abcd":
        hour = rng.uniform(0, 12)
        for _ in range(4):
            stay = rng.uniform(1, 20)
            moments = [start + pd.Timedelta(hours=x) for x in (hour, hour + stay, hour + stay + 1)]
            rows.append((station, *(m.floor("s") for m in moments)))
            hour += stay + rng.uniform(0.3, 4)

    def days_in(zone):
        made = [
            (name, *(m.tz_convert(zone).isoformat() for m in times), 9) for name, *times in rows
        ]
        return days_of(*((a, b, c, kwh, d, kwh) for a, b, c, d, kwh in made), zone=zone)

    across, steady = days_in(ZONE), days_in("Etc/GMT+8")
    assert across.dates.tolist() == steady.dates.tolist()
    assert {*np.unique(across.garage.clock_hours)} == {0, 1}
    same = replace(across.garage, clock_hours=steady.garage.clock_hours)
    jax.tree.map(np.testing.assert_array_equal, same, steady.garage)


def test_an_hour_that_the_wall_clock_shows_twice_breaks_no_session():
    rows = [("a", "2021-11-07 01:40", "2021-11-07 01:20", 1.0)]
    with pytest.raises(InputError, match='"departure" is before'):
        days_of(*rows)
    garage = days_of(*rows, zone=ZONE).garage
    assert garage.stay_hours[garage.begins].tolist() == pytest.approx([2 / 3])


def standard_time(times):
    """Convert to standard time, in which days begin and end."""
    there = times.dt.tz_localize(ZONE, ambiguous=True, nonexistent="shift_forward")
    return there.dt.tz_convert("Etc/GMT+8").dt.tz_localize(None)


def test_arrays_hold_every_session_of_the_embedded_days():
    frame = read_sessions()
    days = Days.of(frame, "caltech", embedded_site("caltech"))
    garage = days.garage
    assert garage.arrival.shape[:2] == (len(days), 54)
    rows = frame[(frame.site == "caltech")]
    # Only stays without a whole period are left out.
    first = standard_time(rows.arrival).dt.ceil("15min")
    last = standard_time(rows.departure).dt.floor("15min")
    assert garage.begins.sum() == (last > first).sum()
    # Energy that a tapering car could not have drawn is cut: 11 % of the total.
    found = (garage.need_kwh * garage.begins).sum()
    assert 0.87 * rows.delivered_kwh.sum() < found < rows.delivered_kwh.sum()
    fast = days.stations.index("11900388")
    assert (garage.need_kwh * garage.begins)[:, fast].sum() > 0.1 * found
    spans = (garage.begins & (garage.departure > 96)).sum()
    assert spans == (last > first.dt.normalize() + pd.Timedelta(days=1)).sum() > 0
    assert (garage.there & ~garage.begins).sum() >= spans


def test_days_are_chosen_by_dates_both_included_and_refused_where_there_are_none(jpl):
    chosen = jpl.between("2019-06-03", "2019-06-05")
    assert chosen.dates.astype(str).tolist() == ["2019-06-03", "2019-06-04", "2019-06-05"]
    row = int(np.searchsorted(jpl.dates, chosen.dates[0]))
    assert np.array_equal(chosen.garage.need_kwh[0], jpl.garage.need_kwh[row])
    for start, end, sentence in (
        ("2020-01-01", "2020-12-31", "no day with a car from 2020-01-01 to 2020-12-31"),
        ("soon", None, "is not a day"),
    ):
        with pytest.raises(InputError, match=sentence):
            jpl.between(start, end)
    with pytest.raises(InputError, match='site "mars".* the sites are caltech, jpl'):
        Days.of(read_sessions(), "mars", embedded_site("jpl"))


def test_medians_are_of_what_was_stated_else_of_what_happened_in_training():
    days = days_of(
        ("a", DAY + "08:00", DAY + "10:00", 1.0, DAY + "09:00", 10.0),
        ("b", DAY + "08:00", DAY + "10:00", 1.0, DAY + "11:00", 30.0),
        ("c", DAY + "08:00", DAY + "10:00", 1.0, DAY + "12:00", 20.0),
        ("d", DAY + "08:00", DAY + "18:00", 9.0),
    )
    assert _Medians.of(days.garage) == (20, 3)
    other = days_of(("a", DAY + "08:00", DAY + "09:00", 1.0, DAY + "16:00", 99.0))
    assert _Medians.of(days.garage, other.garage).requested_kwh == 25
    silent = days_of(("a", DAY + "08:00", DAY + "10:00", 4.0))
    assert _Medians.of(silent.garage) == (4, 2)
    with pytest.raises(InputError, match="1 session cannot fix 9 coefficients"):
        Predictor.fit(silent)
