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
from ocpp.routing import on
from ocpp.v16 import ChargePoint as ChargePoint16
from ocpp.v16 import call as call16
from ocpp.v16 import call_result as result16
from ocpp.v201 import ChargePoint as ChargePoint201
from ocpp.v201 import call as call201
from ocpp.v201 import call_result as result201
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from apportion.domains.charging.controller import PowerOffers
from apportion.domains.charging.site import Site, Station
from apportion.errors import InputError, reading
from apportion.runs.files import write_json

VALID_PERIODS = 3
"""So long a profile holds where the server is lost; a charge point's clock may be a period off."""
_PATIENCE_S = 10.0
"""Who has not answered by then has not heard."""
_ATTEMPTS = 4
"""To find others who give what somebody does not."""
_MOST_UNKNOWN = 100
_DEFAULT, _OWN = 1, 2
"""Numbers of profiles: the default, and the transaction's."""

_log = logging.getLogger("apportion.charging")
_library = logging.getLogger("apportion.ocpp")
# What is no OCPP is answered by the library as the standard says, and told by us in a sentence.
_library.setLevel(logging.CRITICAL)


@dataclass
class Transaction:
    """A car at a station, as its charge point told of it."""

    number: str
    arrival: datetime
    start_wh: float | None = None
    start: str = ""
    """What the charge point said when it began: said again, it is the same."""


@dataclass
class Meter:
    """What a meter has shown since the last decision, once the newest offer had settled."""

    first: tuple[datetime, float] | None = None
    """Time and register, Wh."""
    last: tuple[datetime, float] | None = None
    kw: list[float] = field(default_factory=list)

    def drawn_kw(self) -> float | None:
        """The mean power; None where too little was shown."""
        if self.kw:
            return sum(self.kw) / len(self.kw)
        if self.first is None or self.last is None:
            return None
        hours = (self.last[0] - self.first[0]).total_seconds() / 3600
        return (self.last[1] - self.first[1]) / 1000 / hours if hours > 0 else None


