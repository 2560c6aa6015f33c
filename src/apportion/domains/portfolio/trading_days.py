"""Days from what a file writes for them: read where one reading is certain, refused where two are."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from apportion.errors import InputError

_TIME = r"(?:[T ]\d{1,2}:\d{2}.*)?"
_FORMATS = {
    "year first": rf"(?P<year>\d{{4}})[-/.](?P<month>\d{{1,2}})[-/.](?P<day>\d{{1,2}}){_TIME}",
    "digits": r"(?P<year>\d{4})(?P<month>\d{2})(?P<day>\d{2})",
    "year last": rf"(?P<one>\d{{1,2}})[-/.](?P<two>\d{{1,2}})[-/.](?P<year>\d{{4}}){_TIME}",
    "words": r"(?=.*[A-Za-z]{3})(?=.*\d{4}).*",
}


def looks_like_day(text: str) -> bool:
    """Whether a cell holds a day, in whichever way it is written."""
    return any(re.fullmatch(pattern, text.strip()) for pattern in _FORMATS.values())


def read_days(column: Any, name: str, place: Callable[[int], str], source: str) -> np.ndarray:
    """A column as datetime64[D]; a time of day and its offset are those of the exchange, and fall away.

    `place` says where a reader finds the row of this number.
    """
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        days = column.dt.tz_localize(None)
        text = column.astype(str)
    else:
        text = column.fillna("").astype(str).str.strip()
        days = _parse(text, name, place, source)
    bad = np.flatnonzero(days.isna())
    if len(bad):
        raise InputError(
            f'{source}: column "{name}" has {len(bad)} values that are not dates, first '
            f'"{text.iloc[bad[0]]}" at {place(text.index[bad[0]])}; write days as 2019-01-02'
        )
    return days.to_numpy().astype("datetime64[D]")


def _parse(text: Any, name: str, place: Callable[[int], str], source: str) -> Any:
    """Days of the one format that most values have; a value of any other is none."""
    fits = {kind: text.str.fullmatch(pattern) for kind, pattern in _FORMATS.items()}
    # Words fit whatever has a time zone's name behind it, so they come last.
    kind = max(_FORMATS, key=lambda kind: int(fits[kind].sum()))
    if kind == "words":
        return pd.to_datetime(text.where(fits[kind]), errors="coerce", format="mixed")
    parts = text.str.extract(f"^{_FORMATS[kind]}$").where(fits[kind])
    if kind == "year last":
        parts = _ordered(parts, text, name, place, source)
    numbers = parts.apply(pd.to_numeric)
    return pd.to_datetime(numbers[["year", "month", "day"]], errors="coerce")


def _ordered(parts: Any, text: Any, name: str, place: Callable[[int], str], source: str) -> Any:
    """Which of two numbers is the day: the one that exceeds 12 somewhere in the column."""
    numbers = parts[["one", "two"]].astype(float)
    one, two = (np.flatnonzero(numbers[which] > 12) for which in ("one", "two"))
    if len(one) and len(two):
        one, two = one[0], two[0]
        raise InputError(
            f'{source}: column "{name}" has days before months, as "{text.iloc[one]}" at '
            f'{place(text.index[one])}, and after them, as "{text.iloc[two]}" at '
            f"{place(text.index[two])}; write days as 2019-01-02"
        )
    if not len(one) and not len(two):
        raise InputError(
            f'{source}: column "{name}": "{text.iloc[0]}" at {place(text.index[0])} may have the day '
            "or the month first, and no other row tells; write days as 2019-01-02"
        )
    day, month = ("one", "two") if len(one) else ("two", "one")
    return parts.rename(columns={day: "day", month: "month"})
