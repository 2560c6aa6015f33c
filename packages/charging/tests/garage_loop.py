"""Simulate a garage of charge points and cars against the real server process, minute by minute.

The server reads its time from a file that the simulation writes, so a minute ends when all its
events are done. In `Loop`, charge points use OCPP 1.6 or 2.0.1 over WebSockets, and drivers and an
energy manager use HTTP. In `HttpLoop`, a back end posts the garage's state in each period, without
OCPP. The seed determines the faults: restarts, kills, lost states, changed site files, lost
connections, charge points that reject or do not answer, wrong meter values, changed limits, a
silent energy manager. After each minute, the currents in force are compared with every limit.

    python packages/charging/tests/garage_loop.py --seconds 3600 --days 2 --out docs/results/garage_loop
    python packages/charging/tests/garage_loop.py --signals 100 --out docs/results/garage_loop
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import struct
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

import jax
import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from apportion.policy import Pooled
from apportion.runs.folder import Run
from apportion.runs.runner import JobResult, finish
from apportion_charging.problem import CHANNELS
from apportion_charging.settings import ChargingSettings
from apportion_charging.site import Branch, Site, Station

START = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
PERIOD = 5
"""Minutes between two decisions."""
VALID = 4 * PERIOD
SITE = Site(
    {
        "A": Station(32.0),
        "B": Station(16.0, (2, 3, 1)),
        "C": Station(16.0, (1,)),
        "D": Station(16.0, (3,)),
        "E": Station(32.0, (3, 1, 2)),
        "F": Station(16.0),
    },
    feeder_a=40.0,
    branches={"back": Branch(25.0, ("D", "E", "F"), safe_a=16.0)},
    timezone="UTC",
    period_minutes=PERIOD,
    capacity_ttl_s=7200.0,
    safe_a=32.0,
    safe_kw=20.0,
)
STATIONS = {**SITE.stations, "G": Station(16.0, (2,))}
"""All stations, including the one that a changed site file adds."""
SAFE = {"feeder": 20.0} | dict.fromkeys(("feeder L1", "feeder L2", "feeder L3"), 32.0)
SAFE |= dict.fromkeys(("back L1", "back L2", "back L3"), 16.0)
LIVE = (
    {"feeder L1": {"a": 18}},
    {"feeder": {"a": 26}, "back L3": {"a": 10}},
    {"feeder": {"a": 38}, "back": {"a": 22}},
    {"back": {"kw": 7.0}},
)
"""Limits that the energy manager sends; the feeder's power is limited by `capacity_kw`."""
SERVER = """
import struct, sys
from apportion_charging import clock, ocpp
ocpp._POLL_SECONDS, ocpp._REPLY_SECONDS, path = 0.01, 2.0, sys.argv.pop(1)
clock.now = lambda: struct.unpack("d", open(path, "rb").read())[0]
from apportion.cli import main
main()
"""
TOKEN = "of the loop"


ABOUT = {
    "job": "charging",
    "predictor": {
        "need": [2.0] + [0.0] * 8,
        "stay": [2.0] + [0.0] * 8,
        "medians": [9.0, 8.0],
        "to_come_kwh": [0.0] * 96,
    },
}


def make_run(folder):
    """Save a finished run of an untrained policy; return its folder."""
    policy = Pooled(CHANNELS, 4, key=jax.random.key(0))
    run = Run.create(
        Path(folder) / "run", "charging", ChargingSettings(), {"data": {}, "versions": {}}
    )
    finish(run, JobResult(policy, {}, "", ABOUT))
    return run.folder


@dataclass
class Car:
    """A stay: arrival and departure in minutes, need, largest current and number of phases."""

    station: str
    comes: int
    leaves: int
    need_kwh: float
    car_a: float
    single: bool
    states: str
    """When its driver states the need: before, after or never."""
    got_kwh: float = 0.0


