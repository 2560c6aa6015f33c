"""Daily prices v_{i,n}: the table, and how a user's file becomes one; what is wrong gets one sentence.

A file has ISO dates, decimal points and one of three layouts: wide (a column of closes for each ticker),
long (a row for each date and ticker), or yfinance's (a column for each field and ticker). Anything else is
refused with the line of pandas that converts it. Everything behind this file may rely on positive numbers
on ascending days, full but for the days before an instrument is listed and after it is delisted, which are
NaN. Nothing here starts JAX.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.domains.tables import as_day, read_parquet, require_file
from apportion.errors import InputError, optional_import, reading

Day = str | np.datetime64 | None
"""A day, such as 2019-01-02, or none."""
LEAST_DAYS = 33
LEAST_TICKERS = 2
_SPLITS = ((2, 1), (3, 1), (4, 1), (5, 1), (10, 1), (20, 1), (3, 2))
_FIELDS = {
    *("open", "high", "low", "close", "adj close", "volume", "dividends", "stock splits"),
    *("capital gains", "repaired?"),
}
"""What a file may say of an instrument on a day."""
_CORNER = {"", "price", "ticker", "date", "attributes", "symbols"}
"""What stands above the days where the names have two levels."""
_TIMES_OF_DAY = {"timestamp", "datetime", "time", "epoch", "unix"}
_NEVER = _FIELDS - {"open", "high", "low", "close"} | _TIMES_OF_DAY
"""Names that are no instrument's; LOW and OPEN are."""
_READ = ("close", "adj close", "high", "low", "volume")
_RECENT = 5
"""Trading days within which an instrument without a price may be one whose file was cut short."""
_MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "#N/A", "<NA>", "NaT")
_ISO = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{1,2}:\d{2}.*)?"


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
    volume: np.ndarray | None = None
    """What was traded of each on each day, NaN where it is not known, or None: a large move is judged by it
    and by nothing else, so that it is no part of the fingerprint."""

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

    def filled(self) -> np.ndarray:
        """The same with prices that stand still where there are none."""
        # A ticker without any price yet stands at 1.
        close = pd.DataFrame(self.close).ffill().bfill().fillna(1.0).to_numpy()
        return np.where(np.isnan(self.close)[..., None], close[..., None], self.values())

    def relatives(self) -> np.ndarray:
        """Price relatives y_n = v_n / v_{n-1}, (time, universe); 1 on the first row and where an
        instrument is not listed.
        """
        close = self.filled()[..., 0]
        return np.concatenate([np.ones_like(close[:1]), close[1:] / close[:-1]])

    def tradable(self) -> np.ndarray | None:
        """Whether an instrument can be held over the period that ends on each row; None where all can.

        It can be bought at its first close and is sold at its last one: a delisting is known by then.
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
        """Rows before `day`: all that may be known when it begins."""
        return self._cut(slice(0, self.row(day)))

    def since(self, day: str | np.datetime64) -> "Prices":
        """Rows from `day` on."""
        return self._cut(slice(self.row(day), None))

    def _cut(self, rows: slice | np.ndarray, columns: slice | list[int] = slice(None)) -> "Prices":
        names = np.array(self.tickers, dtype=object)[columns]
        others = (self.high, self.low, self.volume)
        others = (s if s is None else s[rows][:, columns] for s in others)
        return Prices(self.dates[rows], tuple(names), self.close[rows][:, columns], *others)

    def with_tomorrow(self, days: int) -> "Prices":
        """The last `days` rows and a day more, on which prices stand still: no decision sees it."""
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
        """What the data is, in a line."""
        series = "close" if self.high is None else "close, high, low"
        return (
            f"{len(self.tickers)} tickers x {len(self.dates)} days, {self.dates[0]} to "
            f"{self.dates[-1]}, {series}, fingerprint {self.fingerprint}"
        )


def day_after(day: str | np.datetime64) -> np.datetime64:
    """The calendar day after this one."""
    return as_day(day) + np.timedelta64(1, "D")


def read_prices(path: Path | None, *, allow_jumps: bool | Sequence[str] | None = None) -> Prices:
    """A price file, refused where a price jumps unless that is allowed; or the embedded stocks.

    `allow_jumps` names moves to take as they are, each as TICKER:DAY; `all`, or True, takes every one.
    """
    if path is None:
        return embedded_prices()
    prices = load_prices(path)
    if allow_jumps is True or "all" in (allow_jumps or ()):
        return prices
    jumps = [jump for jump in find_jumps(prices) if not jump.market]
    allowed = set(allow_jumps or ())
    strange = sorted(allowed - {jump.name for jump in jumps})
    if strange:
        known = ", ".join(jump.name for jump in jumps[:4]) or "none"
        raise InputError(
            f"--allow-jumps {strange[0]}: {path} has no such move; those in question are {known}"
        )
    jumps = [jump for jump in jumps if jump.name not in allowed]
    if jumps:
        more = f" and {len(jumps) - 4} more" if len(jumps) > 4 else ""
        told = ", ".join(str(jump) for jump in jumps[:4])
        raise InputError(
            f"{path}: prices move too far in one day: {told}{more}; give prices that are adjusted for "
            f"splits and free of slips, or --allow-jumps {jumps[0].name} to take such a move as it is "
            "(without a name, every one)"
        )
    return prices


def check_last_day(prices: Prices, delisted: Sequence[str] = ()) -> None:
    """Refuse to decide on a file whose last days lack an instrument, as one that was cut short does.

    An instrument without a price would be sold. `delisted` names those that are in truth.
    """
    gone = {prices.tickers[k] for k in np.flatnonzero(np.isnan(prices.close[-1]))}
    wrong = [name for name in delisted if name not in gone]
    if wrong:
        why = "has a price on" if wrong[0] in prices.tickers else "is not among the prices of"
        raise InputError(f"--delisted {wrong[0]}: it {why} {prices.dates[-1]}; leave it out")
    recent = ~np.isnan(prices.close[-1 - _RECENT : -1]).all(0)
    for k in np.flatnonzero(np.isnan(prices.close[-1]) & recent):
        name = prices.tickers[k]
        if name not in delisted:
            last = prices.dates[np.flatnonzero(~np.isnan(prices.close[:, k]))[-1]]
            raise InputError(
                f"prices: {name} has no price on {prices.dates[-1]}, the last day, and its last one is of "
                f"{last}; complete the file, or say --delisted {name}, and what is held of it is sold"
            )


def embedded_prices() -> Prices:
    """Closes of 20 large S&P 500 stocks, 1990 to 2022, as skfolio ships them."""
    otherwise = " or give your own file with --prices"
    with optional_import("the embedded prices come with skfolio", "market", otherwise):
        from skfolio.datasets import load_sp500_dataset
    return from_frame(load_sp500_dataset(), source="embedded prices")


@dataclass(frozen=True)
class Jump:
    """A move of an instrument in a day that a split or a slip may have made, and why it was not, if so."""

    ticker: str
    day: str
    change: float
    split: tuple[int, int] | None
    market: str = ""
    """What shows that the market made it; nothing where nothing does."""

    @property
    def name(self) -> str:
        """As `--allow-jumps` takes it."""
        return f"{self.ticker}:{self.day}"

    def __str__(self) -> str:
        looks = f" (looks like a split of {self.split[0]}:{self.split[1]})" if self.split else ""
        return f"{self.ticker} {self.change:+.1%} on {self.day}" + (
            f", and the market's: {self.market}" if self.market else looks
        )


def find_jumps(prices: Prices) -> list[Jump]:
    """Moves as far as a split that was not adjusted for, or a slip, would make them, day by day.

    A move beyond half is named whatever it is; a smaller one only where it is a usual split's, to within
    what prices move beside it. Crashes of 20 to 40 % pass. A move is the market's where far more was traded
    than usual, or, where volumes are not known, where prices move far more after it than before: a split
    moves neither.

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
    # Markets fall by a third now and then, so of 3:2 only the very ratio counts.
    near = off <= np.where(ratios.sum(1) == 5, 0.01, 0.02)
    found: list[Jump] = []
    for row, column in np.argwhere((np.abs(relatives - 1) > 0.5) | near.any(-1)):
        one, other = ratios[off[row, column].argmin()]
        # What moves beside a split that is named anyway may be more.
        split = (int(one), int(other)) if off[row, column].min() <= 0.05 else None
        change = float(relatives[row, column]) - 1
        market = _market(prices, relatives, row, column)
        found.append(Jump(prices.tickers[column], str(prices.dates[row]), change, split, market))
    return found


