"""Safety of a garage: live limits, unknown stations, states of other sites, meters, signals."""

import asyncio
import json
import random
import time
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

pytest.importorskip("ocpp")
from garage_loop import ABOUT, ChargePoint, until
from served import serving

from apportion.policy import Pooled
from apportion_charging import clock
from apportion_charging.controller import Controller, PowerOffers
from apportion_charging.limits import LiveLimits
from apportion_charging.meters import Meter, read_samples
from apportion_charging.ocpp import ChargePoints
from apportion_charging.ocpp_versions import LINKS
from apportion_charging.problem import CHANNELS
from apportion_charging.site import Branch, Site, Station
from cli.command import apportion as command
from cli.command import assert_refused

SITE = Site(
    {"A": Station(16.0), "B": Station(16.0, (2, 3, 1)), "C": Station(16.0, (1,))},
    feeder_a=16.0,
    timezone="UTC",
    period_minutes=5,
)
EVERY = 300.0


@pytest.fixture
def at(monkeypatch):
    """A clock in seconds that the test sets."""
    now = SimpleNamespace(seconds=1.8e9)
    monkeypatch.setattr(clock, "now", lambda: now.seconds)
    return now


def make_points(site=SITE, path=None, **options):
    def decide(now):
        points.asked.append(now)
        return PowerOffers(dict.fromkeys(site.stations, 0), {}, 0.0, "none")

    points = ChargePoints(site, decide, LiveLimits(site), every=EVERY, path=path, **options)
    points.asked = []
    return points


def test_a_capacity_outlives_a_restart_and_its_end_never_raises_it(tmp_path, at):
    site = replace(SITE, capacity_ttl_s=600.0, safe_kw=8.0)
    for kw, later in ((5.0, 5.0), (10.0, 8.0)):
        LiveLimits(site, tmp_path / "limits.json").set_capacity(kw)
        at.seconds += 500
        again = LiveLimits(site, tmp_path / "limits.json")
        assert again.in_force()[0] == kw
        assert again.describe("feeder") == {"source": "live", "age_s": 500.0}
        at.seconds += 101
        assert again.in_force()[0] == later
    # Without a time to live, the last capacity stays.
    forever = LiveLimits(SITE)
    forever.set_capacity(3)
    at.seconds += 1e8
    assert forever.in_force()[0] == 3


def test_a_limit_that_ends_before_the_next_answer_applies_at_once(at):
    limits = LiveLimits(replace(SITE, safe_a=10.0))
    limits.set({"limits": {"feeder L1": {"a": 14}, "feeder L2": {"a": 6}}, "ttl_s": 400})
    limits.ahead_seconds = EVERY
    assert limits.in_force()[1:].tolist() == [14, 6, 10]
    at.seconds += 101
    assert limits.in_force()[1:].tolist() == [10, 6, 10]
    at.seconds += 300
    assert limits.in_force()[1:].tolist() == [10, 10, 10]


def test_a_station_that_the_state_does_not_know_counts_until_its_profile_would_have_ended(
    tmp_path, at
):
    points = make_points(path=tmp_path / "s.json")
    assert [point.bound_a() for point in points.points.values()] == [16.0, 16.0, 16.0]
    assert [entry["fixed_a"] for entry in points._now()["stations"]] == [16.0, 16.0, 16.0]
    points.points["A"].heard = True
    points.on_status(points.points["A"], "Available")
    points.points["A"].has_default = True
    assert points.points["A"].bound_a() == 0.0
    # A transaction whose start was missed may have a profile of another server; a new one has none.
    points.resume(points.points["B"], "7")
    assert points.points["B"].bound_a() == 16.0
    at.seconds += 4 * EVERY + 1
    assert [point.bound_a() for point in points.points.values()] == [0.0, 0.0, 0.0]


