"""The three ways in which a table can hold prices, each checked into the same arrays.

Wide: a column of closes for each instrument. Long: a row for each (date, ticker). Two levels: a column
for each (field, ticker), as yfinance has them. Rows may come in any order. Where there are adjusted
closes they are the closes, and highs and lows are adjusted by as much.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from apportion.domains.portfolio.listings import outside
from apportion.domains.portfolio.price_files import FIELDS, MISSING, Table, field_name, is_unnamed
from apportion.domains.portfolio.trading_days import looks_like_day, read_days
from apportion.errors import InputError


class Series(NamedTuple):
    """What a table says, days ascending; prices are (time, universe), NaN while not listed."""

    dates: np.ndarray
    tickers: tuple[str, ...]
    close: np.ndarray
    high: np.ndarray | None = None
    low: np.ndarray | None = None


def read_layout(table: Table) -> Series:
    """The prices of a table, whichever way it holds them."""
    if not len(table.frame):
        raise InputError(f"{table.source}: has no rows; give a row for each day")
    if table.fields is not None:
        return _from_levels(table, table.fields)
    if "ticker" in map(field_name, table.names):
        return _from_long(table)
    return _from_wide(table)


def _from_wide(table: Table) -> Series:
    day = _day_column(table)
    instruments = [k for k in range(len(table.names)) if k not in (day, _row_count(table, day))]
    found = {field_name(table.names[k]) for k in instruments}
    field = next((f for f in ("close", "adj close") if f in found), None)
    if field is None and {"high", "low"} <= found <= FIELDS:
        field = "high"
    if field is not None:
        raise InputError(
            f'{table.source}: column "ticker" is missing beside "{field}"; add it to name each row\'s '
            "instrument, or give a column of closes for each ticker"
        )
    _refuse_names(table, instruments)
    table, days = _by_day(table, day)
    _refuse_repeats(days, table.frame.index.to_numpy(), "", table)
    tickers = tuple(table.names[k] for k in instruments)
    close = [
        _numbers(table.frame[k], name, days, np.full(len(days), name), table)
        for k, name in zip(instruments, tickers, strict=True)
    ]
    return Series(days, tickers, np.stack(close, -1) if close else np.ones((len(days), 0)))


def _day_column(table: Table) -> int:
    """The column called date, in any case; else the first. An instrument may be called DATE too."""
    called = [k for k, name in enumerate(table.names) if name.lower() == "date"]
    if 0 in called or not called:
        return 0
    if len(called) > 1:
        raise InputError(
            f"{table.source}: columns {' and '.join(str(k + 1) for k in called)} are both called "
            '"date"; call the days "date" and put them first'
        )
    return called[0] if _holds_days(table.frame[called[0]]) else 0


def _holds_days(column: Any) -> bool:
    is_time = pd.api.types.is_datetime64_any_dtype(column.dtype)
    return is_time or looks_like_day(str(column.iloc[0]))


def _row_count(table: Table, day: int) -> int | None:
    """The first column where it is an index that was written along: no name, and rows counted."""
    if day == 0 or not is_unnamed(table.names[0]):
        return None
    values = np.asarray(pd.to_numeric(table.frame[0], errors="coerce"), float)
    if np.array_equal(values, np.arange(len(values))):
        return 0
    raise InputError(
        f"{table.source}: column 1 has no name; drop it if it is a written index, or name the "
        "instrument"
    )


def _refuse_names(table: Table, columns: Sequence[int]) -> None:
    """Refuse instruments without a name, and two of one name."""
    seen: dict[str, int] = {}
    for k in columns:
        name = table.names[k]
        if is_unnamed(name):
            raise InputError(f"{table.source}: column {k + 1} has no name; name its ticker")
        if name in seen:
            first, second = table.written[seen[name]], table.written[k]
            raise InputError(
                f'{table.source}: columns {seen[name] + 1} ("{first}") and {k + 1} ("{second}") are '
                f"both called {name}; rename or drop one"
            )
        seen[name] = k


def _from_long(table: Table) -> Series:
    places = _long_columns(table)
    table, days = _by_day(table, places["date"])
    who = _row_tickers(table, places["ticker"])
    rows = table.frame.index.to_numpy()
    values: dict[str, np.ndarray] = {}
    for field in ("close", "adj close", "high", "low"):
        if field in places:
            column, name = table.frame[places[field]], table.names[places[field]]
            closes = next(iter(values.values()), None)
            values[field] = _numbers(column, name, days, who, table, closes)
    values = _adjusted(values, days, who, rows, table)
    tickers = tuple(dict.fromkeys(who[np.argsort(rows)].tolist()))
    calendar = np.unique(days)
    places_of = {ticker: place for place, ticker in enumerate(tickers)}
    column = np.array([places_of[ticker] for ticker in who])
    for place, ticker in enumerate(tickers):
        mine = np.flatnonzero(column == place)
        _refuse_repeats(days[mine], rows[mine], f" for {ticker}", table)
        lived = calendar[(calendar >= days[mine[0]]) & (calendar <= days[mine[-1]])]
        if len(mine) < len(lived):
            absent = np.setdiff1d(lived, days[mine])
            raise InputError(
                f'{table.source}: column "close": {ticker} has no row on {len(absent)} of '
                f"{len(calendar)} days, first {absent[0]}; add the rows or drop the ticker"
            )
    full = {}
    for field, found in values.items():
        full[field] = np.full((len(calendar), len(tickers)), np.nan)
        full[field][np.searchsorted(calendar, days), column] = found
    return Series(calendar, tickers, full["close"], full.get("high"), full.get("low"))


def _long_columns(table: Table) -> dict[str, int]:
    """The place of each column that is read."""
    places: dict[str, int] = {}
    for k, name in enumerate(table.names):
        field = field_name(name)
        if field in places and field in ("date", "ticker", "close", "adj close", "high", "low"):
            raise InputError(
                f'{table.source}: columns {places[field] + 1} and {k + 1} are both called "{field}"; '
                "rename or drop one"
            )
        places.setdefault(field, k)
    if "close" not in places and "adj close" not in places:
        _missing_column(table, "close")
    if "date" not in places:
        _missing_column(table, "date")
    _refuse_half(set(places), table)
    return places


def _missing_column(table: Table, field: str) -> None:
    raise InputError(
        f'{table.source}: column "{field}" is missing; a long file has date, ticker, close and '
        "perhaps high and low"
    )


def _refuse_half(fields: set[str], table: Table) -> None:
    """Refuse highs without lows, and both where nothing says by how much to adjust them."""
    for given, other in (("high", "low"), ("low", "high")):
        if given in fields and other not in fields:
            raise InputError(
                f'{table.source}: column "{other}" is missing beside "{given}"; give both or neither'
            )
    if {"high", "adj close"} <= fields and "close" not in fields:
        raise InputError(
            f'{table.source}: column "close" is missing beside "adj close" and "high"; give it, so '
            "that highs and lows can be adjusted as closes are, or leave them out"
        )


def _row_tickers(table: Table, place: int) -> np.ndarray:
    """Each row's instrument."""
    written = table.frame[place].fillna("").astype(str)
    who = written.str.strip()
    nameless = np.flatnonzero(who == "")
    if len(nameless):
        row = table.frame.index[nameless[0]]
        raise InputError(
            f'{table.source}: column "ticker" is empty at {table.place(row)}; name the instrument'
        )
    spelt: dict[str, str] = {}
    for row, name in enumerate(written):
        other = spelt.setdefault(name.strip(), name)
        if other != name:
            raise InputError(
                f'{table.source}: column "ticker": "{name}" at '
                f'{table.place(table.frame.index[row])} and "{other}" differ by spaces only; write '
                "one name for one instrument"
            )
    return who.to_numpy()


