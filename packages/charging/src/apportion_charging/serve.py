"""`apportion serve`: a running controller with an HTTP interface, a page and an OCPP server.

One event loop runs the controller; a decision takes milliseconds. The certificate in the run's
folder is read before each decision and sets the trust in the policy; each change is logged.
"""

import asyncio
import atexit
import gc
import logging
import os
import secrets
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from filelock import FileLock, Timeout
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from apportion.errors import InputError, first_line
from apportion.report.page import Part, Section, page
from apportion.runs.signals import listening
from apportion_charging import clock
from apportion_charging.access import (
    MAX_CONNECTIONS,
    Guard,
    HttpConnection,
    answer_refusal,
    check_size,
    find_token,
    make_tls,
    read_body,
    read_passwords,
)
from apportion_charging.backtest import read_certificate
from apportion_charging.controller import FIELDS, Controller, PowerOffers
from apportion_charging.ocpp import VALID_PERIODS, ChargePoints
from apportion_charging.settings import ChargingServeOptions
from apportion_charging.site import Site

_BARS = "A bar is the current offered to a car as a share of what its cable carries."
_LATE_PERIODS = 3
"""Periods without a decision after which the controller is reported as late."""

_log = logging.getLogger("apportion.charging")


@dataclass
class _CertificateGate:
    """The trust in the policy from a certificate for this site and this baseline.

    A certificate written while the controller runs applies from the next decision on.
    """

    path: Path
    site: Site
    baseline: str
    default: float
    """Trust without a valid certificate, or by hand."""
    by_hand: bool = False
    """Whether the user gave --trust, which overrides the certificate."""
    why: str = ""
    trust: float = 0.0

    def look(self) -> float:
        """Read the certificate; return the trust, and log each change with its reason."""
        before, level = (self.trust, self.why), logging.INFO
        self.trust, self.why = self.default, "no certificate; --trust applies"
        try:
            if os.path.exists(self.path):
                self.trust, self.why = self._judge()
            if self.by_hand:
                found = f"the certificate ({100 * self.trust:.0f} %)"
                found = found if os.path.exists(self.path) else "a certificate"
                self.trust, self.why = self.default, f"--trust by hand, which overrides {found}"
        except InputError as error:
            level = logging.WARNING
            self.why = f"the certificate is not used: {error}; --trust applies"
        if (self.trust, self.why) != before:
            _log.log(level, "trust in the policy %.0f %%: %s", 100 * self.trust, self.why)
        return self.trust

    def _judge(self) -> tuple[float, str]:
        found = read_certificate(self.path, self.site)
        against, verdict = found.get("against"), found.get("verdict")
        if against != self.baseline:
            raise InputError(f"it is against {against}, and the baseline is {self.baseline}")
        days = f"{found.get('start')} to {found.get('end')}"
        return found["trust"], f"{verdict} against {against}, by the days {days}"


