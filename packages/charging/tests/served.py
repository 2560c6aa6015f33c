"""A process of `apportion serve`, and requests to it."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from http.client import HTTPConnection

from apportion_charging.site import Branch, Site, Station

TOKEN = "of these tests"
JSON = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
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


@contextmanager
def serving(run, *options, token=TOKEN, files=None):
    """Run a server process; yield its ports and, at the end, its output and exit code."""
    environment = {name: x for name, x in os.environ.items() if name != "APPORTION_TOKEN"}
    environment |= {} if token is None else {"APPORTION_TOKEN": token}
    options = ("--port", 0, *options)
    options += () if "--site" in options else ("--site", run.parent / "site.toml")
    given = [sys.executable, "-m", "apportion", "serve", str(run), *map(str, options)]
    if files is not None:
        given = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *given]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(given, text=True, env=environment, **pipes) as process:
        said, last = "", "charge points connect" if "--ocpp" in options else "serving"
        while last not in said:
            assert process.poll() is None, said
            said += process.stderr.readline()
        found = {"said": said, "ports": [int(x) for x in re.findall(r"127.0.0.1:(\d+)", said)]}
        try:
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            found["out"], rest = process.communicate(timeout=60)
            found |= {"said": said + rest, "code": process.returncode}


def ask(port, path, body=None, **headers):
    """Return status and JSON or text of an answer; POST if there is a body, no headers of None."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    method, usual = "POST", JSON | {"content-length": str(len(data))}
    if body is None:
        method, usual, data = "GET", {}, None
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    link = HTTPConnection("127.0.0.1", port, timeout=60)
    link.putrequest(method, path, skip_host="host" in sent)
    for name, value in (usual | sent).items():
        if value is not None:
            link.putheader(name, value)
    link.endheaders(data)
    answer = link.getresponse()
    text = answer.read().decode()
    link.close()
    is_json = "json" in answer.headers.get("content-type", "")
    return answer.status, json.loads(text) if is_json else text
