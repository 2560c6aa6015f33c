"""A server for charge points that use OCPP 1.6 or 2.0.1.

A charge point connects to ws://HOST:PORT/ocpp/ID, where ID is its station's name in the site; its
second connector is the station `ID:2`. After its first message it receives a default profile of
0 A, and then a profile for each transaction. If the server fails, that profile expires after a few
periods and the default applies.

The feeder's limit holds even if charge points misbehave. The current that may flow at a station is
the maximum over all profiles that may be in force. A rejected profile changes nothing; one without
a reply may be in force. Decreases are sent first, and increases only after these are accepted. If
one is not, the server decides again with that station's current fixed. A station that the state
file does not list may have another server's profile: its cable is reserved until that expires.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from apportion.errors import reading
from apportion.runs.files import write_json
from apportion_charging import clock
from apportion_charging.access import has_password, is_foreign
from apportion_charging.controller import PowerOffers, warn_of_unknown
from apportion_charging.limits import LiveLimits
from apportion_charging.meters import MARGIN, Meter, read_number, read_samples
from apportion_charging.ocpp_versions import LINKS, Link, stamp
from apportion_charging.site import Site, Station

VALID_PERIODS = 3
"""Periods after which a profile expires; the server assumes one more, because clocks may differ."""
_REPLY_SECONDS, _MIN_REPLY_SECONDS = 10.0, 2.0
"""Seconds to wait for a reply: a quarter of a period, within these bounds."""
_ATTEMPTS = 4
"""Maximum number of decisions in a row while charge points do not accept a decrease."""
_MAX_UNKNOWN_LOGGED = 100
_POLL_SECONDS = 1.0
"""Maximum seconds between two checks of the clock and the limits."""
_CLOSE_SECONDS = 2.0
"""Seconds to wait for a charge point to close its connection."""
_STATEMENT_SECONDS = 3600.0
"""Seconds for which a driver's statement is kept before the car is plugged in."""
_KEPT = ("start_wh", "register_wh", "read_at", "currents_a")
"""Fields of a meter that the state file stores."""
_STATEMENTS = ("requested_kwh", "stated_departure", "max_kw")

_log = logging.getLogger("apportion.charging")
_websockets = logging.getLogger("apportion.websockets")
# This module logs the effects of connections instead.
_websockets.setLevel(logging.CRITICAL)


@dataclass
class _Transaction:
    """A transaction, as its charge point reported it."""

    number: str
    arrival: datetime
    start: str = ""
    """Values of the start message; a repeated message has the same values."""


@dataclass(eq=False)
class _Point:
    """The state of a station, which is a connector of a charge point."""

    name: str
    station: Station
    connector: int = 1
    link: Link | None = None
    heard: bool = False
    """Whether its charge point has ever sent a message."""
    has_default: bool = False
    car: _Transaction | None = None
    profiles: list[tuple[float, float]] = field(default_factory=list)
    """Pairs (A, expiry) that may be in force for this car; a single pair if it was accepted."""
    again: bool = False
    """Whether to send the profile again, after a reconnection."""
    status: str = ""
    full: bool | None = None
    meter: Meter = field(default_factory=lambda: Meter(math.inf))
    settled: float = 0.0
    """Time in seconds since 1970 from which the meter reflects the newest offer."""
    statements: dict[str, Any] = field(default_factory=dict)
    stated: float = 0.0
    """Time of the driver's last statement, in seconds since 1970."""

    @property
    def connected(self) -> bool:
        """Whether its charge point can receive messages."""
        return self.link is not None and self.link.ready

    def bound_a(self) -> float:
        """Return the largest current that a car may draw at this station, in A."""
        now = clock.now()
        self.profiles = [profile for profile in self.profiles if profile[1] > now]
        if self.profiles:
            return max(amperes for amperes, _ in self.profiles)
        return 0.0 if self.has_default or not self.heard else self.station.max_a

    def begin(self, car: _Transaction | None, start_wh: float | None = None) -> None:
        """Reset the state for a new car, or for no car."""
        early = self.car is None and clock.now() - self.stated < _STATEMENT_SECONDS
        self.statements = self.statements if early else {}
        self.car, self.profiles, self.full = car, [], None
        self.meter = Meter(self.meter.most_kw, start_wh, start_wh)
        self.meter.read_at = clock.now() if car is None else car.arrival.timestamp()