class Service:
    """A controller, its certificate gate, and a history of its decisions."""

    def __init__(self, controller: Controller, gate: _CertificateGate, *, every: float):
        self.controller, self.gate, self.every = controller, gate, every
        self.limits = controller.limits
        self.token = secrets.token_urlsafe()
        """Token that write requests need."""
        self.hosts: tuple[str, ...] = ()
        """Host names by which clients may call the server, besides localhost."""
        self.tls: ssl.SSLContext | None = None
        self.points: ChargePoints | None = None
        self.offers: PowerOffers | None = None
        self.decided: Counter[str] = Counter()
        self.seconds = 0.0
        """Duration of the last decision."""
        self.last: float | None = None
        """Time of the last decision, in seconds since 1970."""
        self._time: Any = None
        self._said: set[str] = set()
        controller.trust = gate.look()

    def decide(self, now: dict[str, Any]) -> PowerOffers:
        """Decide, and record the decision for the page and the metrics."""
        self.controller.trust = self.gate.look()
        begun = time.perf_counter()
        offers = self.controller.allocate(now)
        self.seconds = time.perf_counter() - begun
        self.offers, self.last = offers, clock.now()
        self.decided[offers.decided_by] += 1
        for warning in offers.warnings:
            if warning not in self._said:
                _log.warning("%s", warning)
        self._said = set(offers.warnings)
        self._time = now.get("time")
        return offers

    def state(self) -> dict[str, Any]:
        """Return the present state of cars, offers and limits as plain values."""
        site, offers = self.controller.site, self.offers
        amperes_of = {} if offers is None else offers.allocation_a
        stations = [self._station(name, amperes_of.get(name, 0)) for name in site.stations]
        flows = np.array([x.get("confirmed_a", x["offered_a"]) for x in stations], float)
        wiring = site.wiring()
        load = wiring.load if self.points is None else self.points.load()
        used, most = (load @ flows).round(3).tolist(), self.limits.in_force().round(3).tolist()
        limits = [
            {"name": name, "used": used[n], "limit": most[n], "unit": "A" if n else "kW"}
            | self.limits.describe(name)
            for n, name in enumerate(wiring.names)
        ]
        warnings = [] if offers is None else list(offers.warnings)
        if self.points is not None:
            troubles = self.points.troubles.items()
            warnings += [f"station {name}: {topic}: {what}" for (name, topic), what in troubles]
        return {
            "time": self._time,
            "decided": self.last,
            "every_seconds": self.every,
            "ocpp": self.points is not None,
            "decided_by": None if offers is None else offers.decided_by,
            "baseline": self.controller.baseline,
            "trust": self.controller.trust,
            "why": self.gate.why,
            "capacity_kw": most[0],
            "offered_kw": round(sum(station["offered_kw"] for station in stations), 3),
            "limits": limits,
            "stations": stations,
            "warnings": warnings,
        }

    def _station(self, name: str, amperes: float) -> dict[str, Any]:
        station, car = self.controller.site.stations[name], self.controller.seen.get(name)
        kw = self.controller.site.volts * len(station.phases) / 1000
        shown = {
            "id": name,
            "plugged": car is not None,
            "offered_a": amperes,
            "offered_kw": round(amperes * kw, 3),
            "max_a": station.max_a,
            "max_kw": round(station.max_a * kw, 3),
            "phases": list(station.phases),
        }
        if car is not None:
            shown |= {
                "arrival": str(car.arrival),
                "stated_departure": car.stated_departure and str(car.stated_departure),
                "requested_kwh": car.requested_kwh,
                "delivered_kwh": car.delivered_kwh,
                "drawn_kw": car.drawn_kw,
                "full": car.full,
            }
        if self.points is not None:
            point = self.points.points[name]
            shown |= {
                "plugged": point.car is not None,
                "connected": point.connected,
                "status": point.status,
                "confirmed_a": point.bound_a(),
                "drawn_kw": point.meter.shown_kw,
                "delivered_kwh": point.meter.delivered_kwh(),
            }
        return shown

    def health(self) -> dict[str, Any]:
        """Return the health and, with charge points, the offered and confirmed currents."""
        found: dict[str, Any] = {"status": "ok", "decisions": self.decided.total()}
        if self.points is None:
            return found
        if self.points.failing:
            found["status"] = "failing"
        elif self.last is None or clock.now() - self.last > _LATE_PERIODS * self.every + 5:
            found["status"] = "late"
        stations = self.state()["stations"]
        return found | {
            field: {station["id"]: station[field] for station in stations}
            for field in ("offered_a", "confirmed_a")
        }

    def metrics(self) -> str:
        """Format the metrics for Prometheus."""
        state = self.state()
        cars = [station for station in state["stations"] if station["plugged"]]
        by = {_label("by", who): number for who, number in sorted(self.decided.items())}
        offered = {_label("station", s["id"]): s["offered_a"] for s in state["stations"]}
        shown: list[tuple[str, str, Mapping[str, float]]] = [
            ("offered_kilowatts", "Power offered to cars.", {"": state["offered_kw"]}),
            ("cars", "Cars plugged in.", {"": len(cars)}),
            ("trust", "The policy's part in the decision.", {"": state["trust"]}),
            ("last_decision_seconds", "When it was, since 1970.", {"": self.last or 0.0}),
            ("decisions_total", "Decisions, by who made them.", by),
            ("station_offered_amperes", "Offered to each station.", offered),
            ("decision_seconds", "Duration of the last decision.", {"": self.seconds}),
        ]
        for unit, words in (("kW", "kilowatts"), ("A", "amperes")):
            limits = {
                _label("name", x["name"]): x["limit"] for x in state["limits"] if x["unit"] == unit
            }
            shown.append((f"limit_{words}", "Limits in force.", limits))
        if self.points is not None:
            points = self.points.points.values()
            heard = {_label("station", point.name): point.meter.heard_at for point in points}
            ages = {name: clock.now() - then for name, then in heard.items() if then}
            confirmed = {_label("station", point.name): point.bound_a() for point in points}
            shown += [
                ("station_confirmed_amperes", "What each station may draw.", confirmed),
                (
                    "charge_points_connected",
                    "Connected stations.",
                    {"": sum(p.connected for p in points)},
                ),
                ("disconnections_total", "Lost connections.", {"": self.points.disconnected}),
                ("profiles_rejected_total", "Rejected profiles.", {"": self.points.rejected}),
                ("meter_age_seconds", "Age of the last meter value.", ages),
            ]
        lines = []
        for name, words, values in shown:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP apportion_{name} {words}", f"# TYPE apportion_{name} {kind}"]
            lines += [f"apportion_{name}{label} {value}" for label, value in values.items()]
        return "\n".join([*lines, ""])


