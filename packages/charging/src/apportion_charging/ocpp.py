"""Charge points by OCPP 1.6 and 2.0.1: what they say of the cars, and the amperes they are told.

A charge point connects to ws://HOST:PORT/ocpp/ID, where ID is its station's name in the site; a second
connector is the station `ID:2`. It is told a profile for each transaction, which ends by itself a few
periods after the server is lost, and at its first word a default of 0 A, which holds then.

The feeder holds whatever charge points do. What may flow at a station is the most of all that it may have
taken over: a refused profile changes nothing, and one without an answer may be in force or not. Less is
told first; more is told only once that is accepted, and where it is not, all is shared out again around
what goes on flowing there.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from apportion.errors import InputError, reading
from apportion.runs.files import write_json
from apportion_charging.controller import PowerOffers
from apportion_charging.ocpp_versions import LINKS, Link, stamp
from apportion_charging.site import Site, Station

_VALID_PERIODS = 3
"""So long a profile holds where the server is lost; a charge point's clock may be a period off."""
_PATIENCE_S = 10.0
"""Who has not answered by then has not heard."""
_ATTEMPTS = 4
"""To find others who give what somebody does not."""
_MOST_UNKNOWN = 100

_log = logging.getLogger("apportion.charging")
_websockets = logging.getLogger("apportion.websockets")
# Who connects and goes is told by what follows from it.
_websockets.setLevel(logging.CRITICAL)


@dataclass
class _Transaction:
    """A car at a station, as its charge point told of it."""

    number: str
    arrival: datetime
    start_wh: float | None = None
    start: str = ""
    """What the charge point said when it began: said again, it is the same."""


@dataclass
class _Meter:
    """What a meter has shown since the last decision, once the newest offer had settled."""

    wh: list[tuple[datetime, float]] = field(default_factory=list)
    """Times and registers."""
    kw: list[float] = field(default_factory=list)

    def drawn_kw(self) -> float | None:
        """The mean power; None where too little was shown."""
        if self.kw:
            return sum(self.kw) / len(self.kw)
        if len(self.wh) < 2:
            return None
        (begun, before), (now, wh) = self.wh[0], self.wh[-1]
        hours = (now - begun).total_seconds() / 3600
        return (wh - before) / 1000 / hours if hours > 0 else None


@dataclass(eq=False)
class _Point:
    """A station, as its charge point shows it."""

    name: str
    station: Station
    connector: int = 1
    link: Link | None = None
    heard: bool = False
    """Whether its charge point ever spoke."""
    has_default: bool = False
    car: _Transaction | None = None
    profiles: list[tuple[float, float]] = field(default_factory=list)
    """Amperes that may be in force for this car, and until when: one where it was accepted."""
    again: bool = False
    """Whether it must be told anew, having come back."""
    status: str = ""
    full: bool | None = None
    meter: _Meter = field(default_factory=_Meter)
    register_wh: float | None = None
    settled: float = 0.0
    """When its newest offer can show on the meter."""
    shown_kw: float | None = None
    statements: dict[str, Any] = field(default_factory=dict)

    @property
    def connected(self) -> bool:
        """Whether it can be told anything."""
        return self.link is not None and self.link.ready

    def bound_a(self) -> float:
        """The most that may flow here, if a car wants it."""
        now = time.time()
        self.profiles = [profile for profile in self.profiles if profile[1] > now]
        if self.profiles:
            return max(amperes for amperes, _ in self.profiles)
        return 0.0 if self.has_default else self.station.max_a

    def may_flow_a(self) -> float:
        """The same, and nothing where no car can be without our knowing."""
        if not self.heard or (self.connected and self.has_default and self.car is None):
            return 0.0
        return self.bound_a()

    def begin(self, car: _Transaction | None) -> None:
        """A car has come, or it has left."""
        self.car, self.profiles, self.full, self.shown_kw = car, [], None, None
        self.meter, self.register_wh, self.statements = _Meter(), car and car.start_wh, {}

    def delivered_kwh(self) -> float | None:
        """By the register; None where it has not spoken."""
        if self.car is None or self.car.start_wh is None or self.register_wh is None:
            return None
        return (self.register_wh - self.car.start_wh) / 1000