_TIMES = 4.0
"""How far beyond the usual volume, or movement after it, shows a move to be the market's."""


def _market(prices: Prices, relatives: np.ndarray, row: int, column: int) -> str:
    """What shows that the market made a move, or nothing: a split or a slip changes numbers alone."""
    moves = np.abs(np.log(relatives[:, column]))
    before, after = moves[max(row - 60, 1) : row], moves[row + 1 : row + 6]
    # A slip is undone the next day, whatever was traded.
    if not len(after) or len(before) < 20 or abs(after[0] - moves[row]) < 0.5 * moves[row]:
        return ""
    if prices.volume is not None:
        usual = prices.volume[max(row - 60, 0) : row, column]
        usual = np.median(usual[np.isfinite(usual)]) if np.isfinite(usual).any() else np.nan
        # A split of 10:1 has ten times as many pieces traded, for the same money.
        money = float(prices.volume[row, column] * min(relatives[row, column], 1.0))
        if np.isfinite(usual) and np.isfinite(money):
            far = money > _TIMES * usual
            return f"{money / usual:.0f} times as much as usual was traded" if far else ""
    usual = float(np.median(before))
    far = usual > 0 and len(after) == 5 and after.mean() > _TIMES * usual
    return (
        f"the days after it moved {after.mean() / usual:.0f} times as far as usual" if far else ""
    )


