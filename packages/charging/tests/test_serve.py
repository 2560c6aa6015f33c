"""`apportion serve` as a garage asks it: by HTTP, by its page, by a charge point, and by a signal."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import jax
import pytest

pytest.importorskip("uvicorn")
from garage_loop import ABOUT, ChargePoint, make_run, until

import apportion_charging
from apportion.policy import Pooled
from apportion_charging.controller import Controller
from apportion_charging.problem import CHANNELS
from apportion_charging.serve import Service, _bind, _CertificateGate, _run_service
from apportion_charging.site import Branch, Site, Station
from cli.command import apportion as command
from cli.command import assert_refused
from report.test_report import browser, errors, wait  # noqa: F401

TOKEN = os.environ["APPORTION_TOKEN"] = "a token of the tests"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
HOSTILE = "<img src=x onerror=alert(1)>"
SITE = Site(
    {
        "P00": Station(32.0),
        "B": Station(16.0, (2,)),
        "C": Station(16.0, (3,)),
        HOSTILE: Station(32.0),
    },
    feeder_a=40.0,
    branches={"north": Branch(32.0, ("P00", "B"))},
    period_minutes=5,
)
NOW = {
    "time": "2026-03-02 09:00",
    "stations": [
        {"id": "P00", "plugged": True, "arrival": "2026-03-02 08:10", "requested_kwh": 20,
         "stated_departure": "2026-03-02 12:00", "delivered_kwh": 3.0, "drawn_kw": 6.2},
        {"id": "B", "plugged": False},
        {"id": "C", "plugged": True, "arrival": "2026-03-02 07:30", "full": True},
        {"id": HOSTILE, "plugged": True, "arrival": "2026-03-02 08:30"},
    ],
}  # fmt: skip


def policy():
    return Pooled(CHANNELS, 4, key=jax.random.key(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of an untrained policy."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "site.toml").write_text(SITE.to_toml())
    return make_run(folder)


@contextmanager
def serving(controller, folder):
    """A service at a port of its own, in a thread; its address and itself."""
    site = controller.site
    gate = _CertificateGate(folder / "certificate.json", site, "llf", 1.0)
    service = Service(controller, gate, every=1.0)
    service.token = TOKEN
    opened = socket.create_server(("127.0.0.1", 0))
    stop, loop = asyncio.Event(), asyncio.new_event_loop()
    running = _run_service(service, opened, None, stop)
    thread = threading.Thread(target=lambda: loop.run_until_complete(running))
    thread.start()
    try:
        yield f"http://127.0.0.1:{opened.getsockname()[1]}", service
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
    assert not thread.is_alive()
    loop.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The garage above, served."""
    with serving(Controller(policy(), ABOUT, SITE), tmp_path_factory.mktemp("gate")) as found:
        yield found


