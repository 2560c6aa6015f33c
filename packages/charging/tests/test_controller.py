"""The controller: it serves as much as the backtest says, and it answers any input."""

import copy
import json
import math
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from garages import opinionated
from hypothesis import given, settings
from hypothesis import strategies as st
from live_garage import KINDS, Stay, check_limits, play, stays_of

from apportion.errors import InputError
from apportion.policy import Policy
from apportion_charging.controller import FIELDS, Controller
from apportion_charging.days import Days
from apportion_charging.domain import DOMAIN, ChargingAllocateOptions
from apportion_charging.forecasts import Predictor, add_forecasts
from apportion_charging.limits import LiveLimits
from apportion_charging.problem import CHANNELS, PolicySchedule
from apportion_charging.schedulers import SCHEDULERS, simulate
from apportion_charging.sessions import read_sessions
from apportion_charging.site import Branch, Site, Station, embedded_site

# As many stations as one program simulates.
NAMES = list(embedded_site("jpl").stations)[:23]
SITE = Site(
    {name: KINDS[place % len(KINDS)] for place, name in enumerate(NAMES)},
    feeder_a=32.0,
    branches={"first": Branch(25.0, tuple(NAMES[:10]))},
    timezone="America/Los_Angeles",
)
FRAME = read_sessions()
FRAME = FRAME[(FRAME.site == "jpl") & FRAME.station.astype(str).isin(NAMES)]
RNG = np.random.default_rng(3)
DAYS = Days.of(FRAME.assign(max_kw=RNG.choice([3.7, 11.0, 22.0], len(FRAME))), "jpl", SITE)
# A third of the cars uses one phase.
SINGLE = (RNG.random(len(FRAME)) < 1 / 3)[DAYS.garage.number]
CAR_SHARE = np.where(SINGLE, 1 / DAYS.wiring.phases[:, None], 1) * DAYS.garage.there
DAYS = replace(DAYS, garage=replace(DAYS.garage, car_share=CAR_SHARE.astype(np.float32)))
PREDICTOR = Predictor.fit(DAYS.between("2019-01-01", "2019-12-31"))
ABOUT = {"job": "charging", "predictor": PREDICTOR.to_dict(), "channels": CHANNELS}
FORTNIGHT = add_forecasts(DAYS.between("2019-05-06", "2019-05-19"), PREDICTOR)
POLICY = opinionated()
SMALL = Site(
    {
        "A": Station(),
        "B": Station(16.0),
        "C": Station(16.0, (1,)),
        "D": Station(32.0, (2,)),
        "E": Station(10.0, (2,), 8.0),
    },
    feeder_a=40.0,
    branches={"back": Branch(20.0, ("C", "D", "E"))},
    timezone="Europe/Berlin",
)
NOW = {
    "time": "2021-06-01 09:00",
    "capacity_kw": 20.0,
    "stations": [
        {"id": "A", "plugged": True, "arrival": "2021-06-01 08:10", "requested_kwh": 20,
         "stated_departure": "2021-06-01 12:00", "delivered_kwh": 3, "drawn_kw": 6},
        {"id": "B", "max_kw": 5, "plugged": True, "arrival": "2021-06-01 07:10"},
        {"id": "C", "plugged": False},
        {"id": "D", "plugged": True, "arrival": "2021-06-01 07:30", "requested_kwh": 9,
         "stated_departure": "2021-06-01 17:00"},
        {"id": "E", "plugged": False},
    ],
}  # fmt: skip


def controller(site: Site = SMALL, policy=POLICY, **options) -> Controller:
    return Controller(policy, ABOUT, site, **options)


def at(minutes: float, **changes) -> dict:
    """Return the same garage some minutes later, with changes by station."""
    now = copy.deepcopy(NOW)
    now["time"] = str(pd.Timestamp(NOW["time"]) + pd.Timedelta(minutes=minutes))
    for station in now["stations"]:
        station |= changes.get(station["id"], {})
    return now


