"""The table of charging sessions, read from CSV or Parquet and checked.

A row is a car's stay at a station: site, station, arrival, departure, stated_departure, requested_kwh,
delivered_kwh and optionally max_kw, the car's maximum power. ACN-Data's layout is also accepted.
Times are local: ISO 8601 without a zone, or with one if the garage's zone is given. The result has
text names, times in one zone or none, departures after arrivals, and finite energies >= 0.
"""

import ast
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

from apportion.domains.tables import load_table
from apportion.errors import InputError
from apportion.runs.settings import suggest

_MAX_KW, _MAX_KWH, _MAX_CAR_KW = 400.0, 1000.0, 1000.0
"""Limits of a cable's power, a car's energy and a car's power; larger values are in W or Wh."""
_LEAST_KWH = 0.2
"""A file whose energies are all smaller is in MWh."""
_EMBEDDED = Path(__file__).parent / "data" / "acn_sessions.parquet"
_LAYOUT = {
    "site": "siteID",
    # ACN's space is our station.
    "station": "spaceID",
    "arrival": "connectionTime",
    "departure": "disconnectTime",
    "stated_departure": "requestedDeparture",
    "requested_kwh": "kWhRequested",
    "delivered_kwh": "kWhDelivered",
}
"""Our columns and ACN-Data's, which may have statements inside a column userInputs."""
_OTHERS = ("max_kw", "userinputs", "timezone")
"""Optional columns besides these."""
_NEEDED = ("station", "arrival", "departure", "delivered_kwh")
_TIMES = ("arrival", "departure", "stated_departure")
_ACN_TIME = "%a, %d %b %Y %H:%M:%S GMT"
_ZONED = r"[T ]\d[^ ]*? *(?:Z|GMT|[+-]\d\d(?::?\d\d)?)$"
_SIGNED = r"[T ]\d.*[+-]"
"""Pattern of a time with an offset in any notation."""
_NO_DAY = r"\d{4}(?:\D\d\d?)?"
"""Pattern of a year or month, which pandas reads as its first day."""
_MISSING = ("", "nan", "na", "n/a", "none", "null", "nat", "<na>")
_YEARS = (1970, 2200)
_YEAR = pd.Timedelta(days=366)
"""Longest plausible stay; beyond it, one of the dates is wrong."""


def count(number: int, thing: str) -> str:
    """Format a count with its noun: 1 session, 2,000 sessions."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


@dataclass(frozen=True, eq=False)
class CheckedSessions:
    """A valid table of sessions, and notes about it."""

    source: str
    frame: pd.DataFrame
    """The sessions, sorted by site and arrival."""
    notes: list[str]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the table."""
        return fingerprint(self.frame)

    def describe(self) -> str:
        """Describe the data in one line."""
        frame = self.frame
        sites = ", ".join(
            f"{site} ({count(len(rows), 'session')} at {count(rows.station.nunique(), 'station')})"
            for site, rows in frame.groupby("site", observed=True)
        )
        return (
            f"{self.source}: {count(len(frame), 'session')}, {frame.arrival.min():%Y-%m-%d} to "
            f"{frame.arrival.max():%Y-%m-%d}, {frame.delivered_kwh.sum():,.0f} kWh; {sites}; "
            f"fingerprint {self.fingerprint}"
        )

    def summary(self) -> str:
        """Describe the data and list the notes, one line each."""
        return "\n".join([f"valid: {self.describe()}", *self.notes])

    def to_json(self) -> dict[str, Any]:
        """Return the description and the notes as plain values."""
        facts = {"file": self.source, "summary": self.describe(), "notes": self.notes}
        return {"sessions": facts | {"fingerprint": self.fingerprint}}

    def to_frame(self) -> pd.DataFrame:
        """Return the sessions."""
        return self.frame


def read_sessions(path: str | Path | None = None, **options: Any) -> pd.DataFrame:
    """Read and check a file of sessions; without a path, return the embedded sessions.

    Options are those of `inspect_sessions`.

    Examples
    --------
    >>> read_sessions().groupby("site", observed=True).size().to_dict()
    {'caltech': 8533, 'jpl': 14916}
    """
    return _embedded().copy() if path is None else inspect_sessions(path, **options).frame


@cache
def _embedded() -> pd.DataFrame:
    return inspect_sessions().frame


