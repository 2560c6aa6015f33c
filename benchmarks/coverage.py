"""Coverage of the 95 % intervals of `apportion.certify.statistics` in the layout of every study.

Each layout is drawn many times with a known truth, with as many units as the study has at paper scale,
what its units share (years, days, policies) and the skew seen in its committed tables. Written to
docs/results/coverage/table.csv; tests/test_statistics.py holds it to 93 to 97 %.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.signal import lfilter

from apportion.certify.statistics import (
    Estimate,
    clustered_ratio,
    mean_over,
    of_means,
    over_blocks,
    over_rows_and_columns,
)
from apportion.domains.federated.data import KINDS
from apportion.domains.portfolio import record
from apportion_studies.theory import crossover, fig1

SIMULATIONS = 10_000
TABLE = Path(__file__).parents[1] / "docs" / "results" / "coverage" / "table.csv"


@dataclass(frozen=True)
class Layout:
    """What one study's intervals are made of: `draw` is given a generator and the sizes."""

    study: str
    units: str
    draw: Callable[..., np.ndarray]
    sizes: tuple
    estimate: Callable[[np.ndarray], Estimate]
    truth: float


def skewed(rng: np.random.Generator, shape: int | tuple[int, ...], shapes: float = 4.0):
    """Mean 0, variance 1; skew 2 / sqrt(shapes), 1 unless said."""
    return (rng.gamma(shapes, 1.0, shape) - shapes) / np.sqrt(shapes)


def crossed(rng, rows: int, columns: int, by_row: float, by_column: float) -> np.ndarray:
    """Rows by columns: what each row has in common, what each column has, and a cell's own, of size 1."""
    own = skewed(rng, (rows, columns))
    shared = by_row * skewed(rng, (rows, 1)) + by_column * skewed(rng, (1, columns))
    return 1.0 + own + shared


def alone(rng, count: int, shapes: float = 4.0) -> np.ndarray:
    """Independent units."""
    return 1.0 + skewed(rng, count, shapes)


def nested(rng, seeds: int, tasks: int, shared: float) -> np.ndarray:
    """Means by seed over tasks that share the seed's policy."""
    own = skewed(rng, (seeds, tasks))
    return (1.0 + shared * skewed(rng, (seeds, 1)) + own).mean(1)


def spreads(rng, years: int, seeds: int) -> np.ndarray:
    """The log of the ratio of two interquartile ranges over seeds, for each year."""
    low, high = np.quantile(skewed(rng, (2, years, seeds)), [0.25, 0.75], axis=-1)
    first, second = high - low
    return np.log(first / second)


def curves(rng, runs: int, means: np.ndarray, spread: float) -> np.ndarray:
    """Falling curves of independent runs: log-normal, a run's points half its own and half common."""
    noise = rng.normal(size=(runs, *means.shape)) + rng.normal(size=(runs, *[1] * means.ndim))
    noise *= spread / np.sqrt(2)
    return means * np.exp(noise - spread**2 / 2)


def correlations(rng, runs: int) -> np.ndarray:
    """Of runs, each below 1."""
    return np.tanh(0.8 + 0.25 * rng.normal(size=runs))


def garage(rng, days: int, stations: int) -> np.ndarray:
    """Gains and sizes, days by stations: a day's weather is every station's, a station's cars its own."""
    own = 0.02 + 0.05 * skewed(rng, (days, stations))
    sizes = rng.gamma(4.0, 1.0, (days, 1)) * rng.uniform(0.5, 1.5, (days, stations))
    return np.stack([sizes * (own + 0.05 * skewed(rng, (days, 1))), sizes])


def by_day(garage: np.ndarray) -> Estimate:
    return clustered_ratio(tuple(garage.sum(2)))


def splits(rng, days: int, stations: int, tested: int, count: int, by_split: float) -> np.ndarray:
    """Gains and sizes, splits by days by stations, `tested` of them in each split.

    Days and splits, whose networks are their own, have an effect each. Stations have a large one, but
    behind one feeder what a station gains the others lose, but for a twentieth.
    """
    shape = (count, days, stations)
    effects = 0.05 * skewed(rng, (1, days, 1)) + by_split * skewed(rng, (count, 1, 1))
    effects = effects + 0.2 * rng.normal(size=shape)
    tests = np.zeros((count, 1, stations))
    for own in tests:
        own[:, rng.permutation(stations)[:tested]] = 1.0
    each = 0.3 * skewed(rng, (1, 1, stations))
    effects = effects + each - 0.95 * (each * tests).sum(-1, keepdims=True) / tested
    sizes = tests * rng.gamma(4.0, 1.0, (1, days, 1))
    return np.stack([sizes * (0.02 + effects), sizes])


def by_day_and_split(splits: np.ndarray) -> Estimate:
    return clustered_ratio(*(tuple(splits.sum(axes)) for axes in ((1, 3), (2, 3))))


MEAN, SPREAD = 0.0005, 0.01
"""Of a day's return."""


def days(rng, count: int, autocorrelation: float, clustered: float = 0.0) -> np.ndarray:
    """Daily returns with heavy tails (t, 5 degrees of freedom), each this much like the one before.

    `clustered` is the spread of the logarithm of their variance, which drifts over months.
    """
    noise = rng.standard_t(5, count + 200) * np.sqrt(3 / 5)
    if clustered:
        wild = lfilter([np.sqrt(1 - 0.97**2)], [1.0, -0.97], rng.normal(size=count + 200))
        noise = noise * np.exp(clustered * wild / 2 - clustered**2 / 4)
    series = lfilter([1.0], [1.0, -autocorrelation], noise)[200:]
    return MEAN + SPREAD * np.sqrt(1 - autocorrelation**2) * series


