"""How often a planted split goes unnoticed by `Prices.jumps`, and how often it warns of real moves.

300 splits of each kind are planted on random days, one at a time, in the embedded stocks (closes only) and,
if a file of prices with volumes is given, in that file. Written to docs/results/splits/table.csv:

    python benchmarks/splits.py [FILE]
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from apportion.domains.portfolio import Prices, embedded_prices, load_prices

PLANTED = 300
KINDS = ((2, 1), (3, 1), (3, 2), (5, 4), (7, 4), (8, 5), (10, 1), (100, 1))
TABLE = Path(__file__).parents[1] / "docs" / "results" / "splits" / "table.csv"


def plant(prices: Prices, row: int, column: int, ratio: float) -> Prices:
    """Divide the prices of one instrument by `ratio` from `row` on; as many more units are traded."""
    close = prices.close.copy()
    close[row:, column] /= ratio
    volume = prices.volume
    if volume is not None:
        volume = volume.astype(float)
        volume[row:, column] *= ratio
    return replace(prices, close=close, high=None, low=None, volume=volume)


def count_unnoticed(prices: Prices, ratio: float, rng: np.random.Generator) -> int:
    """Return how many of the planted splits are not refused."""
    unnoticed = 0
    for _ in range(PLANTED):
        row, column = rng.integers(100, len(prices.dates) - 5), rng.integers(len(prices.tickers))
        around = prices.since(prices.dates[row - 70]).until(prices.dates[row + 4])
        found = plant(around, 70, int(column), ratio).jumps
        planted = f"{prices.tickers[column]}:{prices.dates[row]}"
        unnoticed += planted not in [jump.name for jump in found]
    return unnoticed


def main() -> None:
    """Measure both sets of prices and write the table."""
    files = {"20 stocks, closes": embedded_prices()}
    if len(sys.argv) > 1:
        prices = load_prices(sys.argv[1])
        files[f"{len(prices.tickers)} stocks, closes and volumes"] = prices
    rng, rows = np.random.default_rng(0), []
    for name, prices in files.items():
        for one, other in KINDS:
            missed = count_unnoticed(prices, one / other, rng)
            rows.append((name, f"unnoticed {one}:{other} of {PLANTED}", missed))
        alarms = len(prices.jumps)
        years = len(prices.tickers) * len(prices.dates) / 252
        rows.append((name, f"false alarms in {years:.0f} stock-years", alarms))
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=["prices", "measure", "count"]).to_csv(TABLE, index=False)
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