def load_prices(path: str | Path) -> Prices:
    """Read and check a price file.

    Parameters
    ----------
    path
        CSV or Parquet; wide with a first column of days and a column of closes for each ticker, long
        with columns date, ticker, close and perhaps high, low and volume (open is ignored), or with
        two levels of names as yfinance has them. Where there are adjusted closes ("adj close")
        they are the closes, and highs and lows are adjusted by as much.

    Raises
    ------
    InputError
        One sentence naming the file, the place and the way out.
    """
    path = require_file(path, "a CSV or Parquet file of daily prices")
    with reading(path, "save it as a plain CSV or Parquet table"):
        parquet = path.suffix.lower() in (".parquet", ".pq")
        frame = _with_days(read_parquet(path)) if parquet else _read_csv(path)
        prices = _checked(frame, str(path))
    days, tickers = prices.close.shape
    if tickers < LEAST_TICKERS:
        raise InputError(
            f"{path}: {tickers} ticker{'s' * (tickers != 1)} found; at least {LEAST_TICKERS} are "
            "needed to share anything out, so add columns (wide) or rows of other tickers (long)"
        )
    if days < LEAST_DAYS:
        raise InputError(
            f"{path}: {days} days found, {prices.dates[0]} to {prices.dates[-1]}; at least "
            f"{LEAST_DAYS} are needed, so give a longer history"
        )
    gaps = np.diff(prices.dates)
    if gaps.max() > np.timedelta64(366, "D"):
        last = int(gaps.argmax())
        raise InputError(
            f"{path}: no day between {prices.dates[last]} and {prices.dates[last + 1]}; correct the date "
            "of the rows beyond the gap, or leave them out"
        )
    priced = ~np.isnan(prices.close)
    if not priced.any(0).all():
        never = prices.tickers[int(priced.any(0).argmin())]
        raise InputError(f'{path}: ticker "{never}" has no price at all; drop it')
    if priced.sum(1).min() < LEAST_TICKERS:
        few = int((priced.sum(1) < LEAST_TICKERS).argmax())
        raise InputError(
            f"{path}: {priced[few].sum()} tickers have a price on {prices.dates[few]}; at least "
            f"{LEAST_TICKERS} are needed on every day, so cut such days off or add tickers"
        )
    return prices