class ChargePoints:
    """The charge points of a site: connections, transactions, meters and profiles.

    Parameters
    ----------
    decide
        Function from the present state to set-points, such as `Controller.allocate`.
    limits
        The limits in force.
    every
        Seconds between two decisions.
    path
        JSON file that stores transactions and profiles across restarts.
    """

    def __init__(
        self,
        site: Site,
        decide: Callable[[dict[str, Any]], PowerOffers],
        limits: LiveLimits,
        *,
        every: float,
        path: Path | None = None,
    ):
        self.site, self.limits, self.every = site, limits, every
        self.troubles: dict[tuple[str, str], str] = {}
        """Present problems, by station and topic."""
        self.reply_seconds = min(_REPLY_SECONDS, max(_MIN_REPLY_SECONDS, every / 4))
        self.changed = asyncio.Event()
        self.stopping = self.failing = False
        """Whether to stop, and whether the last decision failed."""
        self._decide, self._path = decide, path
        self.rejected = self.disconnected = 0
        self.passwords: Mapping[str, bytes] | None = None
        """Password of each charge point by name; None accepts all connections."""
        self._lock = asyncio.Lock()
        self._unresponsive: set[str] = set()
        self._unknown: set[str] = set()
        self._number = 0
        self._removed: dict[str, Any] = {}
        """Saved state of stations no longer in the site, while their profiles may be in force."""
        self.points = {name: _Point(name, station) for name, station in site.stations.items()}
        self._valid_seconds = (VALID_PERIODS + 1) * every
        self._of: dict[str, dict[int, _Point]] = {}
        for name, point in self.points.items():
            full_kw = len(point.station.phases) * site.volts * point.station.max_a / 1000
            point.meter.most_kw = MARGIN * full_kw
            point.profiles = [(point.station.max_a, clock.now() + self._valid_seconds)]
            point_id, colon, connector = name.rpartition(":")
            if colon and connector.isdecimal():
                point.connector = int(connector)
            else:
                point_id = name
            self._of.setdefault(point_id, {})[point.connector] = point
        if path is not None and path.exists():
            self._restore(path)

    @property
    def charge_points(self) -> Collection[str]:
        """The names by which charge points connect."""
        return self._of.keys()

    # Incoming messages.

    def listen(self, **where: Any) -> serve:
        """Return the WebSocket server; `where` is passed to `websockets`."""
        return serve(
            self._handle_connection,
            select_subprotocol=_choose_subprotocol,
            process_request=self._refuse,
            logger=_websockets,
            close_timeout=_CLOSE_SECONDS,
            **where,
        )

    def _refuse(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return 404 for an unknown station, 401 for a wrong password, 403 for another origin."""
        point_id, headers = _point_id(request.path), request.headers
        if is_foreign(headers.get("Origin"), headers.get("Host", "")):
            return connection.respond(403, "no web page may connect\n")
        if point_id in self._of and self.passwords is not None:
            given = headers.get("Authorization", "")
            allowed = has_password(given, point_id, self.passwords.get(point_id))
            self._note(point_id, "login", None if allowed else "refused: a wrong password, or none")
            if not allowed:
                refusal = connection.respond(401, "the password is wrong or missing\n")
                refusal.headers["WWW-Authenticate"] = 'Basic realm="ocpp"'
                return refusal
        if point_id in self._of:
            return None
        if point_id not in self._unknown and len(self._unknown) < _MAX_UNKNOWN_LOGGED:
            self._unknown.add(point_id)
            _log.warning("refused charge point %.60r: it is no station of the site", point_id)
        return connection.respond(404, "no station of this site\n")

    async def _handle_connection(self, connection: ServerConnection) -> None:
        """Handle a charge point's messages until it disconnects."""
        request = connection.request
        point_id = _point_id("" if request is None else request.path)
        kind = LINKS.get(connection.subprotocol or "")
        if kind is None:
            _log.warning("charge point %s offers neither %s; closed", point_id, " nor ".join(LINKS))
            await connection.close(1002, "no common subprotocol")
            return
        link = kind(self, point_id, connection)
        mine = self._of[point_id].values()
        before = {point.link for point in mine if point.link is not None}
        for point in mine:
            point.link, point.again = link, True
        for old in before:
            await old.connection.close(1000, "replaced by a new connection")
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
                        self._unresponsive.discard(point.name)
                    self.changed.set()
        except ConnectionClosed:
            pass
        finally:
            for point in mine:
                if point.link is link:
                    point.link = None
            self.disconnected += 1
            self.changed.set()

    def on_boot(self, link: Link) -> None:
        """Resend all profiles, because after a boot it is unknown which are in force."""
        link.default_sent = False
        for point in self._of[link.id].values():
            point.has_default, point.again = False, True
        self.changed.set()

    def begin(
        self, point: _Point, number: str | None, arrival: str, wh: Any, start: str = ""
    ) -> _Transaction:
        """Begin a transaction; `arrival` is empty if its start message was missed."""
        if point.car is not None and start and point.car.start == start:
            return point.car
        if number is None:
            # Larger than all numbers of earlier server runs.
            self._number = max(self._number + 1, int(clock.now()))
            number = str(self._number)
        car, profiles = _Transaction(number, self._moment(arrival), start), point.profiles
        point.begin(car, read_number(wh))
        if not arrival:
            # The profile of another server may be in force.
            point.profiles = profiles
        self._changed()
        return car

    def end(self, point: _Point | None) -> None:
        """End the station's transaction."""
        if point is not None:
            point.begin(None)
            self._changed()

    def _changed(self) -> None:
        self._save()
        self.changed.set()

    def find(self, point_id: str, number: str) -> _Point | None:
        """Find the station of a transaction."""
        mine = self._of[point_id].values()
        return next((point for point in mine if point.car and point.car.number == number), None)

    def find_connector(self, point_id: str, connector: int | None) -> _Point | None:
        """Find the station of a connector; report a connector that the site does not describe."""
        mine = self._of[point_id]
        number = next(iter(mine)) if connector is None and len(mine) == 1 else connector
        if number != 0 and number not in mine:
            what = f"the site does not describe connector {number!s:.20}"
            self._note(point_id, "connector", f"{what}, which is refused")
        return mine.get(number or 0)

    def resume(self, point: _Point, number: str) -> None:
        """Continue the station's transaction under the number that its charge point uses."""
        if point.car is None:
            self.begin(point, number, "", None)
        elif point.car.number != number:
            point.car.number, point.again = number, True
            self._changed()

    def on_status(self, point: _Point | None, status: str) -> None:
        """Process a connector's status: end a transaction, or note whether the car is full."""
        if point is None:
            return
        point.status = status
        left = point.car is not None and status == "Available"
        if left or (point.car is None and point.profiles and status in ("Available", "Preparing")):
            self.end(point)
        # Without an offer the status says nothing about a car's demand; neither does "Occupied".
        full = status == "SuspendedEV" and point.bound_a() >= point.station.min_a
        if status != "Occupied" and (full or None) != point.full:
            point.full = full or None
            self.changed.set()

    def on_meter_values(
        self, point: _Point | None, values: Iterable[Mapping[str, Any]], number: Any = None
    ) -> None:
        """Process meter values, also of an unknown transaction; ignore invalid values."""
        if point is not None and number:
            self.resume(point, str(number))
        if point is None or point.car is None:
            return
        point.meter.heard_at, bad = clock.now(), None
        for value in values:
            found = read_samples(value.get("sampled_value"), self.site.volts, point.station.phases)
            moment = self._moment(value.get("timestamp", "")).timestamp()
            bad = point.meter.take(found, moment, clock.now() >= point.settled) or bad
        self._note(point.name, "meter", bad and f"a value was ignored: {bad}")

    def add_statements(self, now: Mapping[str, Any]) -> list[str]:
        """Store drivers' statements, even before the car is plugged in; return warnings."""
        given = now.get("stations")
        stations = given if isinstance(given, list) else []
        for station in stations:
            name = str(station.get("id")) if isinstance(station, Mapping) else ""
            point = self.points.get(name)
            if point is not None:
                found = {name: station[name] for name in _STATEMENTS if name in station}
                fresh = point.car is not None or clock.now() - point.stated < _STATEMENT_SECONDS
                point.statements = (point.statements if fresh else {}) | found
                point.stated = clock.now() if found else point.stated
        self._save()
        return warn_of_unknown(stations, self.points)

    def load(self) -> np.ndarray:
        """Return the load of an ampere, (limits, stations), by the phases that meters show."""
        one_phase = {name: x.meter.phase for name, x in self.points.items() if x.meter.phase}
        return self.site.wiring(one_phase).load

    # Outgoing messages.

    async def run(self) -> None:
        """Decide every period and after each change of a station or limit, until `stopping`."""
        last, limits = -math.inf, self.limits.in_force()
        while not self.stopping:
            try:
                # `wait_for` of Python 3.11 loses a cancellation that coincides with a change.
                async with asyncio.timeout(min(_POLL_SECONDS, self.every / 20)):
                    await self.changed.wait()
                # Collect simultaneous changes.
                await asyncio.sleep(min(0.05, _POLL_SECONDS, self.every / 20))
            except TimeoutError:
                pass
            now, before, limits = clock.now(), limits, self.limits.in_force()
            # A clock that is set back must not delay a decision.
            periodic = not last <= now < last + self.every
            if not (periodic or self.changed.is_set() or (limits != before).any()):
                continue
            last = now if periodic else last
            try:
                await self.decide_and_send(periodic=periodic)
                self.failing = False
            except Exception:
                self.failing = True
                _log.exception("a decision failed; the last set-points hold until the next")

    async def decide_and_send(self, *, periodic: bool = False) -> PowerOffers:
        """Decide and send changed profiles; a periodic decision sends all, also to unresponsive points."""
        async with self._lock:
            self.changed.clear()
            await self._send_defaults(periodic)
            if periodic:
                self._unresponsive.clear()
            for attempt in range(_ATTEMPTS):
                offers = self._decide(self._now())
                for point in self.points.values() if attempt == 0 else ():
                    point.meter.begin_period()
                wanted = {
                    point: float(offers.allocation_a[point.name])
                    for point in self.points.values()
                    if point.connected and point.car and point.name not in self._unresponsive
                }
                lower = [point for point, amperes in wanted.items() if amperes < point.bound_a()]
                failed = await self._send({point: wanted[point] for point in lower})
                if not failed:
                    await self._send_increases(wanted, periodic)
                    break
                self._unresponsive |= failed
            else:
                # No increase is safe now; the other stations keep their current for another period.
                others = [x for x in wanted if x.profiles and x.name not in self._unresponsive]
                await self._send_increases({x: x.bound_a() for x in others}, periodic)
            self._save()
            return offers

    async def _send_increases(self, wanted: dict[_Point, float], periodic: bool) -> None:
        """Send equal or larger offers, if all limits hold with all of them in force."""
        new = {
            point: amperes
            for point, amperes in wanted.items()
            if point.connected
            and amperes >= (bound := point.bound_a())
            and (periodic or point.again or amperes > bound or not point.profiles)
        }
        now = np.array([point.bound_a() for point in self.points.values()])
        then = np.maximum(now, [new.get(point, 0.0) for point in self.points.values()])
        limit, load = self.limits.in_force(), self.load()
        # A station that ignores offers may exceed a limit already; do not add to that.
        if (load @ then > np.maximum(limit, load @ now) + 1e-6).any():
            _log.warning("no increase in this period: the current that may flow leaves no room")
            new = {point: amperes for point, amperes in new.items() if amperes == point.bound_a()}
        self._unresponsive |= await self._send(new)

    async def _send(self, amperes: dict[_Point, float]) -> set[str]:
        """Send all profiles concurrently; return the names of stations that did not accept."""
        answers = await asyncio.gather(*(self._send_one(p, a) for p, a in amperes.items()))
        return {point.name for point, taken in zip(amperes, answers, strict=True) if not taken}

    async def _send_one(self, point: _Point, amperes: float) -> bool:
        car, link = point.car, point.link
        if car is None or link is None:
            return False
        until = clock.now() + self._valid_seconds
        schedule = {
            "start_schedule": stamp(clock.now_utc() - timedelta(seconds=self.every)),
            "duration": math.ceil(self._valid_seconds),
            **_one_period(amperes, 1 if point.meter.phase else len(point.station.phases)),
        }
        taken = await link.set_profile(point.connector, schedule, car.number)
        if point.car is not car:
            return True
        if taken:
            if [before for before, _ in point.profiles] != [amperes]:
                point.settled = clock.now() + min(10.0, self.every / 10)
                point.meter.begin_period(keep=False)
            point.profiles, point.again = [(amperes, until)], False
            link.default_sent = link.default_sent and point.has_default
        elif taken is None:
            # The profile may be in force. Without a known offer, meter values are not informative.
            point.profiles.append((amperes if point.has_default else point.station.max_a, until))
            point.settled = math.inf
            point.meter.begin_period(keep=False)
        self.rejected += taken is False
        wrong = None if taken else "no answer" if taken is None else "refused"
        self._note(point.name, "profile", wrong and f"{wrong}; {point.bound_a():g} A count")
        return bool(taken)

    async def _send_defaults(self, periodic: bool) -> None:
        """Send the default profile of 0 A to charge points that have not accepted it."""
        waiting: dict[Link, list[_Point]] = {}
        for point in self.points.values():
            if point.link is not None and point.connected and not point.has_default:
                waiting.setdefault(point.link, []).append(point)
        # Resend every period, but if a car is there only after its own profile is accepted.
        sent = [
            self._send_default(link, points)
            for link, points in waiting.items()
            if not link.default_sent or (periodic and not any(point.car for point in points))
        ]
        await asyncio.gather(*sent)

    async def _send_default(self, link: Link, points: list[_Point]) -> None:
        link.default_sent = True
        taken = await link.set_profile(0, _one_period(0.0, len(points[0].station.phases)), None)
        for point in points:
            point.has_default = bool(taken)
            kept = f"not accepted; {point.station.max_a:g} A are reserved"
            self._note(point.name, "default", None if taken else kept)

    def _now(self) -> dict[str, Any]:
        """Describe the present state for the controller."""
        stations = []
        for name, point in self.points.items():
            if not point.heard and not point.bound_a():
                continue
            entry: dict[str, Any] = {"id": name, "plugged": point.car is not None}
            car, bound = point.car, point.bound_a()
            if car is not None:
                entry |= {
                    "arrival": self._format_time(car.arrival),
                    "delivered_kwh": point.meter.delivered_kwh(),
                    "drawn_kw": point.meter.drawn_kw(),
                    "currents_a": point.meter.currents_a and list(point.meter.currents_a),
                    "offered_a": bound,
                    "full": point.full,
                    **point.statements,
                }
            ignores = car is not None and name in self._unresponsive
            if not point.connected or ignores or (car is None and bound):
                entry["fixed_a"] = bound
            stations.append(entry)
        return {"time": self._format_time(clock.now_utc()), "stations": stations}

    def _format_time(self, moment: datetime) -> str:
        """Format a time for the controller: with its zone, or as local time if the site has none."""
        if self.site.timezone is None:
            moment = moment.astimezone().replace(tzinfo=None)
        return moment.isoformat()

    def _moment(self, text: str) -> datetime:
        """Parse a charge point's time; use the present time if it is invalid or implausible."""
        now = clock.now_utc()
        try:
            found = datetime.fromisoformat(text)
        except (TypeError, ValueError):
            return now
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return found if now - timedelta(days=30) < found <= now else now

    def _note(self, name: str, topic: str, wrong: str | None) -> None:
        """Record a problem, or that it is solved; log each change once."""
        before = self.troubles.pop((name, topic), None)
        if wrong is not None:
            self.troubles[name, topic] = wrong
            if wrong != before:
                _log.warning("station %s: %s: %s", name, topic, wrong)
        elif before is not None:
            _log.info("station %s: %s: solved", name, topic)

    # State file.

    def _save(self) -> None:
        if self._path is None:
            return
        names, load = self.site.wiring().names, self.load()
        kept = {
            name: {
                "load": dict(zip(names, load[:, place].tolist(), strict=True)),
                "max_a": point.station.max_a,
                "heard": point.heard,
                "has_default": point.has_default,
                "profiles": point.profiles,
                "meter": {name: getattr(point.meter, name) for name in _KEPT},
                "statements": point.statements,
                "stated": point.stated,
                "car": point.car and asdict(point.car) | {"arrival": str(point.car.arrival)},
            }
            for place, (name, point) in enumerate(self.points.items())
        }
        try:
            write_json(self._path, {"points": self._removed | kept})
        except OSError as error:
            self._note("all", "state", f"{self._path} was not saved ({error})")

    def _restore(self, path: Path) -> None:
        """Restore a state file by station names; new stations keep their initial state."""
        with reading(path, "remove it to start without it"):
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, kept in content["points"].items():
                if name not in self.points:
                    self._reserve(name, kept)
                    continue
                point, car = self.points[name], kept["car"]
                point.heard, point.has_default = bool(kept["heard"]), bool(kept["has_default"])
                if car is not None:
                    car["arrival"] = datetime.fromisoformat(car["arrival"])
                    point.begin(_Transaction(**car))
                for field_name in _KEPT:
                    setattr(point.meter, field_name, kept["meter"][field_name])
                point.statements, point.stated = dict(kept["statements"]), float(kept["stated"])
                point.profiles = [(float(a), float(until)) for a, until in kept["profiles"]]

    def _reserve(self, name: str, kept: Mapping[str, Any]) -> None:
        """Reserve the load of a station that is no longer in the site until its profiles expire."""
        now = clock.now()
        left = [(float(a), float(until)) for a, until in kept["profiles"] if until > now]
        if kept["heard"] and not kept["has_default"]:
            left.append((float(kept["max_a"]), now + self._valid_seconds))
        if not left or "load" not in kept:
            return
        amperes, until = max(a for a, _ in left), max(until for _, until in left)
        _log.warning(
            "station %s left the site; %g A count until its profile expires", name, amperes
        )
        self._removed[name] = kept
        self.limits.reserve({limit: amperes * x for limit, x in kept["load"].items()}, until)


def _point_id(path: str) -> str:
    """Return the charge point named by a path, or an empty string."""
    before, slash, name = path.partition("?")[0].rpartition("/")
    return unquote(name) if slash and before == "/ocpp" else ""


def _one_period(amperes: float, phases: int) -> dict[str, Any]:
    period = {"start_period": 0, "limit": amperes, "number_phases": phases}
    return {"charging_rate_unit": "A", "charging_schedule_period": [period]}


def _choose_subprotocol(connection: ServerConnection, offered: Any) -> Any:
    """Choose the newest common subprotocol; None if there is none."""
    return next((name for name in LINKS if name in offered), None)