def of_backtests() -> list[Layout]:
    """Leads of one strategy over another in three months to six years, and Sharpe ratios."""
    lead, ratio = partial(over_blocks, np.mean), partial(over_blocks, record.sharpe)
    sharpe = MEAN / SPREAD * np.sqrt(record.TRADING_DAYS)
    wild = "500 days, 0.2, calm and wild"
    return [
        *(
            Layout("backtest, lead", f"{count} days, {rho:g}", days, (count, rho), lead, MEAN)
            for count in (60, 250, 500, 1500)
            for rho in (0.1, 0.2, 0.3)
        ),
        Layout("backtest, lead", wild, days, (500, 0.2, 0.8), lead, MEAN),
        Layout("backtest, Sharpe", "500 days, 0.2", days, (500, 0.2), ratio, sharpe),
    ]


def layouts() -> list[Layout]:
    """Every study's layout, and plain means of few units."""
    years, months, families = "10 experiments x 7 years", "10 policies x 12 months", "100 families"
    seeds, both = "7 years, interquartile ranges over 10 seeds", over_rows_and_columns
    kinds = len(KINDS)
    general = (kinds, 6, 2.0, 0.1)
    plain = [
        Layout("plain mean", f"{count} units", alone, (count, 8.0), mean_over, 1.0)
        for count in (3, 6, 10, 12)
    ]
    return [
        *of_curves(),
        Layout("fig3-4", "20 experiments x 7 years", crossed, (20, 7, 0.1, 0.4), both, 1.0),
        Layout("fig3-4, one year", "20 experiments", alone, (20,), mean_over, 1.0),
        Layout("literal", "10 experiments", alone, (10,), mean_over, 1.0),
        Layout("mechanisms", seeds, spreads, (7, 10), mean_over, 0.0),
        Layout("fig5, growth", months, crossed, (10, 12, 0.1, 0.5), both, 1.0),
        Layout("fig5, deviation", months, crossed, (10, 12, 2.5, 0.3), both, 1.0),
        Layout("fig6", "12 seeds of 16 tasks", nested, (12, 16, 1.0), mean_over, 1.0),
        Layout("federations", f"6 seeds of {kinds} kinds", nested, (6, kinds, 0.5), mean_over, 1.0),
        Layout("federations, one kind", "6 seeds", alone, (6,), mean_over, 1.0),
        Layout("federations in general", f"{kinds} kinds x 6 seeds", crossed, general, both, 1.0),
        Layout("recipe", years, crossed, (10, 7, 0.0, 0.6), both, 1.0),
        Layout("recipe-sp500", "4 experiments x 22 years", crossed, (4, 22, 0.45, 0.95), both, 1.0),
        Layout("prioritisation", "10 simulated markets", alone, (10,), mean_over, 1.0),
        Layout("bound", families, alone, (100, 1.0), mean_over, 1.0),
        Layout("charging", "60 days", garage, (60, 10), by_day, 0.02),
        *(
            Layout(
                "charging, splits",
                f"{own[0]} days x {own[2]} of 54 x 5",
                splits,
                own,
                by_day_and_split,
                0.02,
            )
            for own in ((120, 54, 54, 5, 0.005), (240, 54, 16, 5, 0.02))
        ),
        *of_backtests(),
        *plain,
    ]


def of_curves() -> list[Layout]:
    """What is read from mean curves, and correlations of runs."""
    sizes = np.asarray(fig1.SIZES[2:], float)
    falling = 3.0 * sizes**-1.1
    n = np.asarray(crossover.SIZES, float)
    pair = np.stack([60.0 / n, 0.04 + 2.0 / n])
    crossing = float(crossover.log_crossings(pair))

    def slope(curve):
        return of_means(curve, lambda mean: fig1.log_slope(mean, sizes))

    def crossings(curve):
        return of_means(
            curve, lambda mean: np.clip(crossover.log_crossings(mean), *np.log(n[[0, -1]]))
        )

    mean = float(correlations(np.random.default_rng(0), 2_000_000).mean())
    return [
        Layout("fig1", "40 runs, a slope", curves, (40, falling, 0.6), slope, -1.1),
        Layout("fig2", "10 runs, correlations", correlations, (10,), mean_over, mean),
        Layout("crossover", "100 families, a slope", curves, (100, falling, 1.0), slope, -1.1),
        Layout("crossover", "100 families, N", curves, (100, pair, 0.6), crossings, crossing),
    ]


def measure(layout: Layout, simulations: int, seed: int = 0) -> float:
    """The share of simulations whose interval holds the truth."""
    rng = np.random.default_rng(seed)
    held = 0
    for _ in range(simulations):
        found = layout.estimate(layout.draw(rng, *layout.sizes))
        held += found.low <= layout.truth <= found.high
    return held / simulations


def main() -> None:
    rows = []
    for layout in layouts():
        row = {"study": layout.study, "units": layout.units, "simulations": SIMULATIONS}
        rows.append(row | {"coverage": round(measure(layout, SIMULATIONS), 4)})
        print(rows[-1], flush=True)
    pd.DataFrame(rows).to_csv(TABLE, index=False)


if __name__ == "__main__":
    main()