def from_frame(closes: pd.DataFrame, *, source: str = "prices") -> Prices:
    """Check a table of closes: a row a day (the index), a column a ticker; or a frame of yfinance."""
    return _checked(_with_days(closes.rename_axis("date")), source)


def _read_csv(path: Path) -> pd.DataFrame:
    """Names as they are written, prices as numbers; the index is each row's line in the file."""
    plain: dict[str, Any] = {
        "header": None,
        "keep_default_na": False,
        "skip_blank_lines": False,
        "encoding": "utf-8-sig",
    }
    (first,) = pd.read_csv(path, nrows=1, dtype=str, **plain).to_numpy().tolist()
    mark = next((mark for mark in ";\t" if len(first) == 1 and mark in str(first[0])), None)
    if mark is not None:
        raise InputError(
            f"{path}: values must be separated by commas and have decimal points; convert it by "
            f"pd.read_csv({path.name!r}, sep={mark!r}, decimal=',').to_csv('prices.csv', index=False)"
        )
    rows = pd.read_csv(path, nrows=3, dtype=str, **plain).fillna("").to_numpy().tolist()
    names: list[Any] = rows[0]
    headers = 1
    corners = {row[0].strip().lower() for row in rows[:2]}
    if corners <= _CORNER and _fields_first(*(row[1:] for row in rows[:2])) is not None:
        names = [("date", ""), *zip(rows[0][1:], rows[1][1:], strict=True)]
        # pandas writes the name of the index in a row of its own.
        labelled = len(rows) > 2 and not any(rows[2][1:]) and not re.fullmatch(_ISO, rows[2][0])
        headers = 3 if labelled else 2
    words = {k for k, name in enumerate(names) if k == 0 or _field(name) in ("date", "ticker")}
    try:
        frame = pd.read_csv(
            path,
            skiprows=headers,
            # Names are text: 000001 and NA too.
            dtype=dict.fromkeys(words, str),
            na_values={k: _MISSING for k in range(len(names)) if k not in words},
            low_memory=False,
            **plain,
        )
    except pd.errors.EmptyDataError:
        raise InputError(f"{path}: has names but no rows; give a row for each day") from None
    if frame.shape[1] != len(names):
        raise InputError(
            f"{path}: has {len(names)} names in line 1 and {frame.shape[1]} values in line "
            f"{headers + 1}; write numbers with decimal points and no other commas"
        )
    frame.index = pd.RangeIndex(headers + 1, headers + 1 + len(frame), name="line")
    frame.columns = (
        pd.Index(names, dtype=object) if headers == 1 else pd.MultiIndex.from_tuples(names)
    )
    return frame[~(frame.isna() | (frame == "")).all(axis=1)]


def _with_days(frame: pd.DataFrame) -> pd.DataFrame:
    """A data frame as a file would hold it: days in the first column, unless the index only counts rows."""
    index = frame.index
    counts = index.name is None and pd.api.types.is_integer_dtype(index.dtype)
    drop = isinstance(index, pd.RangeIndex) or (counts and "date" in map(_field, frame.columns))
    names = [str(name or "date") for name in index.names]
    frame = frame.reset_index(drop=drop, names=names, allow_duplicates=True)
    frame.index = pd.RangeIndex(1, 1 + len(frame), name="row")
    return frame


def _field(name: object) -> str:
    """A column's name as the layouts spell it.

    >>> _field(" Adj_Close ")
    'adj close'
    """
    plain = re.sub(r"[\s_.-]+", " ", str(name)).strip().lower()
    return "adj close" if plain in ("adjclose", "adjusted close") else plain


def _fields_first(above: Sequence[Any], below: Sequence[Any] = ()) -> bool | None:
    """Of two levels of names, whether the fields stand above; None where no level holds fields."""
    for first, fields, names in ((True, above, below), (False, below, above)):
        found = {_field(field) for field in fields}
        named = all(str(name).strip() for name in names)
        if found <= _FIELDS and found & {"close", "adj close"} and named:
            return first
    return None


_Cells = tuple[np.ndarray, tuple[str, ...], dict[str, np.ndarray], np.ndarray]
"""What a file says, whichever layout it has: days, ascending; tickers; of each field that is read the
values, (time, universe), NaN where there are none; the row of the file each stands in, 0 where in none."""