def test_a_state_is_read_by_the_names_of_stations(tmp_path, at):
    points = make_points(path=tmp_path / "s.json")
    a = points.points["A"]
    points.begin(a, "7", "2027-01-15T08:00:00Z", 500, "start")
    a.heard, a.has_default, a.profiles = True, True, [(12.0, at.seconds + 500)]
    points.add_statements({"stations": [{"id": "A", "requested_kwh": 9}]})
    # A driver states the need before the car is plugged in.
    points.add_statements({"stations": [{"id": "B", "requested_kwh": 4}]})
    points._save()
    more = replace(SITE, stations={"D": Station(16.0), "A": Station(16.0), "B": Station(16.0)})
    again = make_points(more, tmp_path / "s.json")
    a, b, d = (again.points[name] for name in "ABD")
    assert (a.car.number, a.bound_a(), a.statements) == ("7", 12.0, {"requested_kwh": 9})
    assert d.bound_a() == 16.0
    again.begin(b, "8", "2027-01-15T08:01:00Z", 0)
    assert b.statements == {"requested_kwh": 4}
    again.end(b)
    assert b.statements == {}
    again.add_statements({"stations": [{"id": "B", "requested_kwh": 5}]})
    at.seconds += 3700
    again.begin(b, "9", "2027-01-15T10:00:00Z", 0)
    assert b.statements == {}
    assert "station Z is not" in again.add_statements({"stations": [{"id": "Z"}]})[0]
    cars = {"time": "2026-03-02 09:00", "stations": [{"id": "A", "plugged": True}]}
    policy, state = Pooled(CHANNELS, 4, key=jax.random.key(0)), tmp_path / "c.json"
    offers = Controller(policy, ABOUT, SITE, state=state).allocate(cars | {"capacity_kw": 9.0})
    other = Controller(policy, ABOUT, more, state=state)
    assert other.limits.in_force()[0] == 9.0
    assert other.state()["stations"]["A"]["offered_a"] == offers.allocation_a["A"] > 0


def test_what_a_removed_station_holds_is_reserved_until_its_profile_expires(tmp_path, at):
    points = make_points(path=tmp_path / "s.json")
    a = points.points["A"]
    a.heard, a.has_default, a.profiles = True, True, [(12.0, at.seconds + 500)]
    points._save()
    less = replace(SITE, stations={name: SITE.stations[name] for name in "BC"})
    # The same holds after a second restart.
    for _ in range(2):
        again = make_points(less, tmp_path / "s.json")
        assert again.limits.in_force().tolist() == pytest.approx([4 * 0.69, 4, 4, 4])
        again._save()
    at.seconds += 501
    assert again.limits.in_force().tolist() == pytest.approx([16 * 0.69, 16, 16, 16])


def test_by_http_the_last_offer_to_a_removed_station_is_reserved(tmp_path, at):
    policy, state = Pooled(CHANNELS, 4, key=jax.random.key(0)), tmp_path / "c.json"
    cars = [{"id": name, "plugged": True, "arrival": "2026-03-02 08:00"} for name in "AC"]
    now = {"time": "2026-03-02 09:00", "stations": [cars[0], *({"id": x} for x in "BC")]}
    first = Controller(policy, ABOUT, SITE, trust=0.0, state=state).allocate(now).allocation_a
    less = replace(SITE, stations={name: SITE.stations[name] for name in "BC"})
    now["stations"] = [{"id": "B"}, cars[1]]
    assert first["A"] == 16
    for _ in range(2):
        again = Controller(policy, ABOUT, less, trust=0.0, state=state)
        again.reserve_unheard(4 * EVERY)
        assert again.allocate(now).allocation_a["C"] == 0
    at.seconds += 4 * EVERY + 1
    assert again.allocate(now).allocation_a["C"] == 16


