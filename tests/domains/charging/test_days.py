"""Sessions as days: whole periods, working days, and every session of the file in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import Medians, Predictor, add_forecasts
from apportion.domains.charging.garage import RATE_KW
from apportion.domains.charging.sessions import LAYOUT, read_sessions
from apportion.errors import InputError

DAY = "2019-05-02 "


def days_of(*rows):
    """Of rows (station, arrival, departure, delivered[, stated departure, requested])."""
    full = [(*row, None, None)[:6] for row in rows]
    names = "station arrival departure delivered_kwh stated_departure requested_kwh"
    frame = pd.DataFrame(full, columns=names.split()).assign(site="here")
    for name in ("arrival", "departure", "stated_departure"):
        frame[name] = pd.to_datetime(frame[name]).astype("datetime64[s]")
    frame["requested_kwh"] = frame.requested_kwh.astype(float)
    return Days.of(frame[list(LAYOUT)], "here")


def one(*row):
    return jax.tree.map(lambda x: x[0, 0, 0], days_of(row).garage)


@pytest.fixture(scope="module")
def jpl():
    return Days.of(read_sessions(), "jpl")


def test_a_session_fills_whole_periods_until_midnight_and_is_marked_where_nothing_was_stated():
    session = one("a", DAY + "07:31", DAY + "09:14", 3.0, DAY + "10:06", 20.0)
    assert (session.arrival, session.departure) == (31, 36)
    assert session.arrived == pytest.approx(7 * 4 + 31 / 15)
    assert session.stated_departure == pytest.approx(40 + 6 / 15)
    assert (session.requested_kwh, session.stated) == (20, True)
    session = one("a", DAY + "07:30", DAY + "09:15", 3.0, None, 20.0)
    assert (session.arrival, session.departure) == (30, 37)
    assert (session.requested_kwh, session.stated_departure, session.stated) == (0, 0, False)
    # Its need is cut to what the station gives until midnight.
    session = one("a", DAY + "23:00", "2019-05-04 12:00", 30.0)
    assert (session.arrival, session.departure) == (92, 96)
    assert session.need_kwh == pytest.approx(RATE_KW)


def test_of_two_cars_in_one_period_the_earlier_stays_and_one_without_a_period_is_left_out():
    garage = days_of(
        ("a", DAY + "07:01", DAY + "07:20", 1.0),
        ("a", DAY + "08:00", DAY + "10:00", 1.0),
        ("a", DAY + "09:00", DAY + "11:00", 50.0),
        ("a", DAY + "09:30", DAY + "10:30", 5.0),
    ).garage
    assert garage.arrival.tolist() == [[[32, 40, 0]]]
    assert garage.departure.tolist() == [[[40, 44, 0]]]
    assert garage.need_kwh[0, 0].tolist() == pytest.approx([1.0, RATE_KW, 0.0])


def test_only_working_days_are_kept():
    rows = [(name, DAY + "08:00", DAY + "09:00", 1.0) for name in "abcdefg"]
    rows += [(name, "2019-05-05 08:00", "2019-05-05 09:00", 1.0) for name in "ab"]
    rows += [(name, "2019-05-06 08:00", "2019-05-06 09:00", 1.0) for name in "abc"]
    assert days_of(*rows).dates.astype(str).tolist() == ["2019-05-02", "2019-05-06"]
    rows = [
        (f"s{i}", f"2019-05-{i + 1:02} 08:00", f"2019-05-{i + 1:02} 09:00", 1) for i in range(8)
    ]
    with pytest.raises(InputError, match="none of its 8 days has 0.3 sessions a station"):
        days_of(*rows)


def test_arrays_hold_every_session_of_the_embedded_days():
    frame = read_sessions()
    days = Days.of(frame, "caltech")
    garage = days.garage
    assert garage.arrival.shape[:2] == (len(days), 54)
    rows = frame[(frame.site == "caltech")]
    for d in (0, len(days) // 2, len(days) - 1):
        that_day = rows[rows.arrival.dt.normalize() == pd.Timestamp(str(days.dates[d]))]
        expected = {}
        for row in that_day.itertuples():
            midnight = row.arrival.normalize()
            first, last = ((t - midnight).total_seconds() for t in (row.arrival, row.departure))
            first, last = int(-(-first // 900)), min(int(last // 900), 96)
            if last > first:
                need = min(row.delivered_kwh, (last - first) * RATE_KW / 4)
                expected[row.station, first, last] = need
        found = {
            (days.stations[i], int(garage.arrival[d, i, k]), int(garage.departure[d, i, k])): float(
                garage.need_kwh[d, i, k]
            )
            for i, k in np.argwhere(garage.there[d])
        }
        assert found == pytest.approx(expected, abs=1e-3)


def test_days_are_chosen_by_dates_both_included_and_refused_where_there_are_none(jpl):
    chosen = jpl.between("2019-06-03", "2019-06-05")
    assert chosen.dates.astype(str).tolist() == ["2019-06-03", "2019-06-04", "2019-06-05"]
    row = int(np.searchsorted(jpl.dates, chosen.dates[0]))
    assert np.array_equal(chosen.garage.need_kwh[0], jpl.garage.need_kwh[row])
    for start, end, sentence in (
        ("2020-01-01", "2020-12-31", "no working day from 2020-01-01 to 2020-12-31"),
        ("2019-06-08", "2019-06-08", "no working day from 2019-06-08"),
        ("soon", None, "is not a day"),
    ):
        with pytest.raises(InputError, match=sentence):
            jpl.between(start, end)
    with pytest.raises(InputError, match='site "mars".* the sites are caltech, jpl'):
        Days.of(read_sessions(), "mars")


def test_medians_are_of_what_was_stated_else_of_what_happened_in_training():
    days = days_of(
        ("a", DAY + "08:00", DAY + "10:00", 1.0, DAY + "09:00", 10.0),
        ("b", DAY + "08:00", DAY + "10:00", 1.0, DAY + "11:00", 30.0),
        ("c", DAY + "08:00", DAY + "10:00", 1.0, DAY + "12:00", 20.0),
        ("d", DAY + "08:00", DAY + "18:00", 9.0),
    )
    assert Medians.of(days.garage) == (20, 3)
    other = days_of(("a", DAY + "08:00", DAY + "09:00", 1.0, DAY + "16:00", 99.0))
    assert Medians.of(days.garage, other.garage).requested_kwh == 25
    silent = days_of(("a", DAY + "08:00", DAY + "10:00", 4.0))
    assert Medians.of(silent.garage) == (4, 2)
    with pytest.raises(InputError, match="1 session cannot fix 8 coefficients"):
        Predictor.fit(silent)


def test_stations_are_taken_by_place(jpl):
    days = add_forecasts(jpl, Predictor.fit(jpl))
    some = days.at([5, 3])
    assert some.stations == (days.stations[5], days.stations[3])
    assert len(jax.tree.leaves(some.garage)) == 13
    day = days.garage.at(jnp.int32(7), jnp.array([5, 3]))
    assert np.array_equal(day.need_kwh, some.garage.need_kwh[7])
