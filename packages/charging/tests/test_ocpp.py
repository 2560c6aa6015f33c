"""Charge points of both versions over loopback, well and ill behaved: the feeder holds."""

import asyncio
import json
import math
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import jax
import numpy as np
import pytest

pytest.importorskip("ocpp")
from ocpp.routing import on
from ocpp.v16 import ChargePoint as Client16
from ocpp.v16 import call as call16
from ocpp.v16 import call_result as result16
from ocpp.v201 import ChargePoint as Client201
from ocpp.v201 import call as call201
from ocpp.v201 import call_result as result201
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from apportion.errors import InputError
from apportion.policy import Pooled
from apportion_charging.controller import Controller
from apportion_charging.ocpp import _VALID_PERIODS, ChargePoints, _Point, _Transaction
from apportion_charging.ocpp_versions import stamp
from apportion_charging.problem import CHANNELS
from apportion_charging.site import Branch, Site, Station

EVERY = 1.6
"""Seconds of a period: a charge point's profile ends after four of them."""
NAMES = [f"P{i:02d}" for i in range(30)]
SITE = Site(
    {
        name: Station(32.0) if i % 3 == 0 else Station(16.0, (i % 3 + i // 15,))
        for i, name in enumerate(NAMES)
    },
    feeder_a=90.0,
    branches={"north": Branch(48.0, tuple(NAMES[:10]))},
    timezone="Europe/Berlin",
    period_minutes=5,
)
REJECTS, SILENT = ("P01", "P17"), ("P02", "P16")
BABBLES = {"P05": ("NaN", "-5", "much", "1"), "P20": (-5.0, 1.0)}
"""One of each kind of trouble in both versions; of a meter, what it says that cannot be."""
WIRING = SITE.wiring()


ABOUT = {
    "job": "charging",
    "predictor": {
        "need": [2.0] + [0.0] * 8,
        "stay": [2.0] + [0.0] * 8,
        "medians": [9.0, 8.0],
        "to_come_kwh": [0.0] * 96,
    },
}


class Ledger:
    """What may flow at every station by what its charge point took over, held against the limits."""

    def __init__(self):
        self.clients = {}
        self.told, self.above = [], []
        self.most = np.zeros(len(WIRING.limit))

    def check(self):
        flow = [self.clients[n].flow() if n in self.clients else 0.0 for n in NAMES]
        used = WIRING.load @ np.array(flow)
        self.most = np.maximum(self.most, used)
        if (used > WIRING.limit + 1e-6).any():
            self.above.append(dict(zip(WIRING.names, used, strict=True)))

    def is_full(self, connected):
        """Whether nobody who is connected and waits could have the least that charges."""
        flow = [self.clients[name].flow() for name in NAMES]
        left = WIRING.limit - WIRING.load @ np.array(flow)
        there = [name in connected and self.clients[name].transaction for name in NAMES]
        waits = [n for n in range(len(NAMES)) if there[n] and not flow[n]]
        return all((left < 6 * WIRING.load[:, n]).any() for n in waits)


class Garage:
    """What both versions of a charge point have in common: a connector, a car and a meter."""

    ledger: Ledger
    every = EVERY
    default: float | None = None
    limit: float | None = None
    until = 0.0
    transaction = None
    wh = 100.0

    def flow(self) -> float:
        """Amperes that a car would take here."""
        if self.transaction is None:
            return 0.0
        if self.limit is not None and time.time() < self.until:
            return self.limit
        return SITE.stations[self.id].max_a if self.default is None else self.default

    def take(self, profile, schedule) -> str:
        (period,) = schedule["charging_schedule_period"]
        station = SITE.stations[self.id]
        assert schedule["charging_rate_unit"] == "A"
        assert period["number_phases"] == len(station.phases)
        amperes = float(period["limit"])
        assert amperes == int(amperes)
        assert amperes == 0 or station.min_a <= amperes <= station.max_a
        self.ledger.told.append((self.id, profile["charging_profile_purpose"], amperes))
        if self.id in REJECTS:
            return "Rejected"
        if profile["charging_profile_purpose"] == "TxDefaultProfile":
            self.default = amperes
        else:
            if str(profile["transaction_id"]) != str(self.transaction):
                return "Rejected"
            # It ends when its schedule says, however late it came; the clock is half a period off.
            begun = datetime.fromisoformat(schedule["start_schedule"])
            assert schedule["duration"] == math.ceil((_VALID_PERIODS + 1) * self.every)
            left = schedule["duration"] - (datetime.now(UTC) - begun).total_seconds()
            self.limit, self.until = amperes, time.time() + left + self.every / 2
        self.ledger.check()
        return "Accepted"

    async def route_message(self, raw):
        if self.id in SILENT and "SetChargingProfile" in raw:
            return
        await super().route_message(raw)


class Point16(Garage, Client16):
    @on("SetChargingProfile")
    def on_profile(self, connector_id, cs_charging_profiles):
        profile = cs_charging_profiles
        return result16.SetChargingProfile(self.take(profile, profile["charging_schedule"]))

    async def boot(self):
        answer = await self.call(call16.BootNotification("model", "maker"))
        assert answer.status == "Accepted"
        await self.call(call16.StatusNotification(1, "NoError", "Preparing"))
        await self.call(call16.Authorize("tag"))

    async def plug(self):
        # It counts from when the charge point decides, not from when it hears.
        answer = await self.call(call16.StartTransaction(1, "tag", int(self.wh), now()))
        self.transaction = answer.transaction_id

    async def meter(self, value=None):
        value = f"{self.wh:.1f}" if value is None else value
        sampled = [{"value": value, "measurand": "Energy.Active.Import.Register", "unit": "Wh"}]
        values = [{"timestamp": now(), "sampledValue": sampled}]
        await self.call(call16.MeterValues(1, values, self.transaction))

    async def leave(self):
        number, self.transaction = self.transaction, None
        await self.call(call16.StopTransaction(int(self.wh), now(), number))
        await self.call(call16.StatusNotification(1, "NoError", "Available"))


class Point201(Garage, Client201):
    @on("SetChargingProfile")
    def on_profile(self, evse_id, charging_profile):
        (schedule,) = charging_profile["charging_schedule"]
        return result201.SetChargingProfile(self.take(charging_profile, schedule))

    async def boot(self):
        station = {"model": "model", "vendorName": "maker"}
        answer = await self.call(call201.BootNotification(station, "PowerUp"))
        assert answer.status == "Accepted"
        await self.call(call201.StatusNotification(now(), "Occupied", 1, 1))
        await self.call(call201.Heartbeat())

    async def _event(self, kind, reason, value=None):
        value, stamp = self.wh if value is None else value, now()
        sampled = [
            {"value": value, "unitOfMeasure": {"unit": "Wh"}},
            {"value": 0.0, "measurand": "SoC", "location": "EV"},
        ]
        await self.call(
            call201.TransactionEvent(
                kind,
                stamp,
                reason,
                0,
                {"transactionId": self.transaction, "chargingState": "Charging"},
                meter_value=[{"timestamp": stamp, "sampledValue": sampled}],
                evse={"id": 1, "connectorId": 1},
            )
        )

    async def plug(self):
        self.transaction = f"t-{self.id}-{now()}"[:36]
        await self._event("Started", "CablePluggedIn")

    async def meter(self, value=None):
        await self._event("Updated", "MeterValuePeriodic", value)

    async def leave(self):
        await self._event("Ended", "EVDeparted")
        self.transaction = None


def now():
    return stamp(datetime.now(UTC))


def version(name):
    return (Point16, "ocpp1.6") if int(name[1:]) < 15 else (Point201, "ocpp2.0.1")


async def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to what was waited for"
        await asyncio.sleep(0.02)


class Town:
    """A server and its clients in one loop."""

    def __init__(self, controller, path=None):
        self.ledger, self.running = Ledger(), {}
        self.points = ChargePoints(
            SITE, controller.allocate, controller.limits, every=EVERY, path=path
        )

    async def __aenter__(self):
        self.server = await self.points.listen(host="127.0.0.1", port=0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.deciding = asyncio.create_task(self.points.run())
        return self

    async def __aexit__(self, *_):
        self.deciding.cancel()
        for name in list(self.running):
            await self.drop(name)
        self.server.close()
        await self.server.wait_closed()

    async def connect(self, name):
        """A client, or the same again after its connection was lost."""
        kind, protocol = version(name)
        socket = await connect(
            f"ws://127.0.0.1:{self.port}/ocpp/{name}", subprotocols=[protocol], ping_interval=None
        )
        client = kind(name, socket, 5)
        client.ledger = self.ledger
        if (before := self.ledger.clients.get(name)) is not None:
            kept = ("default", "limit", "until", "transaction", "wh")
            vars(client).update({k: vars(before)[k] for k in kept if k in vars(before)})
        self.ledger.clients[name] = client
        self.running[name] = (socket, asyncio.create_task(client.start()))
        return client

    async def drop(self, name):
        socket, task = self.running.pop(name)
        await socket.close()
        await asyncio.gather(task, return_exceptions=True)


async def everything(controller, path):
    async with Town(controller, path) as town:
        points, ledger = town.points, town.ledger
        # Those who listen to nobody are there first: all of their cables is kept for them.
        obstinate = (*REJECTS, *SILENT)
        for name in obstinate:
            client = await town.connect(name)
            await client.boot()
            await client.plug()
        await until(lambda: {(name, "default") for name in obstinate} <= points.troubles.keys())
        assert all(points.points[name].bound_a() == 16.0 for name in obstinate)
        others = [name for name in NAMES if name not in obstinate]
        clients = dict(zip(others, await asyncio.gather(*map(town.connect, others)), strict=True))
        await asyncio.gather(*(client.boot() for client in clients.values()))
        await until(lambda: all(client.default == 0.0 for client in clients.values()))
        await until(lambda: all(points.points[name].has_default for name in others))
        cars = others[:24]
        await asyncio.gather(*(clients[name].plug() for name in cars))
        metering = asyncio.create_task(meters(town, cars))
        await until(lambda: sum(client.flow() > 0 for client in clients.values()) >= 8)
        await asyncio.sleep(2 * EVERY)
        ledger.check()
        await until(lambda: ledger.is_full(town.running))

        # Strangers.
        with pytest.raises(InvalidStatus, match="404"):
            await connect(f"ws://127.0.0.1:{town.port}/ocpp/P99", subprotocols=["ocpp1.6"])
        async with connect(f"ws://127.0.0.1:{town.port}/ocpp/P29") as stranger:
            with pytest.raises(ConnectionClosed):
                await stranger.recv()

        # A meter that babbles, and what is no OCPP at all.
        for name, values in BABBLES.items():
            for value in values:
                await clients[name].meter(value)
                assert (name, "meter") in points.troubles
            for raw in ("{", "[]", '[2, "x", "Nonsense", {}]', '[2, "y", "Heartbeat", {"a": 1}]'):
                await town.running[name][0].send(raw)
            await clients[name].meter()
            assert (name, "meter") not in points.troubles

        # Lost connections: what they took counts until it is over, and they are told again.
        charging = [name for name in cars if clients[name].flow() > 0 and name not in BABBLES]
        first, second = charging[0], charging[-1]
        assert version(first) != version(second)
        for name in (first, second):
            await town.drop(name)
            took = clients[name].limit
            await until(lambda name=name: points.points[name].link is None)
            assert points.points[name].bound_a() >= took
        await asyncio.sleep(1.5 * EVERY)
        ledger.check()
        again = await town.connect(first)
        told = len(ledger.told)
        await again.meter()
        assert points.points[first].car.number == str(again.transaction)
        await until(lambda: any(name == first for name, *_ in ledger.told[told:]))
        # Without its server a charge point falls back to nothing, and then nothing counts.
        await until(lambda: points.points[second].bound_a() == 0.0)
        assert ledger.clients[second].flow() == 0.0

        # Who leaves makes room.
        metering.cancel()
        leaving = [name for name in charging[1:-1] if name in town.running][:6]
        for name in leaving:
            await clients[name].leave()
        assert not any(points.points[name].car for name in leaving)
        await until(lambda: ledger.is_full(town.running))
        ledger.check()
        return points, ledger


async def meters(town, names):
    """Cars draw what they may."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(EVERY / 3)
        hours, last = (time.monotonic() - last) / 3600, time.monotonic()
        for place, name in enumerate(NAMES):
            client = town.ledger.clients[name]
            client.wh += client.flow() * WIRING.kw_per_a[place] * 1000 * hours
        there = [town.ledger.clients[name] for name in names if name in town.running]
        calls = (client.meter() for client in there)
        await asyncio.gather(*calls, return_exceptions=True)


def test_thirty_charge_points_of_both_versions_never_take_more_than_the_feeder(tmp_path):
    controller = Controller(Pooled(CHANNELS, 4, key=jax.random.key(0)), ABOUT, SITE)
    path = tmp_path / "points.json"
    points, ledger = asyncio.run(everything(controller, path))
    assert ledger.above == []
    # And that is no wonder of an empty feeder: the second phase is full. The first has five cars of 16 A,
    # and those of three phases wait for the second.
    assert (ledger.most[1:3] > [75.0, 85.0]).all()
    purposes = {purpose for _, purpose, _ in ledger.told}
    assert purposes == {"TxDefaultProfile", "TxProfile"}
    # Who starts anew knows the transactions, and what counts.
    again = ChargePoints(SITE, controller.allocate, controller.limits, every=EVERY, path=path)
    for name, point in again.points.items():
        assert point.bound_a() <= SITE.stations[name].max_a
        assert (point.car and point.car.number) == (
            points.points[name].car and points.points[name].car.number
        )
    path.write_text(json.dumps({"points": {"P00": {}}}))
    with pytest.raises(InputError, match="remove it"):
        ChargePoints(SITE, controller.allocate, controller.limits, every=EVERY, path=path)


def test_an_offer_without_an_answer_counts_as_both_what_was_and_what_was_told():
    point = _Point("A", Station(32.0), heard=True)
    assert point.bound_a() == 32.0
    point.has_default = True
    point.link = SimpleNamespace(ready=True)
    assert point.bound_a() == 0.0
    now = time.time()
    point.begin(_Transaction("1", datetime.now(UTC)))
    point.profiles = [(20.0, now + 9), (6.0, now + 99)]
    assert point.bound_a() == 20.0
    point.profiles = [(20.0, now - 1), (6.0, now + 99)]
    assert point.bound_a() == 6.0
    point.profiles = [(20.0, now - 1)]
    assert point.bound_a() == 0.0