def _from_wide(frame: pd.DataFrame, source: str) -> _Cells:
    """A first column of days, and a column of closes for each ticker."""
    written = list(frame.columns)
    names = [name.strip() for name in written]
    if names[0].lower() != "date" and "date" in map(str.lower, names):
        raise InputError(
            f'{source}: column {1 + [*map(str.lower, names)].index("date")} is called "date" and not the '
            'first; convert it by frame.set_index("date").to_csv("prices.csv"), and rename any other'
        )
    fields = {_field(name) for name in names[1:]}
    field = next((field for field in ("close", "adj close") if field in fields), "high")
    if field != "high" or {"high", "low"} <= fields <= _FIELDS:
        raise InputError(
            f'{source}: column "ticker" is missing beside "{field}"; add it to name each row\'s '
            "instrument, or give a column of closes for each ticker"
        )
    for k, name in enumerate(names[1:], 2):
        if re.fullmatch(r"(Unnamed: \d+|__index_level_\d+__|)", name):
            raise InputError(f"{source}: column {k} has no name; name its ticker, or drop it")
        if _field(name) in _NEVER:
            raise InputError(
                f'{source}: column {k} is called "{written[k - 1]}", which is no instrument; drop it'
            )
        first = names.index(name, 1) + 1
        if first < k:
            raise InputError(
                f'{source}: columns {first} ("{written[first - 1]}") and {k} ("{written[k - 1]}") are '
                f"both called {name}; rename or drop one"
            )
    return _from_columns(frame, [("close", name) for name in names[1:]], source)


def _from_levels(frame: pd.DataFrame, source: str) -> _Cells:
    """As yfinance has them: a first column of days, and a column for each field and ticker."""
    above, below = (list(frame.columns.get_level_values(level)[1:]) for level in (0, -1))
    first = _fields_first(above, below)
    if first is None or frame.columns.nlevels > 2:
        raise InputError(
            f"{source}: the columns' names have several levels, but not one of fields, such as Close, "
            'and one of tickers; keep the closes by frame["Close"].to_csv("prices.csv")'
        )
    fields, tickers = (above, below) if first else (below, above)
    pairs = [(_field(f), str(t).strip()) for f, t in zip(fields, tickers, strict=True)]
    twice = next((pair for k, pair in enumerate(pairs) if pair in pairs[:k]), None)
    if twice is not None:
        raise InputError(f'{source}: two columns are both "{twice[0]}" of {twice[1]}; drop one')
    read = [field for field in _READ if field in {field for field, _ in pairs}]
    _refuse_half(read, source)
    names = tuple(dict.fromkeys(ticker for _, ticker in pairs))
    needed = [field for field in read if field != "volume"]
    absent = next(((f, t) for f in needed for t in names if (f, t) not in pairs), None)
    if absent is not None:
        raise InputError(
            f'{source}: {absent[1]} has no column "{absent[0]}", which others have; add it or drop '
            "the ticker"
        )
    return _from_columns(frame, pairs, source)


def _from_columns(frame: pd.DataFrame, pairs: list[tuple[str, str]], source: str) -> _Cells:
    """The cells where days are in the first column, and every other one is a field of a ticker."""
    name = frame.columns[0]
    days = _days(frame.iloc[:, 0], name[0] if isinstance(name, tuple) else name, source)
    twice = pd.Series(days).duplicated().to_numpy()
    if twice.any():
        row = int(twice.argmax())
        raise InputError(
            f'{source}: column "date": {days[row]} occurs twice at {frame.index.name} '
            f"{frame.index[row]}; keep one row for each day"
        )
    order = np.argsort(days)
    frame, days = frame.iloc[order], days[order]
    tickers = {ticker: k for k, ticker in enumerate(dict.fromkeys(who for _, who in pairs))}
    shape = (len(days), len(tickers))
    read = [field for field in _READ if field in {field for field, _ in pairs}] or ["close"]
    values = {field: np.full(shape, np.nan) for field in read}
    for place, (field, ticker) in enumerate(pairs, 1):
        if field in values:
            label = f"{field} {ticker}" if isinstance(name, tuple) else ticker
            numbers = _numbers(frame.iloc[:, place], label, source, known=field != "volume")
            values[field][:, tickers[ticker]] = numbers
    places = np.broadcast_to(frame.index.to_numpy()[:, None], shape)
    return days, tuple(tickers), values, places