def _label(name: str, text: str) -> str:
    written = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{name}="{written}"}}'


@contextmanager
def _bad_request() -> Iterator[None]:
    """Convert an InputError in the block to status 400."""
    try:
        yield
    except InputError as error:
        raise HTTPException(400, str(error)) from None


def application(service: Service) -> Starlette:
    """Create the HTTP application."""

    async def allocate(request: Request) -> Response:
        now = await read_body(request)
        check_size(now, service.controller.site.stations, FIELDS)
        if "capacity_kw" in now:
            with _bad_request():
                service.limits.set_capacity(now.pop("capacity_kw"))
        if service.points is None:
            return JSONResponse(service.decide(now).to_json())
        unknown = service.points.add_statements(now)
        offers = await service.points.decide_and_send()
        return JSONResponse(replace(offers, warnings=(*unknown, *offers.warnings)).to_json())

    async def limits(request: Request) -> Response:
        body = await read_body(request)
        with _bad_request():
            service.limits.set(body)
        if service.points is not None:
            await service.points.decide_and_send()
        return JSONResponse({"limits": service.state()["limits"]})

    async def state(request: Request) -> Response:
        return JSONResponse(service.state(), headers={"Cache-Control": "no-store"})

    async def health(request: Request) -> Response:
        found = service.health()
        return JSONResponse(found, 200 if found["status"] == "ok" else 503)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")

    shown = live_page(service)

    async def home(request: Request) -> Response:
        return HTMLResponse(shown)

    return Starlette(
        routes=[
            Route("/", home),
            Route("/allocate", allocate, methods=["POST"]),
            Route("/limits", limits, methods=["POST"]),
            Route("/state", state),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: answer_refusal},
        middleware=[Middleware(Guard, service.token, service.hosts)],
    )


@dataclass(frozen=True)
class _Place(Part):
    """A page element that the page's script fills."""

    place: str

    def html(self, name: str) -> str:
        return f'<div id="{escape(self.place)}" aria-live="polite"></div>'


def live_page(service: Service) -> str:
    """Create the page that shows the live state, in the style of the report."""
    site = service.controller.site
    script = files("apportion_charging").joinpath("live.js").read_text(encoding="utf-8")
    sections = [
        Section("Now", [_Place("cards")]),
        Section("Power by car", [_Place("cars")], _BARS),
        Section("Limits", [_Place("limits")], "What is offered below each of them."),
        Section("Warnings", [_Place("warnings")]),
    ]
    return page("The garage now", sections, subtitle=site.describe(), live=script)


class _Server(uvicorn.Server):
    """A server without signal handlers of its own: `_live` handles signals."""

    def capture_signals(self) -> Any:
        return nullcontext()


