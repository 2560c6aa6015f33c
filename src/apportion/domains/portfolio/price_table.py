"""The table of daily prices v_{i,n} everything else in this folder starts from.

A `Prices` is full and positive on ascending days; `prices.py` makes it from files and checks it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from apportion.errors import InputError


@dataclass(frozen=True, eq=False)
class Prices:
    """Closes, and where the source has them highs and lows, of every ticker on every day.

    Examples
    --------
    >>> days = np.array(["2024-01-02", "2024-01-03"], "datetime64[D]")
    >>> prices = Prices(days, ("A", "B"), np.array([[1.0, 2.0], [1.1, 2.0]]))
    >>> prices.relatives()[1].round(2).tolist()
    [1.1, 1.0]
    """

    dates: np.ndarray
    """Trading days, ascending, as datetime64[D]."""
    tickers: tuple[str, ...]
    """Names of the instruments, one a column."""
    close: np.ndarray
    """Closing prices, (time, universe)."""
    high: np.ndarray | None = None
    """Highest prices of each day, or None."""
    low: np.ndarray | None = None
    """Lowest prices of each day, or None."""

    @property
    def channels(self) -> int:
        """Series a policy reads of each instrument: close, or close, high and low."""
        return 1 if self.high is None else 3

    @property
    def fingerprint(self) -> str:
        """A hash of the whole table: the same data gives the same 16 digits on every machine."""
        digest = hashlib.sha256("\n".join(self.tickers).encode())
        digest.update(self.dates.astype("datetime64[D]").astype("<i8").tobytes())
        digest.update(np.ascontiguousarray(self.values(), "<f8").tobytes())
        return digest.hexdigest()[:16]

    def values(self) -> np.ndarray:
        """All series as one array, (time, universe, channels)."""
        if self.high is None or self.low is None:
            return self.close[..., None]
        return np.stack([self.close, self.high, self.low], -1)

    def relatives(self) -> np.ndarray:
        """Price relatives y_n = v_n / v_{n-1}, (time, universe); the first row is 1."""
        first = np.ones_like(self.close[:1])
        return np.concatenate([first, self.close[1:] / self.close[:-1]])

    def row(self, day: str | np.datetime64) -> int:
        """The row of the first trading day on or after `day`; past the end when none is left."""
        return int(np.searchsorted(self.dates, as_day(day)))

    def select(self, tickers: Sequence[str]) -> "Prices":
        """The named instruments, in this order."""
        places = {ticker: place for place, ticker in enumerate(self.tickers)}
        unknown = [ticker for ticker in tickers if ticker not in places]
        if unknown:
            raise InputError(
                f"prices: ticker {unknown[0]} is not among the {len(self.tickers)} in the data; "
                f"known ones start {', '.join(self.tickers[:5])}"
            )
        columns = [places[ticker] for ticker in tickers]
        high, low = (s if s is None else s[:, columns] for s in (self.high, self.low))
        return Prices(self.dates, tuple(tickers), self.close[:, columns], high, low)

    def until(self, day: str | np.datetime64) -> "Prices":
        """Rows before `day`: all that may be known when it begins."""
        return self._rows(slice(0, self.row(day)))

    def since(self, day: str | np.datetime64) -> "Prices":
        """Rows from `day` on."""
        return self._rows(slice(self.row(day), None))

    def years(self) -> list[int]:
        """Calendar years in the data."""
        return sorted({int(year) for year in self.dates.astype("datetime64[Y]").astype(int) + 1970})

    def to_frame(self) -> pd.DataFrame:
        """Closes as a table: a row a day, a column a ticker."""
        index = pd.DatetimeIndex(self.dates, name="date")
        return pd.DataFrame(self.close, index=index, columns=list(self.tickers))

    def summary(self) -> str:
        """What the data is, in a line."""
        series = "close" if self.high is None else "close, high, low"
        return (
            f"{len(self.tickers)} tickers x {len(self.dates)} days, {self.dates[0]} to "
            f"{self.dates[-1]}, {series}, fingerprint {self.fingerprint}"
        )

    def _rows(self, rows: slice) -> "Prices":
        high, low = (s if s is None else s[rows] for s in (self.high, self.low))
        return Prices(self.dates[rows], self.tickers, self.close[rows], high, low)


def as_day(day: str | np.datetime64) -> np.datetime64:
    """A calendar day from its text."""
    try:
        return np.datetime64(str(day), "D")
    except ValueError:
        raise InputError(f"date {day!r} is not a day; write it as 2019-01-02") from None