def test_without_a_state_a_station_that_no_statement_has_listed_keeps_its_cable(tmp_path, at):
    policy, state = Pooled(CHANNELS, 4, key=jax.random.key(0)), tmp_path / "c.json"
    car = {"id": "C", "plugged": True, "arrival": "2026-03-02 08:00"}

    def offered(*stations, restart=False):
        if restart:
            found = Controller(policy, ABOUT, SITE, trust=0.0, state=state)
            found.reserve_unheard(4 * EVERY)
            cold.append(found)
        return (
            cold[-1]
            .allocate({"time": "2026-03-02 09:00", "stations": [*stations]})
            .allocation_a["C"]
        )

    cold, others = [], [{"id": name, "plugged": False} for name in "AB"]
    assert offered(car, restart=True) == 0
    assert offered(car, others[0]) == 0
    assert offered(car, others[1]) == 16
    # The state has the names of all stations that were listed.
    assert offered(car, restart=True) == 16
    state.unlink()
    assert offered(car, restart=True) == 0
    at.seconds += 4 * EVERY + 1
    assert offered(car) == 16


def test_a_transaction_stays_with_its_station_and_a_strange_connector_is_refused(at):
    points = make_points()
    a = points.points["A"]
    points.begin(a, "of 2.0.1", "2027-01-15T08:00:00Z", 0)
    link = LINKS["ocpp1.6"](points, "A", SimpleNamespace())
    assert link.version_fields(3, {}, a.car.number)["transaction_id"] is None
    points.on_meter_values(a, [], 77)
    assert (a.car.number, a.again) == ("77", True)
    assert link.version_fields(3, {}, a.car.number)["transaction_id"] == 77
    start = {"connector_id": 2, "id_tag": "t", "timestamp": "2027-01-15T08:00:00Z"}
    assert link.on_start(**start, meter_start=0).id_tag_info["status"] == "Invalid"
    assert a.car.number == "77"
    assert "does not describe connector 2" in points.troubles["A", "connector"]


def test_decreases_that_fail_leave_no_other_station_without_an_answer(at):
    names, sent = "ABCDE", []
    points = make_points(Site(dict.fromkeys(names, Station(16.0)), feeder_a=99.0))

    def decide(now):
        points.asked.append(now)
        lower = {names[len(points.asked) - 1]: 6, "E": 16}
        return PowerOffers(dict.fromkeys(names, 10) | lower, {}, 0.0, "none")

    def make_link(name):
        async def set_profile(connector, schedule, number):
            sent.append((name, schedule["charging_schedule_period"][0]["limit"]))
            return name == "E"

        return SimpleNamespace(ready=True, default_sent=True, set_profile=set_profile)

    points._decide = decide
    for name, point in points.points.items():
        points.begin(point, name, "", 0)
        point.heard, point.has_default, point.link = True, True, make_link(name)
        point.profiles = [(10.0, at.seconds + EVERY)]
    asyncio.run(points.decide_and_send(periodic=True))
    # Each decision lowers another station, which rejects it: "E" keeps its 10 A for another period.
    assert sent == [("A", 6.0), ("B", 6.0), ("C", 6.0), ("D", 6.0), ("E", 10.0)]
    assert points.points["E"].profiles[0][1] > at.seconds + EVERY


def test_totals_count_before_phases_and_the_neutral_never():
    power = {"measurand": "Power.Active.Import", "unit": "kW"}
    phases = [{"value": "3.7", **power, "phase": f"L{n}"} for n in (1, 2, 3)]
    assert read_samples(phases, 230.0, (1, 2, 3)).kw == pytest.approx(11.1)
    both = [*phases, {"value": "11", **power}]
    assert read_samples(both, 230.0, (1, 2, 3)).kw == pytest.approx(11)
    amperes = [
        {"value": a, "measurand": "Current.Import", "phase": phase}
        for phase, a in (("L1", "16"), ("L2", "0.1"), ("L3", "0"), ("N", "16"))
    ]
    found = read_samples(amperes, 230.0, (2, 3, 1))
    assert (found.kw, found.currents_a) == (pytest.approx(3.703), (0.0, 16.0, 0.1))
    for multiplier in (3e8, -10, "3", None, float("nan")):
        scaled = [{"value": 2.0, "unit_of_measure": {"unit": "Wh", "multiplier": multiplier}}]
        assert read_samples(scaled, 230.0, (1,))[:2] == (None, None)
    scaled[0]["unit_of_measure"]["multiplier"] = 3
    assert read_samples(scaled, 230.0, (1,)).wh == 2000.0
    for value in ("nan", "-1", None, "1e99", 10**400):
        assert read_samples([{"value": value}], 230.0, (1,)).bad is not None
    assert read_samples("x", 230.0, (1,)) == (None, None, None, None)


