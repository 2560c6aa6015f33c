"""Site-days a second: a trained policy's network and the schedulers, and acnportal's own simulator.

    python benchmarks/charging.py [--peer PYTHON]

A site-day is 96 periods of all 52 stations of JPL behind one feeder. With the python of an environment
with acnportal (`make peers-env`), least laxity first is timed against its simulator too, on 20 days of
10 stations; that both deliver the same energy is asked by `make test-peers`.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import numpy as np
from table import ROOT, alternate, facts, options, per_second, ratio, spread, version_in, write

from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import Predictor, add_forecasts
from apportion.domains.charging.problem import CHANNELS
from apportion.domains.charging.schedulers import SCHEDULERS, PolicySchedule, simulate
from apportion.domains.charging.sessions import read_sessions
from apportion.domains.charging.site import embedded_site
from apportion.policy import Pooled

sys.path.insert(0, str(ROOT / "tests"))

from domains.charging.garages import acnportal_days

STATIONS, DAYS, COPIES, PHI, RATE_KW = 10, 20, 48, 0.15, 6.656


def whole_site(days: Days) -> list[dict]:
    """All days of all stations, under each schedule by turns."""
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
            "to reach": "1,000 a second" if name.startswith("policy") else None,
        }
        for name, rates in found.items()
    ]


def against_acnportal(days: Days, python: str) -> dict:
    """Least laxity first on the same few days; ours at several garages at once, as it is used."""
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
        "to reach": "100 times",
    }


def main() -> None:
    asked = options(__doc__, peer="acnportal").parse_args()
    versions = {"acnportal": version_in(asked.peer, "acnportal")} if asked.peer else {}
    about = facts(**versions)
    days = Days.of(read_sessions(), "jpl", embedded_site("jpl"))
    rows = whole_site(days)
    if asked.peer:
        rows.append(against_acnportal(days, asked.peer))
    text = (
        f"{len(days)} days of 96 periods; medians over turns taken alternately, with the least and "
        "the most."
    )
    write("charging", "Site-days a second", text, rows, about, asked.out)


if __name__ == "__main__":
    main()
