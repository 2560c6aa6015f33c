"""Site-days a second under policy and schedulers, beside acnportal's own simulator, and a live answer.

    python benchmarks/charging.py [--peer PYTHON] [--answers]

A site-day is 96 periods of all 52 stations of JPL behind one feeder. `--peer` names the Python of an
environment with acnportal (`make peers-env`); least laxity first is then timed against its simulator on 20
days of 10 stations (`make test-peers` checks that both deliver the same energy). A second table is how long
a live controller takes to answer with a car at every station, in wall-clock and in processor time; the
target is 50 ms at the 99th percentile. `--answers` measures this table alone.
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from table import ROOT, alternate, facts, options, per_second, ratio, spread, version_in, write

from apportion.policy import Pooled
from apportion_charging.controller import Controller
from apportion_charging.days import Days
from apportion_charging.forecasts import Predictor, add_forecasts
from apportion_charging.problem import CHANNELS, PolicySchedule
from apportion_charging.schedulers import SCHEDULERS, simulate
from apportion_charging.sessions import read_sessions
from apportion_charging.site import Site, Station, embedded_site

sys.path.insert(0, str(ROOT / "packages" / "charging" / "tests"))

from garages import acnportal_days

STATIONS, DAYS, COPIES, PHI, RATE_KW, ANSWERS = 10, 20, 48, 0.15, 6.656, 2000


def whole_site(days: Days) -> list[dict]:
    """Time all days at all stations under each schedule, the schedules in turn."""
    days = add_forecasts(days, Predictor.fit(days), recall=True)
    capacity = PHI * len(days.stations) * RATE_KW
    schedules = {
        "policy, 48 hidden units": PolicySchedule(Pooled(CHANNELS, 48, key=jax.random.key(0))),
        "llf": SCHEDULERS["llf"],
        "equal": SCHEDULERS["equal"],
    }
    sides = {
        name: per_second(len(days), partial(simulate, days, [schedule], capacity))
        for name, schedule in schedules.items()
    }
    found = alternate(sides, 7)
    return [
        {
            "schedule": f"{name}; {len(days.stations)} stations",
            "site-days a second": spread(rates),
            "acnportal": None,
            "ratio": None,
        }
        for name, rates in found.items()
    ]


def against_acnportal(days: Days, python: str) -> dict:
    """Time least laxity first on the same days; ours simulates several garages at once, as in use."""
    some = days.at(np.random.default_rng(0).choice(len(days.stations), STATIONS, replace=False))
    some = add_forecasts(some, Predictor.fit(days)).between(None, some.dates[DAYS - 1])
    capacity = PHI * STATIONS * RATE_KW
    garages = np.broadcast_to(np.arange(STATIONS), (COPIES, STATIONS))
    work = partial(simulate, some, [SCHEDULERS["llf"]], capacity, garages)
    with tempfile.TemporaryDirectory() as folder:

        def theirs() -> float:
            found = acnportal_days(python, some, capacity, Path(folder))
            return DAYS / float(found["llf/seconds"])

        sides = {"ours": per_second(COPIES * DAYS, work), "acnportal": theirs}
        found = alternate(sides, 3)
    return {
        "schedule": f"llf; {STATIONS} stations",
        "site-days a second": spread(found["ours"]),
        "acnportal": spread(found["acnportal"]),
        "ratio": ratio(found["ours"], found["acnportal"]),
    }


def answers_ms(stations: int, about: dict) -> np.ndarray:
    """Wall-clock and processor time of answers in a garage with meters, called every 15 seconds."""
    names = [f"S{place}" for place in range(stations)]
    site = Site(dict.fromkeys(names, Station()), feeder_a=6.0 * stations)
    policy = Pooled(CHANNELS, 48, key=jax.random.key(0))
    controller = Controller(policy, about, site, trust=0.5)
    start, taken = pd.Timestamp("2021-06-01 09:00"), []
    drawn = dict.fromkeys(names, 0.0)
    for number in range(ANSWERS):
        cars = [
            {"id": name, "plugged": True, "arrival": "2021-06-01 08:30", "requested_kwh": 20.0}
            | {"stated_departure": "2021-06-01 17:00", "drawn_kw": drawn[name]}
            for name in names
        ]
        now = {"time": str(start + pd.Timedelta(seconds=15 * number)), "stations": cars}
        begun = np.array([time.perf_counter(), time.process_time()])
        drawn = controller.allocate(now).allocation_kw
        taken.append(np.array([time.perf_counter(), time.process_time()]) - begun)
    return 1e3 * np.array(taken).T


def answers(days: Days, about: dict, out: Path) -> None:
    """Write the table of live answers."""
    predictor = Predictor.fit(days.between(None, "2019-06-30")).to_dict()
    knows = {"job": "charging", "predictor": predictor, "channels": CHANNELS}
    rows = []
    for stations in (20, 200):
        for kind, taken in zip(("clock", "processor"), answers_ms(stations, knows), strict=True):
            found = {"median": float(np.median(taken)), "99th": float(np.quantile(taken, 0.99))}
            rows.append({"stations": str(stations), "time": kind, "median, ms": found["median"]})
            rows[-1] |= {"99th percentile, ms": found["99th"], "longest, ms": float(taken.max())}
    text = (
        f"{ANSWERS:,} answers in a row of a controller with a car at every station, without HTTP."
    )
    write("charging_answers", "A live answer", text, rows, about, out)


def main() -> None:
    parser = options(__doc__, peer="acnportal")
    parser.add_argument("--answers", action="store_true", help="measure live answers alone")
    asked = parser.parse_args()
    versions = {"acnportal": version_in(asked.peer, "acnportal")} if asked.peer else {}
    about = facts(**versions)
    days = Days.of(read_sessions(), "jpl", embedded_site("jpl"))
    if asked.answers:
        answers(days, about, asked.out)
        return
    rows = whole_site(days)
    if asked.peer:
        rows.append(against_acnportal(days, asked.peer))
    text = (
        f"{len(days)} days of 96 periods; medians over turns taken alternately, with the least and "
        "the most."
    )
    write("charging", "Site-days a second", text, rows, about, asked.out)
    answers(days, about, asked.out)


if __name__ == "__main__":
    main()