def inspect_sessions(
    path: str | Path | None = None,
    *,
    timezone: str | None = None,
    usual_zone: str | None = None,
    columns: Sequence[str] = (),
) -> CheckedSessions:
    """Read and check a file of sessions, and note its oddities.

    Parameters
    ----------
    path
        CSV or Parquet; site, stated_departure and requested_kwh may be absent.
    timezone
        The garage's zone, such as America/Los_Angeles: all times are then in this zone.
    usual_zone
        The zone if the file itself names none.
    columns
        The file's own column names, such as `arrival=Start`; ours and ACN-Data's are known.

    Raises
    ------
    InputError
        If the file is invalid; the message has one sentence for each mistake.
    """
    source = "embedded sessions" if path is None else str(path)
    raw = load_table(_EMBEDDED if path is None else Path(path), "charging sessions")
    return _inspect_frame(_rename_columns(raw, columns, source), source, timezone, usual_zone)


def _rename_columns(raw: pd.DataFrame, columns: Sequence[str], source: str) -> pd.DataFrame:
    """Rename the columns that arguments such as `arrival=Start` name.

    An argument may have several pairs, separated by commas.

    >>> theirs = pd.DataFrame(columns=["Start", "Ende"])
    >>> list(_rename_columns(theirs, ["arrival=Start,departure=Ende"], "sessions.csv"))
    ['arrival', 'departure']
    """
    known, theirs = [*_LAYOUT, "max_kw", "timezone"], {}
    for pair in [pair for word in columns for pair in re.split(r",(?=\s*\w+\s*=)", word)]:
        ours, equals, name = (part.strip() for part in pair.partition("="))
        if not equals or ours not in known:
            raise InputError(
                f"--columns {pair}: write arrival=Start, ours before theirs; ours are {', '.join(known)}"
                f"{suggest(ours, known)}"
            )
        if name not in raw.columns:
            raise InputError(
                f"{source}: has no column {name!r} for {ours}{suggest(name, raw.columns)}; the columns "
                f"found are {', '.join(map(str, raw.columns))}"
            )
        theirs[ours] = name
    named = [*theirs.values(), *(name for name in raw if str(name).strip().lower() in theirs)]
    others = raw.drop(columns=named, errors="ignore")
    return pd.concat([raw[list(theirs.values())].set_axis(list(theirs), axis=1), others], axis=1)


def fingerprint(frame: pd.DataFrame) -> str:
    """Hash the whole table; equal sessions give the same 16 digits on every machine."""
    # The order of ties, the bits of NaN and the last bits of parsed numbers may differ.
    texts = [pd.factorize(frame[name].astype(str), sort=True) for name in ("site", "station")]
    numbers = []
    for name in _TIMES:
        local = frame[name].dt.tz_localize(None)
        numbers.append(local.to_numpy().astype("datetime64[s]").astype("<i8"))
    for name in ("requested_kwh", "delivered_kwh", *({"max_kw"} & {*frame.columns})):
        numbers.append(np.nan_to_num(frame[name].to_numpy().astype("<f4"), nan=-1.0))
    order = np.lexsort([*reversed(numbers), *(codes for codes, _ in reversed(texts))])
    names = [np.asarray(words, object)[codes[order]] for codes, words in texts]
    digest = hashlib.sha256("\n".join(np.concatenate(names)).encode())
    for x in numbers:
        digest.update(x[order].tobytes())
    return digest.hexdigest()[:16]


class _Found:
    """Collects messages about a table; each names the source, the first row and a remedy."""

    def __init__(self, raw: pd.DataFrame, source: str):
        self.source, self.rows = source, raw.index.to_numpy()
        self.refusals: list[str] = []
        self.notes: list[str] = []

    def raise_refusals(self) -> None:
        """Raise an InputError with a sentence for each refusal."""
        if self.refusals:
            raise InputError("\n".join(self.refusals))

    def refuse(self, bad: Any, what: str, way_out: str, values: Any = None) -> None:
        """Refuse the sessions marked in `bad`; the message shows the first of `values`."""
        self.refusals += self._say(bad, what, way_out, values)

    def note(self, odd: Any, what: str, what_follows: str) -> None:
        """Note the sessions marked in `odd`."""
        self.notes += self._say(odd, what, what_follows)

    def _say(self, bad: Any, what: str, then: str, values: Any = None) -> list[str]:
        places = np.flatnonzero(bad)
        if not len(places):
            return []
        number = int(self.rows[places[0]])
        csv = self.source.lower().endswith(".csv")
        first = f"line {number + 2}" if csv else f"row {number + 1}"
        shown = "" if values is None else f' ("{np.asarray(values, object)[places[0]]}")'
        many = count(len(places), "session")
        return [f"{self.source}: {what} in {many}, first at {first}{shown}; {then}"]


