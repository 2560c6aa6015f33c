"""Times of sessions as local time: ISO 8601 or RFC 1123, with or without a zone.

A day begins at local midnight, so a zone is converted only where it is said which one is local;
otherwise all times must carry the same one, and are taken as they are written.
"""

import re
from typing import Any

import numpy as np
import pandas as pd

_ZONED = re.compile(r"^(.*\d:\d{2}\S*?)\s*(Z|GMT|UTC|[+-][01]\d(?::?[0-5]\d)?)$")
_RFC_1123 = "%a, %d %b %Y %H:%M:%S"
_YEARS = (1970, 2200)
_NO_TIME = ("nat", "nan", "none", "null", "na", "n/a", "<na>")


def count(number: int, thing: str) -> str:
    """A number of things in words: 1 session, 2,000 sessions."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


class Findings:
    """Gathers sentences; each names the source, the first place, and the way out."""

    def __init__(self, frame: pd.DataFrame, source: str):
        self.source = source
        self.rows = frame.index.to_numpy()
        self.refusals: list[str] = []
        self.notes: list[str] = []

    def place(self, row: int) -> str:
        number = int(self.rows[row])
        csv = self.source.lower().endswith(".csv")
        return f"line {number + 2}" if csv else f"row {number + 1}"

    def refuse(self, bad: np.ndarray, what: str, way_out: str, values: Any = None) -> None:
        self._say(self.refusals, bad, what, way_out, values)

    def note(self, bad: np.ndarray, what: str, what_follows: str) -> None:
        self._say(self.notes, bad, what, what_follows, None)

    def _say(self, said: list[str], bad, what: str, then: str, values: Any) -> None:
        places = np.flatnonzero(bad)
        if len(places):
            example = "" if values is None else f' ("{np.asarray(values, object)[places[0]]}")'
            many, first = count(len(places), "session"), self.place(places[0])
            said.append(f"{self.source}: {what} in {many}, first at {first}{example}; {then}")


def local_times(
    columns: dict[str, Any], zone: str | None, found: Findings
) -> dict[str, np.ndarray]:
    """The columns of times as datetime64[s] without a zone; what is wrong with them goes to `found`."""
    times, parts = {}, {}
    for name, column in columns.items():
        if pd.api.types.is_datetime64_dtype(column):
            times[name] = _plausible(name, column.to_numpy().astype("datetime64[s]"), found)
        else:
            parts[name] = [_split(text) for text in _texts(column)]
    written = {zone for column in parts.values() for bare, zone in column if bare}
    written |= {""} if times else set()
    convert = zone if _one_kind(written, zone, found) and written != {""} else None
    for name, column in parts.items():
        times[name] = _clock(name, column, convert, found)
    for name, column in columns.items():
        if name != "stated_departure" and name not in parts:
            _refuse_gaps(name, column.isna().to_numpy(), found)
    return times


def _clock(
    name: str, column: list[tuple[str, str]], zone: str | None, found: Findings
) -> np.ndarray:
    """A column's times on the clock of `zone`, or as they are written."""
    bare = pd.Series([text for text, _ in column], dtype=object)
    local, gap = _parse(bare), (bare == "").to_numpy()
    found.refuse(
        np.isnat(local) & ~gap,
        f'column "{name}" is no time',
        "write times as 2019-05-01 07:30:00",
        bare,
    )
    local = _plausible(name, local, found)
    if name != "stated_departure":
        _refuse_gaps(name, gap, found)
    if zone is None:
        return local
    minutes = np.array([_minutes(offset) for _, offset in column], "timedelta64[m]")
    utc = pd.DatetimeIndex(local - minutes).tz_localize("UTC")
    return utc.tz_convert(zone).tz_localize(None).to_numpy().astype("datetime64[s]")


def _plausible(name: str, times: np.ndarray, found: Findings) -> np.ndarray:
    """The times, without those of years that calendars of zones do not reach."""
    years = times.astype("datetime64[Y]").astype(int) + 1970
    first, last = _YEARS
    odd = ~np.isnat(times) & ((years < first) | (years >= last))
    found.refuse(odd, f'column "{name}" is not of the years {first} to {last}', "fix it", times)
    return np.where(odd, np.datetime64("NaT", "s"), times)


def _refuse_gaps(name: str, gap: np.ndarray, found: Findings) -> None:
    found.refuse(gap, f'column "{name}" is missing', "fill it in, or drop the session")


def _one_kind(written: set[str], zone: str | None, found: Findings) -> bool:
    """Whether all times can be understood as of one clock."""
    zoned = sorted(written - {""})
    if zoned and "" in written:
        found.refusals.append(
            f"{found.source}: some times carry a zone ({zoned[0]}) and some do not; write all in "
            "local time without a zone, or all with one"
        )
        return False
    if len(zoned) > 1 and zone is None:
        found.refusals.append(
            f"{found.source}: times carry different zones ({', '.join(zoned[:3])}); write all in "
            "local time without a zone, or say where the garage is in a column timezone, such as "
            "America/Los_Angeles"
        )
        return False
    if zoned and zone is None:
        found.notes.append(
            f"{found.source}: times carry the zone {zoned[0]} and are taken as they are written; if "
            "that is not the garage's own, add a column timezone, such as America/Los_Angeles"
        )
    return True


def _texts(column: Any) -> list[str]:
    """Times as text, '' where there is none; a Parquet file's own times keep their zone."""
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        texts = ["" if pd.isna(time) else time.isoformat() for time in column]
    else:
        texts = [str(value).strip() for value in column]
    return ["" if text.lower() in _NO_TIME else text for text in texts]


def _split(text: str) -> tuple[str, str]:
    """A time without its zone, and the zone as Z or +hhmm, '' if there is none."""
    match = _ZONED.match(text)
    if match is None:
        return text, ""
    zone = match[2].replace(":", "")
    zone = "Z" if zone in ("GMT", "UTC", "+00", "+0000", "-0000") else zone
    return match[1], zone if zone == "Z" else zone.ljust(5, "0")


def _minutes(zone: str) -> int:
    """Minutes that a zone is ahead of UTC."""
    if zone in ("", "Z"):
        return 0
    ahead = int(zone[1:3]) * 60 + int(zone[3:5])
    return -ahead if zone[0] == "-" else ahead


def _parse(bare: pd.Series) -> np.ndarray:
    """ISO 8601 or RFC 1123 without its zone; NaT where it is neither."""
    times = np.full(len(bare), "NaT", "datetime64[s]")
    rfc = bare.str.match(r"[A-Za-z]{3}, ").to_numpy(bool)
    for rows, style in ((~rfc, "ISO8601"), (rfc, _RFC_1123)):
        if rows.any():
            parsed: Any = pd.to_datetime(bare[rows], format=style, errors="coerce")
            times[rows] = parsed.to_numpy().astype("datetime64[s]")
    return times
