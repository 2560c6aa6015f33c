"""Site-days a second: a trained policy's network and the schedulers, all stations of JPL behind one feeder.

    python benchmarks/charging.py

A site-day is 96 periods of all 52 stations. It writes benchmarks/results/charging.md and .json. The
ratio to acnportal's own simulator is measured by its peer tests (`make test-peers`).
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import jax
import numpy as np

from apportion.domains.charging.backtest import PolicySchedule
from apportion.domains.charging.days import Days
from apportion.domains.charging.peers import PEERS, simulate
from apportion.domains.charging.predictions import Predictor
from apportion.domains.charging.problem import CHANNELS
from apportion.domains.charging.sessions import RATE_KW, read_sessions
from apportion.policy import Pooled

TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    begun = os.getloadavg()
    days = Days.of(read_sessions(), "jpl")
    predictor = Predictor.fit(days)
    garage = predictor.apply(days).garage()
    capacity = 0.15 * len(days.stations) * RATE_KW
    schedules = {
        "policy, 48 hidden units": PolicySchedule(Pooled(CHANNELS, 48, key=jax.random.key(0))),
        "llf": PEERS["llf"],
        "equal": PEERS["equal"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in schedules}
    for turn in range(TURNS + 1):
        for name, schedule in schedules.items():
            start = time.perf_counter()
            simulate(garage, schedule, capacity, predictor.medians)
            if turn:  # the first turn compiles
                seconds[name].append(time.perf_counter() - start)
    rates = {
        name: {
            "site_days_a_second": len(days) / float(np.median(took)),
            "slowest": len(days) / max(took),
            "fastest": len(days) / min(took),
        }
        for name, took in seconds.items()
    }
    facts = {
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {jax.devices()[0]}",
        "load when begun": " ".join(f"{load:.1f}" for load in begun),
        "jax": jax.__version__,
    }
    found = facts | {"days": len(days), "rates": rates}
    out.mkdir(parents=True, exist_ok=True)
    (out / "charging.json").write_text(json.dumps(found, indent=1) + "\n")
    text = table(rates, facts)
    (out / "charging.md").write_text(text)
    print(text)


def table(rates: dict[str, dict[str, float]], facts: dict[str, str]) -> str:
    lines = ["# Site-days a second", "", "| schedule | site-days a second | slowest to fastest |"]
    lines.append("|---|---|---|")
    for name, rate in rates.items():
        spread = f"{rate['slowest']:,.0f} to {rate['fastest']:,.0f}"
        lines.append(f"| {name} | {rate['site_days_a_second']:,.0f} | {spread} |")
    return "\n".join([*lines, "", *(f"- {name}: {value}" for name, value in facts.items()), ""])


if __name__ == "__main__":
    main()