def ask(address, body=None):
    """Status and text of an answer."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urlopen(Request(address, data=data, headers=HEADERS), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as refused:
        return refused.code, refused.read().decode()


def test_http_answers_what_the_controller_decides_and_shows_it(served):
    address, service = served
    code, text = ask(f"{address}/allocate", NOW | {"capacity_kw": SITE.capacity_kw})
    offers = json.loads(text)
    assert code == 200
    assert offers == service.offers.to_json() | {"warnings": []}
    assert offers["decided_by"] == "policy"
    told = offers["allocation_a"]
    assert told["C"] == told["B"] == 0
    assert 6 <= told["P00"] <= 32
    assert told["P00"] + told[HOSTILE] <= 40
    state = json.loads(ask(f"{address}/state")[1])
    assert {s["id"]: s["offered_a"] for s in state["stations"]} == told
    assert [s["plugged"] for s in state["stations"]] == [True, False, True, True]
    assert [limit["name"] for limit in state["limits"]] == [
        *("feeder", "feeder L1", "feeder L2", "feeder L3", "north L1", "north L2", "north L3")
    ]
    assert all(limit["used"] <= limit["limit"] + 1e-6 for limit in state["limits"])
    assert json.loads(ask(f"{address}/health")[1])["status"] == "ok"
    metrics = ask(f"{address}/metrics")[1]
    for line in (
        "apportion_cars 3",
        'apportion_decisions_total{by="policy"} 1',
        f'apportion_station_offered_amperes{{station="P00"}} {told["P00"]}',
        "# TYPE apportion_decisions_total counter",
        f"apportion_capacity_kilowatts {SITE.capacity_kw:g}",
    ):
        assert line in metrics.splitlines()
    code, text = ask(f"{address}/allocate", NOW | {"time": "2026-03-02 09:05", "capacity_kw": 0})
    assert not any(json.loads(text)["allocation_a"].values())
    assert json.loads(ask(f"{address}/state")[1])["capacity_kw"] == 0


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "not a JSON object"),
        (b"[" * 100_000, 400, "not JSON"),
        (b" " * (1 << 20) + b"{}", 413, "more than a megabyte"),
        ({"stations": [{"id": "D", "plugged": True}]}, 200, "did you mean"),
    ],
)
def test_what_cannot_be_used_is_answered_in_a_sentence(served, body, code, words):
    found, text = ask(f"{served[0]}/allocate", body)
    assert found == code, text
    assert code == 200 or words in json.loads(text)["error"]
    assert ask(f"{served[0]}/nothing")[0] == 404
    assert ask(f"{served[0]}/health")[0] == 200


@pytest.mark.browser
def test_the_page_follows_the_controller(served, browser):  # noqa: F811
    address, _ = served
    for minute in range(3):
        ask(f"{address}/allocate", NOW | {"time": f"2026-03-02 10:0{minute}", "capacity_kw": 27.6})
    browser.set_window_size(1280, 900)
    browser.get_log("browser")
    browser.get(address)

    def text(place):
        return browser.find_element("id", place).text

    wait(lambda: "Trust in the policy" in text("cards"))
    for words in ("100 %", "no certificate", "policy", "of 27.6 kW", "no car waits"):
        assert words in text("cards"), text("cards")
    assert HOSTILE in text("cars")
    assert "Without a car: B." in text("cars")
    assert "north L2" in text("limits")
    bars = browser.find_elements("css selector", "#cars meter")
    assert [float(bar.get_attribute("value")) > 0 for bar in bars] == [True, False, True]
    ask(f"{address}/allocate", NOW | {"time": "2026-03-02 10:05", "capacity_kw": 0})
    wait(lambda: "waiting: P00" in text("cards"))
    assert browser.find_elements("css selector", "img[src='x']") == []
    assert [row for row in errors(browser) if "favicon" not in row["message"]] == []


def certificate(folder, **changes):
    content = {
        "verdict": "certified",
        "against": "llf",
        "site": SITE.fingerprint,
        "trust": 0.75,
        "start": "2026-01-01",
        "end": "2026-02-01",
    }
    (folder / "certificate.json").write_text(json.dumps(content | changes))


def test_the_certificate_decides_on_trust_while_it_runs_and_why_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, "apportion.charging")
    gate = _CertificateGate(tmp_path / "certificate.json", SITE, "llf", 0.5)
    assert gate.look() == 0.5
    assert "no certificate" in gate.why
    certificate(tmp_path)
    assert gate.look() == 0.75
    assert "trust in the policy 75 %: certified against llf" in caplog.text
    for changes, trust, words in (
        ({"verdict": "harmful", "trust": 0.2}, 0.0, "harmful"),
        ({"site": "another"}, 0.5, "not of this site"),
        ({"against": "equal"}, 0.5, "against equal"),
        ({"trust": "much"}, 0.5, "no certificate"),
        ({"trust": True}, 0.5, "no certificate"),
        ({"verdict": "fine"}, 0.5, "no certificate"),
    ):
        certificate(tmp_path, **changes)
        assert gate.look() == trust
        assert words in gate.why
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 3
    (tmp_path / "certificate.json").unlink()
    assert gate.look() == 0.5


def test_the_command_serves_charge_points_and_a_signal_ends_it(run, tmp_path):
    state = tmp_path / "state.json"
    options = (
        f"--site {run.parent / 'site.toml'} --port 0 --ocpp 0 --ocpp-open --every 2 --state {state}"
    )
    given = [sys.executable, "-m", "apportion", "serve", str(run), *options.split()]
    with subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said = [process.stderr.readline() for _ in range(3)]
        ports = [int(found) for found in re.findall(r"127.0.0.1:(\d+)", " ".join(said))]
        assert "no certificate" in said[0], said
        try:
            asyncio.run(one_car(*ports))
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert re.fullmatch(r"stopped after \d+ decisions; .*state.json\n", out)
    assert "Traceback" not in err
    assert json.loads(state.read_text())["stations"].keys() == {"P00"}
    assert json.loads(state.with_suffix(".ocpp.json").read_text())["points"]["P00"]["car"]


async def one_car(port, ocpp):
    """A charge point with a car is told its amperes, and anew what its driver says by HTTP."""
    address = f"http://127.0.0.1:{port}"
    client = ChargePoint("P00", SITE.stations["P00"], time.time)
    await client.connect(ocpp)
    await client.boot()
    await client.plug()
    # The cables of the other stations count until profiles of another server would have ended.
    await until(lambda: client.profile and client.profile[0] == 32.0)
    body = {"capacity_kw": 10.0, "stations": [{"id": "P00", "requested_kwh": 7}, {"id": "P01"}]}
    code, text = await asyncio.to_thread(ask, f"{address}/allocate", body)
    assert (code, json.loads(text)["allocation_a"]["P00"]) == (200, 14)
    assert "station P01 is not one of the site" in json.loads(text)["warnings"][0]
    assert client.in_force() == 14.0
    shown = json.loads((await asyncio.to_thread(ask, f"{address}/state"))[1])
    assert shown["stations"][0]["confirmed_a"] == 14.0
    assert shown["stations"][0]["requested_kwh"] == 7
    for bad in ("5.0", -1, {}, None):
        code, text = await asyncio.to_thread(ask, f"{address}/allocate", {"capacity_kw": bad})
        assert (code, "capacity_kw" in text, client.in_force()) == (400, True, 14.0)
    # A station that does not answer counts with what it may draw.
    client.answers = "Rejected"
    body = {"limits": {"feeder": {"a": 0}}, "ttl_s": 60}
    await asyncio.to_thread(ask, f"{address}/limits", body)
    code, text = await asyncio.to_thread(ask, f"{address}/health")
    found = json.loads(text)
    assert (found["offered_a"]["P00"], found["confirmed_a"]["P00"]) == (0, 14)
    await client.drop()


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_header():
    with _bind("127.0.0.1", 0, "--port") as opened:
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_and_a_missing_extra_are_refused_in_a_sentence(run, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        assert_refused(command("serve", run, "--port", port), f"--port {port}: cannot listen")
        given = ("serve", run, "--port", 0, "--ocpp-open", "--ocpp", port)
        assert_refused(command(*given), f"--ocpp {port}: cannot listen", "choose another")
    assert_refused(command("serve", run, "--port", 0, "--every", -1), "--every is -1")
    assert_refused(command("serve", run, "--port", 70000), "--port 70000: cannot listen")
    assert_refused(command("serve", run, "--prot", 1), "did you mean --port?")
    name = "apportion_charging.serve"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(apportion_charging, "serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert_refused(command("serve", run), "pip install 'apportion-charging[serve]'")
