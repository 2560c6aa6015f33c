"""Access to a real server process: tokens, hosts, passwords, live limits, and clients that misbehave."""

import asyncio
import base64
import json
import re
import runpy
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("uvicorn")
from garage_loop import ChargePoint, until
from served import JSON, NOW, SITE, TOKEN, ask, serving
from test_serve import certificate
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from apportion_charging.limits import LiveLimits
from apportion_charging.site import Branch, Site
from cli.command import apportion as command
from cli.command import assert_refused
from report.test_report import wait

PASSWORD = "correct horse"
SAFE = Site(
    SITE.stations,
    feeder_a=40.0,
    branches={"north": Branch(32.0, ("P00", "B"), safe_a=8.0)},
    period_minutes=5,
    safe_a=10.0,
)


@pytest.fixture(scope="module")
def garage(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("garage")
    (folder / "site.toml").write_text(SAFE.to_toml())
    options = ("--site", folder / "site.toml", "--allowed-hosts", "garage.example", "--every", "1")
    with serving(run, *options) as found:
        yield found["ports"][0]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"authorization": None}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": None}, 415),
        ({"host": "evil.example"}, 403),
        ({"host": "garage.example:99"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://garage.example"}, 200),
    ],
)
def test_a_write_needs_the_token_json_and_a_known_host_and_origin(garage, headers, status):
    before = ask(garage, "/health")[1]["decisions"]
    assert ask(garage, "/allocate", NOW, **headers)[0] == status
    assert ask(garage, "/health")[1]["decisions"] == before + (status == 200)
    assert ask(garage, "/limits", {}, **headers)[0] == (400 if status == 200 else status)
    for path in ("/", "/state", "/health", "/metrics"):
        assert ask(garage, path)[0] == 200
    assert ask(garage, "/state", host="evil.example")[0] == 403


def test_a_token_is_made_for_its_owner_alone_and_kept(run, tmp_path):
    made, tokens = tmp_path / "state.token", []
    # A process that is killed before it writes the token leaves an empty file.
    made.touch(0o644)
    for _ in range(2):
        with serving(run, "--state", tmp_path / "state.json", token=None) as found:
            assert f"writes need the token in {made}" in found["said"]
            assert made.stat().st_mode & 0o777 == 0o600
            tokens.append(made.read_text())
            bearer = f"Bearer {tokens[0]}"
            assert ask(found["ports"][0], "/allocate", NOW, authorization=bearer)[0] == 200
    assert tokens[0] == tokens[1]
    given = tmp_path / "mine"
    given.write_text("mine\n")
    with serving(run, "--token-file", given) as found:
        assert ask(found["ports"][0], "/allocate", NOW)[0] == 401
        assert ask(found["ports"][0], "/allocate", NOW, authorization="Bearer mine")[0] == 200


def limits_of(port):
    return {limit["name"]: limit for limit in ask(port, "/state")[1]["limits"]}


def test_live_limits_hold_for_phases_and_branches_and_expire_to_the_safe_ones(garage):
    def amperes():
        return ask(garage, "/allocate", NOW)[1]["allocation_a"]

    body = {"limits": {"feeder": {"a": 32}, "north": {"a": 99}}, "ttl_s": 600}
    ask(garage, "/limits", body)
    shown = limits_of(garage)
    assert shown["north L2"]["limit"] == 32
    assert amperes()["P00"] > 10
    assert shown["feeder"]["limit"] == pytest.approx(32 * 0.69)
    assert shown["feeder L3"]["source"] == "live"
    assert 0 <= shown["feeder L3"]["age_s"] < 600
    body = {"limits": {"feeder L2": {"kw": 2.3}, "north L3": {"a": 7}}, "ttl_s": 600}
    assert ask(garage, "/limits", body)[0] == 200
    assert limits_of(garage)["feeder L2"]["limit"] == 10
    assert limits_of(garage)["north L3"]["limit"] == 7
    assert sum(amperes().values()) <= 10
    for bad in (
        {"limits": {"feeder L1": {"a": -1}}, "ttl_s": 9},
        {"limits": {"feeder L1": {"a": 5}, "north": {"a": "32"}}, "ttl_s": 9},
        {"limits": {"feeder L1": {"a": 5}, "south": {"a": 3}}, "ttl_s": 9},
        {"limits": {"feeder L1": {"v": 5}}, "ttl_s": 9},
        {"limits": {"feeder L1": {"a": 5}}},
        {"limits": {"feeder L1": {"a": 5}}, "ttl_s": True},
        {"limits": [], "ttl_s": 9},
    ):
        before = limits_of(garage)["feeder L1"]["limit"]
        assert ask(garage, "/limits", bad)[0] == 400
        assert limits_of(garage)["feeder L1"]["limit"] == before
    ask(garage, "/limits", body | {"ttl_s": 0.1})
    wait(lambda: limits_of(garage)["north L3"]["source"] == "safe", seconds=60)
    shown = limits_of(garage)
    assert (shown["feeder L2"]["limit"], shown["feeder L2"]["source"]) == (10, "safe")
    assert (shown["north L3"]["limit"], shown["north L3"]["source"]) == (8, "safe")
    assert 'apportion_limit_amperes{name="north L3"} 8.0' in ask(garage, "/metrics")[1]