def draw_cars(days, rng):
    """Draw cars that follow one another at each station."""
    cars = []
    for name in STATIONS:
        minute = int(rng.integers(0, 300))
        while minute < days * 1440 - 60:
            stay = int(rng.integers(60, 480))
            need, car_a = rng.uniform(3, 35), rng.choice([10.0, 16.0, 32.0])
            said = str(rng.choice(["before", "after", "never"]))
            cars.append(Car(name, minute, minute + stay, need, car_a, rng.random() < 0.3, said))
            minute += stay + int(rng.integers(5, 400))
    return cars


async def until(condition, seconds=120.0):
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


class ChargePoint:
    """A charge point with one connector; it keeps its profiles while it is disconnected."""

    def __init__(self, name, station, clock, version="1.6"):
        self.name, self.station, self.clock, self.version = name, station, clock, version
        self.link, self.reading, self.waiting, self.number = None, None, {}, 0
        self.default, self.profile, self.transaction = None, None, None
        self.wh, self.heard, self.answers = 1000.0, -1e9, "Accepted"

    def stamp(self):
        return datetime.fromtimestamp(self.clock(), UTC).isoformat().replace("+00:00", "Z")

    def in_force(self):
        """Return the amperes that a car may draw."""
        if self.transaction is None:
            return 0.0
        if self.profile is not None and self.clock() < self.profile[1]:
            return self.profile[0]
        return self.station.max_a if self.default is None else self.default

    async def connect(self, port):
        options = {"subprotocols": [f"ocpp{self.version}"], "ping_interval": None}
        options["open_timeout"] = 120
        self.use(await connect(f"ws://127.0.0.1:{port}/ocpp/{self.name}", **options))

    def use(self, link):
        """Use an open connection."""
        self.link = link
        self.reading = asyncio.create_task(self._read(link))

    async def drop(self):
        if self.link is not None:
            link, self.link = self.link, None
            await link.close()
            await self.reading

    async def _read(self, link):
        with contextlib.suppress(ConnectionClosed):
            async for raw in link:
                kind, number, *rest = json.loads(raw)
                if kind == 2:
                    status = self._take(*rest)
                    if status is not None:
                        await link.send(json.dumps([3, number, {"status": status}]))
                elif number in self.waiting:
                    self.waiting.pop(number).set_result(rest[-1])
        for waiting in self.waiting.values():
            waiting.cancel()
        self.waiting = {}
        if self.link is link:
            self.link = None

    async def call(self, action, **payload):
        """Send a message and return the answer; None if the connection is lost."""
        if self.link is None:
            return None
        self.number += 1
        answer = self.waiting[str(self.number)] = asyncio.get_running_loop().create_future()
        try:
            await self.link.send(json.dumps([2, str(self.number), action, payload]))
            return await asyncio.wait_for(answer, 120)
        except (ConnectionClosed, asyncio.CancelledError):
            return None

    def _take(self, action, payload):
        assert action == "SetChargingProfile", action
        profile = payload.get("csChargingProfiles") or payload["chargingProfile"]
        schedule = profile["chargingSchedule"]
        schedule = schedule[0] if isinstance(schedule, list) else schedule
        (period,) = schedule["chargingSchedulePeriod"]
        amperes = float(period["limit"])
        assert amperes == 0 or self.station.min_a <= amperes <= self.station.max_a
        if self.answers != "Accepted":
            return None if self.answers == "silent" else "Rejected"
        if profile["chargingProfilePurpose"] == "TxDefaultProfile":
            self.default = amperes
            return "Accepted"
        given = profile.get("transactionId")
        if self.transaction is None or given not in (None, self.transaction):
            return "Rejected"
        begins = datetime.fromisoformat(schedule["startSchedule"]).timestamp()
        self.profile, self.heard = (amperes, begins + schedule["duration"]), self.clock()
        return "Accepted"

    async def boot(self):
        if self.version == "1.6":
            await self.call("BootNotification", chargePointModel="m", chargePointVendor="v")
            await self._status("Available" if self.transaction is None else "Charging")
        else:
            station = {"model": "m", "vendorName": "v"}
            await self.call("BootNotification", reason="PowerUp", chargingStation=station)
            await self._status("Available" if self.transaction is None else "Occupied")

    async def _status(self, status):
        if self.version == "1.6":
            await self.call("StatusNotification", connectorId=1, errorCode="NoError", status=status)
        else:
            said = {"evseId": 1, "connectorId": 1, "connectorStatus": status}
            await self.call("StatusNotification", timestamp=self.stamp(), **said)

    async def _event(self, kind, samples=()):
        values = [{"timestamp": self.stamp(), "sampledValue": list(samples)}] if samples else None
        await self.call(
            "TransactionEvent",
            eventType=kind,
            timestamp=self.stamp(),
            triggerReason="MeterValuePeriodic",
            seqNo=0,
            transactionInfo={"transactionId": self.transaction},
            evse={"id": 1},
            **({"meterValue": values} if values else {}),
        )

    async def plug(self):
        """Begin a transaction; an OCPP 1.6 charge point needs a connection for that."""
        self.profile = None
        if self.version == "1.6":
            answer = await self.call(
                "StartTransaction",
                connectorId=1, idTag="t", meterStart=int(self.wh), timestamp=self.stamp(),
            )  # fmt: skip
            self.transaction = None if answer is None else answer["transactionId"]
        else:
            self.transaction = f"{self.name}-{self.clock():.0f}"
            await self._event("Started")

    async def meter(self, currents=None, glitch=None):
        """Send the register and the currents of the station's phases."""
        energy = "Energy.Active.Import.Register"
        samples = [(f"{self.wh if glitch is None else glitch:.1f}", energy, None, "Wh")]
        if currents is not None:
            names = ["L1", "L2", "L3", "N"]
            samples += [
                (f"{a:.2f}", "Current.Import", name, "A")
                for name, a in zip(names, [*currents, 9.0], strict=False)
            ]
        if self.version == "1.6":
            sampled = [
                {"value": value, "measurand": what, "unit": unit} | ({"phase": p} if p else {})
                for value, what, p, unit in samples
            ]
            value = [{"timestamp": self.stamp(), "sampledValue": sampled}]
            own = {"transactionId": self.transaction}
            await self.call("MeterValues", connectorId=1, meterValue=value, **own)
        else:
            sampled = [
                {"value": float(value), "measurand": what, "unitOfMeasure": {"unit": unit}}
                | ({"phase": p} if p else {})
                for value, what, p, unit in samples
            ]
            await self._event("Updated", sampled)

    async def leave(self):
        if self.version == "1.6":
            number = self.transaction
            stop = {"meterStop": int(self.wh), "timestamp": self.stamp(), "transactionId": number}
            await self.call("StopTransaction", **stop)
        else:
            await self._event("Ended")
        self.transaction = self.profile = None
        await self._status("Available")