def test_a_register_that_jumps_is_set_aside_and_one_that_was_replaced_is_followed():
    meter = Meter(11.0, 1000.0, 1000.0, read_at=0.0)

    def take(wh, minute):
        return meter.take(read_samples([{"value": wh}], 230.0, (1, 2, 3)), 60.0 * minute, True)

    assert take(1800.0, 5) is None
    assert "1800 to 61800" in take(61800.0, 10)
    assert take(2500.0, 15) is None
    assert meter.delivered_kwh() == 1.5
    assert meter.drawn_kw() == pytest.approx(4.2)
    assert take(0.0, 20) is not None
    assert take(800.0, 25) is None
    assert meter.delivered_kwh() == pytest.approx(2.3)


def test_a_car_on_one_phase_reserves_that_phase_alone():
    site = replace(SITE, feeder_a=32.0, branches={"all": Branch(32.0, ("A", "B", "C"))})
    site = replace(site, stations=SITE.stations | {"D": Station(32.0, (3,))})
    assert Site.of(tomllib.loads(site.to_toml())) == site
    asked = Controller(Pooled(CHANNELS, 4, key=jax.random.key(0)), ABOUT, site, trust=0.0)
    cars = [{"id": name, "plugged": True, "arrival": "2026-03-02 08:00"} for name in "ABCD"]
    cars[0]["currents_a"] = [0.1, 15.9, 0.0]
    cars[0]["fixed_a"] = 16
    second = asked.allocate({"time": "2026-03-02 09:01", "stations": cars})
    wiring = site.wiring({"A": 2})
    amperes = np.array([second.allocation_a[name] for name in site.stations])
    assert (wiring.load @ amperes <= wiring.limit + 1e-6).all()
    assert second.allocation_a["D"] == 32
    cars[0]["currents_a"] = [9.0, 9.0, 9.0]
    third = asked.allocate({"time": "2026-03-02 09:02", "stations": cars})
    assert third.allocation_a["D"] <= 16


def test_a_change_at_the_moment_of_the_end_does_not_keep_it_running():
    async def story():
        points = make_points()
        task = asyncio.create_task(points.run())
        await until(lambda: points.asked)
        await asyncio.sleep(0.3)
        points.changed.set()
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=60)
        return bool(done)

    assert asyncio.run(story())


def test_a_state_has_one_server_and_signals_under_traffic_end_it(run, tmp_path):
    state, site = tmp_path / "state.json", tmp_path / "site.toml"
    site.write_text(SITE.to_toml())
    options = ("--site", site, "--state", state, "--ocpp", "0", "--ocpp-open", "--every", "1")

    async def traffic(port):
        client = ChargePoint("A", SITE.stations["A"], time.time)
        await client.connect(port)
        await client.boot()
        await client.plug()
        for _ in range(random.randrange(20)):
            await client.meter()
        return client

    with serving(run, *options) as found:
        assert_refused(command("serve", run, "--port", 0, *options), "another server uses it")
        asyncio.run(traffic(found["ports"][1]))
    # `serving` ends the server by SIGTERM and waits for it.
    assert "Traceback" not in found["said"]
    assert json.loads(state.with_suffix(".ocpp.json").read_text())["points"]["A"]["car"]