def test_live_limits_survive_a_restart_and_without_a_safe_limit_the_last_stays(tmp_path):
    path = tmp_path / "limits.json"
    first = LiveLimits(SITE, path)
    assert first.in_force().tolist() == SITE.wiring().limit.tolist()
    first.set({"limits": {"north": {"a": 9}}, "ttl_s": 0.01})
    time.sleep(0.02)
    again = LiveLimits(SITE, path)
    assert again.describe("north L1")["source"] == "expired"
    assert again.in_force()[4:].tolist() == [9, 9, 9]
    assert LiveLimits(SAFE, path).in_force()[1:].tolist() == [10, 10, 10, 8, 8, 8]
    assert SAFE.fingerprint == SITE.fingerprint
    assert Site.read(write(tmp_path / "site.toml", SAFE.to_toml())) == SAFE


def write(path, text):
    path.write_text(text)
    return path


@contextmanager
def charging(run, tmp_path, *options, **more):
    """Run a server for charge points with a password."""
    passwords = write(tmp_path / "passwords.toml", f'P00 = "{PASSWORD}"\n')
    given = ("--ocpp", "0", "--every", "2", "--ocpp-passwords", passwords)
    with serving(run, *given, *options, **more) as found:
        yield found


def dial(port, *, password=PASSWORD, scheme="ws", **more):
    basic = base64.b64encode(f"P00:{password}".encode()).decode()
    headers = {} if password is None else {"Authorization": f"Basic {basic}"}
    return connect(
        f"{scheme}://127.0.0.1:{port}/ocpp/P00",
        subprotocols=["ocpp1.6"],
        additional_headers=headers,
        open_timeout=60,
        **more,
    )


@contextmanager
def listening(link):
    client = ChargePoint("P00", SITE.stations["P00"], time.time)
    client.use(link)
    try:
        yield client
    finally:
        client.reading.cancel()


def test_a_charge_point_needs_its_password_and_a_limit_that_expires_is_sent(run, tmp_path):
    async def story(http, port):
        for refused in ({"password": "wrong"}, {"password": None}):
            with pytest.raises(InvalidStatus, match="401"):
                await dial(port, **refused)
        with pytest.raises(InvalidStatus, match="403"):
            await dial(port, origin="http://evil.example")
        async with dial(port) as link:
            with listening(link) as client:
                await client.boot()
                with pytest.raises(InvalidStatus, match="401"):
                    await dial(port, password="wrong")
                await client.plug()
                await until(lambda: client.profile and client.profile[0] == 8.0)
                for seconds, amperes in ((600, 14.0), (0.1, 8.0)):
                    body = {"limits": {"feeder": {"a": 14}, "north": {"a": 14}}, "ttl_s": seconds}
                    assert (await asyncio.to_thread(ask, http, "/limits", body))[0] == 200
                    await until(lambda amperes=amperes: client.in_force() == amperes)
                await client.meter()
            async with dial(port):
                await asyncio.wait_for(link.wait_closed(), 60)
        return (await asyncio.to_thread(ask, http, "/metrics"))[1]

    site = write(tmp_path / "site.toml", SAFE.to_toml())
    with charging(run, tmp_path, "--site", site) as found:
        metrics = asyncio.run(story(*found["ports"]))
    assert re.search(r"^apportion_disconnections_total [1-9]", metrics, re.MULTILINE)
    assert "apportion_profiles_rejected_total 0" in metrics
    assert 'apportion_meter_age_seconds{station="P00"} ' in metrics
    assert re.search(r"^apportion_decision_seconds \d", metrics, re.MULTILINE)
    assert "no password for charge point B" in found["said"]


def test_charge_points_without_passwords_are_refused_unless_opened(run, tmp_path):
    assert_refused(
        command("serve", run, "--port", 0, "--ocpp", 0), "--ocpp-passwords", "--ocpp-open"
    )
    other = write(tmp_path / "other.toml", 'Z = "x"\n')
    site = run.parent / "site.toml"
    given = ("serve", run, "--site", site, "--port", 0, "--ocpp", 0, "--ocpp-passwords", other)
    assert "other.toml: Z: give the password" in command(*given).stderr
    assert "--ocpp-key" in command(*given, "--ocpp-cert", other).stderr


