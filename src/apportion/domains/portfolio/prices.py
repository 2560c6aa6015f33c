"""Daily prices v_{i,n}: the table, and the reader of price files.

A file has one of three layouts: wide (a column of closes for each ticker), long (a row for each date and
ticker), or yfinance's (a column for each field and ticker). Prices are positive numbers on ascending days,
complete except for NaN before an instrument is listed and after it is delisted. Importing this module does
not import JAX.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.domains.tables import as_day, read_parquet, require_file
from apportion.errors import InputError, optional_import, reading

Day = str | np.datetime64 | None
"""A day, such as 2019-01-02, or None."""
_LEAST_DAYS, _LEAST_TICKERS = 33, 2
_LARGEST_GAP, _LARGEST_MEAN_GAP = 366, 2.0
"""Largest gap between two daily prices, and largest mean gap, in days."""
_RECENT_DAYS = 5
"""Number of last trading days; a series that ends within them suggests a truncated file."""
_PRICE_RANGE = (1e-30, 1e30)
"""Range of prices that single precision can represent and divide."""
_ROUNDING = 1e-3
"""Relative tolerance for a close above the high or below the low."""
_SPLITS = (2, 3, 4, 5, 10, 20, 100, 3 / 2, 5 / 4, 8 / 5, 7 / 4)
_UNUSUAL_MOVES = {"unknown": (0.36, 0.5), "usual": (0.186, 0.5), "high": (0.6, 0.6)}
"""Log falls and rises, relative to the other instruments, from which a move is unusual, by volume:
30 % and 65 % if unknown, 17 % and 65 % if usual, 45 % and 82 % if high (likely a real move)."""
_SMALLEST_MOVE = 0.09
"""Absolute log move up to which no move is unusual."""
_HIGH_VOLUME_RATIO = 2.5
"""Ratio to the usual volume above which a volume is high."""
_LARGEST_MARKET_MOVE = 0.15
"""Bound on the log move of the market; a larger move may be a change of unit of all instruments."""
_READ_FIELDS = ("close", "adj close", "high", "low", "volume")
_NOT_TICKERS = {"", "close", "adj close", "volume"}
_MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "#N/A", "<NA>", "NaT")
_DAY = r"\d{4}-\d\d-\d\d(?:[T ]00:00(?::00(?:\.0*)?)?(?: ?[Z+-].*)?)?"
_EXPECTED = (
    "give a CSV with commas and decimal points, or Parquet: days such as 2019-01-02 in the first column "
    "and a column of closes for each ticker; columns date, ticker and close, and perhaps high and low "
    "together and volume; or what yfinance.download returns"
)
"""The supported layouts, for error messages."""


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
    """Names of the instruments, one per column."""
    close: np.ndarray
    """Closing prices, (time, universe); NaN while an instrument is not listed."""
    high: np.ndarray | None = None
    """Highest prices of each day, or None."""
    low: np.ndarray | None = None
    """Lowest prices of each day, or None."""
    volume: np.ndarray | None = None
    """Traded volume, NaN if unknown, or None. Only `jumps` uses it; the fingerprint does not."""

    @property
    def channels(self) -> int:
        """Number of series per instrument: 1 (close) or 3 (close, high, low)."""
        return 1 if self.high is None else 3

    @property
    def fingerprint(self) -> str:
        """Hash of tickers, days and prices, 16 hexadecimal digits, equal on every machine."""
        digest = hashlib.sha256("\n".join(self.tickers).encode())
        digest.update(self.dates.astype("datetime64[D]").astype("<i8").tobytes())
        digest.update(np.ascontiguousarray(self.values(), "<f8").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def jumps(self) -> list["Jump"]:
        """Daily moves that look like an unadjusted split or an error.

        These are falls of more than 30 % and rises of more than 65 % relative to the median of the
        other instruments. If the file has volumes, the limits are 17 % and 65 % on ordinary volume,
        and 45 % and 82 % on unusually high volume, which suggests a real move.

        Examples
        --------
        >>> days = np.array(["2020-08-28", "2020-08-31"], "datetime64[D]")
        >>> prices = Prices(days, ("AAPL", "KO"), np.array([[499.23, 49.8], [129.04, 49.5]]))
        >>> str(prices.jumps[0])
        'AAPL -74.2% on 2020-08-31 (looks like a split of 4:1)'
        """
        moves = np.log(self.relatives())
        found: list[Jump] = []
        for row, column in np.argwhere(np.abs(moves) > _SMALLEST_MOVE).tolist():
            move = float(moves[row, column])
            market = float(np.median(np.delete(moves[row], column)))
            beyond = move - np.clip(market, -_LARGEST_MARKET_MOVE, _LARGEST_MARKET_MOVE)
            fall, rise = _UNUSUAL_MOVES[self._kind_of_volume(moves, row, column)]
            if not -fall < beyond < rise:
                found.append(Jump(self.tickers[column], str(self.dates[row]), move))
        return found

    def _kind_of_volume(self, moves: np.ndarray, row: int, column: int) -> str:
        """Compare the money traded on a day with the median: "usual", "high" or "unknown"."""
        if self.volume is None or not 20 <= row < len(moves) - 1:
            return "unknown"
        move, after = moves[row : row + 2, column]
        usual = np.median(self.volume[max(row - 60, 0) : row, column])
        # After a split of 10:1 the same money trades ten times as many units.
        traded = self.volume[row, column] * min(np.exp(move), 1.0)
        # A move that is reversed on the next day may be an error at any volume.
        is_reversed = abs(abs(after) - abs(move)) < 0.5 * abs(move)
        if is_reversed or not usual > 0 or np.isnan(traded):
            return "unknown"
        return "high" if traded > _HIGH_VOLUME_RATIO * usual else "usual"

    def values(self) -> np.ndarray:
        """Return all series as one array, (time, universe, channels)."""
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

        An instrument can be bought at its first close at the earliest and is sold at its last.
        """
        priced = ~np.isnan(self.close)
        return None if priced.all() else priced & np.concatenate([priced[:1], priced[:-1]])

    def row(self, day: str | np.datetime64) -> int:
        """Return the row of the first trading day on or after `day`; past the end if there is none."""
        return int(np.searchsorted(self.dates, as_day(day)))

    def select(self, tickers: Sequence[str]) -> "Prices":
        """Return the named instruments, in this order."""
        places = {ticker: place for place, ticker in enumerate(self.tickers)}
        unknown = [ticker for ticker in tickers if ticker not in places]
        if unknown:
            raise InputError(
                f"prices: ticker {unknown[0]!r} is not among the {len(self.tickers)} in the data; "
                f"the first are {', '.join(self.tickers[:5])}"
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
        """Return the last `days` rows, and the last again as the next day, which is unobserved."""
        end = len(self.dates) - 1
        last = self._cut(np.append(np.arange(max(end + 1 - days, 0), end + 1), end))
        dates = np.append(last.dates[:-1], day_after(last.dates[-1]))
        return replace(last, dates=dates)

    def years(self) -> list[int]:
        """Return the calendar years in the data."""
        return np.unique(self.dates.astype("datetime64[Y]").astype(int) + 1970).tolist()

    def to_frame(self) -> pd.DataFrame:
        """Return the closes as a table, one row per day and one column per ticker."""
        index = pd.DatetimeIndex(self.dates, name="date")
        return pd.DataFrame(self.close, index=index, columns=list(self.tickers))

    def summary(self) -> str:
        """Describe the data in one line."""
        series = "close" if self.high is None else "close, high, low"
        return (
            f"{len(self.tickers)} tickers x {len(self.dates)} days, {self.dates[0]} to "
            f"{self.dates[-1]}, {series}, fingerprint {self.fingerprint}"
        )


def day_after(day: str | np.datetime64) -> np.datetime64:
    """Return the next calendar day."""
    return as_day(day) + np.timedelta64(1, "D")


def check_last_day(prices: Prices) -> None:
    """Raise InputError if an instrument has a recent price but none on the last day.

    The file may be truncated, and a policy would sell an instrument without a price.
    """
    priced = ~np.isnan(prices.close)
    for place in np.flatnonzero(priced[-1 - _RECENT_DAYS :].any(0) & ~priced[-1]):
        raise InputError(
            f"prices: {prices.tickers[place]} has no price on {prices.dates[-1]}, the last day; complete "
            "the file, or remove the instrument from it if it is no longer traded"
        )


def embedded_prices() -> Prices:
    """Return the closes of 20 large S&P 500 stocks, 1990 to 2022, from skfolio."""
    otherwise = " or give your own file with --prices"
    with optional_import("the embedded prices come with skfolio", "market", otherwise):
        from skfolio.datasets import load_sp500_dataset
    return _parse(load_sp500_dataset().reset_index(), "embedded prices")


@dataclass(frozen=True)
class Jump:
    """Daily move that looks like a split or an error."""

    ticker: str
    day: str
    move: float
    """Log of the price relative."""

    @property
    def name(self) -> str:
        """The move in the form that `--allow-jumps` accepts."""
        return f"{self.ticker}:{self.day}"

    def __str__(self) -> str:
        factor = np.exp(abs(self.move))
        split = min(_SPLITS, key=lambda ratio: abs(factor / ratio - 1))
        looks = ""
        if abs(factor / split - 1) <= 0.05:
            ratio = Fraction(split).limit_denominator(5).as_integer_ratio()
            one, other = ratio if self.move < 0 else ratio[::-1]
            looks = f" (looks like a split of {one}:{other})"
        return f"{self.ticker} {np.expm1(self.move):+.1%} on {self.day}{looks}"


def load_prices(path: str | Path | None, *, allow_jumps: Sequence[str] | None = None) -> Prices:
    """Read and validate a price file.

    Parameters
    ----------
    path : str, Path or None
        CSV or Parquet file: wide, with days in the first column and a column of closes for each ticker;
        long, with columns date, ticker, close and optionally high, low and volume; or with two levels of
        names, as yfinance writes them. Other fields are ignored. Adjusted closes ("adj close") replace the
        closes, and highs and lows are adjusted by the same factor. None returns the embedded stocks.
    allow_jumps : sequence of str, optional
        Daily moves to accept although they look like unadjusted splits or errors (see `Prices.jumps`),
        each as TICKER:DAY; "all" accepts every move.

    Returns
    -------
    Prices
        The validated prices.

    Raises
    ------
    InputError
        If the file is invalid; the message names the file, the place and a remedy.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "prices.csv"
    >>> days = pd.bdate_range("2024-01-01", periods=40, name="date")
    >>> pd.DataFrame({"A": 10.0, "B": 20.0}, days).to_csv(file)
    >>> load_prices(file).tickers
    ('A', 'B')
    """
    if path is None:
        return embedded_prices()
    path = require_file(path, "a CSV or Parquet file of daily prices")
    with reading(path, _EXPECTED):
        parquet = path.suffix.lower() in (".parquet", ".pq")
        prices = _parse(_read_parquet(path) if parquet else _read_csv(path), str(path))
    days = prices.dates
    gaps = np.diff(days).astype(int)
    mean, largest = gaps.sum() / max(len(gaps), 1), gaps.max(initial=0)
    if len(days) < _LEAST_DAYS or mean > _LARGEST_MEAN_GAP or largest > _LARGEST_GAP:
        after = f" after {days[gaps.argmax()]}" if len(gaps) else ""
        raise InputError(
            f"{path}: {len(days)} days found, {mean:.3g} days apart on average and at most {largest}"
            f"{after}; give at least {_LEAST_DAYS} daily prices without a gap of a year, because annual "
            "numbers assume 252 days per year"
        )
    priced = (~np.isnan(prices.close)).sum(1)
    if priced.min() < _LEAST_TICKERS:
        few = int((priced < _LEAST_TICKERS).argmax())
        raise InputError(
            f"{path}: {priced[few]} tickers have a price on {days[few]}; at least {_LEAST_TICKERS} are "
            "needed on every day, so cut such days off or add tickers"
        )
    allowed = allow_jumps or ()
    jumps = [] if "all" in allowed else [jump for jump in prices.jumps if jump.name not in allowed]
    if jumps:
        more = f" and {len(jumps) - 4} more" if len(jumps) > 4 else ""
        raise InputError(
            f"{path}: prices move too far in one day: {', '.join(map(str, jumps[:4]))}{more}; give prices "
            f"that are adjusted for splits and free of errors, or --allow-jumps {jumps[0].name} to accept "
            "a move (without a name, all moves)"
        )
    return prices


def _read_csv(path: Path) -> pd.DataFrame:
    """Read all values as text, so that 000001 and NA are tickers; the index is the line in the file."""
    plain: dict[str, Any] = {"header": None, "keep_default_na": False, "skip_blank_lines": False}
    text = pd.read_csv(path, dtype=str, encoding="utf-8-sig", **plain).fillna("")
    rows = text.head(3).to_numpy().tolist()
    names, headers = pd.Index(rows[0], dtype=object), 1
    data = len(rows) < 3 or re.match(_DAY, rows[1][0])
    if not data and _field_level(rows[0][1:], rows[1][1:]) is not None:
        names = pd.MultiIndex.from_arrays(rows[:2])
        # pandas writes the name of the index in a separate row.
        headers = 2 if any(rows[2][1:]) else 3
    frame = text.iloc[headers:].set_axis(names, axis=1)
    frame.index = pd.RangeIndex(headers + 1, headers + 1 + len(frame), name="line")
    return frame[(frame != "").any(axis=1)]


def _read_parquet(path: Path) -> pd.DataFrame:
    """Read a table and move its index to the first columns unless the index is the row number."""
    frame = read_parquet(path)
    frame = frame.reset_index(drop=pd.api.types.is_integer_dtype(frame.index.dtype))
    frame.index = pd.RangeIndex(1, 1 + len(frame), name="row")
    return frame


def _field(name: object) -> str:
    """Normalise the name of a field.

    >>> _field("Adj_Close"), _field("AdjClose")
    ('adj close', 'adj close')
    """
    plain = re.sub(r"[\s_]+", " ", str(name)).strip().lower()
    return "adj close" if plain in ("adjclose", "adjusted close") else plain


def _field_level(*levels: Sequence[str]) -> int | None:
    """Return the level of yfinance's column names that has the fields, or None."""
    for level, names in enumerate(levels):
        fields = set(map(_field, names))
        if "close" in fields and not fields & {"date", "ticker"}:
            return level
    return None


def _to_long(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Convert a table in one of the three layouts to columns date, ticker and one for each field."""
    columns = frame.columns
    levels = [
        [str(name).strip() for name in columns.get_level_values(i)] for i in range(columns.nlevels)
    ]
    tickers, fields = levels[0], ["close"] * len(columns)
    long = len(levels) == 1 and "ticker" in map(_field, tickers)
    if len(levels) > 1:
        level = _field_level(levels[0][1:], levels[1][1:])
        fields, tickers = levels[:2] if level == 0 else levels[1::-1]
    names = [_field(name) for name in tickers]
    pairs = [(_field(field), ticker) for field, ticker in zip(fields, tickers, strict=True)][1:]
    found = set(names) if long else {"date", *(field for field, _ in pairs)}
    complete = {"date", "close"} <= found and ("high" in found) == ("low" in found)
    repeated = len(names) > len(found) if long else len(pairs) > len(set(pairs))
    # LOW is a ticker, unless there is also a column HIGH.
    wrong = not long and (set(names[1:]) & _NOT_TICKERS or {"high", "low"} <= set(names[1:]))
    if repeated or wrong or not complete:
        raise InputError(
            f"{source}: the columns {tickers[:8]} match none of the layouts or repeat a name; {_EXPECTED}"
        )
    if long:
        return frame.set_axis(pd.Index(names, dtype=object), axis=1)
    parts: dict[str, dict[str, Any]] = {}
    for place, (field, ticker) in enumerate(pairs, 1):
        part = parts.setdefault(ticker, {"date": frame.iloc[:, 0], "ticker": ticker})
        part[field] = frame.iloc[:, place]
    return pd.concat([pd.DataFrame(part, index=frame.index) for part in parts.values()])


def _refuse_cells(column: Any, bad: Any, what: str, way_out: str, source: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        value = str(column.iloc[row])[:40]
        raise InputError(
            f"{source}: {value!r} at {column.index.name} {column.index[row]} is {what}; {way_out}"
        )


def _text(column: Any) -> Any:
    return column.fillna("").astype(str).str.strip()


def _numbers(column: Any, source: str) -> np.ndarray:
    """Convert a column to floats, NaN if a value is missing."""
    if not pd.api.types.is_numeric_dtype(column.dtype):
        column = column.astype(str)
        column = column.where(~column.isin(_MISSING))
    values = np.asarray(pd.to_numeric(column, errors="coerce"), float)
    bad = np.isnan(values) & column.notna().to_numpy()
    _refuse_cells(column, bad, "no number", "write numbers such as 1234.5, without commas", source)
    return values


def _parse(frame: pd.DataFrame, source: str) -> Prices:
    """Validate a table in one of the three layouts; adjust highs and lows by the factor of the closes."""
    frame = _to_long(frame, source)
    # A time of day is refused, because 15:00 in UTC is the next day in Tokyo.
    text = _text(frame["date"])
    iso = text.where(text.str.fullmatch(_DAY)).str[:10]
    parsed = pd.to_datetime(iso, format="%Y-%m-%d", errors="coerce")
    # Allow one day, by which dates differ between time zones.
    wrong = ~(parsed <= pd.Timestamp.now() + pd.Timedelta(days=1))
    way_out = "write past days of the exchange such as 2019-01-02, without a time of day"
    _refuse_cells(text, wrong, "no day of trading", way_out, source)
    days = parsed.to_numpy().astype("datetime64[D]")
    who = _text(frame["ticker"])
    wrong = ~who.map(lambda name: name.isprintable() and name[:1] not in ("", *"=+-@"))
    way_out = "write a name in one line, and not with =, +, - or @ in front, as a formula has"
    _refuse_cells(who, wrong, "no ticker", way_out, source)
    if "currency" in frame:
        currency = _text(frame["currency"])
        changes = currency != currency.groupby(who).transform("first")
        way_out = f"the currency of {who[changes].head(1).sum()} changes; convert all prices to one"
        _refuse_cells(currency, changes, "another currency", way_out, source)
    twice = pd.DataFrame({"day": days, "who": who}).duplicated().to_numpy()
    way_out = "keep one row for each day"
    _refuse_cells(who + " " + days.astype(str), twice, "there twice", way_out, source)
    column, names = pd.factorize(who)
    tickers = tuple(map(str, names))
    calendar, row = np.unique(days, return_inverse=True)
    values: dict[str, np.ndarray] = {}
    for field in _READ_FIELDS:
        if field in frame:
            values[field] = np.full((len(calendar), len(tickers)), np.nan)
            values[field][row, column] = _numbers(frame[field], source)

    def refuse(bad: np.ndarray, what: str, way_out: str) -> None:
        if bad.any():
            row, column = np.argwhere(bad)[0]
            place = f"{calendar[row]} {tickers[column]}"
            raise InputError(f"{source}: {bad.sum()} {what}, first at {place}; {way_out}")

    volume = values.pop("volume", None)
    priced = ~np.isnan(values["close"])
    listed = np.maximum.accumulate(priced) & np.maximum.accumulate(priced[::-1])[::-1]
    listed |= ~priced.any(0)
    for field, found in values.items():
        missing = np.isnan(found) & listed
        refuse(missing, f"missing values of {field}", "fill them in, or drop the ticker or the day")
        wrong = (found < _PRICE_RANGE[0]) | (found > _PRICE_RANGE[1])
        refuse(wrong, f"values of {field} that are no prices", "prices must be finite and > 0")
    close = values.get("adj close", values["close"])
    years = 1970 + calendar.astype("datetime64[Y]").astype(int)
    times = (~priced | (close == years[:, None])).all(0)
    refuse(times & priced, "values that count time", "drop the ticker")
    if "high" not in values:
        return Prices(calendar, tickers, close, volume=volume)
    nearest = np.clip(values["close"], values["low"], values["high"])
    outside = np.abs(values["close"] / nearest - 1) > _ROUNDING
    outside |= values["high"] < values["low"]
    refuse(outside, 'values of "close" above "high" or below "low"', "fix or swap them")
    factor = close / values["close"]
    return Prices(calendar, tickers, close, values["high"] * factor, values["low"] * factor, volume)
