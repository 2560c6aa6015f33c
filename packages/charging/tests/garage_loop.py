"""A garage of charge points and cars against the real server process, minute by simulated minute.

The server reads its time from a file that the simulation writes, so that a minute passes when all that
belongs to it is done. Charge points speak OCPP 1.6 or 2.0.1 over WebSockets, drivers and an energy manager
HTTP. Faults are drawn by the seed: restarts, kills, lost states, changed site files, lost connections,
charge points that reject or do not answer, meters that err, limits that change. After each minute the
currents in force and drawn are held against every limit.

    python packages/charging/tests/garage_loop.py --seeds 1 2 3 --days 30 --out FILE.json
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
from collections import Counter
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
    branches={"back": Branch(25.0, ("D", "E", "F"))},
    timezone="UTC",
    period_minutes=PERIOD,
    capacity_ttl_s=7200.0,
    safe_kw=20.0,
)
STATIONS = {**SITE.stations, "G": Station(16.0, (2,))}
"""With one that a changed site file adds."""
SERVER = """
import struct, sys
from apportion_charging import clock, ocpp
ocpp._POLL_SECONDS, ocpp._REPLY_SECONDS, path = 0.01, 0.5, sys.argv.pop(1)
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
    """A finished run of an untrained policy."""
    policy = Pooled(CHANNELS, 4, key=jax.random.key(0))
    run = Run.create(
        Path(folder) / "run", "charging", ChargingSettings(), {"data": {}, "versions": {}}
    )
    finish(run, JobResult(policy, {}, "", ABOUT))
    return run.folder


@dataclass
class Car:
    """A stay: minutes, what the car needs and can take, and its phases."""

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
    """Cars that follow one another at each station."""
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


async def until(condition, seconds=30.0):
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