@cache
def simulated() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Simulate the fortnight: the kWh of each day by schedule, and the need of each day."""
    schedules = [SCHEDULERS["llf"], PolicySchedule(POLICY)]
    kwh = simulate(FORTNIGHT, schedules, SITE.capacity_kw).energy_kwh[:, 0].sum((-1, -2))
    need = (FORTNIGHT.garage.need_kwh * FORTNIGHT.garage.begins).sum((1, 2))
    return dict(zip(("llf", "policy"), kwh, strict=True)), need


def stays(days: slice) -> list[Stay]:
    """Return the cars of some days of the fortnight."""
    chosen = FORTNIGHT.dates[days]
    return stays_of(FORTNIGHT.between(chosen[0], chosen[-1]))


def points_ahead(ask, days: slice, schedule="policy", *, minutes=15, **options):
    """Return how much more `ask` serves than the simulator, in points of the need."""
    served = play(SITE, stays(days), ask, minutes, **options)
    kwh, need = simulated()
    return 100 * (served - kwh[schedule][days].sum()) / need[days].sum()


def test_a_week_with_a_restart_serves_what_the_backtest_does(tmp_path, monkeypatch):
    # Skip fsync, which takes longer than everything else; the test has no power failure.
    monkeypatch.setattr("os.fsync", lambda handle: None)
    state = tmp_path / "state.json"
    asked, running = 0, controller(SITE, state=state)

    def ask(now):
        nonlocal asked, running
        asked += 1
        if asked == 150:
            running = controller(SITE, state=state)
        found = running.allocate(now)
        assert (found.warnings, found.decided_by) == ((), "policy")
        return found.allocation_a

    assert points_ahead(ask, slice(0, 5)) == pytest.approx(0, abs=0.01)
    assert asked > 250
    kwh, need = simulated()
    assert kwh["policy"].sum() < 0.97 * need.sum()


A_DAY = slice(1, 2)


def test_without_trust_the_baseline_serves_what_its_backtest_does():
    ask = controller(SITE, trust=0.0).allocate
    ahead = points_ahead(lambda now: ask(now).allocation_a, A_DAY, "llf")
    assert ahead == pytest.approx(0, abs=0.01)


ODD = st.sampled_from(
    [None, True, False, 0, -1, 0.5, 7, 1e6, 1e300, -math.inf, math.nan, "", "A", "7", "nan", [], {}, [1],
     "2021-06-01 09:00", "2021-06-01T10:00+02:00", "1969-01-01", "2300-01-01", "2021-13-40", "now",
     "2021-10-31 02:30", "2021-03-28 02:30", 10**400, b"x"]
)  # fmt: skip
# A station with `fixed_a` does not follow the controller, so limits may be exceeded.
FIELD = st.sampled_from([*(name for name in FIELDS if name != "fixed_a"), "colour", 5])


@st.composite
def visits(draw):
    """Draw a valid station, then set up to two fields to odd values."""
    hour = draw(st.integers(0, 12))
    station = {
        "id": draw(st.sampled_from("ABCDE")),
        "plugged": True,
        "arrival": f"2021-06-01 {hour:02d}:10",
        "requested_kwh": draw(st.none() | st.floats(0, 90)),
        "drawn_kw": draw(st.none() | st.floats(0, 22)),
        "full": draw(st.sampled_from([None, None, None, True, False])),
    }
    for field in draw(st.lists(FIELD, max_size=2)):
        station[field] = draw(ODD)
    return station


NOWS = st.fixed_dictionaries(
    {"stations": st.lists(visits() | ODD, max_size=7) | ODD},
    optional={
        "time": st.integers(0, 1439).map(lambda m: f"2021-06-01 {m // 60:02d}:{m % 60:02d}") | ODD,
        "capacity_kw": st.floats(0, 60) | ODD,
        "site": ODD,
    },
)


HALF_TRUSTED = controller(trust=0.5)


@settings(max_examples=100)
@given(st.lists(NOWS | ODD, min_size=1, max_size=4))
def test_whatever_it_is_asked_it_answers_within_every_limit(questions):
    # The state is replaced, never changed in place: a copy is independent.
    asked = copy.copy(HALF_TRUSTED)
    asked.limits = LiveLimits(SMALL)
    for now in questions:
        found = asked.allocate(now)
        capacity = now.get("capacity_kw") if isinstance(now, dict) else None
        number = type(capacity) in (int, float) and 0 <= capacity < 1e9
        check_limits(SMALL, found.allocation_a, capacity if number else math.inf)
        json.dumps(found.to_json(), allow_nan=False)
        assert found.summary()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arrival": "2021-06-01 09:20"}, "after now; now is used"),
        ({"arrival": None}, "missing"),
        ({"arrival": "yesterday"}, "write it as"),
        ({"arrival": "05/02/2018 09:00"}, "write it as"),
        ({"delivered_kwh": -1}, "delivered_kwh is -1; it is left out"),
        ({"drawn_kw": "6 kW"}, "drawn_kw is '6 kW'"),
        ({"drawn_kw": 6000}, "is it in W?"),
        ({"delivered_kwh": 9500}, "is it in Wh?"),
        ({"requested": 20}, "'requested' is not a known field"),
        ({"plugged": "yes"}, "a car is assumed to be there"),
        ({"plugged": None}, "a car is assumed to be there"),
        ({"full": "no"}, "full is 'no'; it is left out"),
        ({"id": "Z"}, "station Z is not one of the site"),
        ({"id": "B"}, "station B is listed twice"),
    ],
)
def test_a_datum_that_cannot_be_is_set_aside_and_the_others_are_served(changes, said):
    found = controller().allocate(at(0, A=changes))
    assert said in " ".join(found.warnings)
    assert found.allocation_a["D"] >= 6
    if "id" not in changes:
        assert found.allocation_a["A"] >= 6


def test_no_feeder_no_power_and_no_more_than_the_site_has():
    asked = controller()
    nothing = asked.allocate(at(0) | {"capacity_kw": 0})
    assert set(nothing.allocation_a.values()) == {0}
    assert nothing.warnings == ()
    # A capacity that is invalid or missing leaves the last one in force.
    for capacity in ("5.0", -1, {}, None, math.nan, True):
        closed = asked.allocate(at(1) | {"capacity_kw": capacity})
        assert set(closed.allocation_a.values()) == {0}
        assert "the last one stays" in closed.warnings[0]
    silent = {name: value for name, value in at(1).items() if name != "capacity_kw"}
    assert set(asked.allocate(silent).allocation_a.values()) == {0}
    much = asked.allocate(at(2) | {"capacity_kw": 500})
    check_limits(SMALL, much.allocation_a, 27.6)
    assert sum(much.allocation_kw.values()) > 15


def test_what_a_silent_station_was_told_is_reserved_until_it_speaks():
    asked = controller()
    first = asked.allocate(at(0)).allocation_a
    quiet = at(1)
    quiet["stations"] = [s for s in quiet["stations"] if s["id"] != "A"]
    second = asked.allocate(quiet)
    assert second.allocation_a["A"] == first["A"] > 0
    less = asked.allocate(quiet | {"time": "2021-06-01 09:02", "capacity_kw": 5.0}).allocation_a
    check_limits(SMALL, less, 5.0)
    # The silent station may not have received the lower limit.
    assert set(less.values()) == {0}
    again = asked.allocate(quiet | {"time": "2021-06-01 09:03"}).allocation_a
    assert again["A"] == first["A"]


def test_full_is_believed_a_done_car_is_probed_and_of_a_silent_meter_nothing_is_concluded():
    asked, silence = controller(trust=0.0), {"drawn_kw": None, "delivered_kwh": None}
    for minute in range(0, 46, 5):
        told = asked.allocate(at(minute, A=silence, D={"drawn_kw": 0.0})).allocation_a
    assert (told["A"] > 0, told["D"]) == (True, 0)
    # Energy counts as offered.
    car = asked.state()["stations"]["A"]
    assert (car["got_kwh"] > 2, car["idle_hours"]) == (True, 0)
    believed = asked.allocate(at(50, D={"drawn_kw": 0.0, "full": False})).allocation_a
    assert believed["D"] >= 6
    assert asked.allocate(at(51, D={"full": True})).allocation_a["D"] == 0
    # Power is free, and half an hour has passed.
    later = [asked.allocate(at(m, D={"drawn_kw": 0.0})).allocation_a["D"] for m in range(52, 95, 5)]
    assert later[0] == 0
    assert 6 in later


def test_a_clock_that_is_a_little_ahead_makes_no_new_car():
    asked = controller()
    asked.allocate(at(0, A={"arrival": "2021-06-01 09:00:02"}))
    asked._known = replace(asked._known, limit_a=asked._known.limit_a * 0 + 9)
    found = asked.allocate(at(1, A={"arrival": "2021-06-01 09:00:02"}))
    assert found.warnings == ()
    assert found.allocation_a["A"] <= 14


class Broken(Policy):
    """A policy that raises an error, or whose wishes are NaN."""

    raises: bool

    def encode(self, history, mask):
        return history

    def allocate(self, features, held, mask, bounds=None):
        if self.raises:
            raise RuntimeError("out of order")
        return jnp.full(mask.shape, jnp.nan)


@pytest.mark.parametrize(("raises", "said"), [(True, "out of order"), (False, "not finite")])
def test_where_the_policy_cannot_decide_the_baseline_does(raises, said):
    found = controller(policy=Broken(raises)).allocate(at(0))
    assert found.decided_by == "llf"
    assert said in found.warnings[0]
    assert found.allocation_a == controller(trust=0.0).allocate(at(0)).allocation_a


def test_trust_is_between_0_and_1_and_says_who_decided():
    asked = controller(trust=0.5)
    assert asked.allocate(at(0)).decided_by == "policy and llf"
    with pytest.raises(InputError, match="between 0 and 1"):
        asked.trust = 1.1
    with pytest.raises(InputError, match="no scheduler 'clairvoyant'"):
        controller(baseline="clairvoyant")
    with pytest.raises(InputError, match="not for charging"):
        Controller(POLICY, {"job": "portfolio"}, SMALL)


def test_zones_and_clock_changes_are_nothing():
    """Local time, an offset and UTC give the same answers; an hour that occurs twice is an hour."""
    answers = []
    for suffix, hour in (("", 9), ("+02:00", 9), ("Z", 7)):
        now = json.loads(json.dumps(NOW))
        now["time"] = f"2021-06-01 {hour:02d}:00{suffix}"
        for station in now["stations"]:
            for field in ("arrival", "stated_departure"):
                if field in station:
                    then = pd.Timestamp(station[field]) - pd.Timedelta(hours=9 - hour)
                    station[field] = f"{then}{suffix}"
        answers.append(controller().allocate(now))
    assert answers[0] == answers[1] == answers[2]
    asked = controller()
    night = [f"2021-10-31 {t}" for t in ("02:00", "02:45", "02:00", "02:45", "03:15")]
    for time in night:
        now = at(0) | {"time": time}
        for station in now["stations"]:
            station.pop("stated_departure", None)
            station["arrival"] = "2021-10-30 22:00"
        asked.allocate(now)
    assert asked._known.on_hours.max() == pytest.approx(2.25)


def test_call_after_call_of_the_command_line_is_one_controller(tmp_path):
    """Repeat `apportion allocate RUN --now now.json --site site.toml --state state.json`."""

    class Run:
        folder, policy = tmp_path, POLICY

    (tmp_path / "site.toml").write_text(SMALL.to_toml())
    import apportion.runs.policy_file as policy_file

    one = controller(trust=0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_file, "load_about", lambda folder: ABOUT)
        for minute in range(0, 40, 4):
            drawn = {"A": {"drawn_kw": 7.0}, "D": {"drawn_kw": 0.0 if minute > 9 else 1.5}}
            now = at(minute, **drawn)
            (tmp_path / "now.json").write_text(json.dumps(now))
            options = ChargingAllocateOptions(
                now=tmp_path / "now.json",
                site=str(tmp_path / "site.toml"),
                state=tmp_path / "state.json",
                trust=0.7,
            )
            assert DOMAIN.allocate(Run, options) == one.allocate(now)  # pyright: ignore
        with pytest.raises(InputError, match="--now FILE.json"):
            DOMAIN.allocate(Run, replace(options, now=None))  # pyright: ignore
        FRAME.head(20).to_parquet(tmp_path / "earlier.parquet")
        with pytest.raises(InputError, match="recalls no earlier days"):
            DOMAIN.allocate(Run, replace(options, earlier=tmp_path / "earlier.parquet"))  # pyright: ignore
        wrong = {"time": "x", "stations": {"A": {"got_kwh": "much"}}}
        for text, said in (
            ("{", "state.json"),
            ("[]", "not a valid controller state"),
            (json.dumps(wrong), "not a valid controller state"),
        ):
            (tmp_path / "state.json").write_text(text)
            with pytest.raises(InputError, match=said):
                DOMAIN.allocate(Run, options)  # pyright: ignore


def test_a_controller_recalls_the_sessions_it_is_given_and_works_without():
    about = ABOUT | {"recall": True}
    past = FRAME[FRAME.arrival < "2019-05-06"]
    both = [Controller(POLICY, about, SITE, earlier=earlier) for earlier in (past, None)]
    with pytest.raises(InputError, match="recalls no earlier days"):
        Controller(POLICY, ABOUT, SITE, earlier=past)
    with pytest.raises(InputError, match="of 2 sites"):
        Controller(POLICY, about, SITE, earlier=read_sessions())
    seen = []
    play(SITE, stays(A_DAY), lambda now: seen.append(now) or dict.fromkeys(NAMES, 0), 15)
    midday = max(seen, key=lambda now: sum(station["plugged"] for station in now["stations"]))
    told = [one.allocate(midday) for one in both]
    assert told[0].allocation_a != told[1].allocation_a
    assert np.isfinite(list(told[0].allocation_kw.values())).all()


def test_stations_that_nobody_knows_are_named_up_to_twenty_in_letters_that_can_be_written():
    stations = [{"id": name} for name in ("\ud800", "x" * 300, *(f"no {n}" for n in range(98)))]
    offers = controller().allocate(NOW | {"stations": [*NOW["stations"], *stations]})
    assert offers.warnings[-1] == "80 more stations are not of the site"
    assert len(offers.warnings) == 21
    assert r"station \ud800 is not one" in offers.warnings[0]
    assert "\n".join(offers.warnings).encode("utf-8")
    assert max(map(len, offers.warnings)) < 150