@dataclass(eq=False)
class Point:
    """A station, as its charge point shows it."""

    name: str
    station: Station
    connector: int = 1
    link: "Link16 | Link201 | None" = None
    heard: bool = False
    """Whether its charge point ever spoke."""
    has_default: bool = False
    car: Transaction | None = None
    profiles: list[tuple[float, float]] = field(default_factory=list)
    """Amperes that may be in force for this car, and until when: one where it was accepted."""
    again: bool = False
    """Whether it must be told anew, having come back."""
    status: str = ""
    full: bool | None = None
    meter: Meter = field(default_factory=Meter)
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

    def begin(self, car: Transaction) -> None:
        """A car has come."""
        self.car, self.profiles, self.full, self.shown_kw = car, [], None, None
        self.meter, self.register_wh, self.statements = Meter(), car.start_wh, {}

    def end(self) -> None:
        """It has left."""
        self.car, self.profiles, self.full, self.shown_kw, self.statements = (
            None,
            [],
            None,
            None,
            {},
        )

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
    speed, start
        To try a day in a minute: the clock's seconds in one, and where it begins.
    path
        A JSON file that keeps transactions and what was accepted, for a restart.
    """

    def __init__(
        self,
        site: Site,
        decide: Callable[[dict[str, Any]], PowerOffers],
        *,
        every: float,
        speed: float = 1.0,
        start: datetime | None = None,
        path: Path | None = None,
    ):
        self.site, self.every, self._speed = site, every, speed
        self._begun = None if start is None else (start, time.monotonic())
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
        self.points = {name: Point(name, station) for name, station in site.stations.items()}
        self._of: dict[str, dict[int, Point]] = {}
        for name, point in self.points.items():
            point_id, colon, connector = name.rpartition(":")
            if colon and connector.isdecimal():
                point.connector = int(connector)
            else:
                point_id = name
            self._of.setdefault(point_id, {})[point.connector] = point
        if path is not None and path.exists():
            self._restore(path)

    def clock(self) -> datetime:
        """The time, with its zone."""
        if self._begun is None:
            return datetime.now(UTC)
        start, begun = self._begun
        return start + timedelta(seconds=self._speed * (time.monotonic() - begun))

    # What comes in.

    def refuse_unknown(self, connection: ServerConnection, request: Request) -> Response | None:
        """An answer to who asks for anything but a station of the site; None lets it connect."""
        point_id = _identity(request.path)
        if point_id in self._of:
            return None
        if point_id not in self._unknown and len(self._unknown) < _MOST_UNKNOWN:
            self._unknown.add(point_id)
            _log.warning("refused charge point %.60r: it is no station of the site", point_id)
        return connection.respond(404, "no station of this site\n")

    async def converse(self, connection: ServerConnection) -> None:
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
        before = {id(point.link): point.link for point in mine if point.link is not None}
        for point in mine:
            point.link, point.again = link, True
        for old in before.values():
            await old._connection.close(1000, "connected anew")
        try:
            async for raw in connection:
                try:
                    await link.route_message(raw)
                except ConnectionClosed:
                    break
                except Exception as error:
                    self._trouble(point_id, "message", f"cannot be used ({error!s:.80})")
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

    def booted(self, link: "Link16 | Link201") -> None:
        """Of one that has started anew, nobody knows what it has kept."""
        link.asked = False
        for point in self._of[link.id].values():
            point.has_default, point.again = False, True
        self.changed.set()

    def begin(
        self, point: Point, number: str | None, arrival: str, wh: Any, start: str = ""
    ) -> Transaction:
        """A transaction that begins, or is heard of for the first time."""
        if point.car is not None and start and point.car.start == start:
            return point.car
        if number is None:
            # Larger than those of any earlier start of the server.
            self._number = max(self._number + 1, int(time.time()))
            number = str(self._number)
        car = Transaction(number, self._moment(arrival), _number(wh), start)
        point.begin(car)
        self._save()
        self.changed.set()
        return car

    def end(self, point: Point) -> None:
        """Its car has left."""
        point.end()
        self._save()
        self.changed.set()

    def find(self, point_id: str, number: str) -> Point | None:
        """Where a transaction is."""
        for point in self._of[point_id].values():
            if point.car is not None and point.car.number == number:
                return point
        return None

    def at(self, point_id: str, connector: int | None) -> Point | None:
        """The station of a connector; a charge point of one has it whatever its number."""
        mine = self._of[point_id]
        if connector == 0:
            return None
        return next(iter(mine.values())) if len(mine) == 1 else mine.get(connector or 1)

    def suspended(self, point: Point, by_car: bool) -> None:
        """Whether the car takes nothing of what it is offered; while nothing is, that says nothing."""
        full = True if by_car and point.bound_a() >= point.station.min_a else None
        if full != point.full:
            point.full = full
            self.changed.set()

    def metered(self, point: Point | None, values: Iterable[Mapping[str, Any]]) -> None:
        """Meter values; what cannot be is set aside."""
        if point is None or point.car is None:
            return
        volts, phases = self.site.volts, len(point.station.phases)
        most, bad = 1.2 * volts * phases * point.station.max_a / 1000, None
        for value in values:
            moment = self._moment(value.get("timestamp", ""))
            wh, kw, wrong = read_samples(value.get("sampled_value"), volts, phases)
            bad = wrong or bad
            settled = time.time() >= point.settled
            if wh is not None and point.register_wh is not None and wh < point.register_wh:
                bad, wh = f"its register fell to {wh:g} Wh", None
            if wh is not None:
                point.register_wh = wh
                if point.car.start_wh is None:
                    point.car.start_wh = wh
                if settled:
                    point.meter.first = point.meter.first or (moment, wh)
                    point.meter.last = (moment, wh)
            if kw is not None and kw > most:
                bad, kw = f"a power of {kw:g} kW", None
            if kw is not None:
                point.shown_kw = kw
                if settled:
                    point.meter.kw.append(kw)
        if bad:
            self._trouble(point.name, "meter", f"a value was set aside: {bad}")
        else:
            self._fine(point.name, "meter")

    def say(self, told: Any) -> None:
        """What charge points cannot say: the feeder's power now, and the drivers' statements."""
        if not isinstance(told, Mapping):
            return
        if "capacity_kw" in told:
            self.capacity_kw = told["capacity_kw"]
        stations = told.get("stations")
        for station in stations if isinstance(stations, list) else []:
            point = (
                self.points.get(str(station.get("id"))) if isinstance(station, Mapping) else None
            )
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
                if attempt == 0:
                    for point in self.points.values():
                        self._read_out(point)
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

    async def _raise(self, told: dict[Point, float], periodic: bool) -> None:
        """Tell those who get as much or more, if all limits hold even where all of them take it."""
        new = {
            point: amperes
            for point, amperes in told.items()
            if point.connected
            and amperes >= (bound := point.bound_a())
            and (periodic or point.again or amperes > bound or not point.profiles)
        }
        flow = [max(point.may_flow_a(), new.get(point, 0.0)) for point in self.points.values()]
        limit, load = self._wiring.limit, self._wiring.load
        now = load @ np.array([point.may_flow_a() for point in self.points.values()])
        # What is above a limit already, by a station that takes what it likes, is raised no further.
        if (load @ np.array(flow) > np.maximum(limit, now) + 1e-6).any():
            _log.warning("nobody gets more in this period: what may flow leaves no room")
            return
        self._deaf |= await self._tell(new)

    async def _tell(self, amperes: dict[Point, float]) -> set[str]:
        """Tell stations their amperes, all at once; the names of those who did not take them."""
        answers = await asyncio.gather(*(self._tell_one(p, a) for p, a in amperes.items()))
        return {point.name for point, taken in zip(amperes, answers, strict=True) if not taken}

    async def _tell_one(self, point: Point, amperes: float) -> bool:
        car, link = point.car, point.link
        if car is None or link is None:
            return False
        begun, before = time.time(), point.bound_a()
        until = begun + (VALID_PERIODS + 1) * self.every
        period = self.every * self._speed
        start = (self.clock() - timedelta(seconds=period)).astimezone(UTC)
        schedule = {
            "start_schedule": start.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "duration": math.ceil((VALID_PERIODS + 1) * period),
            **_one_period(amperes, point.station),
        }
        taken = await link.set_profile(point.connector, schedule, car.number)
        if point.car is not car:
            return True
        if taken:
            point.profiles, point.again = [(amperes, until)], False
            link.asked = link.asked and point.has_default
            if amperes != before:
                point.settled, point.meter = time.time() + min(10.0, self.every / 10), Meter()
            self._fine(point.name, "profile")
        elif taken is None:
            # In force or not; and once it is over, the default, where there is one.
            point.profiles.append((amperes if point.has_default else point.station.max_a, until))
            self._trouble(point.name, "profile", f"no answer; {point.bound_a():g} A count")
        else:
            self._trouble(point.name, "profile", f"refused; {point.bound_a():g} A count")
        return bool(taken)

    async def _tell_defaults(self, periodic: bool) -> None:
        """See that a car gets nothing where nobody is told anything."""
        waiting: dict[Any, list[Point]] = {}
        for point in self.points.values():
            if point.connected and not point.has_default:
                waiting.setdefault(point.link, []).append(point)
        # One with a car is asked by its own profile, and again for this once it listens.
        links = [
            link
            for link, points in waiting.items()
            if not link.asked or (periodic and not any(point.car for point in points))
        ]

        async def ask(link: Any) -> None:
            link.asked = True
            taken = await link.set_profile(0, _one_period(0.0, waiting[link][0].station), None)
            for point in waiting[link]:
                point.has_default = bool(taken)
                if taken:
                    self._fine(point.name, "default")
                else:
                    kept = f"not taken; {point.station.max_a:g} A are kept for it"
                    self._trouble(point.name, "default", kept)

        await asyncio.gather(*map(ask, links))

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
        now = {"time": self._told(self.clock()), "stations": stations}
        return now if self.capacity_kw is None else now | {"capacity_kw": self.capacity_kw}

    def _read_out(self, point: Point) -> None:
        """Begin a meter's next period."""
        drawn = point.meter.drawn_kw()
        point.shown_kw = point.shown_kw if drawn is None else drawn
        point.meter = Meter(point.meter.last, point.meter.last)

    def _told(self, moment: datetime) -> str:
        """A time for the controller: with its zone, or of the wall where the site has none."""
        if self.site.timezone is None:
            moment = moment.astimezone().replace(tzinfo=None)
        return moment.isoformat()

    def _moment(self, text: str) -> datetime:
        """A charge point's time; now where it is none, or one that cannot be."""
        now = self.clock()
        try:
            found = datetime.fromisoformat(text)
        except (TypeError, ValueError):
            return now
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return found if now - timedelta(days=30) < found <= now else now

    def _trouble(self, name: str, topic: str, what: str) -> None:
        if self.troubles.get((name, topic)) != what:
            self.troubles[name, topic] = what
            _log.warning("station %s: %s: %s", name, topic, what)

    def _fine(self, name: str, topic: str) -> None:
        if self.troubles.pop((name, topic), None) is not None:
            _log.info("station %s: %s: in order again", name, topic)

    # What is kept.

    def _save(self) -> None:
        if self._path is None:
            return
        kept = {}
        for name, point in self.points.items():
            if point.heard:
                car = None if point.car is None else asdict(point.car)
                kept[name] = {
                    "has_default": point.has_default,
                    "profiles": point.profiles,
                    "register_wh": point.register_wh,
                    "car": car and car | {"arrival": car["arrival"].isoformat()},
                }
        try:
            write_json(self._path, {"site": self.site.fingerprint, "points": kept})
        except OSError as error:
            self._trouble("all", "state", f"{self._path} was not saved ({error})")

    def _restore(self, path: Path) -> None:
        with reading(path, "remove it to begin anew"):
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["site"] != self.site.fingerprint:
                raise InputError(f"{path}: it is of another site; remove it, or name another file")
            for name, kept in content["points"].items():
                point, car = self.points[name], kept["car"]
                point.heard, point.has_default = True, bool(kept["has_default"])
                if car is not None:
                    point.begin(
                        Transaction(**car | {"arrival": datetime.fromisoformat(car["arrival"])})
                    )
                point.register_wh = kept["register_wh"]
                point.profiles = [(float(a), float(until)) for a, until in kept["profiles"]]