def _from_long(frame: pd.DataFrame, source: str) -> _Cells:
    """A row for each day and ticker."""
    fields = [_field(name) for name in frame.columns]
    for field in ("date", "ticker", *_READ):
        if fields.count(field) > 1:
            raise InputError(f'{source}: two columns are both called "{field}"; rename or drop one')
    for field in ("close", "date"):
        if field not in fields and not (field == "close" and "adj close" in fields):
            raise InputError(
                f'{source}: column "{field}" is missing; a long file has date, ticker, close and '
                "perhaps high and low"
            )
    read = [field for field in _READ if field in fields]
    _refuse_half(read, source)
    frame = frame.set_axis(pd.Index(fields, dtype=object), axis=1)
    days = _days(frame["date"], "date", source)
    written = frame["ticker"].fillna("").astype(str)
    who = written.str.strip()
    unit = frame.index.name
    if (who == "").any():
        raise InputError(
            f'{source}: column "ticker" is empty at {unit} {(who == "").idxmax()}; name the instrument'
        )
    spelt: Any = pd.DataFrame({"who": who, "written": written}).drop_duplicates()
    again = spelt[spelt["who"].duplicated()]
    if len(again):
        other = spelt["written"][spelt["who"] == again["who"].iloc[0]].iloc[0]
        raise InputError(
            f'{source}: column "ticker": "{again["written"].iloc[0]}" at {unit} {again.index[0]} and '
            f'"{other}" differ by spaces only; write one name for one instrument'
        )
    twice = pd.DataFrame({"day": days, "who": who}).duplicated()
    if twice.any():
        row = int(twice.to_numpy().argmax())
        raise InputError(
            f'{source}: column "date": {days[row]} occurs twice for {who.iloc[row]} at {unit} '
            f"{frame.index[row]}; keep one row for each day"
        )
    column, tickers = pd.factorize(who)
    calendar, row = np.unique(days, return_inverse=True)
    shape = (len(calendar), len(tickers))
    values = {field: np.full(shape, np.nan) for field in read}
    for field, full in values.items():
        full[row, column] = _numbers(frame[field], field, source, known=field != "volume")
    places = np.zeros(shape, int)
    places[row, column] = frame.index
    return calendar, tuple(map(str, tickers)), values, places


def _refuse_half(read: Sequence[str], source: str) -> None:
    """Refuse highs without lows, and both where nothing says by how much to adjust them."""
    for given, other in (("high", "low"), ("low", "high")):
        if given in read and other not in read:
            raise InputError(
                f'{source}: column "{other}" is missing beside "{given}"; give both or neither'
            )
    if {"high", "adj close"} <= set(read) and "close" not in read:
        raise InputError(
            f'{source}: column "close" is missing beside "adj close" and "high"; give it, so that '
            "highs and lows can be adjusted as closes are, or leave them out"
        )


def _days(column: Any, name: str, source: str) -> np.ndarray:
    """A column as datetime64[D]; a time of day and its offset are those of the exchange, and fall away."""
    text = column.fillna("").astype(str).str.strip()
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        days = column.dt.tz_localize(None)
    else:
        iso = text.where(text.str.fullmatch(_ISO)).str[:10]
        days = pd.to_datetime(iso, format="%Y-%m-%d", errors="coerce")
    bad = days.isna()
    if bad.all() and name.strip().lower() != "date":
        raise InputError(
            f'{source}: column "date" is missing; the first column must hold the days, as 2019-01-02'
        )
    if bad.any():
        row = bad.idxmax()
        raise InputError(
            f'{source}: column "{name}" has {bad.sum()} values that are not dates, first "{text[row]}" '
            f"at {column.index.name} {row}; write days as 2019-01-02, for instance by "
            'frame["date"] = pd.to_datetime(frame["date"], dayfirst=True)'
        )
    return days.to_numpy().astype("datetime64[D]")