class ChargePoint:
    """A charge point with one connector, which keeps its profiles while it is not connected."""

    def __init__(self, name, station, clock, version="1.6"):
        self.name, self.station, self.clock, self.version = name, station, clock, version
        self.link, self.reading, self.waiting, self.number = None, None, {}, 0
        self.default, self.profile, self.transaction = None, None, None
        self.wh, self.heard, self.answers = 1000.0, -1e9, "Accepted"
        self.connected_at = 0.0

    def stamp(self):
        return datetime.fromtimestamp(self.clock(), UTC).isoformat().replace("+00:00", "Z")

    def in_force(self):
        """Amperes that a car may draw."""
        if self.transaction is None:
            return 0.0
        if self.profile is not None and self.clock() < self.profile[1]:
            return self.profile[0]
        return self.station.max_a if self.default is None else self.default

    async def connect(self, port):
        options = {"subprotocols": [f"ocpp{self.version}"], "ping_interval": None}
        self.use(await connect(f"ws://127.0.0.1:{port}/ocpp/{self.name}", **options))

    def use(self, link):
        """Talk over an open connection."""
        self.link, self.connected_at = link, self.clock()
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
            return await asyncio.wait_for(answer, 20)
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
        """Begin a transaction; without a connection it begins when the connection is back."""
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

    def __init__(self, run, folder, seed, days, *, faults=True):
        self.run, self.folder, self.days, self.faults = run, Path(folder), days, faults
        self.rng = np.random.default_rng(seed + 10**6)
        self.site, self.minute, self.counts = SITE, 0, Counter()
        self.cars = draw_cars(days, np.random.default_rng(seed))
        self.here: dict[str, Car] = {}
        versions = np.random.default_rng(seed).choice(["1.6", "2.0.1"], 9)
        self.points = {
            name: ChargePoint(name, station, self.now, str(version))
            for (name, station), version in zip(STATIONS.items(), versions, strict=False)
        }
        self.back: dict[str, int] = {}
        """When faults end: by station, or the server's."""
        self.live: tuple[float, float] | None = None
        """The capacity in kW and when it ends."""
        self.wanted_kw, self.before, self.excused = None, None, None
        self.process, self.ports, self.up_at, self.errors = None, None, 0.0, []
        self.missing_since: dict[str, float] = {}
        (self.folder / "clock").write_bytes(struct.pack("d", self.now()))

    def now(self):
        return START + 60.0 * self.minute

    # The server.

    async def start(self):
        """Start the server and connect all charge points that can."""
        (self.folder / "site.toml").write_text(self.site.to_toml())
        options = (
            f"serve {self.run} --site {self.folder}/site.toml --state {self.folder}/state.json --port 0 "
            "--ocpp 0 --ocpp-open"
        )
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVER, f"{self.folder}/clock", *options.split()),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env=os.environ | {"APPORTION_TOKEN": TOKEN},
        )
        said = b""
        while b"charge points connect" not in said:
            line = await asyncio.wait_for(self.process.stderr.readline(), 120)
            assert line, said.decode()
            said += line
        self.ports = [int(x) for x in re.findall(r"127.0.0.1:(\d+)", said.decode())]
        self.listening = asyncio.create_task(self._listen(self.process))
        self.up_at = self.now()
        for name in self.site.stations:
            if name not in self.back:
                await self.connect(name)

    async def _listen(self, process):
        """Keep what the server logs as errors."""
        async for line in process.stderr:
            if b"Traceback" in line or b"a decision failed" in line:
                self.errors.append(line.decode())

    async def stop(self, how=signal.SIGTERM):
        process, self.process = self.process, None
        begun = time.monotonic()
        process.send_signal(how)
        await asyncio.wait_for(process.wait(), 30)
        if how == signal.SIGTERM:
            self.counts["SIGTERM within 5 s"] += time.monotonic() - begun < 5
            assert process.returncode == 0, process.returncode
        await self.listening
        for point in self.points.values():
            await point.drop()

    async def connect(self, name):
        point = self.points[name]
        await point.connect(self.ports[1])
        await point.boot()

    async def ask(self, path, body=None):
        """Status and answer of the server."""

        def call():
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            data = None if body is None else json.dumps(body).encode()
            try:
                request = Request(f"http://127.0.0.1:{self.ports[0]}{path}", data, headers)
                with urlopen(request, timeout=30) as found:
                    return found.status, json.load(found)
            except OSError as error:
                return getattr(error, "code", 0), {}

        return await asyncio.to_thread(call)

    # A minute.

    async def live_through(self):
        """Live through all days; return the share of the need that was served."""
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
            if self.minute % PERIOD == 0:
                await self.send_meters()
                await self.await_profiles()
            elif changed:
                status, _ = await self.ask("/allocate", {"stations": []})
                assert status == 200, status
        self.draw_power()
        self.check()

    async def move_cars(self):
        changed = False
        for car in [car for car in self.here.values() if car.leaves <= self.minute]:
            del self.here[car.station]
            await self.points[car.station].leave()
            changed = True
        for car in self.cars:
            point = self.points[car.station]
            up = self.process is not None and car.station in self.site.stations
            need = {"id": car.station, "requested_kwh": round(car.need_kwh, 1)}
            if up and car.states == "before" and car.comes - 2 == self.minute:
                await self.ask("/allocate", {"stations": [need]})
            if up and car.states == "after" and car.comes + 3 == self.minute:
                await self.ask("/allocate", {"stations": [need]})
            # A car begins to charge once its charge point can report it.
            waits = car.comes <= self.minute < car.leaves and car.station not in self.here
            if waits and point.link is not None:
                self.here[car.station] = car
                await point.plug()
                if point.transaction is None:
                    del self.here[car.station]
                changed = True
        return changed

    async def change_limits(self):
        """The energy manager: the same limits with and without faults."""
        rng = np.random.default_rng(self.minute)
        expired = self.live is not None and self.minute >= self.live[1]
        if expired:
            # The end of a capacity lowers it to the site's safe one at most.
            self.live = (min(self.live[0], SITE.safe_kw), 1e12)
        if self.minute % 60 == 7 and rng.random() < 0.2:
            self.wanted_kw = float(rng.choice([5.0, 12.0, 18.0, 27.0, 99.0]))
        if self.wanted_kw is None or self.process is None:
            return expired
        for bad in ("5.0", -1, {}, None) if self.faults else ():
            assert (await self.ask("/allocate", {"capacity_kw": bad}))[0] == 400
        body = {"capacity_kw": self.wanted_kw, "stations": []}
        assert (await self.ask("/allocate", body))[0] == 200
        self.counts["limit changes"] += 1
        self.live = (self.wanted_kw, self.minute + SITE.capacity_ttl_s / 60)
        self.wanted_kw = None
        return True

    async def change_site(self):
        """Add or remove the last station, and change a limit, with and without faults."""
        rng = np.random.default_rng([self.minute, 1])
        if self.process is None or self.minute % 240 != 11 or rng.random() > 0.3:
            return False
        self.counts["site changes"] += 1
        await self.stop()
        adds = "G" not in self.site.stations or "G" in self.here
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
                if self.points[name].link is None:
                    await self.connect(name)
            changed = True
        draw = self.rng.random()
        if self.process is not None and draw < 1 / 300:
            kind = str(self.rng.choice(["restart", "kill", "lost state"]))
            self.counts[kind] += 1
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
            kind = str(self.rng.choice(["disconnect", "Rejected", "silent", "reconnect"]))
            if name in self.back:
                return changed
            self.counts[kind] += 1
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
        """On the station's own phases."""
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

        end = time.monotonic() + 10
        while missing() and time.monotonic() < end:
            await asyncio.sleep(0.005)
        for name in missing():
            point = self.points[name]
            plugged = START + 60.0 * self.here[name].comes
            since = max(point.heard, point.connected_at, self.up_at, plugged)
            self.counts["late answers"] += 1
            assert self.now() - since <= 120.0 * PERIOD, (self.minute, name, "no answer")

    def phases_of(self, name):
        """The site's phases that the car at a station may use."""
        phases, car = self.points[name].station.phases, self.here.get(name)
        return phases[:1] if car is not None and car.single else phases

    def draw_power(self):
        for name, car in self.here.items():
            kw = self.drawn_a(name, car) * len(self.phases_of(name)) * SITE.volts / 1000
            kwh = min(kw / 60, car.need_kwh - car.got_kwh)
            car.got_kwh += kwh
            self.points[name].wh += 1000 * kwh

    def check(self):
        """Hold what is in force against all limits."""
        site, names = replace(self.site, stations=STATIONS), list(self.points)
        single = {n: self.phases_of(n)[0] for n in names if len(self.phases_of(n)) == 1}
        wiring = site.wiring(single)
        load, limit = wiring.load, wiring.limit.copy()
        limit[0] = min(limit[0], SITE.safe_kw if self.live is None else self.live[0])
        force = np.array([point.in_force() for point in self.points.values()])
        fixed = force * [not self.can_reach(name) for name in names]
        held = load @ fixed
        if self.before is None:
            self.before, self.excused = limit, np.zeros(len(limit))
        # A limit that falls below what unreachable stations hold cannot be met until that ends.
        self.excused = np.where(limit < self.before - 1e-9, held, np.minimum(self.excused, held))
        self.before, used = limit, load @ force
        self.counts["minutes"] += 1
        self.counts["minutes in which all limits held"] += bool((used <= limit + 1e-6).all())
        above = used > np.maximum(limit, self.excused) + 1e-6
        assert not above.any(), {
            "minute": self.minute, "used": used.tolist(), "limit": limit.tolist(), "names": wiring.names,
            "force": dict(zip(names, force.tolist(), strict=True)), "up": self.process is not None,
        }  # fmt: skip


def compare(run, seed, days):
    """Live through the same days without and with faults; return the shares served and counts."""
    served, counts = [], Counter()
    for faults in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            loop = Loop(run, folder, seed, days, faults=faults)
            served.append(asyncio.run(loop.live_through()))
            counts = loop.counts
    return *served, counts


def main():
    """Run seeds and write their counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--out", type=Path)
    given, rows = parser.parse_args(), []
    for seed in given.seeds:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            plain, disturbed, counts = compare(make_run(folder), seed, given.days)
        row = {"seed": seed, "days": given.days, "served": plain, "served with faults": disturbed}
        rows.append(row | dict(counts) | {"seconds": round(time.monotonic() - begun)})
        print(json.dumps(rows[-1]), flush=True)
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
