"""How long a live controller takes to answer, in garages of 20 and 200 stations that are all taken.

    python benchmarks/controller.py

Printed: the median and the longest of 2,000 answers, in milliseconds, by the clock and of the processor's
time, which other programs on the machine do not change; an operator wants 50 at most.
"""

import time

import jax
import numpy as np
import pandas as pd

from apportion.domains.charging.controller import Controller
from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import Predictor
from apportion.domains.charging.problem import CHANNELS
from apportion.domains.charging.sessions import read_sessions
from apportion.domains.charging.site import Site, Station, embedded_site
from apportion.policy import Pooled

ANSWERS = 2000


def answers_ms(stations: int, about: dict) -> np.ndarray:
    """A garage whose meters speak, asked every 15 seconds: by the clock, and the processor's time."""
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


def main() -> None:
    days = Days.of(read_sessions(), "jpl", embedded_site("jpl")).between(None, "2019-06-30")
    predictor = Predictor.fit(days).to_dict()
    about = {"job": "charging", "predictor": predictor, "channels": CHANNELS}
    for stations in (20, 200):
        for kind, taken in zip(("clock", "processor"), answers_ms(stations, about), strict=True):
            longest = f"at most {taken.max():.1f} ms"
            print(f"{stations} stations, {kind}: {np.median(taken):.1f} ms, {longest}")


if __name__ == "__main__":
    main()