def _numbers(column: Any, name: str, source: str, *, known: bool = True) -> np.ndarray:
    """A column as floats, NaN where a value is missing; what need not be `known` may be anything."""
    if not pd.api.types.is_numeric_dtype(column.dtype) or pd.api.types.is_bool_dtype(column.dtype):
        # True is no price of 1.
        column = column.astype(object).where(~column.isin(_MISSING), None)
        column = column.map(lambda value: str(value) if isinstance(value, bool) else value)
    values = np.asarray(pd.to_numeric(column, errors="coerce"), float)
    bad = np.isnan(values) & column.notna().to_numpy() & known
    if bad.any():
        row = int(bad.argmax())
        example = str(column.iloc[row])
        commas = ', without commas: pd.read_csv("prices.csv", thousands=",")'
        raise InputError(
            f'{source}: column "{name}" has {bad.sum()} values that are not numbers, first "{example}" '
            f"at {column.index.name} {column.index[row]}; write prices as plain numbers such as 1234.5"
            + (commas if "," in example else "")
        )
    return values


def _checked(frame: pd.DataFrame, source: str) -> Prices:
    """The table of a file with one of the three layouts, once all that it says is a price.

    Adjusted closes adjust highs and lows too.
    """
    unit = str(frame.index.name)
    if not len(frame):
        raise InputError(f"{source}: has no rows; give a row for each day")
    if frame.columns.nlevels > 1:
        days, tickers, values, places = _from_levels(frame, source)
    else:
        frame = frame.set_axis(pd.Index(map(str, frame.columns), dtype=object), axis=1)
        long = "ticker" in map(_field, frame.columns)
        read = _from_long if long else _from_wide
        days, tickers, values, places = read(frame, source)

    volume = values.pop("volume", None)
    spelt: dict[str, str] = {}
    for ticker in tickers:
        other = spelt.setdefault(ticker.casefold(), ticker)
        if other != ticker:
            raise InputError(
                f'{source}: "{other}" and "{ticker}" differ by case only; write one name for one '
                "instrument, and rename or drop any other"
            )

    def refuse(bad: np.ndarray, what: str, way_out: str) -> None:
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise InputError(
                f"{source}: {bad.sum()} {what}, first at {days[row]} {tickers[column]} ({unit} "
                f"{places[row, column]}); {way_out}"
            )

    priced = ~np.isnan(next(iter(values.values())))
    listed = np.maximum.accumulate(priced) & np.maximum.accumulate(priced[::-1])[::-1]
    absent = listed & (places == 0)
    if absent.any():
        column = int(absent.any(0).argmax())
        mine = absent[:, column]
        raise InputError(
            f"{source}: {tickers[column]} has no row on {mine.sum()} of {len(days)} days, first "
            f"{days[mine][0]}; add the rows or drop the ticker"
        )
    for field, found in values.items():
        missing = np.isnan(found) & listed
        refuse(missing, f"missing values of {field}", "fill them in, or drop the ticker or the day")
        refuse(np.isinf(found), f"infinite values of {field}", "prices must be finite")
        refuse(found < 0, f"negative values of {field}", "prices must be > 0")
        refuse(
            found == 0, f"zero values of {field}", "prices must be > 0; drop days without trading"
        )
    if "high" in values:
        upside_down = values["high"] < values["low"]
        refuse(upside_down, 'values of "high" below "low"', "swap or fix them")
    close = values["adj close" if "adj close" in values else "close"]
    for k, ticker in enumerate(tickers):
        own = close[priced[:, k], k]
        # Seconds since 1970, or more of them: they rise by the day, and no price is as high.
        if len(own) > 1 and own.min() > 1e8 and (own % 1 == 0).all() and (np.diff(own) > 0).all():
            raise InputError(
                f'{source}: "{ticker}" counts time ({own[0]:.0f}, {own[1]:.0f}, ...) and is no instrument; '
                "drop it"
            )
    if "high" not in values:
        return Prices(days, tickers, close, volume=volume)
    factor = close / values["close"]
    return Prices(days, tickers, close, values["high"] * factor, values["low"] * factor, volume)