def _inspect_frame(
    raw: pd.DataFrame, source: str, timezone: str | None = None, usual_zone: str | None = None
) -> CheckedSessions:
    """Check a table of sessions, whose columns may be ours or ACN-Data's."""
    found = _Found(raw, source)
    columns = _columns(raw, found)
    for name in _NEEDED:
        if name not in columns:
            found.refusals.append(
                f'{source}: column "{name}" is missing; add it, or say what it is called there with '
                f"--columns {name}=THEIRS (ACN-Data calls it {_LAYOUT[name]}): "
                f"the columns found are {', '.join(map(str, raw.columns)) or 'none'}"
            )
    if raw.empty and not found.refusals:
        found.refusals.append(f"{source}: holds no session; give a file with a row for each stay")
    found.raise_refusals()
    frame = pd.DataFrame(index=raw.index)
    for name in ("site", "station"):
        if name in columns:
            text = _text(columns[name])
            found.refuse(text == "", f'column "{name}" is empty', f"name the {name}")
            frame[name] = text.astype("category")
        else:
            frame[name] = pd.Categorical(["garage"] * len(frame))
            found.notes.append(f'{source}: no column "{name}"; all sessions count as one {name}')
    _refuse_alike(frame.site.cat.categories, "sites", found, frame.site)
    for _, stations in frame.groupby("site", observed=True).station:
        _refuse_alike(sorted(set(stations)), "stations", found, frame.station)
    zone = _zone(columns.get("timezone"), timezone, found) or usual_zone
    times = _local_times(columns, zone, found)
    for name in _TIMES:
        nothing = pd.Series(np.full(len(frame), "NaT", "datetime64[s]"), frame.index)
        frame[name] = times[name] if name in times else localize_times(nothing, zone)
    for name in ("requested_kwh", "delivered_kwh"):
        frame[name] = _numbers(columns[name], name, found) if name in columns else np.nan
    if "max_kw" in columns:
        frame["max_kw"] = _numbers(columns["max_kw"], "max_kw", found)
        found.refuse(
            (frame.max_kw == 0) | (frame.max_kw > _MAX_CAR_KW),
            f'column "max_kw" is 0 or above {_MAX_CAR_KW:,.0f} kW',
            "divide it by 1000 if it is in W, and leave it empty if it is not known",
            columns["max_kw"],
        )
    found.refuse(
        frame.departure < frame.arrival, '"departure" is before "arrival"', "swap or fix them"
    )
    found.refuse(
        frame.departure - frame.arrival > _YEAR,
        '"departure" is more than a year after "arrival"',
        "correct the date that is wrong",
    )
    found.raise_refusals()
    _refuse_units(frame, found)
    _note_oddities(frame, found)
    _note_unused(raw, found)
    frame = frame.sort_values(by=["site", "arrival", "station"], kind="stable")
    return CheckedSessions(source, frame.reset_index(drop=True), found.notes)


def _columns(raw: pd.DataFrame, found: _Found) -> dict[str, Any]:
    """Return the columns by our names; drivers' statements may be inside ACN's userInputs."""
    _refuse_alike([str(name).strip() for name in raw.columns], "columns", found)
    there: dict[str, Any] = {}
    for place, column in enumerate(raw.columns):
        there.setdefault(str(column).strip().lower(), raw.iloc[:, place])
    columns = {
        name: there[known]
        for name, theirs in _LAYOUT.items()
        for known in (theirs.lower(), name)
        if known in there
    }
    if "userinputs" in there:
        stated = [_first_input(value) for value in there["userinputs"]]
        for name in ("stated_departure", "requested_kwh"):
            values = [str(entry.get(_LAYOUT[name]) or "") for entry in stated]
            columns.setdefault(name, pd.Series(values, raw.index, dtype=object))
    return columns | {name: there[name] for name in ("max_kw", "timezone") if name in there}


