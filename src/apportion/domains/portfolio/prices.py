"""The table of daily prices v_{i,n}, read from CSV or Parquet; one sentence on what is wrong with a file.

Long files hold a row for each (date, ticker); wide files a column of closes for each ticker.
Everything behind this file may rely on a table of positive numbers on ascending days, full but for
the days before an instrument is listed and after it is delisted, which are NaN (see `listings`).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.domains.portfolio.listings import fill, outside, refuse_empty_days
from apportion.errors import InputError

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


def as_day(day: str | np.datetime64) -> np.datetime64:
    """A calendar day from its text."""
    try:
        return np.datetime64(str(day), "D")
    except ValueError:
        raise InputError(f"date {day!r} is not a day; write it as 2019-01-02") from None


def load_prices(
    path: str | Path, *, least_days: int = LEAST_DAYS, least_tickers: int = LEAST_TICKERS
) -> Prices:
    """Read and check a price file.

    Parameters
    ----------
    path
        CSV or Parquet; long with columns date, ticker, close and perhaps high and low (open and
        volume are ignored), or wide with a date column and a column of closes for each ticker.
    least_days, least_tickers
        Less data than this is refused.

    Raises
    ------
    InputError
        One sentence naming the file, the column, the row and the way out.
    """
    path = Path(path)
    frame = _read(path)
    names = {str(column).strip().lower(): column for column in frame.columns}
    frame = frame.rename(columns={column: name for name, column in names.items() if name in _LONG})
    if "ticker" in frame.columns:
        prices = _from_long(frame, path)
    else:
        prices = _from_wide(frame, path)
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
    try:
        from skfolio.datasets import load_sp500_dataset
    except ImportError:
        raise InputError(
            "the embedded prices come with skfolio, which is not installed; "
            "run pip install 'apportion[market]' or give your own file with --prices"
        ) from None
    return from_frame(load_sp500_dataset(), source="embedded prices")


def from_frame(closes: pd.DataFrame, *, source: str = "prices") -> Prices:
    """Check a table of closes: a row a day (the index), a column a ticker."""
    frame = closes.rename_axis("date").reset_index()
    return _from_wide(frame, Path(source))


_LONG = ("date", "ticker", "close", "high", "low", "open", "volume")


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; give the path of a CSV or Parquet file of daily prices"
        )
    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            frame = pd.read_parquet(path)
            return frame if isinstance(frame.index, pd.RangeIndex) else frame.reset_index()
        return pd.read_csv(path)
    except Exception as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(
            f"{path}: cannot be read ({reason}); save it as a plain CSV or Parquet table"
        ) from None


def _line(path: Path, row: int) -> str:
    """Where a reader finds the row: a CSV's header is its line 1."""
    return f"line {row + 2}" if path.suffix.lower() == ".csv" else f"row {row + 1}"


def _days(column: Any, path: Path) -> np.ndarray:
    days = pd.to_datetime(column, errors="coerce", format="mixed")
    bad = np.flatnonzero(days.isna())
    if len(bad):
        raise InputError(
            f'{path}: column "{column.name}" has {len(bad)} values that are not dates, first '
            f'"{column.iloc[bad[0]]}" at {_line(path, bad[0])}; write days as 2019-01-02'
        )
    if days.dt.tz is not None:
        days = days.dt.tz_localize(None)
    return days.to_numpy().astype("datetime64[D]")


def _numbers(
    column: Any, days: np.ndarray, who: Sequence[str] | np.ndarray, path: Path, closes: Any = None
) -> np.ndarray:
    """A column as positive floats, NaN where the ticker is not listed; `who` names each row's ticker."""
    values = np.asarray(pd.to_numeric(column, errors="coerce"), float)

    def refuse(bad: np.ndarray, what: str, way_out: str) -> None:
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            raise InputError(
                f'{path}: column "{column.name}" has {bad.sum()} {what}, first at {days[first]} '
                f"{who[first]} ({_line(path, first)}); {way_out}"
            )

    text = np.isnan(values) & column.notna().to_numpy()
    if text.any():
        example = column.iloc[int(np.flatnonzero(text)[0])]
        refuse(text, f'values that are not numbers ("{example}")', "prices must be plain numbers")
    unlisted = _unlisted(values if closes is None else closes, np.asarray(who))
    refuse(
        np.isnan(values) & ~unlisted,
        "missing values",
        "fill them in, or drop the ticker or the day",
    )
    refuse(np.isinf(values), "infinite values", "prices must be finite")
    refuse(values < 0, "negative values", "prices must be > 0")
    refuse(values == 0, "zero values", "prices must be > 0; drop days without trading")
    return values


