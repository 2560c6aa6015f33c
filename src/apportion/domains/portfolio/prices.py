"""The table of daily prices v_{i,n}, read from CSV or Parquet; one sentence on what is wrong with a file.

`price_files` reads a file as it was written, `price_layouts` checks what it says.
Everything behind this file may rely on a table of positive numbers on ascending days, full but for
the days before an instrument is listed and after it is delisted, which are NaN (see `listings`).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from apportion.domains.portfolio.listings import fill, refuse_empty_days
from apportion.domains.portfolio.price_files import read_table, table_of, with_days
from apportion.domains.portfolio.price_layouts import read_layout
from apportion.domains.tables import as_day
from apportion.errors import InputError, needing

Day = str | np.datetime64 | None
"""A day, such as 2019-01-02, or none."""
LEAST_DAYS = 33
LEAST_TICKERS = 2


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
    """Closing prices, (time, universe); NaN while an instrument is not listed."""
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
        """Price relatives y_n = v_n / v_{n-1}, (time, universe); 1 on the first row and where an
        instrument is not listed.
        """
        close = fill(self.close)
        return np.concatenate([np.ones_like(close[:1]), close[1:] / close[:-1]])

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


def load_prices(
    path: str | Path, *, least_days: int = LEAST_DAYS, least_tickers: int = LEAST_TICKERS
) -> Prices:
    """Read and check a price file.

    Parameters
    ----------
    path
        CSV or Parquet; long with columns date, ticker, close and perhaps high and low (open and
        volume are ignored), wide with a date column and a column of closes for each ticker, or
        with two levels of names as yfinance has them. Where there are adjusted closes ("adj
        close") they are the closes.
    least_days, least_tickers
        Less data than this is refused.

    Raises
    ------
    InputError
        One sentence naming the file, the column, the row and the way out.
    """
    path = Path(path)
    try:
        prices = Prices(*read_layout(read_table(path)))
    except UnicodeDecodeError as error:
        # A Parquet file's text is looked at only when it is used.
        raise InputError(f"{path}: holds text that is not UTF-8 ({error}); save it again") from None
    days, tickers = prices.close.shape
    if tickers < least_tickers:
        raise InputError(
            f"{path}: {tickers} ticker{'s' * (tickers != 1)} found; at least {least_tickers} are "
            "needed to share anything out, so add columns (wide) or rows of other tickers (long)"
        )
    if days < least_days:
        raise InputError(
            f"{path}: {days} days found, {prices.dates[0]} to {prices.dates[-1]}; at least "
            f"{least_days} are needed, so give a longer history"
        )
    refuse_empty_days(prices.close, prices.dates, prices.tickers, least_tickers, path)
    return prices


def embedded_prices() -> Prices:
    """Closes of 20 large S&P 500 stocks, 1990 to 2022, as skfolio ships them."""
    otherwise = " or give your own file with --prices"
    with needing("the embedded prices come with skfolio", "market", otherwise):
        from skfolio.datasets import load_sp500_dataset
    return from_frame(load_sp500_dataset(), source="embedded prices")


def from_frame(closes: pd.DataFrame, *, source: str = "prices") -> Prices:
    """Check a table of closes: a row a day (the index), a column a ticker; or a frame of yfinance."""
    return Prices(*read_layout(table_of(with_days(closes.rename_axis("date")), source)))