class Loop:
    """A garage, its server and its faults."""

    kind, options, ready = ChargePoint, "--ocpp 0 --ocpp-open", b"charge points connect"
    station_faults = ("disconnect", "Rejected", "silent", "reconnect")

    def __init__(self, run, folder, seed, days, *, faults=True):
        self.run, self.folder, self.days, self.faults = run, Path(folder), days, faults
        self.rng = np.random.default_rng(seed + 10**6)
        self.site, self.minute, self.counts = SITE, 0, Counter()
        self.cars = draw_cars(days, np.random.default_rng(seed))
        self.here: dict[str, Car] = {}
        versions = np.random.default_rng(seed).choice(["1.6", "2.0.1"], 9)
        self.points = {
            name: self.kind(name, station, self.now, str(version))
            for (name, station), version in zip(STATIONS.items(), versions, strict=False)
        }
        self.back: dict[str, int] = {}
        """Minute in which a fault ends, by station or for the server."""
        self.live: dict[str, tuple[float, float, bool]] = {}
        """Live limits by name: value, end, and whether the safe value then can only lower it."""
        self.wanted_kw, self.beat, self.before, self.excused = None, None, None, None
        self.process, self.ports, self.errors, self.seed = None, None, [], seed
        self.log = deque(maxlen=40)
        """Latest faults and lines of the server's log, with their minutes."""
        self.unanswered: Counter[str] = Counter()
        """Minutes since a car's last answer in which its charge point could receive one."""
        (self.folder / "clock").write_bytes(struct.pack("d", self.now()))

    def now(self):
        return START + 60.0 * self.minute

    # The server.

    async def start(self):
        """Start the server and connect all charge points that can."""
        (self.folder / "site.toml").write_text(self.site.to_toml())
        options = (
            f"serve {self.run} --site {self.folder}/site.toml --state {self.folder}/state.json --port 0 "
            f"{self.options}"
        )
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVER, f"{self.folder}/clock", *options.split()),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env=os.environ | {"APPORTION_TOKEN": TOKEN},
        )
        said = b""
        while self.ready not in said:
            line = await asyncio.wait_for(self.process.stderr.readline(), 120)
            assert line, said.decode()
            said += line
        self.ports = [int(x) for x in re.findall(r"127.0.0.1:(\d+)", said.decode())]
        self.listening = asyncio.create_task(self._listen(self.process))
        for name in self.site.stations:
            if name not in self.back:
                await self.connect(name)

    async def _listen(self, process):
        """Keep the lines that the server logs, and errors separately."""
        async for line in process.stderr:
            self.log.append((self.minute, line.decode().strip()))
            if b"Traceback" in line or b"a decision failed" in line:
                self.errors.append(line.decode())

    async def stop(self, how=signal.SIGTERM):
        process, self.process = self.process, None
        begun = time.monotonic()
        process.send_signal(how)
        await asyncio.wait_for(process.wait(), 120)
        if how == signal.SIGTERM:
            self.counts["SIGTERM"] += 1
            self.counts["SIGTERM within 5 s"] += time.monotonic() - begun < 5
            assert process.returncode == 0, process.returncode
        await self.listening
        for point in self.points.values():
            await point.drop()

    async def connect(self, name):
        point = self.points[name]
        await point.connect(self.ports[-1])
        await point.boot()

    async def ask(self, path, body=None):
        """Return status and answer of a request to the server."""

        def call():
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            data = None if body is None else json.dumps(body).encode()
            try:
                request = Request(f"http://127.0.0.1:{self.ports[0]}{path}", data, headers)
                with urlopen(request, timeout=120) as found:
                    return found.status, json.load(found)
            except OSError as error:
                return getattr(error, "code", 0), {}

        return await asyncio.to_thread(call)

    # A minute.

    async def live_through(self):
        """Simulate all days; return the share of the need that was served."""
        try:
            await self.start()
            while self.minute < self.days * 1440:
                await self.step()
        finally:
            if self.process is not None:
                await self.stop()
        assert not self.errors, self.errors[:3]
        need = sum(car.need_kwh for car in self.cars)
        return sum(car.got_kwh for car in self.cars) / need

    async def step(self):
        self.minute += 1
        (self.folder / "clock.part").write_bytes(struct.pack("d", self.now()))
        os.replace(self.folder / "clock.part", self.folder / "clock")
        changed = await self.move_cars()
        changed |= await self.change_limits()
        changed |= await self.change_site()
        if self.faults:
            changed |= await self.disturb()
        if self.process is not None:
            await self.decide(changed)
        self.count_answers()
        self.draw_power()
        self.check()

    async def decide(self, changed):
        """Let the server decide: in each period, after a change, and when a limit has expired."""
        if self.minute % PERIOD == 0:
            await self.send_meters()
            await self.await_profiles()
        elif changed:
            status, _ = await self.ask("/allocate", {"stations": []})
            assert status == 200, status
        end = time.monotonic() + 120
        while self.find_excess() and time.monotonic() < end:
            await asyncio.sleep(0.005)

    async def move_cars(self):
        changed = False
        for car in [car for car in self.here.values() if car.leaves <= self.minute]:
            del self.here[car.station]
            await self.points[car.station].leave()
            changed = True
        for car in self.cars:
            point = self.points[car.station]
            up = self.process is not None and car.station in self.site.stations
            if up and self.minute == car.comes + {"before": -2, "after": 3}.get(car.states, -1e9):
                await self.state_need(car)
            # A car begins to charge once its charge point can report it.
            waits = car.comes <= self.minute < car.leaves and car.station not in self.here
            if waits and point.link is not None:
                self.here[car.station] = car
                await point.plug()
                if point.transaction is None:
                    del self.here[car.station]
                changed = True
        return changed

    async def state_need(self, car):
        need = {"id": car.station, "requested_kwh": round(car.need_kwh, 1)}
        await self.ask("/allocate", {"stations": [need]})

    async def change_limits(self):
        """Act as the energy manager and its heartbeat, the same with and without faults."""
        rng = np.random.default_rng([self.seed, self.minute])
        if self.minute % 60 == 7 and rng.random() < 0.2:
            self.wanted_kw = float(rng.choice([5.0, 12.0, 18.0, 27.0, 99.0]))
        if self.minute % 60 == 31 and rng.random() < 0.5:
            # The limits are sent again every 5 minutes until the energy manager stops.
            body = {"limits": LIVE[rng.integers(len(LIVE))], "ttl_s": 60.0 * rng.integers(7, 30)}
            self.beat = (body, self.minute + int(rng.integers(0, 120)))
        if self.process is None:
            return False
        changed = False
        if self.wanted_kw is not None:
            for bad in ("5.0", -1, {}, None) if self.faults else ():
                assert (await self.ask("/allocate", {"capacity_kw": bad}))[0] == 400
            body = {"capacity_kw": self.wanted_kw, "stations": []}
            assert (await self.ask("/allocate", body))[0] == 200
            self.counts["capacity_kw"] += 1
            end = self.minute + SITE.capacity_ttl_s / 60
            self.live["feeder"], self.wanted_kw = (self.wanted_kw, end, True), None
            changed = True
        if self.beat is not None and self.minute % 5 == 1:
            body, last = self.beat
            assert (await self.ask("/limits", body))[0] == 200
            self.counts["live limits"] += 1
            end = self.minute + body["ttl_s"] / 60
            for name, given in body["limits"].items():
                self.live |= {row: (a, end, False) for row, a in in_rows(name, given)}
            if self.minute >= last:
                self.counts["heartbeats lost"] += 1
                self.beat = None
            changed = True
        return changed

    def limits(self, own):
        """Return the limits in force, given the site's own limits by name."""
        found = {}
        for name, limit in own.items():
            value, end, falls = self.live.get(name, (np.inf, -1.0, False))
            if self.minute >= end:
                value = min(value, SAFE[name]) if falls else SAFE[name]
            found[name] = min(limit, value)
        phases = sum(found[f"feeder L{phase}"] for phase in (1, 2, 3))
        found["feeder"] = min(found["feeder"], phases * SITE.volts / 1000)
        return np.array([*found.values()])

    async def change_site(self):
        """Add or remove the last station, and change a limit, with and without faults."""
        rng = np.random.default_rng([self.minute, 1])
        if self.process is None or self.minute % 240 != 11 or rng.random() > 0.3:
            return False
        self.counts["site changes"] += 1
        await self.stop()
        adds = "G" not in self.site.stations
        self.counts["stations removed with a car"] += not adds and "G" in self.here
        feeder = float(rng.choice([32.0, 40.0]))
        self.site = replace(SITE, stations=STATIONS if adds else SITE.stations, feeder_a=feeder)
        await self.start()
        return True

    async def disturb(self):
        """Draw the faults of this minute, and end old ones."""
        changed = False
        for name in [name for name, minute in self.back.items() if minute <= self.minute]:
            if name == "server":
                del self.back[name]
                await self.start()
            elif self.process is not None:
                del self.back[name]
                self.points[name].answers = "Accepted"
                if self.points[name].link is None and name in self.site.stations:
                    await self.connect(name)
            changed = True
        draw = self.rng.random()
        if self.process is not None and draw < 1 / 300:
            kind = str(self.rng.choice(["restart", "kill", "lost state"]))
            removed = self.points.keys() - self.site.stations.keys()
            if any(self.points[name].in_force() for name in removed):
                # The server cannot count a station that is in neither the site file nor the state.
                kind = "restart" if kind == "lost state" else kind
            self.count(kind, "server")
            await self.stop(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            if kind == "lost state":
                for path in (*self.folder.glob("state*.json"), *self.folder.glob("state.lock")):
                    if "limits" not in path.name:
                        path.unlink()
            self.back["server"] = self.minute + int(self.rng.integers(0, 8))
            if self.back["server"] == self.minute:
                del self.back["server"]
                await self.start()
        elif self.process is not None and draw < 1 / 300 + 1 / 60:
            name = str(self.rng.choice([*self.site.stations]))
            kind = str(self.rng.choice(self.station_faults))
            if name in self.back:
                return changed
            self.count(kind, name)
            self.back[name] = self.minute + int(self.rng.integers(1, 10))
            if kind in ("disconnect", "reconnect"):
                await self.points[name].drop()
            else:
                self.points[name].answers = kind
            if kind == "reconnect":
                del self.back[name]
                await self.connect(name)
            changed = True
        return changed

    def count(self, fault, where):
        self.counts[fault] += 1
        self.log.append((self.minute, f"{where}: {fault}"))

    async def send_meters(self):
        for name, car in self.here.items():
            point, glitch = self.points[name], None
            if point.link is None:
                continue
            if self.faults and self.rng.random() < 0.02:
                glitch = float(self.rng.choice([point.wh + 60000, 0.0, point.wh + 1e8]))
                self.counts["meter glitches"] += 1
            currents = self.currents(name, car) if len(point.station.phases) == 3 else None
            await point.meter(currents and list(currents), glitch)

    def currents(self, name, car):
        """Return the drawn currents on the station's own phases."""
        amperes = self.drawn_a(name, car)
        return (amperes, 0.0, 0.0) if car.single else (amperes,) * 3

    def drawn_a(self, name, car):
        left = car.got_kwh < car.need_kwh
        return min(self.points[name].in_force(), car.car_a) if left else 0.0

    def can_reach(self, name):
        point = self.points[name]
        up = self.process is not None and name in self.site.stations
        return up and point.link is not None and point.answers == "Accepted"

    async def await_profiles(self):
        """Wait until the server has sent this period's profiles."""

        def missing():
            return [
                name
                for name in self.here
                if self.can_reach(name) and self.points[name].heard <= self.now() - 60.0 * PERIOD
            ]

        end = time.monotonic() + 120
        while missing() and time.monotonic() < end:
            await asyncio.sleep(0.005)

    def count_answers(self):
        """Count the minutes without an answer; neither a restart nor a reconnection resets them."""
        for name in self.points:
            point = self.points[name]
            if name not in self.here or point.heard >= self.now():
                self.unanswered[name] = 0
            elif self.can_reach(name):
                self.unanswered[name] += 1
            longest = self.counts["longest without an answer, minutes"]
            self.counts["longest without an answer, minutes"] = max(longest, self.unanswered[name])
            assert self.unanswered[name] <= 2 * PERIOD, (self.minute, name, "no answer", self.log)

    def phases_of(self, name):
        """Return the site's phases that the car at a station may use."""
        phases, car = self.points[name].station.phases, self.here.get(name)
        return phases[:1] if car is not None and car.single else phases

    def draw_power(self):
        for name, car in self.here.items():
            kw = self.drawn_a(name, car) * len(self.phases_of(name)) * SITE.volts / 1000
            kwh = min(kw / 60, car.need_kwh - car.got_kwh)
            car.got_kwh += kwh
            self.points[name].wh += 1000 * kwh

    def compare_limits(self):
        """Return the load in force, its part that no decision can change now, and the limits."""
        site, names = replace(self.site, stations=STATIONS), list(self.points)
        single = {n: self.phases_of(n)[0] for n in names if len(self.phases_of(n)) == 1}
        wiring = site.wiring(single)
        limit = self.limits(dict(zip(wiring.names, wiring.limit.tolist(), strict=True)))
        force = np.array([point.in_force() for point in self.points.values()])
        fixed = force * [not self.can_reach(name) for name in names]
        return wiring.load @ force, wiring.load @ fixed, limit

    def excuse(self, held, limit):
        """Return the load that unreachable stations may keep after a limit has dropped below it."""
        if self.before is None:
            return np.zeros(len(limit))
        return np.where(limit < self.before - 1e-9, held, np.minimum(self.excused, held))

    def find_excess(self):
        used, held, limit = self.compare_limits()
        return (used > np.maximum(limit, self.excuse(held, limit)) + 1e-6).any()

    def check(self):
        """Compare the currents in force with all limits."""
        used, held, limit = self.compare_limits()
        above = self.find_excess()
        self.before, self.excused = limit, self.excuse(held, limit)
        self.counts["minutes"] += 1
        self.counts["minutes in which all limits held"] += bool((used <= limit + 1e-6).all())
        assert not above, {
            "minute": self.minute, "used": used.tolist(), "limit": limit.tolist(),
            "force": {name: point.in_force() for name, point in self.points.items()},
            "held": held.tolist(), "up": self.process is not None, "live": self.live,
            "log": self.log,
        }  # fmt: skip


def in_rows(name, given):
    """Yield the limits that a live limit sets, with their values in the limits' units."""
    for unit, value in given.items():
        if unit == "kw" and name == "feeder":
            yield name, value
        else:
            rows = [name] if " L" in name else [f"{name} L{phase}" for phase in (1, 2, 3)]
            each = value if unit == "a" else value * 1000 / SITE.volts / len(rows)
            yield from ((row, each) for row in rows)


class BackEndPoint(ChargePoint):
    """A charge point that another central system controls."""

    def __init__(self, *about):
        super().__init__(*about)
        self.default, self.may = 0.0, 0.0
        """`may` is the largest current of a profile without an answer."""

    async def connect(self, port):
        self.link = self

    async def drop(self):
        self.link = None

    async def boot(self):
        pass

    async def plug(self):
        self.profile, self.transaction, self.may = None, "open", 0.0

    async def leave(self):
        self.transaction = self.profile = None

    def take(self, amperes, applies):
        """Set a profile; return whether the station confirmed it."""
        assert amperes == 0 or self.station.min_a <= amperes <= self.station.max_a
        if self.answers == "silent":
            self.may = max(self.may, self.in_force(), amperes)
        if self.answers == "Accepted" or (self.answers == "silent" and applies):
            self.profile = (amperes, self.clock() + 60.0 * VALID)
        if self.answers == "Accepted":
            self.may, self.heard = 0.0, self.clock()
        return self.answers == "Accepted"


class HttpLoop(Loop):
    """A garage whose own back end posts its state in each period; it has no OCPP."""

    kind, options, ready = BackEndPoint, "", b"serving"
    station_faults = ("disconnect", "Rejected", "silent", "left out")

    def __init__(self, *about, **options):
        super().__init__(*about, **options)
        self.posted, self.got_then = 0.0, {}

    async def state_need(self, car):
        pass

    async def decide(self, changed):
        """Post the state, set decreases, and increases once all decreases are confirmed."""
        if self.minute % PERIOD and not changed:
            return
        failed = {name for name, point in self.points.items() if point.link is None}
        for _ in range(4):
            shown = [name for name in self.site.stations if self.points[name].answers != "left out"]
            body = {"stations": [self.describe(name, name in failed) for name in shown]}
            body["time"] = self.points["A"].stamp()
            status, answer = await self.ask("/allocate", body)
            assert status == 200, status
            wanted = {name: answer["allocation_a"][name] for name in shown if name not in failed}
            wanted = {name: a for name, a in wanted.items() if name in self.here}
            lower = [name for name, a in wanted.items() if a < self.points[name].in_force()]
            refused = {name for name in lower if not self.set(name, wanted[name])}
            if not refused:
                for name in wanted.keys() - set(lower):
                    self.set(name, wanted[name])
                break
            failed |= refused
        self.posted = self.now()
        self.got_then = {name: car.got_kwh for name, car in self.here.items()}

    def set(self, name, amperes):
        return self.points[name].take(amperes, self.rng.random() < 0.5)

    def describe(self, name, failed):
        """Describe a station as the back end knows it."""
        point, car = self.points[name], self.here.get(name)
        entry = {"id": name, "plugged": car is not None}
        if failed or point.answers != "Accepted":
            entry["fixed_a"] = max(point.in_force(), point.may) if car is not None else 0.0
        if car is None:
            return entry
        hours = (self.now() - self.posted) / 3600
        got = car.got_kwh - self.got_then.get(name, 0.0)
        entry |= {"arrival": datetime.fromtimestamp(START + 60 * car.comes, UTC).isoformat()}
        entry |= {
            "delivered_kwh": car.got_kwh,
            "drawn_kw": got / hours,
            "offered_a": point.in_force(),
        }
        if car.states != "never":
            entry["requested_kwh"] = round(car.need_kwh, 1)
        if len(point.station.phases) == 3:
            own = dict(zip(point.station.phases, self.currents(name, car), strict=True))
            entry["currents_a"] = [own[phase] for phase in (1, 2, 3)]
        if self.faults and self.rng.random() < 0.02:
            wrong = self.rng.choice(["delivered_kwh", "drawn_kw", "currents_a"])
            entry[str(wrong)] = [1e8, -1.0, "many", None][self.rng.integers(4)]
            self.counts["meter glitches"] += 1
        return entry


def compare(run, seed, days, kind=Loop):
    """Simulate the same days without and with faults; return the shares served and the counts."""
    served, counts = [], Counter()
    for faults in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            loop = kind(run, folder, seed, days, faults=faults)
            served.append(asyncio.run(loop.live_through()))
            counts = loop.counts
    return *served, counts


async def end_under_traffic(run, folder, number, rng):
    """Send SIGTERM to the server at random moments under traffic; return the seconds to its end."""
    loop, seconds = Loop(run, folder, 1, 1), []

    async def talk(point):
        await point.plug()
        while point.link is not None:
            await point.meter()

    async def ask():
        while loop.process is not None:
            await loop.ask("/allocate", {"stations": []})

    for _ in range(number):
        loop.minute += 1
        await loop.start()
        tasks = [talk(point) for point in loop.points.values() if point.link is not None]
        tasks = [asyncio.create_task(task) for task in (*tasks, ask())]
        await asyncio.sleep(rng.uniform(0, 1))
        begun = time.monotonic()
        loop.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(loop.process.wait(), 60)
        seconds.append(time.monotonic() - begun)
        assert loop.process.returncode == 0, loop.process.returncode
        loop.process = None
        await loop.listening
        for point in loop.points.values():
            await point.drop()
            point.transaction = None
        await asyncio.gather(*tasks)
    assert not loop.errors, loop.errors[:3]
    return seconds


def write(path, content):
    """Write a JSON file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main():
    """Run seeds until the time is over, or send signals, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no seed after so long")
    parser.add_argument("--days", type=int, default=2)
    parser.add_argument("--signals", type=int, default=0, help="end the server so often instead")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    given, rows, begun = parser.parse_args(), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run, rng = make_run(folder), np.random.default_rng(given.seed)
        if given.signals:
            state = Path(folder) / "state"
            state.mkdir()
            seconds = asyncio.run(end_under_traffic(run, state, given.signals, rng))
            found = {"SIGTERM": len(seconds), "within 5 s": sum(x < 5 for x in seconds)}
            write(given.out / "signals.json", found | {"longest, seconds": round(max(seconds), 2)})
            return
        seed = given.seed
        while time.monotonic() - begun < given.seconds:
            for kind in (Loop, HttpLoop):
                then = time.monotonic()
                plain, disturbed, counts = compare(run, seed, given.days, kind)
                row = {"garage": kind.__name__, "seed": seed, "days": given.days, "served": plain}
                row |= {"served with faults": disturbed, **counts}
                rows.append(row | {"seconds": round(time.monotonic() - then)})
                print(json.dumps(rows[-1]), flush=True)
                write(given.out / "rows.json", rows)
            seed += 1


if __name__ == "__main__":
    main()
