"""A public site: its own central system keeps the charge points, and apportion decides by HTTP.

An adapter for CitrineOS (https://citrineos.github.io) with OCPP 1.6 and one connector a station. In every
period it reads the open transactions by GraphQL, asks `apportion serve` (without --ocpp) for amperes, and
sets a charging profile for each car, decreases first. Authorization, billing and remote start stay with
CitrineOS. Give every charge point a TxDefaultProfile of 0 A there: it applies when a profile expires
because this adapter is lost.

    APPORTION_TOKEN=... python examples/ocpp_backend.py http://citrine:8080 http://citrine:8090/v1/graphql \
        http://localhost:8080
"""

import json
import os
import sys
import time
from urllib.parse import urlencode
from urllib.request import Request, urlopen

PERIOD_SECONDS = 60
OPEN = """query { Transactions(where: {isActive: {_eq: true}}) {
    stationId transactionId startTime totalKwh } }"""


def call(url, body=None, token=None):
    """Send JSON by POST, or GET without a body; return the JSON answer."""
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, headers), timeout=10) as answer:
        return json.load(answer)


def set_profile(citrine, station, transaction, amperes):
    """Ask CitrineOS to send a profile; return whether it was sent."""
    schedule = {
        "chargingRateUnit": "A",
        "duration": 3 * PERIOD_SECONDS,
        "chargingSchedulePeriod": [{"startPeriod": 0, "limit": amperes}],
    }
    profile = {
        "chargingProfileId": 1,
        "transactionId": int(transaction),
        "stackLevel": 1,
        "chargingProfilePurpose": "TxProfile",
        "chargingProfileKind": "Relative",
        "chargingSchedule": schedule,
    }
    where = urlencode({"identifier": station, "tenantId": 1})
    url = f"{citrine}/ocpp/1.6/smartcharging/setChargingProfile?{where}"
    done = call(url, {"connectorId": 1, "csChargingProfiles": profile})
    return all(one["success"] for one in done)


def share_power(citrine, graphql, apportion, token, in_force):
    """Decide once. `in_force` has the amperes of each station's last profile, and is updated."""
    cars = {car["stationId"]: car for car in call(graphql, {"query": OPEN})["data"]["Transactions"]}
    stations = []
    for station in call(f"{apportion}/state")["stations"]:
        name = station["id"]
        if name not in cars:
            in_force.pop(name, None)
            stations.append({"id": name, "plugged": False})
            continue
        car = cars[name]
        seen = {"arrival": car["startTime"], "delivered_kwh": car["totalKwh"]}
        seen["offered_a"] = in_force.get(name, 0)
        stations.append({"id": name, "plugged": True, **seen})
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "stations": stations}
    amperes = call(f"{apportion}/allocate", now, token)["allocation_a"]
    wanted = {name: amperes[name] for name in cars if name in amperes}
    # Increases only when every decrease was sent: the feeder's limit holds in between.
    lower = {name: limit for name, limit in wanted.items() if limit < in_force.get(name, 0)}
    for some in (lower, {name: limit for name, limit in wanted.items() if name not in lower}):
        for name, limit in some.items():
            if not set_profile(citrine, name, cars[name]["transactionId"], limit):
                print(f"station {name}: the profile was not sent", file=sys.stderr)
                return
            in_force[name] = limit


if __name__ == "__main__":
    profiles = {}
    while True:
        try:
            share_power(*sys.argv[1:4], os.environ["APPORTION_TOKEN"], profiles)
        except OSError as error:
            print(f"no decision: {error}", file=sys.stderr)
        time.sleep(PERIOD_SECONDS)
