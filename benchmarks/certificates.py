"""The certificates of docs/certificates.md, and how often certificates deceive.

    python benchmarks/certificates.py

Trains a charging and a portfolio policy as the page says, and certifies them; simulates gains of known mean
besides. Writes table.csv, simulated.csv and certificate.json to docs/results/certificates. Tests take their
gains from here.
"""

import json
import math
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
PATHS = 2000
TRAINED = {
    "garage": "train charging",
    "market": "train portfolio --until 2018-12-31",
}
CERTIFIED = {
    "charging, JPL, single days": ("garage", "--against llf --site jpl --block 1"),
    "charging, JPL, single days, bound of 10 points": (
        "garage",
        "--against llf --site jpl --block 1 --bound 0.1",
    ),
    "charging, JPL, blocks of 5 days": ("garage", "--against llf --site jpl --block 5"),
    "charging, JPL": ("garage", "--against llf --site jpl"),
    "charging, Caltech": ("garage", "--against llf --site caltech"),
    "portfolio": ("market", "--against lazy-crp"),
}
COLUMNS = [
    *("verdict", "decided", "start", "end", "period", "block"),
    *("bets", "bound", "mean", "lower", "upper", "clipped", "trust"),
]
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
"""Gains, paths by periods."""


def clipped(gains: np.ndarray) -> np.ndarray:
    return np.clip(gains, -1, 1)


def noise(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return clipped(rng.normal(0, 0.3, shape))


def autocorrelated(rng, shape, persistence: float, lag: int = 1, deviation: float = 0.4):
    """A gain is `persistence` times the one `lag` periods before, and noise."""
    before = lag * math.ceil(5 / (1 - persistence))
    size = shape[0], before + shape[1]
    shocks = rng.normal(0, deviation * math.sqrt(1 - persistence**2), size)
    past = [1.0, *[0.0] * (lag - 1), -persistence]
    return clipped(lfilter([1.0], past, shocks, axis=1)[:, before:])


def slow(rng, shape, persistence: float) -> np.ndarray:
    """Noise and a small component that lasts."""
    return clipped(noise(rng, shape) + autocorrelated(rng, shape, persistence, deviation=0.1))


def weekdays(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Each weekday has a level of its own for twenty weeks."""
    levels = np.tile(rng.normal(0, 0.3, (shape[0], shape[1] // 140 + 1, 1, 7)), (1, 1, 20, 1))
    return clipped(levels.reshape(shape[0], -1)[:, : shape[1]] + noise(rng, shape))


def reacting(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A fair game that plays for more whenever the policy seems to be ahead."""
    signs, found, ahead = rng.choice([-1.0, 1.0], shape), np.zeros(shape), np.zeros(shape[0])
    for n in range(shape[1]):
        found[:, n] = signs[:, n] * np.where(ahead > 0, 1.0, 0.05)
        ahead += found[:, n]
    return found


def best_start(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A record that begins where, in hindsight, the gains of as many periods begin to rise."""
    paths, periods = shape
    gains = noise(rng, (paths, 2 * periods))
    first = 1 + np.cumsum(gains, axis=1)[:, :periods].argmin(1)
    return gains[np.arange(paths)[:, None], first[:, None] + np.arange(periods)]


def with_holes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.4, np.nan, rng.uniform(-1, 1, shape))


def crashes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One block in fifty loses all on every day."""
    rare = rng.random((shape[0], shape[1] // 28 + 1)) < 0.02
    return np.where(np.repeat(rare, 28, axis=1)[:, : shape[1]], -0.98, 0.02)


def gaining(deviations: float) -> Draw:
    """Gains of so many standard deviations of a block of 28."""
    return lambda rng, shape: clipped(rng.normal(0.3 * deviations / math.sqrt(28), 0.3, shape))


NULLS: dict[str, tuple[Draw, int, int]] = {
    "independent, normal": (noise, 28, 1000),
    "independent, normal, single": (noise, 1, 400),
    "coins, single": (lambda rng, shape: rng.choice([-1.0, 1.0], shape), 1, 400),
    "t(2), clipped": (lambda rng, shape: clipped(0.2 * rng.standard_t(2, shape)), 28, 1000),
    "t(2), clipped, single": (lambda rng, n: clipped(0.2 * rng.standard_t(2, n)), 1, 400),
    "rare large losses, single": (
        lambda rng, shape: np.where(rng.random(shape) < 0.02, -0.98, 0.02),
        1,
        400,
    ),
    "worse than nothing, single": (lambda rng, shape: rng.uniform(-1, 0.96, shape), 1, 400),
    "missing": (with_holes, 28, 1000),
    "reacting": (reacting, 28, 1000),
    "best start in hindsight": (best_start, 28, 1000),
    "drifting from below 0 to above": (
        lambda rng, shape: clipped(noise(rng, shape) + np.linspace(-0.1, 0.1, shape[1])),
        28,
        1000,
    ),
    **{
        f"AR(1) {persistence}": (partial(autocorrelated, persistence=persistence), 28, 1000)
        for persistence in (0.3, 0.5, 0.7, 0.9, 0.95, 0.98)
    },
    **{
        f"AR at lag {lag}, {persistence}": (
            partial(autocorrelated, persistence=persistence, lag=lag),
            28,
            1000,
        )
        for lag in (2, 5, 7)
        for persistence in (0.5, 0.9)
    },
    "slow component of AR .99": (partial(slow, persistence=0.99), 28, 1000),
    "slow component of AR .99, longer": (partial(slow, persistence=0.99), 28, 2000),
    "weekdays": (weekdays, 28, 1000),
}
"""Gains without a mean, or with one below 0; the block that they are bet on in, and their periods."""
BROKEN: dict[str, tuple[Draw, int, int]] = {
    "slow component of AR .997": (partial(slow, persistence=0.997), 28, 1000),
    "slow component of AR .99 a week": (partial(slow, persistence=0.99), 13, 1000),
    "whole blocks of losses, rarely": (crashes, 28, 4000),
    "AR at lag 7, 0.9, single": (partial(autocorrelated, persistence=0.9, lag=7), 1, 400),
    "AR at lag 7, 0.9, blocks of 5": (partial(autocorrelated, persistence=0.9, lag=7), 5, 400),
}
"""What the test of dependence does not see, by default or in blocks that are too short."""
GAINED: dict[str, tuple[Draw, int, int]] = {
    f"a gain of {deviations} deviations of a block, {blocks} blocks": (
        gaining(deviations),
        28,
        28 * blocks,
    )
    for deviations, blocks in ((0.6, 36), (0.6, 60), (0.8, 36))
}


def verdicts(kind: str, paths: int) -> list[str]:
    """The verdicts on so many paths; one that is reached stays, so this is stopping at the best moment."""
    draw, block, periods = (NULLS | BROKEN | GAINED)[kind]
    drawn = draw(np.random.default_rng(7), (paths, periods))
    return [Gains(own, -1.0, 1.0).certify(block=block).verdict for own in drawn]


def simulated() -> pd.DataFrame:
    """How many paths of each kind are certified or called harmful at any time."""
    rows = []
    for kind, (_, block, periods) in (NULLS | BROKEN | GAINED).items():
        found = verdicts(kind, PATHS)
        row = {"gains": kind, "block": block, "paths": PATHS, "periods": periods}
        row |= {name: found.count(name) / PATHS for name in ("certified", "harmful")}
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