def _from_levels(table: Table, fields: tuple[str, ...]) -> Series:
    places: dict[str, dict[str, int]] = {}
    for k, (field, ticker) in enumerate(zip(fields, table.names, strict=True)):
        if k and ticker in places.setdefault(field, {}):
            raise InputError(
                f'{table.source}: columns {places[field][ticker] + 1} and {k + 1} are both "{field}" '
                f"of {ticker}; drop one"
            )
        if k:
            places[field][ticker] = k
    read = {f: places[f] for f in ("close", "adj close", "high", "low") if f in places}
    _refuse_half(set(read), table)
    tickers = tuple(dict.fromkeys(table.names[1:]))
    for field, known in read.items():
        for ticker in tickers:
            if ticker not in known:
                raise InputError(
                    f'{table.source}: {ticker} has no column "{field}", which others have; add it or '
                    "drop the ticker"
                )
    table, days = _by_day(table, 0)
    rows = table.frame.index.to_numpy()
    _refuse_repeats(days, rows, "", table)
    found: list[dict[str, np.ndarray]] = []
    for ticker in tickers:
        who = np.full(len(days), ticker)
        values: dict[str, np.ndarray] = {}
        for field, known in read.items():
            closes = next(iter(values.values()), None)
            column = table.frame[known[ticker]]
            values[field] = _numbers(column, f"{field} {ticker}", days, who, table, closes)
        found.append(_adjusted(values, days, who, rows, table))
    full = {field: np.stack([values[field] for values in found], -1) for field in found[0]}
    return Series(days, tickers, full["close"], full.get("high"), full.get("low"))