class ChargePoints:
    """The charge points of a site: who is connected, what they said, and what they are told.

    Parameters
    ----------
    decide
        From what is known now to set-points, as `Controller.allocate`.
    every
        Seconds between two decisions.
    path
        A JSON file that keeps transactions and what was accepted, for a restart.
    """

    def __init__(
        self,
        site: Site,
        decide: Callable[[dict[str, Any]], PowerOffers],
        *,
        every: float,
        path: Path | None = None,
    ):
        self.site, self.every = site, every
        self.capacity_kw: float | None = None
        self.troubles: dict[tuple[str, str], str] = {}
        """What is wrong now, by station and topic."""
        self.patience = min(_PATIENCE_S, every / 4)
        self.changed = asyncio.Event()
        self._decide, self._path = decide, path
        self._wiring = site.wiring()
        self._lock = asyncio.Lock()
        self._deaf: set[str] = set()
        self._unknown: set[str] = set()
        self._number = 0
        self.points = {name: _Point(name, station) for name, station in site.stations.items()}
        self._of: dict[str, dict[int, _Point]] = {}
        for name, point in self.points.items():
            point_id, colon, connector = name.rpartition(":")
            if colon and connector.isdecimal():
                point.connector = int(connector)
            else:
                point_id = name
            self._of.setdefault(point_id, {})[point.connector] = point
        if path is not None and path.exists():
            self._restore(path)

    # What comes in.

    def listen(self, **where: Any) -> serve:
        """The server that they connect to, at the address or socket that `websockets` is told."""
        return serve(
            self._converse,
            select_subprotocol=_choose_subprotocol,
            process_request=self._refuse_unknown,
            logger=_websockets,
            **where,
        )

    def _refuse_unknown(self, connection: ServerConnection, request: Request) -> Response | None:
        """An answer to who asks for anything but a station of the site; None lets it connect."""
        point_id = _identity(request.path)
        if point_id in self._of:
            return None
        if point_id not in self._unknown and len(self._unknown) < _MOST_UNKNOWN:
            self._unknown.add(point_id)
            _log.warning("refused charge point %.60r: it is no station of the site", point_id)
        return connection.respond(404, "no station of this site\n")

    async def _converse(self, connection: ServerConnection) -> None:
        """Listen to a charge point until it goes."""
        request = connection.request
        point_id = _identity("" if request is None else request.path)
        kind = LINKS.get(connection.subprotocol or "")
        if kind is None:
            _log.warning("charge point %s speaks neither %s; closed", point_id, " nor ".join(LINKS))
            await connection.close(1002, "no common subprotocol")
            return
        link = kind(self, point_id, connection)
        mine = self._of[point_id].values()
        before = {point.link for point in mine if point.link is not None}
        for point in mine:
            point.link, point.again = link, True
        for old in before:
            await old.connection.close(1000, "connected anew")
        try:
            async for raw in connection:
                try:
                    await link.route_message(raw)
                except ConnectionClosed:
                    break
                except Exception as error:
                    self._note(point_id, "message", f"cannot be used ({error!s:.80})")
                if not link.ready:
                    link.ready = True
                    for point in mine:
                        point.heard = True
                        self._deaf.discard(point.name)
                    self.changed.set()
        except ConnectionClosed:
            pass
        finally:
            for point in mine:
                if point.link is link:
                    point.link = None
            self.changed.set()

    def booted(self, link: Link) -> None:
        """Of one that has started anew, nobody knows what it has kept."""
        link.asked = False
        for point in self._of[link.id].values():
            point.has_default, point.again = False, True
        self.changed.set()

    def begin(
        self, point: _Point, number: str | None, arrival: str, wh: Any, start: str = ""
    ) -> _Transaction:
        """A transaction that begins, or is heard of for the first time."""
        if point.car is not None and start and point.car.start == start:
            return point.car
        if number is None:
            # Larger than those of any earlier start of the server.
            self._number = max(self._number + 1, int(time.time()))
            number = str(self._number)
        car = _Transaction(number, self._moment(arrival), _number(wh), start)
        self._plug(point, car)
        return car

    def end(self, point: _Point | None) -> None:
        """Its car has left."""
        if point is not None:
            self._plug(point, None)

    def _plug(self, point: _Point, car: _Transaction | None) -> None:
        point.begin(car)
        self._save()
        self.changed.set()

    def find(self, point_id: str, number: str) -> _Point | None:
        """Where a transaction is."""
        mine = self._of[point_id].values()
        return next((point for point in mine if point.car and point.car.number == number), None)

    def at(self, point_id: str, connector: int | None) -> _Point | None:
        """The station of a connector; a charge point of one has it whatever its number."""
        mine = self._of[point_id]
        if connector == 0:
            return None
        return next(iter(mine.values())) if len(mine) == 1 else mine.get(connector or 1)

    def became(self, point: _Point | None, status: str) -> None:
        """What its connector or its car is now: free, or one that takes nothing of what it is offered."""
        if point is None:
            return
        point.status = status
        if point.car is not None and status == "Available":
            self.end(point)
        # While nothing is offered, nobody knows whether it would take it; nor by who is only there.
        full = status == "SuspendedEV" and point.bound_a() >= point.station.min_a
        if status != "Occupied" and (full or None) != point.full:
            point.full = full or None
            self.changed.set()

    def metered(
        self, point: _Point | None, values: Iterable[Mapping[str, Any]], number: Any = None
    ) -> None:
        """Meter values, perhaps of a transaction that nobody knew; what cannot be is set aside."""
        if point is not None and point.car is None and number:
            self.begin(point, str(number), "", None)
        if point is None or point.car is None:
            return
        volts, phases = self.site.volts, len(point.station.phases)
        most, bad = 1.2 * volts * phases * point.station.max_a / 1000, None
        for value in values:
            moment = self._moment(value.get("timestamp", ""))
            wh, kw, wrong = _read_samples(value.get("sampled_value"), volts, phases)
            bad = wrong or bad
            settled = time.time() >= point.settled
            if wh is not None and point.register_wh is not None and wh < point.register_wh:
                bad, wh = f"its register fell to {wh:g} Wh", None
            if wh is not None:
                point.register_wh = wh
                if point.car.start_wh is None:
                    point.car.start_wh = wh
                if settled:
                    point.meter.wh.append((moment, wh))
            if kw is not None and kw > most:
                bad, kw = f"a power of {kw:g} kW", None
            if kw is not None:
                point.shown_kw = kw
                if settled:
                    point.meter.kw.append(kw)
        self._note(point.name, "meter", bad and f"a value was set aside: {bad}")

    def say(self, told: Mapping[str, Any]) -> None:
        """What charge points cannot say: the feeder's power now, and the drivers' statements."""
        self.capacity_kw = told.get("capacity_kw", self.capacity_kw)
        stations = told.get("stations")
        for station in stations if isinstance(stations, list) else []:
            name = str(station.get("id")) if isinstance(station, Mapping) else ""
            point = self.points.get(name)
            if point is not None and point.car is not None:
                names = ("requested_kwh", "stated_departure", "max_kw")
                point.statements |= {name: station[name] for name in names if name in station}

    # What goes out.

    async def run(self) -> None:
        """Decide every period, and whenever something changes."""
        period = time.monotonic()
        while True:
            try:
                await asyncio.wait_for(self.changed.wait(), max(period - time.monotonic(), 0.0))
                # What comes together is one change.
                await asyncio.sleep(min(0.05, self.every / 20))
            except TimeoutError:
                pass
            periodic = time.monotonic() >= period
            if periodic:
                period = time.monotonic() + self.every
            try:
                await self.share_out(periodic=periodic)
            except Exception:
                _log.exception("a decision failed; the last set-points hold until the next")

    async def share_out(self, *, periodic: bool = False) -> PowerOffers:
        """Decide, and tell those concerned; in a period's decision all, those who did not listen too."""
        async with self._lock:
            self.changed.clear()
            await self._tell_defaults(periodic)
            if periodic:
                self._deaf.clear()
            for attempt in range(_ATTEMPTS):
                offers = self._decide(self._now())
                for point in self.points.values() if attempt == 0 else ():
                    # The meter's next period begins.
                    drawn = point.meter.drawn_kw()
                    point.shown_kw = point.shown_kw if drawn is None else drawn
                    point.meter = _Meter(point.meter.wh[-1:])
                told = {
                    point: float(offers.allocation_a[point.name])
                    for point in self.points.values()
                    if point.connected and point.car and point.name not in self._deaf
                }
                lower = [point for point, amperes in told.items() if amperes < point.bound_a()]
                deaf = await self._tell({point: told[point] for point in lower})
                if not deaf:
                    await self._raise(told, periodic)
                    break
                self._deaf |= deaf
            self._save()
            return offers

    async def _raise(self, told: dict[_Point, float], periodic: bool) -> None:
        """Tell those who get as much or more, if all limits hold even where all of them take it."""
        new = {
            point: amperes
            for point, amperes in told.items()
            if point.connected
            and amperes >= (bound := point.bound_a())
            and (periodic or point.again or amperes > bound or not point.profiles)
        }
        now = np.array([point.may_flow_a() for point in self.points.values()])
        then = np.maximum(now, [new.get(point, 0.0) for point in self.points.values()])
        limit, load = self._wiring.limit, self._wiring.load
        # What is above a limit already, by a station that takes what it likes, is raised no further.
        if (load @ then > np.maximum(limit, load @ now) + 1e-6).any():
            _log.warning("nobody gets more in this period: what may flow leaves no room")
            return
        self._deaf |= await self._tell(new)

    async def _tell(self, amperes: dict[_Point, float]) -> set[str]:
        """Tell stations their amperes, all at once; the names of those who did not take them."""
        answers = await asyncio.gather(*(self._tell_one(p, a) for p, a in amperes.items()))
        return {point.name for point, taken in zip(amperes, answers, strict=True) if not taken}

    async def _tell_one(self, point: _Point, amperes: float) -> bool:
        car, link = point.car, point.link
        if car is None or link is None:
            return False
        until = time.time() + (_VALID_PERIODS + 1) * self.every
        schedule = {
            "start_schedule": stamp(datetime.now(UTC) - timedelta(seconds=self.every)),
            "duration": math.ceil((_VALID_PERIODS + 1) * self.every),
            **_one_period(amperes, point.station),
        }
        taken = await link.set_profile(point.connector, schedule, car.number)
        if point.car is not car:
            return True
        if taken:
            if [before for before, _ in point.profiles] != [amperes]:
                point.settled, point.meter = time.time() + min(10.0, self.every / 10), _Meter()
            point.profiles, point.again = [(amperes, until)], False
            link.asked = link.asked and point.has_default
        elif taken is None:
            # In force or not; and once it is over, the default, where there is one. Of a car whose offer
            # nobody knows the meter tells nothing.
            point.profiles.append((amperes if point.has_default else point.station.max_a, until))
            point.settled, point.meter = math.inf, _Meter()
        wrong = None if taken else "no answer" if taken is None else "refused"
        self._note(point.name, "profile", wrong and f"{wrong}; {point.bound_a():g} A count")
        return bool(taken)

    async def _tell_defaults(self, periodic: bool) -> None:
        """See that a car gets nothing where nobody is told anything."""
        waiting: dict[Link, list[_Point]] = {}
        for point in self.points.values():
            if point.link is not None and point.connected and not point.has_default:
                waiting.setdefault(point.link, []).append(point)
        # One with a car is asked by its own profile, and again for this once it listens.
        asked = [
            self._tell_default(link, points)
            for link, points in waiting.items()
            if not link.asked or (periodic and not any(point.car for point in points))
        ]
        await asyncio.gather(*asked)

    async def _tell_default(self, link: Link, points: list[_Point]) -> None:
        link.asked = True
        taken = await link.set_profile(0, _one_period(0.0, points[0].station), None)
        for point in points:
            point.has_default = bool(taken)
            kept = f"not taken; {point.station.max_a:g} A are kept for it"
            self._note(point.name, "default", None if taken else kept)

    def _now(self) -> dict[str, Any]:
        """What the controller is told."""
        stations = []
        for name, point in self.points.items():
            if not point.heard:
                continue
            told: dict[str, Any] = {"id": name, "plugged": point.car is not None}
            car, bound = point.car, point.bound_a()
            if car is not None:
                told |= {
                    "arrival": self._told(car.arrival),
                    "delivered_kwh": point.delivered_kwh(),
                    "drawn_kw": point.meter.drawn_kw(),
                    "offered_a": bound,
                    "full": point.full,
                    **point.statements,
                }
            deaf = car is not None and name in self._deaf
            if not point.connected or deaf or (car is None and not point.has_default):
                told["fixed_a"] = bound
            stations.append(told)
        now = {"time": self._told(datetime.now(UTC)), "stations": stations}
        return now if self.capacity_kw is None else now | {"capacity_kw": self.capacity_kw}

    def _told(self, moment: datetime) -> str:
        """A time for the controller: with its zone, or of the wall where the site has none."""
        if self.site.timezone is None:
            moment = moment.astimezone().replace(tzinfo=None)
        return moment.isoformat()

    def _moment(self, text: str) -> datetime:
        """A charge point's time; now where it is none, or one that cannot be."""
        now = datetime.now(UTC)
        try:
            found = datetime.fromisoformat(text)
        except (TypeError, ValueError):
            return now
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return found if now - timedelta(days=30) < found <= now else now

    def _note(self, name: str, topic: str, wrong: str | None) -> None:
        """What is wrong there now, or that nothing is; said once."""
        before = self.troubles.pop((name, topic), None)
        if wrong is not None:
            self.troubles[name, topic] = wrong
            if wrong != before:
                _log.warning("station %s: %s: %s", name, topic, wrong)
        elif before is not None:
            _log.info("station %s: %s: in order again", name, topic)

    # What is kept.

    def _save(self) -> None:
        if self._path is None:
            return
        kept = {
            name: {
                "has_default": point.has_default,
                "profiles": point.profiles,
                "register_wh": point.register_wh,
                "car": point.car and asdict(point.car) | {"arrival": str(point.car.arrival)},
            }
            for name, point in self.points.items()
            if point.heard
        }
        try:
            write_json(self._path, {"site": self.site.fingerprint, "points": kept})
        except OSError as error:
            self._note("all", "state", f"{self._path} was not saved ({error})")

    def _restore(self, path: Path) -> None:
        with reading(path, "remove it to begin anew"):
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["site"] != self.site.fingerprint:
                raise InputError(f"{path}: it is of another site; remove it, or name another file")
            for name, kept in content["points"].items():
                point, car = self.points[name], kept["car"]
                point.heard, point.has_default = True, bool(kept["has_default"])
                if car is not None:
                    car["arrival"] = datetime.fromisoformat(car["arrival"])
                    point.begin(_Transaction(**car))
                point.register_wh = kept["register_wh"]
                point.profiles = [(float(a), float(until)) for a, until in kept["profiles"]]


