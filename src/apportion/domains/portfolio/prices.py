"""Daily prices v_{i,n}: the table, and the reader of price files.

A file has ISO dates, decimal points and one of three layouts: wide (a column of closes for each ticker),
long (a row for each date and ticker), or yfinance's (a column for each field and ticker). Anything else is
refused in one sentence that names the place and the way out. The rest of the package relies on positive
numbers on ascending days, complete except for NaN before an instrument is listed and after it is delisted.
Importing this file starts no JAX.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.domains.tables import as_day, read_parquet, require_file
from apportion.errors import InputError, optional_import, reading

Day = str | np.datetime64 | None
"""A day, such as 2019-01-02, or None."""
_LEAST_DAYS = 33
_LEAST_TICKERS = 2
_LARGEST_GAP = np.timedelta64(366, "D")
_RECENT_DAYS = 5
"""Trading days within which a missing price may be a file that was cut short."""
_SPLITS = ((2, 1), (3, 1), (4, 1), (5, 1), (10, 1), (20, 1), (3, 2))
_UNUSUAL_MOVE = 0.5
_MARKET_RATIO = 4.0
"""Volume or later movement, relative to the usual, above which a move is attributed to the market."""
_READ = ("close", "adj close", "high", "low", "volume")
_FIELDS = {*_READ, "open", "dividends", "stock splits", "capital gains", "repaired?"}
"""Fields that a file can have of an instrument."""
_NOT_TICKERS = _FIELDS - {"open", "high", "low"} | {
    *("timestamp", "datetime", "time", "epoch", "unix"),
}
_CORNER = {"", "price", "ticker", "date", "attributes", "symbols"}
"""Names above the column of days if the names have two levels."""
_MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "#N/A", "<NA>", "NaT")
_ISO = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{1,2}:\d{2}.*)?"


@dataclass(frozen=True, eq=False)
class Prices:
    """Closes of every ticker on every day, and highs and lows if the source has them.

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
    volume: np.ndarray | None = None
    """Traded volume, NaN if not known, or None. Only `find_jumps` reads it: no part of the fingerprint."""

    @property
    def channels(self) -> int:
        """Number of series of each instrument: close, or close, high and low."""
        return 1 if self.high is None else 3

    @property
    def fingerprint(self) -> str:
        """Hash of tickers, days and prices, 16 digits, the same on every machine."""
        digest = hashlib.sha256("\n".join(self.tickers).encode())
        digest.update(self.dates.astype("datetime64[D]").astype("<i8").tobytes())
        digest.update(np.ascontiguousarray(self.values(), "<f8").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def jumps(self) -> list["Jump"]:
        """Moves that look like a split or an error (see `find_jumps`)."""
        return find_jumps(self)

    def values(self) -> np.ndarray:
        """All series as one array, (time, universe, channels)."""
        if self.high is None or self.low is None:
            return self.close[..., None]
        return np.stack([self.close, self.high, self.low], -1)

    def filled(self) -> np.ndarray:
        """Return `values` with missing prices filled by the nearest one, or by 1 if there is none."""
        close = pd.DataFrame(self.close).ffill().bfill().fillna(1.0).to_numpy()
        return np.where(np.isnan(self.close)[..., None], close[..., None], self.values())

    def relatives(self) -> np.ndarray:
        """Return y_n = v_n / v_{n-1}, (time, universe); 1 on the first row and for unlisted instruments."""
        close = self.filled()[..., 0]
        return np.concatenate([np.ones_like(close[:1]), close[1:] / close[:-1]])

    def tradable(self) -> np.ndarray | None:
        """Return which instruments can be held over the period that ends on each row; None if all can.

        It is bought at its first close at the earliest and sold at its last.
        """
        priced = ~np.isnan(self.close)
        return None if priced.all() else priced & np.concatenate([priced[:1], priced[:-1]])

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
        return self._cut(slice(None), columns)

    def until(self, day: str | np.datetime64) -> "Prices":
        """Return the rows before `day`."""
        return self._cut(slice(0, self.row(day)))

    def since(self, day: str | np.datetime64) -> "Prices":
        """Return the rows from `day` on."""
        return self._cut(slice(self.row(day), None))

    def _cut(self, rows: slice | np.ndarray, columns: slice | list[int] = slice(None)) -> "Prices":
        names = np.array(self.tickers, dtype=object)[columns]
        others = (self.high, self.low, self.volume)
        others = (s if s is None else s[rows][:, columns] for s in others)
        return Prices(self.dates[rows], tuple(names), self.close[rows][:, columns], *others)

    def with_tomorrow(self, days: int) -> "Prices":
        """Return the last `days` rows and one more with the same prices, which no decision sees."""
        end = len(self.dates) - 1
        last = self._cut(np.append(np.arange(max(end + 1 - days, 0), end + 1), end))
        dates = np.append(last.dates[:-1], day_after(last.dates[-1]))
        return replace(last, dates=dates)

    def years(self) -> list[int]:
        """Calendar years in the data."""
        return np.unique(self.dates.astype("datetime64[Y]").astype(int) + 1970).tolist()

    def to_frame(self) -> pd.DataFrame:
        """Closes as a table: a row a day, a column a ticker."""
        index = pd.DatetimeIndex(self.dates, name="date")
        return pd.DataFrame(self.close, index=index, columns=list(self.tickers))

    def summary(self) -> str:
        """Describe the data in a line."""
        series = "close" if self.high is None else "close, high, low"
        return (
            f"{len(self.tickers)} tickers x {len(self.dates)} days, {self.dates[0]} to "
            f"{self.dates[-1]}, {series}, fingerprint {self.fingerprint}"
        )


def day_after(day: str | np.datetime64) -> np.datetime64:
    """The calendar day after this one."""
    return as_day(day) + np.timedelta64(1, "D")


def read_prices(path: Path | None, *, allow_jumps: bool | Sequence[str] | None = None) -> Prices:
    """Read a price file and refuse unusual moves; without a path, return the embedded stocks.

    Parameters
    ----------
    path
        CSV or Parquet file (see `load_prices`).
    allow_jumps
        Moves to accept, each as TICKER:DAY; `all`, or True, accepts every move.
    """
    if path is None:
        return embedded_prices()
    prices = load_prices(path)
    if allow_jumps is True or "all" in (allow_jumps or ()):
        return prices
    jumps = [
        jump for jump in prices.jumps if not jump.market and jump.name not in (allow_jumps or ())
    ]
    if jumps:
        more = f" and {len(jumps) - 4} more" if len(jumps) > 4 else ""
        raise InputError(
            f"{path}: prices move too far in one day: {', '.join(map(str, jumps[:4]))}{more}; give prices "
            f"that are adjusted for splits and free of errors, or --allow-jumps {jumps[0].name} to accept "
            "a move (without a name, every one)"
        )
    return prices


def check_last_day(prices: Prices, delisted: Sequence[str] = ()) -> None:
    """Refuse to decide on a file whose last days lack an instrument, as one that was cut short does.

    An instrument without a price would be sold. `delisted` names those that are really gone.
    """
    priced = ~np.isnan(prices.close)
    recent = np.asarray(priced[-1 - _RECENT_DAYS : -1].any(0))
    for name, there, before in zip(prices.tickers, priced[-1], recent, strict=True):
        if there == (name in delisted) and (there or before):
            state = "a price" if there else "no price"
            raise InputError(
                f"prices: {name} has {state} on {prices.dates[-1]}, the last day; complete the file, and "
                f"say --delisted {name} only if it is no longer traded and to be sold"
            )


def embedded_prices() -> Prices:
    """Return closes of 20 large S&P 500 stocks, 1990 to 2022, from skfolio."""
    otherwise = " or give your own file with --prices"
    with optional_import("the embedded prices come with skfolio", "market", otherwise):
        from skfolio.datasets import load_sp500_dataset
    return from_frame(load_sp500_dataset(), source="embedded prices")


@dataclass(frozen=True)
class Jump:
    """A move in a day that looks like a split or an error."""

    ticker: str
    day: str
    change: float
    split: tuple[int, int] | None
    market: str = ""
    """Evidence that the market made the move; empty if there is none."""

    @property
    def name(self) -> str:
        """The move as `--allow-jumps` takes it."""
        return f"{self.ticker}:{self.day}"

    def __str__(self) -> str:
        looks = f" (looks like a split of {self.split[0]}:{self.split[1]})" if self.split else ""
        return f"{self.ticker} {self.change:+.1%} on {self.day}" + (
            f", and the market's: {self.market}" if self.market else looks
        )


def find_jumps(prices: Prices) -> list[Jump]:
    """Find moves that look like a split without adjustment or an error.

    A move is found if it is larger than half, or close to a usual split ratio; crashes of 20 to 40 % pass.
    It is attributed to the market if far more is traded than usual or, without volumes, if prices move far
    more after it than before: a split changes neither.

    Examples
    --------
    >>> days = np.array(["2020-08-28", "2020-08-31"], "datetime64[D]")
    >>> (jump,) = find_jumps(Prices(days, ("AAPL", "KO"), np.array([[499.23, 49.8], [129.04, 49.5]])))
    >>> str(jump)
    'AAPL -74.2% on 2020-08-31 (looks like a split of 4:1)'
    """
    relatives = prices.relatives()
    ratios = np.array([*_SPLITS, *(split[::-1] for split in _SPLITS)])
    off = np.abs(relatives[..., None] * ratios[:, 0] / ratios[:, 1] - 1)
    # Markets fall by a third now and then, so 3:2 has a smaller tolerance.
    near = off <= np.where(ratios.sum(1) == 5, 0.01, 0.02)
    found: list[Jump] = []
    for row, column in np.argwhere((np.abs(relatives - 1) > _UNUSUAL_MOVE) | near.any(-1)):
        one, other = ratios[off[row, column].argmin()]
        # A move that is found by its size may be further from the ratio.
        split = (int(one), int(other)) if off[row, column].min() <= 0.05 else None
        change = float(relatives[row, column]) - 1
        market = _market_evidence(prices, relatives, row, column)
        found.append(Jump(prices.tickers[column], str(prices.dates[row]), change, split, market))
    return found


def _market_evidence(prices: Prices, relatives: np.ndarray, row: int, column: int) -> str:
    """Describe what shows that the market made a move; an empty text if nothing does."""
    moves = np.abs(np.log(relatives[:, column]))
    before, after = moves[max(row - 60, 1) : row], moves[row + 1 : row + 6]
    # An error is undone the next day, whatever the volume.
    if not len(after) or len(before) < 20 or abs(after[0] - moves[row]) < 0.5 * moves[row]:
        return ""
    if prices.volume is not None:
        usual = prices.volume[max(row - 60, 0) : row, column]
        usual = np.median(usual[np.isfinite(usual)]) if np.isfinite(usual).any() else np.nan
        # After a split of 10:1 ten times as many units are traded for the same money.
        money = float(prices.volume[row, column] * min(relatives[row, column], 1.0))
        if np.isfinite(usual) and np.isfinite(money):
            far = money > _MARKET_RATIO * usual
            return f"{money / usual:.0f} times as much as usual was traded" if far else ""
    usual = float(np.median(before))
    if usual > 0 and len(after) == 5 and after.mean() > _MARKET_RATIO * usual:
        return f"the days after it moved {after.mean() / usual:.0f} times as far as usual"
    return ""


def load_prices(path: str | Path) -> Prices:
    """Read and check a price file.

    Parameters
    ----------
    path
        CSV or Parquet; wide with a first column of days and a column of closes for each ticker, long
        with columns date, ticker, close and perhaps high, low and volume (open is ignored), or with
        two levels of names as yfinance writes them. Adjusted closes ("adj close") replace the closes, and
        highs and lows are adjusted by the same factor.

    Raises
    ------
    InputError
        One sentence with the file, the place and the way out.
    """
    path = require_file(path, "a CSV or Parquet file of daily prices")
    with reading(path, "save it as a plain CSV or Parquet table"):
        parquet = path.suffix.lower() in (".parquet", ".pq")
        prices = _checked(_with_days(read_parquet(path)) if parquet else _read_csv(path), str(path))
    gaps = np.diff(prices.dates)
    if len(prices.dates) < _LEAST_DAYS or gaps.max() > _LARGEST_GAP:
        last = int(gaps.argmax()) if len(gaps) else 0
        raise InputError(
            f"{path}: {len(prices.dates)} days found, none between {prices.dates[last]} and "
            f"{prices.dates[min(last + 1, len(gaps))]}; at least {_LEAST_DAYS} are needed without a gap of "
            "a year, so give a longer history or correct the dates"
        )
    priced = (~np.isnan(prices.close)).sum(1)
    if priced.min() < _LEAST_TICKERS:
        few = int((priced < _LEAST_TICKERS).argmax())
        raise InputError(
            f"{path}: {priced[few]} tickers have a price on {prices.dates[few]}; at least "
            f"{_LEAST_TICKERS} are needed on every day, so cut such days off or add tickers"
        )
    return prices


def from_frame(closes: pd.DataFrame, *, source: str = "prices") -> Prices:
    """Check a table of closes: a row a day (the index), a column a ticker; or a frame of yfinance."""
    return _checked(_with_days(closes.rename_axis("date")), source)


def _read_csv(path: Path) -> pd.DataFrame:
    """Read all values as text, such as the tickers 000001 and NA; the index is the line in the file."""
    with path.open(encoding="utf-8-sig") as file:
        first = file.readline(10_000)
    mark = next((mark for mark in ";\t" if mark in first and "," not in first), None)
    if mark is not None:
        raise InputError(
            f"{path}: values must be separated by commas and have decimal points; convert it by "
            f"pd.read_csv({path.name!r}, sep={mark!r}, decimal=',').to_csv('prices.csv', index=False)"
        )
    plain: dict[str, Any] = {"header": None, "keep_default_na": False, "skip_blank_lines": False}
    text = pd.read_csv(path, dtype=str, encoding="utf-8-sig", **plain).fillna("")
    rows = text.head(3).to_numpy().tolist()
    names, headers = pd.Index(rows[0], dtype=object), 1
    corners = {row[0].strip().lower() for row in rows[:2]}
    if corners <= _CORNER and _fields_first(*(row[1:] for row in rows[:2])) is not None:
        pairs = zip(rows[0][1:], rows[1][1:], strict=True)
        names = pd.MultiIndex.from_tuples([("date", ""), *pairs])
        # pandas writes the name of the index in a row of its own.
        labelled = len(rows) > 2 and not any(rows[2][1:]) and not re.fullmatch(_ISO, rows[2][0])
        headers = 3 if labelled else 2
    frame = text.iloc[headers:].set_axis(names, axis=1)
    frame.index = pd.RangeIndex(headers + 1, headers + 1 + len(frame), name="line")
    return frame[(frame != "").any(axis=1)]


def _with_days(frame: pd.DataFrame) -> pd.DataFrame:
    """Move the index to the first column, as in a file, unless it only counts rows."""
    index = frame.index
    counts = index.name is None and pd.api.types.is_integer_dtype(index.dtype)
    drop = isinstance(index, pd.RangeIndex) or (counts and "date" in map(_field, frame.columns))
    names = [str(name or "date") for name in index.names]
    frame = frame.reset_index(drop=drop, names=names, allow_duplicates=True)
    frame.index = pd.RangeIndex(1, 1 + len(frame), name="row")
    return frame


def _field(name: object) -> str:
    """Normalise a column's name.

    >>> _field(" Adj_Close ")
    'adj close'
    """
    plain = re.sub(r"[\s_.-]+", " ", str(name)).strip().lower()
    return "adj close" if plain in ("adjclose", "adjusted close") else plain


def _fields_first(above: Sequence[Any], below: Sequence[Any] = ()) -> bool | None:
    """Return whether the upper of two levels of names has the fields; None if neither has."""
    for first, fields, names in ((True, above, below), (False, below, above)):
        found = {_field(field) for field in fields}
        named = all(str(name).strip() for name in names)
        if found <= _FIELDS and found & {"close", "adj close"} and named:
            return first
    return None


def _split_columns(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Convert a table with a column for each ticker, or for each field and ticker, to the long layout."""
    if frame.columns.nlevels == 1:
        pairs = [("close", name) for name in _tickers(list(frame.columns), source)]
    else:
        above, below = (list(frame.columns.get_level_values(level)[1:]) for level in (0, -1))
        first = _fields_first(above, below) if frame.columns.nlevels == 2 else None
        fields, names = (above, below) if first else (below, above)
        pairs = [(_field(f), str(t).strip()) for f, t in zip(fields, names, strict=True)]
        read = {field for field, _ in pairs} & {*_READ[:-1]} if first is not None else set()
        needed = [f"{f} {t}" for f in sorted(read | {*_needed(read)}) for _, t in pairs if read]
        _require(needed or ["close"], [f"{f} {t}" for f, t in pairs], source)
        _refuse_alike((f"{f} {t}" for f, t in pairs), source)
    pieces: dict[str, dict[str, Any]] = {}
    for place, (field, ticker) in enumerate(pairs, 1):
        own = pieces.setdefault(ticker, {"date": frame.iloc[:, 0], "ticker": ticker})
        if field in _READ:
            own[field] = frame.iloc[:, place]
    return pd.concat([pd.DataFrame(own, index=frame.index) for own in pieces.values()])


def _tickers(names: list[str], source: str) -> list[str]:
    """Return the tickers of a wide file's columns."""
    fields = {_field(name) for name in names[1:]}
    wrong = _NOT_TICKERS | (set() if _field(names[0]) == "date" else {"date"})
    # LOW and OPEN are tickers, but not beside HIGH and nothing else.
    wrong |= fields if {"high", "low"} <= fields <= _FIELDS else set()
    for k, name in enumerate(names[1:], 2):
        unnamed = re.fullmatch(r"\s*(Unnamed: \d+|__index_level_\d+__|)\s*", name)
        if unnamed or _field(name) in wrong:
            raise InputError(
                f'{source}: column {k} is called "{name}", which is no ticker; give a first column of days '
                "and a column of closes for each ticker, or columns date, ticker and close"
            )
    _refuse_alike(names[1:], source)
    return [name.strip() for name in names[1:]]


def _needed(fields: Iterable[str]) -> tuple[str, ...]:
    """Return the fields that must be there too: closes, and highs and lows together with closes."""
    if {"high", "low"} & set(fields):
        return ("high", "low", "close")
    return () if "adj close" in fields else ("close",)


def _require(needed: Iterable[str], found: Sequence[str], source: str) -> None:
    for name in needed:
        if name not in found:
            raise InputError(
                f'{source}: column "{name}" is missing; a file has a date, a ticker and a close for each '
                "price, and high and low (beside close) either for all of them or for none"
            )


def _refuse_alike(names: Iterable[str], source: str) -> None:
    seen: dict[str, str] = {}
    for name in names:
        key = name.strip().casefold()
        if key in seen:
            raise InputError(
                f'{source}: "{seen[key]}" and "{name}" are one name up to case and spaces; rename or drop '
                "one"
            )
        seen[key] = name


def _refuse_cells(column: Any, bad: Any, what: str, way_out: str, source: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise InputError(
            f'{source}: "{column.iloc[row]}" at {column.index.name} {column.index[row]} is {what}; '
            f"{way_out}"
        )


def _days(column: Any, source: str) -> np.ndarray:
    """Convert a column to datetime64[D]; times of day and offsets are the exchange's, and dropped."""
    text = column.fillna("").astype(str).str.strip()
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        days = column.dt.tz_localize(None)
    else:
        iso = text.where(text.str.fullmatch(_ISO)).str[:10]
        days = pd.to_datetime(iso, format="%Y-%m-%d", errors="coerce")
    way_out = (
        "write days as 2019-01-02 in the first column or in one called date, for instance by "
        'frame["date"] = pd.to_datetime(frame["date"], dayfirst=True)'
    )
    _refuse_cells(text, days.isna(), "no date", way_out, source)
    return days.to_numpy().astype("datetime64[D]")


def _numbers(column: Any, source: str, *, known: bool) -> np.ndarray:
    """Convert a column to floats, NaN if a value is missing or, unless `known`, no number."""
    if not pd.api.types.is_numeric_dtype(column.dtype) or pd.api.types.is_bool_dtype(column.dtype):
        # True is no price of 1.
        column = column.astype(object).where(~column.isin(_MISSING), None)
        column = column.map(lambda value: str(value) if isinstance(value, bool) else value)
    values = np.asarray(pd.to_numeric(column, errors="coerce"), float)
    bad = np.isnan(values) & column.notna().to_numpy() & known
    way_out = "write prices as plain numbers such as 1234.5, without commas"
    _refuse_cells(column, bad, "no number", way_out, source)
    return values


def _checked(frame: pd.DataFrame, source: str) -> Prices:
    """Return the prices of a table in one of the three layouts; adjusts highs and lows as closes are."""
    if not len(frame):
        raise InputError(f"{source}: has no rows; give a row for each day")
    if frame.columns.nlevels == 1:
        frame = frame.set_axis(pd.Index(map(str, frame.columns), dtype=object), axis=1)
    if frame.columns.nlevels > 1 or "ticker" not in map(_field, frame.columns):
        frame = _split_columns(frame, source)
    fields = [_field(name) for name in frame.columns]
    _refuse_alike((field for field in fields if field in ("date", "ticker", *_READ)), source)
    _require(["date", *_needed(fields)], fields, source)
    frame = frame.set_axis(pd.Index(fields, dtype=object), axis=1)
    days = _days(frame["date"], source)
    written = frame["ticker"].fillna("").astype(str)
    who = written.str.strip()
    _refuse_cells(who, who == "", "no ticker", "name the instrument", source)
    _refuse_alike(written.drop_duplicates(), source)
    twice = pd.DataFrame({"day": days, "who": who}).duplicated()
    way_out = "keep one row for each day"
    _refuse_cells(who + " " + days.astype(str), twice.to_numpy(), "there twice", way_out, source)
    column, tickers = pd.factorize(who)
    calendar, row = np.unique(days, return_inverse=True)
    places = np.zeros((len(calendar), len(tickers)), int)
    places[row, column] = frame.index
    values = {field: np.full(places.shape, np.nan) for field in _READ if field in fields}
    for field, full in values.items():
        full[row, column] = _numbers(frame[field], source, known=field != "volume")

    def refuse(bad: np.ndarray, what: str, way_out: str) -> None:
        if bad.any():
            row, column = np.argwhere(bad)[0]
            place = places[row, column]
            where = f"{frame.index.name} {place}" if place else "no row"
            raise InputError(
                f"{source}: {bad.sum()} {what}, first at {calendar[row]} {tickers[column]} ({where}); "
                f"{way_out}"
            )

    volume = values.pop("volume", None)
    priced = ~np.isnan(next(iter(values.values())))
    listed = np.maximum.accumulate(priced) & np.maximum.accumulate(priced[::-1])[::-1]
    listed |= ~priced.any(0)
    for field, found in values.items():
        missing = np.isnan(found) & listed
        refuse(missing, f"missing values of {field}", "fill them in, or drop the ticker or the day")
        wrong = (found <= 0) | np.isinf(found)
        refuse(wrong, f"values of {field} that are no prices", "prices must be finite and > 0")
    if "high" in values:
        upside_down = values["high"] < values["low"]
        refuse(upside_down, 'values of "high" below "low"', "swap or fix them")
    close = values["adj close" if "adj close" in values else "close"]
    # Seconds since 1970, or finer: they rise every day, and no price is as high.
    times = (~priced | (close > 1e8) & (close % 1 == 0)).all(0) & ~(
        np.diff(close, axis=0) <= 0
    ).any(0)
    refuse(times & priced & (len(calendar) > 1), "values that count time", "drop the ticker")
    names = tuple(map(str, tickers))
    if "high" not in values:
        return Prices(calendar, names, close, volume=volume)
    factor = close / values["close"]
    return Prices(calendar, names, close, values["high"] * factor, values["low"] * factor, volume)