def read_samples(
    samples: Any, volts: float, phases: int
) -> tuple[float | None, float | None, str | None]:
    """Register in Wh and power in kW of one meter value, and what of it cannot be.

    >>> read_samples([{"value": "1.5", "unit": "kWh"}], 230.0, 3)
    (1500.0, None, None)
    >>> read_samples([{"value": "10", "measurand": "Current.Import", "phase": "L1"}], 230.0, 3)
    (None, 2.3, None)
    >>> read_samples([{"value": "x"}], 230.0, 3)
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


def _profile(number: str | None) -> dict[str, Any]:
    """What both versions say of a profile: a transaction's, or the default."""
    return {
        "stack_level": 0,
        "charging_profile_purpose": "TxDefaultProfile" if number is None else "TxProfile",
        "charging_profile_kind": "Relative" if number is None else "Absolute",
    }


async def _taken(link: Any, payload: Any) -> bool | None:
    """Whether a charge point took it over; None where nobody knows."""
    try:
        answer = await link.call(payload)
    except Exception:
        # Too late, gone, or no answer that can be read.
        return None
    return answer is not None and answer.status == "Accepted"


class Link16(ChargePoint16):
    """A connection by OCPP 1.6."""

    def __init__(self, owner: ChargePoints, point_id: str, connection: Any):
        super().__init__(point_id, connection, owner.patience, _library)  # pyright: ignore
        self.owner, self.ready, self.asked = owner, False, False

    async def set_profile(
        self, connector: int, schedule: dict[str, Any], number: str | None
    ) -> bool | None:
        """Tell it a limit; of no transaction it is the default."""
        profile = {
            "charging_profile_id": _DEFAULT if number is None else _OWN + connector,
            "charging_schedule": schedule,
            **_profile(number),
        }
        if number is not None:
            profile["transaction_id"] = int(number)
        return await _taken(self, call16.SetChargingProfile(connector, profile))

    @on("BootNotification")
    def on_boot(self, **_: Any) -> Any:
        self.owner.booted(self)
        interval = round(max(1.0, min(self.owner.every, 300.0)))
        return result16.BootNotification(_stamp(self.owner), interval, "Accepted")  # pyright: ignore

    @on("Heartbeat")
    def on_heartbeat(self) -> Any:
        return result16.Heartbeat(_stamp(self.owner))

    @on("Authorize")
    def on_authorize(self, **_: Any) -> Any:
        return result16.Authorize({"status": "Accepted"})  # pyright: ignore

    @on("StatusNotification")
    def on_status(self, connector_id: int, status: str, **_: Any) -> Any:
        point = self.owner.at(self.id, connector_id)
        if point is not None:
            point.status = status
            if point.car is not None and status == "Available":
                self.owner.end(point)
            self.owner.suspended(point, status == "SuspendedEV")
        return result16.StatusNotification()

    @on("StartTransaction")
    def on_start(self, connector_id: int, timestamp: str, meter_start: int, **_: Any) -> Any:
        point = self.owner.at(self.id, connector_id)
        info = {"status": "Accepted"}
        if point is None:
            return result16.StartTransaction(0, {"status": "Invalid"})  # pyright: ignore
        start = f"{connector_id} {timestamp} {meter_start}"
        car = self.owner.begin(point, None, timestamp, meter_start, start)
        return result16.StartTransaction(int(car.number), info)  # pyright: ignore

    @on("MeterValues")
    def on_meter(
        self,
        connector_id: int,
        meter_value: list[Any],
        transaction_id: int | None = None,
        **_: Any,
    ) -> Any:
        point = self.owner.at(self.id, connector_id)
        if point is not None and point.car is None and transaction_id:
            self.owner.begin(point, str(transaction_id), "", None)
        self.owner.metered(point, meter_value)
        return result16.MeterValues()

    @on("StopTransaction")
    def on_stop(self, transaction_id: int, **_: Any) -> Any:
        point = self.owner.find(self.id, str(transaction_id))
        if point is not None:
            self.owner.end(point)
        return result16.StopTransaction({"status": "Accepted"})  # pyright: ignore

    @on("DataTransfer")
    def on_data(self, **_: Any) -> Any:
        return result16.DataTransfer("UnknownVendorId")  # pyright: ignore