def _refuse_alike(names: Iterable[str], what: str, found: _Found, column: Any = None) -> None:
    """Refuse names that differ only by case or by the encoding of accents."""
    spelt: dict[str, str] = {}
    for name in names:
        other = spelt.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other == name:
            continue
        words = f'{what} "{other}" and "{name}" differ by case or by the encoding of accents only'
        way_out = "write one name, and rename or drop any other"
        if column is None:
            found.refusals.append(f"{found.source}: {words}; {way_out}")
        else:
            found.refuse(column == name, words, way_out)


def _first_input(value: Any) -> dict[str, Any]:
    """Return a driver's first statement: later changes were unknown when the car came."""
    if isinstance(value, str) and value.strip():
        for parse in (json.loads, ast.literal_eval):
            try:
                value = parse(value)
                break
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    if isinstance(value, list | tuple | np.ndarray) and len(value):
        value = value[0]
    return value if isinstance(value, dict) else {}


def _text(column: Any) -> Any:
    """Convert a column to stripped text; missing values become ""."""
    if column.dtype != "str":
        column = column.astype(object).where(column.notna(), "").map(str)
    return column.fillna("").str.strip()


def _zone(column: Any, timezone: str | None, found: _Found) -> str | None:
    """Return the given zone, or the one that the file names for all sessions."""
    zones = [] if column is None else [zone for zone in _text(column).unique() if zone]
    zones = zones if timezone is None else [timezone]
    if len(zones) > 1:
        found.refusals.append(
            f'{found.source}: column "timezone" names {len(zones)} zones, first '
            f"{', '.join(zones[:2])}; give the sessions of each in a file of their own"
        )
    for zone in zones[:1]:
        try:
            return ZoneInfo(zone).key
        except (LookupError, OSError, ValueError):
            found.refusals.append(
                f"{found.source}: no such time zone as {zone}; name it as America/Los_Angeles"
            )
    return None


def localize_times(times: Any, zone: str | None, *, later: bool = False) -> Any:
    """Localise naive times in a zone.

    An ambiguous time is in the first pass of the repeated hour, or in the second if `later`. A
    nonexistent time moves forward.
    """
    if zone is None or times.dt.tz is not None:
        return times
    first = np.full(len(times), not later)
    return times.dt.tz_localize(zone, ambiguous=first, nonexistent="shift_forward")


def _local_times(columns: dict[str, Any], zone: str | None, found: _Found) -> dict[str, Any]:
    """Return the time columns in local time, to the second, in the garage's zone if known."""
    times: dict[str, Any] = {}
    zoned: dict[bool, str] = {}
    for name in _TIMES:
        if name in columns:
            times[name], carried = _parse(columns[name], name, found)
            zoned |= {bool(kind): name for kind in carried}
    if len(zoned) > 1:
        found.refusals.append(
            f"{found.source}: some times carry a zone and some do not; write all in local time "
            "without a zone, or all with one"
        )
    elif True in zoned and zone is None:
        name = zoned[True]
        found.refusals.append(
            f"{found.source}: times carry a zone, and the garage's zone is unknown; give "
            "--timezone, or a column timezone, such as America/Los_Angeles, or write local times: "
            f'pd.to_datetime(frame["{name}"], utc=True).dt.tz_convert(ZONE).dt.tz_localize(None)'
        )
    times = {name: column.dt.as_unit("s") for name, column in times.items()}
    if zone is not None and zoned.keys() == {True}:
        return {name: column.dt.tz_convert(zone) for name, column in times.items()}
    return {
        name: localize_times(column.dt.tz_localize(None), zone, later=name != "arrival")
        for name, column in times.items()
    }


def _parse(column: Any, name: str, found: _Found) -> tuple[Any, np.ndarray]:
    """Parse a column of times, naive ones as UTC; also return which kinds it has (zoned or not)."""
    text = _text(column)
    acn = text.str.endswith(" GMT")
    times = pd.to_datetime(text.where(~acn), format="ISO8601", utc=True, errors="coerce")
    if acn.any():
        theirs = pd.to_datetime(text.where(acn), format=_ACN_TIME, utc=True, errors="coerce")
        times = times.where(~acn, theirs)
    gap, zoned = text.str.lower().isin(_MISSING), text.str.contains(_ZONED)
    first, last = _YEARS
    what = f'column "{name}"'
    unclear = (text.str.contains(_SIGNED) & ~zoned) | text.str.fullmatch(_NO_DAY)
    wrong = (times.isna() & ~gap) | unclear
    found.refuse(
        wrong,
        f"{what} is no time",
        "write times as 2019-05-01 07:30:00 or 2019-05-01 07:30:00+07:00, by pandas' own reading if it is "
        f'right: frame["{name}"] = pd.to_datetime(frame["{name}"])',
        text,
    )
    odd = (times.dt.year < first) | (times.dt.year >= last)
    found.refuse(odd, f"{what} is not of the years {first} to {last}", "fix it", text)
    if name in _NEEDED:
        found.refuse(gap, f"{what} is missing", "fill it in, or drop the session")
    return times.mask(odd | wrong), np.unique(zoned[~gap & ~wrong])


