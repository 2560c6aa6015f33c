"""Access control of `apportion serve`: tokens, origins, request limits, passwords and TLS."""

import asyncio
import base64
import hmac
import json
import logging
import os
import secrets
import ssl
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from apportion.errors import InputError, first_line, reading
from apportion.runs.settings import read_toml

MAX_CONNECTIONS = 64
"""Maximum number of simultaneous HTTP connections; charge points use a separate port."""
_HEADER_SECONDS = 10.0
_BODY_SECONDS = 10.0
_MAX_BODY_BYTES = 1 << 20
_MAX_UNKNOWN = 20
"""Maximum number of unknown stations, and of unknown field names, in one request."""
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

_log = logging.getLogger("apportion.charging")


async def answer_refusal(request: Request, error: Exception) -> Response:
    """Return the reason of an HTTPException as JSON."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


class Guard:
    """ASGI middleware that refuses foreign hosts and origins, and writes without token or JSON.

    Parameters
    ----------
    token
        Token that write requests must send as `Authorization: Bearer TOKEN`.
    hosts
        Host names by which clients may call the server, besides localhost and its own address.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str] = ()):
        self._app, self._token = app, token.encode()
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the headers of a request before the application reads it."""
        try:
            self._check(Request(scope))
        except HTTPException as error:
            await (await answer_refusal(Request(scope), error))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        host = request.headers.get("host", "")
        own = request.scope.get("server") or ("",)
        if _hostname(f"//{host}") not in self._hosts.union(_LOCAL_HOSTS, own[:1]):
            raise HTTPException(403, "this host name is not allowed; see --allowed-hosts")
        if is_foreign(request.headers.get("origin"), host, self._hosts):
            raise HTTPException(403, "requests from the pages of other sites are refused")
        if request.method in ("GET", "HEAD"):
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._token):
            raise HTTPException(401, "a write needs the header Authorization: Bearer TOKEN")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "send application/json")


def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def is_foreign(origin: str | None, host: str, hosts: Collection[str] = ()) -> bool:
    """Whether a browser sent a request from another site's page.

    >>> is_foreign("http://evil.example", "localhost:8080")
    True
    >>> is_foreign("http://localhost:8080", "localhost:8080"), is_foreign(None, "localhost:8080")
    (False, False)
    """
    if origin is None or origin.partition("://")[2].lower() == host.lower() != "":
        return False
    return _hostname(origin) not in hosts


async def read_body(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request, within limits of time and size."""
    body = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_BODY_BYTES:
                    raise HTTPException(413, "more than a megabyte; give one garage")
    except TimeoutError:
        raise HTTPException(408, "the body took too long") from None
    except ClientDisconnect:
        _log.info("a client left during its request")
        raise HTTPException(400, "the body is not complete") from None
    try:
        now = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = f"not JSON ({first_line(error)}); see the page on charging"
        raise HTTPException(400, reason) from None
    if not isinstance(now, dict):
        raise HTTPException(400, "not a JSON object; see the page on charging")
    return now


def check_size(now: Mapping[str, Any], stations: Collection[str], fields: Iterable[str]) -> None:
    """Refuse a statement that lists too many stations or unknown fields."""
    listed = now.get("stations")
    if not isinstance(listed, list):
        return
    if len(listed) > len(stations) + _MAX_UNKNOWN:
        raise HTTPException(
            400, f"{len(listed)} stations are listed, and the site has {len(stations)}"
        )
    given = {field for station in listed if isinstance(station, dict) for field in station}
    if len(given.difference(fields)) > _MAX_UNKNOWN:
        raise HTTPException(400, "too many unknown fields; see the page on charging")


class HttpConnection(H11Protocol):
    """An HTTP connection with a request timeout, refused if there are too many connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or answer 503."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._end("503 Service Unavailable")
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._end, "408 Request Timeout")

    def on_response_complete(self) -> None:
        """Wait for the next request of the connection."""
        self._timer.cancel()
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._end, "408 Request Timeout")
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _end(self, status: str) -> None:
        # A request in progress has its own limits.
        if self.cycle is None or self.cycle.response_complete:
            head = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode())
            self.transport.close()


def find_token(given: Path | None, kept: Path) -> str:
    """Return the token of `given`, of APPORTION_TOKEN or of `kept`, which is created if needed."""
    token = os.environ.get("APPORTION_TOKEN", "").strip()
    if given is None and token:
        return token
    path = given or kept
    # A process that was killed before it wrote the token leaves an empty file.
    if given is None and not (kept.exists() and kept.stat().st_size):
        try:
            kept.unlink(missing_ok=True)
            with open(os.open(kept, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32))
        except OSError as error:
            raise InputError(f"{kept}: cannot keep a token ({error}); give --token-file") from None
    with reading(path, "give a file with a token"):
        token = path.read_text(encoding="utf-8").strip()
        if not token:
            raise InputError(f"{path}: it is empty; give a file with a token")
    if given is None:
        _log.info("writes need the token in %s", path)
    return token


def read_passwords(path: Path, charge_points: Collection[str]) -> dict[str, bytes]:
    """Read the passwords of charge points from a TOML file: ID = "password"."""
    found = read_toml(path)
    for name, password in found.items():
        if name not in charge_points or not isinstance(password, str) or not password:
            raise InputError(f"{path}: {name}: give the password of a charge point of the site")
    for name in sorted(set(charge_points) - found.keys()):
        _log.warning("%s: no password for charge point %s; it cannot connect", path, name)
    return {name: password.encode() for name, password in found.items()}


def has_password(authorization: str, name: str, password: bytes | None) -> bool:
    """Whether a header has this user name and password (Basic authentication)."""
    scheme, _, encoded = authorization.partition(" ")
    try:
        user, _, given = base64.b64decode(encoded, validate=True).partition(b":")
    except ValueError:
        return False
    same = hmac.compare_digest(given, password or b"") and password is not None
    return same and scheme.lower() == "basic" and user == name.encode()


def make_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return the TLS context of a certificate and its key, or None without either."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InputError("--ocpp-cert and --ocpp-key need each other")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with reading(certificate, "give a certificate and its key as PEM files"):
        context.load_cert_chain(certificate, key)
    return context
