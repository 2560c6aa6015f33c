"""How long a live controller takes to answer, in garages of 20 and 200 stations that are all taken.

    python benchmarks/controller.py

Printed: the median and the longest of 200 answers, in milliseconds; an operator wants 50 at most.
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


def answers_ms(stations: int, about: dict) -> np.ndarray:
    """Two hundred minutes of a garage, with meters that speak."""
    names = [f"S{place}" for place in range(stations)]
    site = Site(dict.fromkeys(names, Station()), feeder_a=6.0 * stations)
    policy = Pooled(CHANNELS, 48, key=jax.random.key(0))
    controller = Controller(policy, about, site, trust=0.5)
    start, taken = pd.Timestamp("2021-06-01 09:00"), []
    drawn = dict.fromkeys(names, 0.0)
    for minute in range(200):
        cars = [
            {"id": name, "plugged": True, "arrival": "2021-06-01 08:30", "requested_kwh": 20.0}
            | {"stated_departure": "2021-06-01 17:00", "drawn_kw": drawn[name]}
            for name in names
        ]
        now = {"time": str(start + pd.Timedelta(minutes=minute)), "stations": cars}
        begun = time.perf_counter()
        drawn = controller.allocate(now).allocation_kw
        taken.append(1e3 * (time.perf_counter() - begun))
    return np.array(taken)


def main() -> None:
    days = Days.of(read_sessions(), "jpl", embedded_site("jpl")).between(None, "2019-06-30")
    predictor = Predictor.fit(days).to_dict()
    about = {"job": "charging", "predictor": predictor, "channels": CHANNELS}
    for stations in (20, 200):
        taken = answers_ms(stations, about)
        print(f"{stations} stations: {np.median(taken):.1f} ms, at most {taken.max():.1f} ms")


if __name__ == "__main__":
    main()