def _adjusted(
    values: dict[str, np.ndarray],
    days: np.ndarray,
    who: np.ndarray,
    rows: np.ndarray,
    table: Table,
) -> dict[str, np.ndarray]:
    """Close, and perhaps high and low, all adjusted where the closes are."""
    if "high" in values:
        upside_down = np.flatnonzero(values["high"] < values["low"])
        if len(upside_down):
            row = int(upside_down[0])
            raise InputError(
                f'{table.source}: column "high" is below "low" on {len(upside_down)} rows, first at '
                f"{days[row]} {who[row]} ({table.place(rows[row])}); swap or fix them"
            )
    if "adj close" not in values:
        return values
    adjusted = values.pop("adj close")
    factor = adjusted / values.pop("close", adjusted)
    return {"close": adjusted} | {field: series * factor for field, series in values.items()}


def _by_day(table: Table, place: int) -> tuple[Table, np.ndarray]:
    """The table with its rows in the order of their days, and the days."""
    column, name = table.frame[place], table.names[place]
    numbers = np.asarray(pd.to_numeric(column, errors="coerce"), float)
    if name.lower() != "date" and not _holds_days(column) and not np.isnan(numbers).any():
        raise InputError(
            f'{table.source}: column "date" is missing; the first column must hold the days, as '
            "2019-01-02"
        )
    days = read_days(column, name or "date", table.place, table.source)
    order = np.argsort(days, kind="stable")
    return replace(table, frame=table.frame.iloc[order]), days[order]


def _refuse_repeats(days: np.ndarray, rows: np.ndarray, who: str, table: Table) -> None:
    """`rows` are the file's rows of these days, which ascend."""
    again = np.flatnonzero(days[1:] == days[:-1])
    if len(again):
        place = int(again[0]) + 1
        raise InputError(
            f'{table.source}: column "date": {days[place]} occurs twice{who} at '
            f"{table.place(int(rows[place]))}; keep one row for each day"
        )


def _numbers(
    column: Any,
    name: str,
    days: np.ndarray,
    who: np.ndarray,
    table: Table,
    closes: np.ndarray | None = None,
) -> np.ndarray:
    """A column as positive floats, NaN where the ticker is not listed; `who` names each row's ticker."""
    if not pd.api.types.is_numeric_dtype(column.dtype) or pd.api.types.is_bool_dtype(column.dtype):
        # True is no price of 1.
        column = column.astype(object).where(~column.isin(MISSING), None)
        column = column.map(lambda value: str(value) if isinstance(value, bool) else value)
    values = np.asarray(pd.to_numeric(column, errors="coerce"), float)

    def refuse(bad: np.ndarray, what: str, way_out: str) -> None:
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            raise InputError(
                f'{table.source}: column "{name}" has {bad.sum()} {what}, first at {days[first]} '
                f"{who[first]} ({table.place(column.index[first])}); {way_out}"
            )

    text = np.isnan(values) & column.notna().to_numpy()
    if text.any():
        example = str(column.iloc[int(np.flatnonzero(text)[0])])
        plain = ", such as 1234.5, without commas" if "," in example else ""
        what = f'values that are not numbers ("{example}")'
        refuse(text, what, f"prices must be plain numbers{plain}")
    unlisted = _unlisted(values if closes is None else closes, who)
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
