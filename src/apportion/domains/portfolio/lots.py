"""Trades in whole lots, by largest remainders, that never spend more than there is. Starts no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apportion.domains.portfolio.ticker_files import number_in, read_ticker_file, require_rows
from apportion.errors import InputError

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Sides:
    """What one lot of each ticker takes when it is bought and brings in when it is sold."""

    bought: np.ndarray
    sold: np.ndarray

    def spent(self, lots: np.ndarray) -> float:
        """The money that trades of so many lots take; what is sold brings in."""
        return float(np.where(lots > 0, lots * self.bought, lots * self.sold).sum())


def whole_lots(wanted: np.ndarray, held: np.ndarray, money: float, sides: Sides) -> np.ndarray:
    """Whole lots to buy (> 0) and to sell (< 0), near the `wanted` ones, for at most `money`.

    Every trade is rounded down, so that money is left; it goes to the largest remainders first, as far
    as it lasts. Nothing is sold that is not held: of less than a lot nothing can be.

    Examples
    --------
    >>> each = Sides(np.array([10.0, 10.0]), np.array([10.0, 10.0]))
    >>> whole_lots(np.array([1.6, 1.4]), np.zeros(2), 30.0, each).tolist()
    [2, 1]
    """
    least = -np.floor(held + _ROUNDING)
    down = np.maximum(np.floor(wanted + _ROUNDING), least)
    if sides.spent(down) > money:
        down = _affordable(down, money, sides)
    lots, left = down.copy(), money - sides.spent(down)
    remainders = wanted - down
    for i in np.argsort(-remainders, kind="stable"):
        price = sides.bought[i] if lots[i] >= 0 else sides.sold[i]
        if remainders[i] > _ROUNDING and price <= left:
            lots[i] += 1
            left -= price
    return lots.astype(np.int64)


def _affordable(lots: np.ndarray, money: float, sides: Sides) -> np.ndarray:
    """All purchases cut in one proportion to what money allows: sales fell short of what was wanted."""
    low, high = 0.0, 1.0
    for _ in range(60):
        part = (low + high) / 2
        cut = np.where(lots > 0, np.floor(part * lots), lots)
        low, high = (part, high) if sides.spent(cut) <= money else (low, part)
    return np.where(lots > 0, np.floor(low * lots), lots)


def lots_of(lot: float | Path, tickers: Sequence[str]) -> np.ndarray:
    """Units of a lot of each ticker: one number for all, or a CSV of ticker and lot."""
    if not isinstance(lot, Path):
        return np.full(len(tickers), _size(lot, "--lot"))
    table = read_ticker_file(lot, "a number such as 1, or a CSV of ticker and lot")
    if not {"ticker", "lot"} <= set(table.columns):
        raise InputError(f"{lot}: the columns must be ticker and lot")
    sizes: dict[str, float] = {}
    for row, values in enumerate(table.to_dict("records")):
        ticker = str(values["ticker"]).strip()
        if ticker in sizes:
            raise InputError(
                f"{lot}: line {row + 2}: ticker {ticker} occurs twice; give it one row"
            )
        sizes[ticker] = _size(values["lot"], f"{lot}: line {row + 2}: the lot")
    require_rows(sizes, tickers, lot, "lot")
    return np.array([sizes[ticker] for ticker in tickers])


def _size(value: float | str, what: str) -> float:
    size = number_in(value)
    if not 0 < size < np.inf:
        raise InputError(f'{what} is "{value}"; write a number above 0, such as 1 or 100')
    return size