async def _run_service(
    service: Service, http: socket.socket, ocpp: socket.socket | None, stop: asyncio.Event
) -> None:
    """Serve until `stop` is set."""
    config = uvicorn.Config(
        application(service),
        http=HttpConnection,
        backlog=MAX_CONNECTIONS // 2,
        limit_concurrency=MAX_CONNECTIONS,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    answering = asyncio.create_task(server.serve(sockets=[http]))
    tasks = [answering, asyncio.create_task(stop.wait())]
    async with AsyncExitStack() as listeners:
        if ocpp is not None and service.points is not None:
            await listeners.enter_async_context(service.points.listen(sock=ocpp, ssl=service.tls))
            tasks.append(asyncio.create_task(service.points.run()))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if service.points is not None:
            service.points.stopping = True
        # Repeat until all tasks end, because a library may suppress a cancellation.
        while pending := [task for task in tasks[1:] if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.5)
    await asyncio.gather(*tasks, return_exceptions=True)


def serve(make: Callable[[], Controller], folder: Path, options: ChargingServeOptions) -> str:
    """Run a controller until Ctrl-C or SIGTERM; return the closing message."""
    if options.every is not None and not 0 < options.every <= 3600:
        raise InputError(
            f"--every is {options.every:g}; it must be above 0 and at most 3600 seconds"
        )
    # Skip garbage collection at exit: with compiled programs it takes seconds on a busy machine.
    atexit.register(gc.freeze)
    ocpp_port = options.ocpp
    if ocpp_port is not None and options.ocpp_passwords is None and not options.ocpp_open:
        raise InputError(
            "--ocpp needs the charge points' passwords: give --ocpp-passwords FILE.toml, or --ocpp-open in "
            "a network of their own"
        )
    with (
        _lock(options.state),
        _bind(options.host, options.port, "--port") as http,
        nullcontext() if ocpp_port is None else _bind(options.host, ocpp_port, "--ocpp") as ocpp,
        _logged(),
    ):
        decisions = asyncio.run(_live(make(), folder, options, http, ocpp))
    kept = f"; the controller's state is in {options.state}" if options.state else ""
    return f"stopped after {decisions} decisions{kept}"


async def _live(
    controller: Controller,
    folder: Path,
    options: ChargingServeOptions,
    http: socket.socket,
    ocpp: socket.socket | None,
) -> int:
    """Serve until a signal comes; return the number of decisions."""
    site = controller.site
    every = options.every or 60.0 * site.period_minutes
    certificate = options.certificate or folder / "certificate.json"
    default = 1.0 if options.trust is None else options.trust
    by_hand = options.trust is not None
    gate = _CertificateGate(certificate, site, options.baseline, default, by_hand)
    state = options.state
    service = Service(controller, gate, every=every)
    kept = folder / "serve.token" if state is None else state.with_suffix(".token")
    service.token = find_token(options.token_file, kept)
    service.hosts = (*options.allowed_hosts, options.host)
    service.tls = make_tls(options.ocpp_cert, options.ocpp_key)
    _log.info("serving %s at http://%s", site.describe(), _address(http))
    if ocpp is None:
        controller.reserve_unheard((VALID_PERIODS + 1) * every)
        # An answer stays in force until the next one, even if a limit expires before.
        service.limits.ahead_seconds = every
    else:
        kept = options.state and options.state.with_suffix(".ocpp.json")
        points = service.points = ChargePoints(
            site, service.decide, service.limits, every=every, path=kept
        )
        if options.ocpp_passwords is not None:
            points.passwords = read_passwords(options.ocpp_passwords, points.charge_points)
        scheme = "ws" if service.tls is None else "wss"
        _log.info("charge points connect to %s://%s/ocpp/ID", scheme, _address(ocpp))
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def leave(number: int, frame: Any) -> None:
        loop.call_soon_threadsafe(stop.set)

    with listening(leave):
        await _run_service(service, http, ocpp, stop)
    return service.decided.total()


def _lock(state: Path | None) -> AbstractContextManager[Any]:
    """Lock the state file, and refuse a second server that uses it."""
    if state is None:
        return nullcontext()
    try:
        return FileLock(state.with_suffix(".lock")).acquire(blocking=False)
    except Timeout:
        raise InputError(f"--state {state}: another server uses it; stop that one first") from None
    except OSError as error:
        raise InputError(f"--state {state}: cannot be locked ({error}); choose another") from None


def _bind(host: str, port: int, option: str) -> socket.socket:
    try:
        opened = socket.create_server((host, port))
        # asyncio sets it only on sockets made with IPPROTO_TCP; without it replies are 40 ms late.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return opened
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(
            f"{option} {port}: cannot listen at {host}:{port} ({reason}); choose another"
        ) from None


def _address(opened: socket.socket) -> str:
    host, port = opened.getsockname()[:2]
    return f"{host}:{port}"


@contextmanager
def _logged() -> Iterator[None]:
    """Log to standard error inside the block."""
    logger, handler = logging.getLogger("apportion"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