class Link201(ChargePoint201):
    """A connection by OCPP 2.0.1."""

    def __init__(self, owner: ChargePoints, point_id: str, connection: Any):
        super().__init__(point_id, connection, owner.patience, _library)  # pyright: ignore
        self.owner, self.ready, self.asked = owner, False, False

    async def set_profile(
        self, connector: int, schedule: dict[str, Any], number: str | None
    ) -> bool | None:
        """Tell it a limit; of no transaction it is the default."""
        own = _DEFAULT if number is None else _OWN + connector
        profile = {"id": own, "charging_schedule": [{"id": own, **schedule}], **_profile(number)}
        if number is not None:
            profile["transaction_id"] = number
        return await _taken(self, call201.SetChargingProfile(connector, profile))  # pyright: ignore

    @on("BootNotification")
    def on_boot(self, **_: Any) -> Any:
        self.owner.booted(self)
        interval = round(max(1.0, min(self.owner.every, 300.0)))
        return result201.BootNotification(_stamp(self.owner), interval, "Accepted")  # pyright: ignore

    @on("Heartbeat")
    def on_heartbeat(self, **_: Any) -> Any:
        return result201.Heartbeat(_stamp(self.owner))

    @on("Authorize")
    def on_authorize(self, **_: Any) -> Any:
        return result201.Authorize({"status": "Accepted"})  # pyright: ignore

    @on("StatusNotification")
    def on_status(self, evse_id: int, connector_status: str, **_: Any) -> Any:
        point = self.owner.at(self.id, evse_id)
        if point is not None:
            point.status = connector_status
            if point.car is not None and connector_status == "Available":
                self.owner.end(point)
        return result201.StatusNotification()

    @on("TransactionEvent")
    def on_event(
        self,
        event_type: str,
        timestamp: str,
        transaction_info: dict[str, Any],
        evse: dict[str, Any] | None = None,
        meter_value: list[Any] | None = None,
        **_: Any,
    ) -> Any:
        number = str(transaction_info["transaction_id"])
        point = self.owner.find(self.id, number)
        if event_type == "Ended":
            if point is not None:
                self.owner.end(point)
            return result201.TransactionEvent()
        if point is None:
            point = self.owner.at(self.id, (evse or {}).get("id"))
            if point is not None:
                since = timestamp if event_type == "Started" else ""
                self.owner.begin(point, number, since, None)
        if point is not None:
            state = transaction_info.get("charging_state")
            point.status = state or point.status
            self.owner.metered(point, meter_value or [])
            if state is not None:
                self.owner.suspended(point, state == "SuspendedEV")
        return result201.TransactionEvent()

    @on("MeterValues")
    def on_meter(self, evse_id: int, meter_value: list[Any], **_: Any) -> Any:
        self.owner.metered(self.owner.at(self.id, evse_id), meter_value)
        return result201.MeterValues()

    @on("NotifyReport")
    def on_report(self, **_: Any) -> Any:
        return result201.NotifyReport()


LINKS = {"ocpp2.0.1": Link201, "ocpp1.6": Link16}
"""By the subprotocol that a charge point asks for; the first that it offers too is taken."""


def choose_subprotocol(connection: ServerConnection, offered: Any) -> Any:
    """The newest of what is offered that is spoken here; None where none is, and it is closed then."""
    return next((name for name in LINKS if name in offered), None)


def _stamp(owner: ChargePoints) -> str:
    return owner.clock().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