def test_charge_points_connect_by_tls_with_a_certificate(run, tmp_path):
    made = (
        f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -keyout {tmp_path}/key.pem"
    )
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", f"{tmp_path}/cert.pem"]
    subprocess.run(["openssl", *made.split(), *names], check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")

    async def story(port):
        async with dial(port, scheme="wss", ssl=trusted) as link:
            with listening(link) as client:
                await client.boot()
                await client.plug()
                await until(lambda: client.profile and client.profile[0] == 32.0)
        with pytest.raises(Exception, match="."):
            await dial(port)

    with charging(
        run, tmp_path, "--ocpp-cert", tmp_path / "cert.pem", "--ocpp-key", tmp_path / "key.pem"
    ) as found:
        assert "wss://" in found["said"]
        asyncio.run(story(found["ports"][1]))


def test_half_sent_requests_do_not_starve_a_charge_point(run, tmp_path):
    async def story(port):
        async with dial(port) as link:
            with listening(link) as client:
                await client.boot()

    with charging(run, tmp_path, files=200) as found, ExitStack() as opened:
        http, port = found["ports"]
        sockets = []
        for number in range(260):
            link = opened.enter_context(socket.create_connection(("127.0.0.1", http), 60))
            body = b"POST /allocate HTTP/1.1\r\nHost: localhost\r\n"
            if number % 2:
                body += b"Authorization: Bearer %b\r\nContent-Length: 9\r\n" % TOKEN.encode()
                body += b"Content-Type: application/json\r\n\r\n{"
            link.sendall(body)
            sockets.append(link)
        asyncio.run(story(port))
        ends = {link.recv(99).split(b"\r\n")[0] for link in (sockets[0], sockets[1], sockets[-1])}
        assert b"HTTP/1.1 408 Request Timeout" in ends
        assert ask(http, "/health")[0] == 200
        asyncio.run(story(port))
    assert "Traceback" not in found["said"]


def test_work_per_request_is_bounded_and_a_client_that_leaves_is_one_line(run, tmp_path):
    with serving(run) as found:
        port = found["ports"][0]
        fields = {"id": "P00", "plugged": True} | {f"requested_{n}": 1 for n in range(20_000)}
        for stations in ([fields], 60_000 * [{"id": "P00"}]):
            status, answer = ask(port, "/allocate", NOW | {"stations": stations})
            assert status == 400
            assert "stations" in answer["error"] or "fields" in answer["error"]
        with socket.create_connection(("127.0.0.1", port)) as link:
            head = "".join(f"{name}: {value}\r\n" for name, value in JSON.items())
            link.sendall(f"POST /allocate HTTP/1.1\r\nHost: localhost\r\n{head}".encode())
            link.sendall(b"Content-Length: 99\r\n\r\n{")
            time.sleep(0.3)
        time.sleep(0.3)
        assert ask(port, "/health")[0] == 200
    after = found["said"].partition("serving")[2].splitlines()[1:]
    assert len([line for line in after if "a client left" in line]) == 1, after
    assert "Traceback" not in found["said"]


def test_trust_by_hand_overrides_the_certificate_and_says_so(run, tmp_path):
    certificate(tmp_path)
    given = ("--certificate", tmp_path / "certificate.json", "--trust", 0.5)
    with serving(run, *given) as found:
        state = ask(found["ports"][0], "/state")[1]
    assert state["trust"] == 0.5
    assert state["why"] == "--trust by hand, which overrides the certificate (75 %)"
    assert state["why"] in found["said"]


class Citrine(BaseHTTPRequestHandler):
    """The parts of CitrineOS's GraphQL and message interfaces that the example uses."""

    transactions, sent, success = [], [], True

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        url = urlsplit(self.path)
        if url.path == "/v1/graphql":
            answer = {"data": {"Transactions": self.transactions}}
        else:
            assert url.path == "/ocpp/1.6/smartcharging/setChargingProfile"
            period = body["csChargingProfiles"]["chargingSchedule"]["chargingSchedulePeriod"]
            self.sent.append((parse_qs(url.query)["identifier"][0], period[0]["limit"]))
            answer = [{"success": self.success}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


def test_the_example_shares_power_among_the_cars_of_another_central_system(garage):
    adapter = runpy.run_path(Path(__file__).parents[3] / "examples" / "ocpp_backend.py")
    begun = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - 600))

    def car(name, number):
        usual = {"startTime": begun, "totalKwh": 1.5}
        return {"stationId": name, "transactionId": number, **usual}

    with ThreadingHTTPServer(("127.0.0.1", 0), Citrine) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        at, in_force = f"http://127.0.0.1:{server.server_port}", {}
        given = (at, f"{at}/v1/graphql", f"http://127.0.0.1:{garage}", TOKEN, in_force)
        body = {"limits": {"feeder": {"a": 12}, "north": {"a": 32}}, "ttl_s": 60}
        assert ask(garage, "/limits", body)[0] == 200
        Citrine.transactions = [car("P00", "7")]
        adapter["share_power"](*given)
        assert Citrine.sent == [("P00", 12)]
        # With 6 A the first car must get less, whichever car the policy prefers at this time of day.
        assert ask(garage, "/limits", {"limits": {"feeder": {"a": 6}}, "ttl_s": 60})[0] == 200
        Citrine.transactions = [car("B", "8"), car("P00", "7")]
        adapter["share_power"](*given)
        assert [name for name, _ in Citrine.sent[1:]] == ["P00", "B"]
        assert sum(in_force.values()) <= 6
        before, Citrine.success = dict(in_force), False
        ask(garage, "/limits", {"limits": {"feeder": {"a": 0}}, "ttl_s": 60})
        adapter["share_power"](*given)
        assert in_force == before
        server.shutdown()
