"""The certificates of docs/certificates.md, and how often certificates deceive.

    python benchmarks/certificates.py

Trains a charging, a portfolio and a federated policy as the page says, and certifies them; simulates gains
of known mean besides. Writes table.csv, simulated.csv and certificate.json to docs/results/certificates,
and docs/assets/certificate.png. Tests take their gains from here.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.signal import lfilter

from apportion.certify.certificate import Gains

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "certificates"
PATHS, PERIODS = 10_000, 400
TRAINED = {
    "garage": "train charging",
    "market": "train portfolio --until 2018-12-31",
    "federation": "train federated --steps 60",
}
CERTIFIED = {
    "charging, JPL": ("garage", "--against llf --site jpl"),
    "charging, JPL, bound of 10 points": ("garage", "--against llf --site jpl --bound 0.1"),
    "charging, JPL, blocks of 5 days": ("garage", "--against llf --site jpl --block 5"),
    "charging, Caltech": ("garage", "--against llf --site caltech"),
    "portfolio": ("market", "--against lazy-crp"),
    "aggregation": ("federation", "--against fedavg"),
}
COLUMNS = [
    *("verdict", "decided", "start", "end", "period", "block"),
    *("bets", "bound", "mean", "lower", "upper", "clipped", "trust"),
]
Draw = Callable[[np.random.Generator, int], np.ndarray]


def clipped(gains: np.ndarray) -> np.ndarray:
    return np.clip(gains, -1, 1)


def autocorrelated(rng, paths: int, persistence: float, deviation: float) -> np.ndarray:
    noise = rng.normal(0, deviation * math.sqrt(1 - persistence**2), (PERIODS, paths))
    before = persistence * rng.normal(0, deviation, (1, paths))
    return clipped(lfilter([1.0], [1.0, -persistence], noise, axis=0, zi=before)[0].T)


def reacting(rng: np.random.Generator, paths: int) -> np.ndarray:
    """A fair game that plays for more whenever the policy seems to be ahead."""
    signs, found = rng.choice([-1.0, 1.0], (paths, PERIODS)), np.zeros((paths, PERIODS))
    ahead = np.zeros(paths)
    for n in range(PERIODS):
        found[:, n] = signs[:, n] * np.where(ahead > 0, 1.0, 0.05)
        ahead += found[:, n]
    return found


def days_of_garages(rng: np.random.Generator, paths: int) -> np.ndarray:
    """Twenty garages a day that share the day's weather: their mean is the day's one gain."""
    weather = rng.normal(0, 0.2, (paths, PERIODS))
    garages = (clipped(weather + rng.normal(0, 0.2, weather.shape)) for _ in range(20))
    return sum(garages, np.zeros_like(weather)) / 20


def with_holes(rng: np.random.Generator, paths: int) -> np.ndarray:
    gains = rng.uniform(-1, 1, (paths, PERIODS))
    return np.where(rng.random((paths, PERIODS)) < 0.4, np.nan, gains)


NULLS: dict[str, tuple[Draw, int]] = {
    "coins": (lambda rng, paths: rng.choice([-1.0, 1.0], (paths, PERIODS)), 1),
    "bounded": (lambda rng, paths: rng.uniform(-1, 1, (paths, PERIODS)), 1),
    "small": (lambda rng, paths: rng.uniform(-0.01, 0.01, (paths, PERIODS)), 1),
    "heavy tails, clipped": (lambda rng, n: clipped(0.2 * rng.standard_t(2, (n, PERIODS))), 1),
    "rare large losses": (lambda rng, n: np.where(rng.random((n, PERIODS)) < 0.02, -0.98, 0.02), 1),
    "worse than nothing": (lambda rng, paths: rng.uniform(-1, 0.96, (paths, PERIODS)), 1),
    "autocorrelated .5, in blocks of 5": (lambda rng, n: autocorrelated(rng, n, 0.5, 0.5), 5),
    "autocorrelated .9, in blocks of 20": (lambda rng, n: autocorrelated(rng, n, 0.9, 0.5), 20),
    "clustered": (days_of_garages, 1),
    "missing": (with_holes, 3),
    "reacting": (reacting, 1),
}
"""Gains without a mean, or with one below 0, and the block that they are bet on in."""
UNBLOCKED: dict[str, tuple[Draw, int]] = {
    f"autocorrelated .{tenths}, without blocks": (
        partial(autocorrelated, persistence=tenths / 10, deviation=0.4),
        1,
    )
    for tenths in (3, 7, 9)
}
"""To be bet on one by one, as they should not be."""
GAINED: dict[str, tuple[Draw, int]] = {
    "mean 0.1, deviation 0.3": (lambda rng, n: clipped(rng.normal(0.1, 0.3, (n, PERIODS))), 1)
}


def simulated() -> pd.DataFrame:
    """How many paths of each kind are certified at their best moment, and when half of them are."""
    rows = []
    for kind, (draw, block) in (NULLS | UNBLOCKED | GAINED).items():
        when = []
        for own in draw(np.random.default_rng(7), PATHS):
            made = Gains(own, -1.0, 1.0).certify(block=block)
            won = made.decided is not None and made.verdict == "certified"
            when.append(made.ends[made.decided] + 1 if won else np.inf)
        share, half = float(np.isfinite(when).mean()), float(np.median(when))
        row = {"gains": kind, "block": block, "paths": PATHS, "periods": PERIODS}
        row |= {"certified": round(share, 4), "half_after": half if half < np.inf else None}
        rows.append(row)
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def apportion(command: str, *more: Path | str) -> None:
    """The command line."""
    words = [sys.executable, "-m", "apportion", *command.split(), *map(str, more)]
    subprocess.run(words, check=True)


def certified(runs: Path) -> pd.DataFrame:
    """A row for each certificate; the first is also kept as it was printed."""
    rows = []
    for name, (run, options) in CERTIFIED.items():
        if not (runs / run).exists():
            apportion(TRAINED[run], "--quiet", "--out", runs / run)
        out = runs / "certified" / name
        apportion("certify", runs / run, *options.split(), "--out", out)
        found = json.loads((out / "certificate.json").read_text())
        bets = pd.read_csv(out / "certificate.csv", dtype={"period": str})
        if not rows:
            shutil.copy(out / "certificate.png", DOCS / "assets" / "certificate.png")
            (RESULTS / "certificate.json").write_text(json.dumps(found, indent=1) + "\n")
        row = {"name": name, "trained": f"apportion {TRAINED[run]}", "certified": options}
        row |= {key: found[key] for key in COLUMNS}
        row |= {key: found["wealth"][key] for key in ("better", "worse")}
        place = np.flatnonzero(bets.period == found["decided"])
        rows.append(row | {"bet": int(place[0]) + 1 if len(place) else None})
    return pd.DataFrame(rows)


def main() -> None:
    simulated().to_csv(RESULTS / "simulated.csv", index=False)
    with tempfile.TemporaryDirectory() as runs:
        certified(Path(runs)).to_csv(RESULTS / "table.csv", index=False)


if __name__ == "__main__":
    main()