def _unlisted(closes: np.ndarray, who: np.ndarray) -> np.ndarray:
    """Rows before a ticker's first close and after its last one."""
    found = np.zeros(len(closes), bool)
    if np.isnan(closes).any():
        for ticker in np.unique(who):
            found[who == ticker] = outside(closes[who == ticker])
    return found


def _refuse_disorder(days: np.ndarray, rows: np.ndarray, who: str, path: Path) -> None:
    """`rows` are the file's rows of these days, which must ascend strictly."""
    gap = np.diff(days.astype("datetime64[D]").astype(int))
    for bad, what, way_out in (
        (gap < 0, "comes after a later day", "sort the file by date"),
        (gap == 0, "occurs twice", "keep one row for each day"),
    ):
        if bad.any():
            place = int(np.flatnonzero(bad)[0]) + 1
            where = _line(path, int(rows[place]))
            raise InputError(
                f'{path}: column "date": {days[place]} {what}{who} at {where}; {way_out}'
            )


def _from_wide(frame: pd.DataFrame, path: Path) -> Prices:
    if "close" in frame.columns:
        raise InputError(
            f'{path}: column "ticker" is missing beside "close"; add it to name each row\'s '
            "instrument, or give a column of closes for each ticker"
        )
    first = "date" if "date" in frame.columns else frame.columns[0]
    if "date" not in frame.columns and pd.api.types.is_numeric_dtype(frame[first]):
        raise InputError(
            f'{path}: column "date" is missing; the first column must hold the days, as 2019-01-02'
        )
    days = _days(frame[first], path)
    tickers = [column for column in frame.columns if column != first]
    _refuse_disorder(days, np.arange(len(days)), "", path)
    if not tickers or not len(days):
        return Prices(days, (), np.ones((len(days), 0)))
    close = [_numbers(frame[t], days, [str(t)] * len(days), path) for t in tickers]
    return Prices(days, tuple(str(t).strip() for t in tickers), np.stack(close, -1))


def _from_long(frame: pd.DataFrame, path: Path) -> Prices:
    for needed in ("date", "close"):
        if needed not in frame.columns:
            raise InputError(
                f'{path}: column "{needed}" is missing; a long file has date, ticker, close and '
                "perhaps high and low"
            )
    for given, other in (("high", "low"), ("low", "high")):
        if given in frame.columns and other not in frame.columns:
            raise InputError(
                f'{path}: column "{other}" is missing beside "{given}"; give both or neither'
            )
    days = _days(frame["date"], path)
    nameless = np.flatnonzero(frame["ticker"].isna())
    if len(nameless):
        raise InputError(
            f'{path}: column "ticker" is empty at {_line(path, nameless[0])}; name the instrument'
        )
    who = frame["ticker"].astype(str).str.strip().to_numpy()
    series = ["close", "high", "low"] if "high" in frame.columns else ["close"]
    closes = _numbers(frame["close"], days, who, path)
    values = {name: _numbers(frame[name], days, who, path, closes) for name in series}
    if "high" in values:
        upside_down = np.flatnonzero(values["high"] < values["low"])
        if len(upside_down):
            row = int(upside_down[0])
            raise InputError(
                f'{path}: column "high" is below "low" on {len(upside_down)} rows, first at '
                f"{days[row]} {who[row]} ({_line(path, row)}); swap or fix them"
            )
    tickers = tuple(dict.fromkeys(who.tolist()))
    calendar = np.unique(days)
    place_of = {ticker: place for place, ticker in enumerate(tickers)}
    column = np.array([place_of[ticker] for ticker in who])
    for place, ticker in enumerate(tickers):
        rows = np.flatnonzero(column == place)
        _refuse_disorder(days[rows], rows, f" for {ticker}", path)
        lived = calendar[(calendar >= days[rows[0]]) & (calendar <= days[rows[-1]])]
        if len(rows) < len(lived):
            absent = np.setdiff1d(lived, days[rows])
            raise InputError(
                f'{path}: column "close": {ticker} has no row on {len(absent)} of {len(calendar)} '
                f"days, first {absent[0]}; add the rows or drop the ticker"
            )
    table = {}
    for name, column_values in values.items():
        full = np.full((len(calendar), len(tickers)), np.nan)
        full[np.searchsorted(calendar, days), column] = column_values
        table[name] = full
    return Prices(calendar, tickers, table["close"], table.get("high"), table.get("low"))