def _read_samples(
    samples: Any, volts: float, phases: int
) -> tuple[float | None, float | None, str | None]:
    """Register in Wh and power in kW of one meter value, and what of it cannot be.

    >>> _read_samples([{"value": "1.5", "unit": "kWh"}], 230.0, 3)
    (1500.0, None, None)
    >>> _read_samples([{"value": "10", "measurand": "Current.Import", "phase": "L1"}], 230.0, 3)
    (None, 2.3, None)
    >>> _read_samples([{"value": "x"}], 230.0, 3)
    (None, None, "'x'")
    """
    wh, kw, by_current, bad = None, None, None, None
    for sample in samples if isinstance(samples, list) else []:
        measurand = sample.get("measurand", "Energy.Active.Import.Register")
        measure = sample.get("unit_of_measure") or {}
        unit = sample.get("unit") or measure.get("unit")
        if measurand not in (
            "Energy.Active.Import.Register",
            "Power.Active.Import",
            "Current.Import",
        ) or sample.get("location", "Outlet") not in ("Outlet", "Cable"):
            continue
        value = _number(sample.get("value"))
        if value is None or value < 0:
            bad = repr(sample.get("value"))[:40]
            continue
        value *= 10 ** int(measure.get("multiplier", 0))
        value *= 1000 if unit in ("kWh", "kW") else 1
        if measurand.startswith("Energy"):
            wh = value if sample.get("phase") is None else wh
        elif measurand.startswith("Power"):
            kw = (kw or 0.0) + value / 1000
        else:
            every = phases if sample.get("phase") is None else 1
            by_current = (by_current or 0.0) + value * every * volts / 1000
    return wh, by_current if kw is None else kw, bad


def _number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if abs(found) < 1e12 else None


def _identity(path: str) -> str:
    """The charge point that a path names; nothing where it names none."""
    before, slash, name = path.partition("?")[0].rpartition("/")
    return unquote(name) if slash and before == "/ocpp" else ""


def _one_period(amperes: float, station: Station) -> dict[str, Any]:
    period = {"start_period": 0, "limit": amperes, "number_phases": len(station.phases)}
    return {"charging_rate_unit": "A", "charging_schedule_period": [period]}


def _choose_subprotocol(connection: ServerConnection, offered: Any) -> Any:
    """The newest of what is offered that is spoken here; None where none is, and it is closed then."""
    return next((name for name in LINKS if name in offered), None)
