"""`apportion serve` as a garage uses it: HTTP, its page, charge points and signals."""

import asyncio
import json
import logging
import re
import socket
import sys
import time

import pytest

pytest.importorskip("uvicorn")
from garage_loop import ChargePoint, until
from served import HOSTILE, NOW, SITE, ask, serving

import apportion_charging
from apportion_charging.serve import _bind, _CertificateGate
from cli.command import apportion as command
from cli.command import assert_refused
from report.test_report import browser, errors, wait  # noqa: F401


@pytest.fixture(scope="module")
def garage(run):
    """The port of a server."""
    with serving(run) as found:
        yield found["ports"][0]


def test_http_answers_what_the_controller_decides_and_shows_it(garage):
    code, offers = ask(garage, "/allocate", NOW | {"capacity_kw": SITE.capacity_kw})
    assert code == 200
    assert (offers["decided_by"], offers["warnings"]) == ("policy", [])
    told = offers["allocation_a"]
    assert told["C"] == told["B"] == 0
    assert 6 <= told["P00"] <= 32
    assert told["P00"] + told[HOSTILE] <= 40
    state = ask(garage, "/state")[1]
    assert {s["id"]: s["offered_a"] for s in state["stations"]} == told
    assert [s["plugged"] for s in state["stations"]] == [True, False, True, True]
    assert [limit["name"] for limit in state["limits"]] == [
        *("feeder", "feeder L1", "feeder L2", "feeder L3", "north L1", "north L2", "north L3")
    ]
    assert all(limit["used"] <= limit["limit"] + 1e-6 for limit in state["limits"])
    assert ask(garage, "/health")[1]["status"] == "ok"
    metrics = ask(garage, "/metrics")[1]
    for line in (
        "apportion_cars 3",
        'apportion_decisions_total{by="policy"} 1',
        f'apportion_station_offered_amperes{{station="P00"}} {told["P00"]}',
        "# TYPE apportion_decisions_total counter",
        f'apportion_limit_kilowatts{{name="feeder"}} {SITE.capacity_kw:g}',
    ):
        assert line in metrics.splitlines()
    closed = NOW | {"time": "2026-03-02 09:05", "capacity_kw": 0}
    assert not any(ask(garage, "/allocate", closed)[1]["allocation_a"].values())
    assert ask(garage, "/state")[1]["capacity_kw"] == 0


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "not a JSON object"),
        (b"[" * 100_000, 400, "not JSON"),
        (b" " * (1 << 20) + b"{}", 413, "more than a megabyte"),
        ({"stations": [{"id": "P01", "plugged": True}]}, 200, "station P01 is not one of the site"),
    ],
)
def test_what_cannot_be_used_is_answered_in_a_sentence(garage, body, code, words):
    found, answer = ask(garage, "/allocate", body)
    assert found == code
    assert words in str(answer)
    assert ask(garage, "/nothing")[0] == 404
    assert ask(garage, "/health")[0] == 200


@pytest.mark.browser
def test_the_page_follows_the_controller(garage, browser):  # noqa: F811
    for minute in range(3):
        ask(garage, "/allocate", NOW | {"time": f"2026-03-02 10:0{minute}", "capacity_kw": 27.6})
    browser.set_window_size(1280, 900)
    browser.get_log("browser")
    browser.get(f"http://127.0.0.1:{garage}")

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
    ask(garage, "/allocate", NOW | {"time": "2026-03-02 10:05", "capacity_kw": 0})
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
    given = ("--ocpp", 0, "--ocpp-open", "--every", 2, "--state", state)
    with serving(run, *given) as found:
        asyncio.run(one_car(*found["ports"]))
    assert "no certificate" in found["said"].splitlines()[0]
    assert found["code"] == 0
    assert re.fullmatch(r"stopped after \d+ decisions; .*state.json\n", found["out"])
    assert "Traceback" not in found["said"]
    assert json.loads(state.read_text())["stations"].keys() == {"P00"}
    assert json.loads(state.with_suffix(".ocpp.json").read_text())["points"]["P00"]["car"]


async def one_car(port, ocpp):
    """A charge point with a car receives amperes, and again after a driver's statement by HTTP."""

    def call(*given):
        return asyncio.to_thread(ask, port, *given)

    client = ChargePoint("P00", SITE.stations["P00"], time.time)
    await client.connect(ocpp)
    await client.boot()
    await client.plug()
    # Other stations count with their cables until profiles of an earlier server have expired.
    await until(lambda: client.profile and client.profile[0] == 32.0)
    body = {"capacity_kw": 10.0, "stations": [{"id": "P00", "requested_kwh": 7}, {"id": "P01"}]}
    code, answer = await call("/allocate", body)
    assert (code, answer["allocation_a"]["P00"]) == (200, 14)
    assert "station P01 is not one of the site" in answer["warnings"][0]
    assert client.in_force() == 14.0
    shown = (await call("/state"))[1]["stations"][0]
    assert (shown["confirmed_a"], shown["requested_kwh"]) == (14.0, 7)
    for bad in ("5.0", -1, {}, None):
        code, answer = await call("/allocate", {"capacity_kw": bad})
        assert (code, "capacity_kw" in answer["error"], client.in_force()) == (400, True, 14.0)
    # A station that does not confirm a profile counts with the current that it may draw.
    client.answers = "Rejected"
    await call("/limits", {"limits": {"feeder": {"a": 0}}, "ttl_s": 60})
    found = (await call("/health"))[1]
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