def _numbers(column: Any, name: str, found: _Found) -> np.ndarray:
    """Parse a column of energies or powers; NaN if a value is missing."""
    text, what = _text(column), f'column "{name}"'
    kind, unit = ("energy", "kWh") if name.endswith("kwh") else ("power", "kW")
    gap = text.str.lower().isin(_MISSING)
    values = np.asarray(pd.to_numeric(text.where(~gap), errors="coerce"), float)
    if name in _NEEDED:
        found.refuse(gap, f"{what} is missing", "fill it in, or drop the session")
    found.refuse(
        np.isnan(values) & ~gap,
        f"{what} is not a number",
        f"write {kind} in {unit} as 12.5; of decimal commas: "
        f'frame["{name}"].str.replace(",", ".").astype(float)',
        text,
    )
    bad = np.isinf(values) | (values < 0)
    found.refuse(bad, f"{what} is negative or infinite", f"{kind} must be finite and >= 0")
    return values


def _beyond(kwh: Any, hours: Any) -> Any:
    """Mark energies that exceed what a cable delivers in these hours, or what a car takes."""
    return (kwh > _MAX_KWH) | (kwh > _MAX_KW * hours + 1)


def _refuse_units(frame: pd.DataFrame, found: _Found) -> None:
    """Refuse energies that are not in kWh, and a file in which most stays have zero length."""
    hours = (frame.departure - frame.arrival).dt.total_seconds() / 3600
    if (hours == 0).mean() > 0.5:
        way_out = (
            "correct the times (a clock that changes skips an hour), or leave the sessions out"
        )
        found.refuse(hours == 0, '"departure" equals "arrival"', way_out)
    for name, stay in (("delivered_kwh", hours), ("requested_kwh", np.inf)):
        kwh, column = frame[name], f'frame["{name}"]'
        there = (kwh > 0) & (hours > 0)
        beyond = there & _beyond(kwh, stay)
        found.refuse(
            beyond if beyond.sum() > 0.5 * there.sum() else kwh > _MAX_KWH,
            f'column "{name}" is more than cars take',
            f"if it is in Wh, divide: {column} = {column} / 1000, or only these rows if others are in kWh",
            kwh,
        )
        if there.any() and kwh.max() < _LEAST_KWH:
            way_out = f"if it is in MWh, multiply: {column} = {column} * 1000"
            found.refuse(there, f'column "{name}" is below {_LEAST_KWH:g} kWh', way_out, kwh)
    found.raise_refusals()


def _note_unused(raw: pd.DataFrame, found: _Found) -> None:
    """Note the columns that are not used."""
    known = [*_LAYOUT, *(theirs.lower() for theirs in _LAYOUT.values()), *_OTHERS]
    unused = [str(name) for name in raw.columns if str(name).strip().lower() not in known]
    if unused:
        near = suggest(unused[0].strip().lower(), known) if len(unused) == 1 else ""
        found.notes.append(f"{found.source}: not used: {', '.join(unused)}{near}")


def _note_oddities(frame: pd.DataFrame, found: _Found) -> None:
    by_arrival = frame.sort_values("arrival", kind="stable")
    where = [by_arrival.site, by_arrival.station]
    latest = by_arrival.departure.groupby(where, observed=True).cummax()
    latest = latest.groupby(where, observed=True).shift()
    found.note(
        (by_arrival.arrival < latest).reindex(frame.index),
        "a car arrives before the one at its station has left",
        "the earlier one stays until it leaves",
    )
    hours = (frame.departure - frame.arrival).dt.total_seconds() / 3600
    found.note(
        _beyond(frame.delivered_kwh, hours),
        f"more was taken than {_MAX_KW:g} kW gives",
        "the need is cut to what the station can give",
    )
