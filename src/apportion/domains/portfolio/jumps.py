"""Days on which a price moves as no market explains: a split that was not adjusted for, or a slip.

A move beyond half is named whatever it is; a smaller one only where it is a usual split's, to within
what prices move beside it. Crashes of 20 to 40 % pass.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from apportion.domains.portfolio.prices import Prices, embedded_prices, load_prices
from apportion.errors import InputError

BEYOND = 0.5
_SPLITS = ((2, 1), (3, 1), (4, 1), (5, 1), (10, 1), (20, 1), (3, 2))
_RATIOS = (*_SPLITS, *(split[::-1] for split in _SPLITS))
_BESIDE = 0.05
_NAMED = 4
"""Days that a refusal names; the rest are counted."""


@dataclass(frozen=True)
class Jump:
    """One instrument's move on one day."""

    day: str
    ticker: str
    change: float
    split: str
    """The split it looks like, such as 2:1, or nothing."""

    def describe(self) -> str:
        """The move in a few words."""
        looks = f" (looks like a split of {self.split})" if self.split else ""
        return f"{self.ticker} {self.change:+.1%} on {self.day}{looks}"


def read_prices(path: Path | None, *, allow_jumps: bool = False) -> Prices:
    """A price file, refused where a price jumps unless that is allowed; or the embedded stocks."""
    if path is None:
        return embedded_prices()
    found = os.stat(path) if path.is_file() else None
    prices = _load(path, *(() if found is None else (found.st_size, found.st_mtime_ns)))
    if not allow_jumps:
        refuse_jumps(prices, path)
    return prices


@lru_cache(maxsize=1)
def _load(path: Path, *unchanged: int) -> Prices:
    """A file is read to be refused at once and again to be trained on: the second time it is at hand."""
    return load_prices(path)


def find_jumps(prices: Prices) -> list[Jump]:
    """All such moves, day by day.

    Examples
    --------
    >>> days = np.array(["2020-08-28", "2020-08-31"], "datetime64[D]")
    >>> table = Prices(days, ("AAPL", "KO"), np.array([[499.23, 49.8], [129.04, 49.5]]))
    >>> [jump.describe() for jump in find_jumps(table)]
    ['AAPL -74.2% on 2020-08-31 (looks like a split of 4:1)']
    """
    relatives = prices.relatives()
    found = np.abs(relatives - 1) > BEYOND
    for one, other in _RATIOS:
        found |= _near(relatives, one, other)
    return [
        Jump(
            str(prices.dates[row]),
            prices.tickers[column],
            float(relatives[row, column]) - 1,
            _looks_like(float(relatives[row, column])),
        )
        for row, column in np.argwhere(found)
    ]


def refuse_jumps(prices: Prices, source: object) -> None:
    """Refuse prices with such moves, and name the first of them."""
    jumps = find_jumps(prices)
    if not jumps:
        return
    named = ", ".join(jump.describe() for jump in jumps[:_NAMED])
    more = f" and {len(jumps) - _NAMED} more" if len(jumps) > _NAMED else ""
    raise InputError(
        f"{source}: prices move too far in one day: {named}{more}; give prices that are adjusted for "
        "splits and free of slips, or --allow-jumps to take them as they are"
    )


def _near(relative: np.ndarray, one: int, other: int) -> np.ndarray:
    # Markets fall by a third now and then, so of 3:2 only the very ratio counts.
    tolerance = 0.01 if {one, other} == {2, 3} else 0.02
    return _off(relative, one, other) <= tolerance


def _off(relative: np.ndarray | float, one: int, other: int) -> Any:
    return np.abs(relative * one / other - 1)


def _looks_like(relative: float) -> str:
    one, other = min(_RATIOS, key=lambda split: _off(relative, *split))
    # What moves beside a split that is named anyway may be more.
    return f"{one}:{other}" if _off(relative, one, other) <= _BESIDE else ""
