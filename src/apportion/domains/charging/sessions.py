"""The table of charging sessions, read from CSV or Parquet; one sentence for each thing wrong with it.

A row is a car's stay at a station: site, station, arrival, departure, stated_departure, requested_kwh,
delivered_kwh. ACN-Data's own names are understood. Everything behind this file may rely on names that
are text, local times without a zone, departures after arrivals, and energies that are finite and >= 0.
"""

import ast
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

from apportion.domains.charging.times import Findings, count, local_times
from apportion.domains.parquet import read_parquet
from apportion.errors import InputError, reading

RATE_KW = 6.656
"""The most a station gives: 32 A at 208 V."""
EMBEDDED = Path(__file__).parent / "data" / "acn_sessions.parquet"
NAMES = {
    "site": ("siteID", "site_id"),
    # ACN calls the place where a car stands a space; its names are those of the embedded sessions.
    "station": ("spaceID", "stationID", "station_id"),
    "arrival": ("connectionTime",),
    "departure": ("disconnectTime",),
    "stated_departure": ("requestedDeparture",),
    "requested_kwh": ("kWhRequested",),
    "delivered_kwh": ("kWhDelivered",),
}
"""Columns, and what else they may be called."""
NEEDED = ("station", "arrival", "departure", "delivered_kwh")
_MISSING = ("", "nan", "na", "n/a", "none", "null", "nat", "<na>")


@dataclass(frozen=True, eq=False)
class Checked:
    """A table of sessions and what was found in it: what forbids its use, and what is worth knowing."""

    source: str
    frame: pd.DataFrame
    """The sessions, by site and arrival; not to be used if there are refusals."""
    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    def summary(self) -> str:
        """What the data is, in a line."""
        frame = self.frame
        sites = ", ".join(
            f"{site} ({count(len(rows), 'session')} at {count(rows.station.nunique(), 'station')})"
            for site, rows in frame.groupby("site", observed=True)
        )
        return (
            f"{self.source}: {count(len(frame), 'session')}, {frame.arrival.min():%Y-%m-%d} to "
            f"{frame.arrival.max():%Y-%m-%d}, {frame.delivered_kwh.sum():,.0f} kWh; {sites}; "
            f"fingerprint {fingerprint(frame)}"
        )


def read_sessions(path: str | Path | None = None, *, timezone: str | None = None) -> pd.DataFrame:
    """Read and check a file of sessions; without one, the embedded sessions.

    Parameters
    ----------
    path
        CSV or Parquet with the columns of `NAMES`; site and what drivers stated may be left out.
    timezone
        Where the garage is, such as America/Los_Angeles: times that carry a zone are converted to it.

    Raises
    ------
    InputError
        Everything that is wrong with the file, a sentence for each.

    Examples
    --------
    >>> read_sessions().groupby("site", observed=True).size().to_dict()
    {'caltech': 8533, 'jpl': 14916}
    """
    checked = _embedded() if path is None else inspect_sessions(path, timezone=timezone)
    if checked.refusals:
        raise InputError("\n".join(checked.refusals))
    return checked.frame.copy() if path is None else checked.frame


@cache
def _embedded() -> Checked:
    return inspect_sessions(None)


def inspect_sessions(path: str | Path | None = None, *, timezone: str | None = None) -> Checked:
    """Read a file of sessions and gather everything found in it; nothing is raised once it is read."""
    source = "embedded sessions" if path is None else str(path)
    try:
        return _inspect(_read(EMBEDDED if path is None else Path(path)), source, timezone)
    except UnicodeDecodeError as error:
        # A Parquet file's text is looked at only when it is used.
        raise InputError(
            f"{source}: holds text that is not UTF-8 ({error}); save it again"
        ) from None


def fingerprint(frame: pd.DataFrame) -> str:
    """A hash of the whole table: the same sessions give the same 16 digits on every machine."""
    # The order of ties, the bits of a missing number and the last ones of a parsed one may differ.
    columns = [frame[name].astype(str).to_numpy() for name in ("site", "station")]
    for name in ("arrival", "departure", "stated_departure"):
        columns.append(frame[name].to_numpy().astype("datetime64[s]").astype("<i8"))
    for name in ("requested_kwh", "delivered_kwh"):
        columns.append(np.nan_to_num(frame[name].to_numpy().astype("<f4"), nan=-1.0))
    order = np.lexsort([np.unique(x, return_inverse=True)[1] for x in reversed(columns)])
    digest = hashlib.sha256("\n".join(np.concatenate([x[order] for x in columns[:2]])).encode())
    for x in columns[2:]:
        digest.update(x[order].tobytes())
    return digest.hexdigest()[:16]


def choose_site(frame: pd.DataFrame, site: str) -> pd.DataFrame:
    """The sessions of one site.

    Raises
    ------
    InputError
        Where there is no such site; names those there are.
    """
    chosen = frame.loc[frame.site == site]
    if chosen.empty:
        known = ", ".join(sorted(frame.site.astype(str).unique()))
        raise InputError(f'site "{site}": no session is from there; the sites are {known}')
    return chosen


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; give the path of a CSV or Parquet file of charging sessions"
        )
    with reading(path, "save it as a plain CSV or Parquet table"):
        if path.suffix.lower() in (".parquet", ".pq"):
            return read_parquet(path).reset_index(drop=True)
        # Names such as 000001 or NA are names: nothing is turned into numbers or gaps on the way in.
        text = pd.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False)
    if not isinstance(text.index, pd.RangeIndex):
        raise InputError(f"{path}: rows have more fields than there are names; name every column")
    text = text.fillna("")
    return text.loc[(text != "").any(axis=1)]


def _inspect(raw: pd.DataFrame, source: str, timezone: str | None) -> Checked:
    found = Findings(raw, source)
    none = pd.DataFrame({name: [] for name in NAMES})
    columns = _columns(raw)
    absent = [name for name in NEEDED if name not in columns]
    for name in absent:
        also = " or ".join(NAMES[name])
        found.refusals.append(
            f'{source}: column "{name}" is missing; add it (ACN-Data calls it {also}): the columns '
            f"found are {', '.join(map(str, raw.columns)) or 'none'}"
        )
    if raw.empty and not absent:
        found.refusals.append(f"{source}: holds no session; give a file with a row for each stay")
    if found.refusals:
        return Checked(source, none, tuple(found.refusals), ())
    frame = pd.DataFrame(index=raw.index)
    for name in ("site", "station"):
        frame[name] = _names(columns.get(name), name, found)
    zone = _zone(raw, timezone, found)
    times = {
        name: columns[name]
        for name in ("arrival", "departure", "stated_departure")
        if name in columns
    }
    for name, values in local_times(times, zone, found).items():
        frame[name] = values
    for name in ("requested_kwh", "delivered_kwh"):
        frame[name] = _energies(columns.get(name), name, found, needed=name in NEEDED)
    if "stated_departure" not in frame:
        frame["stated_departure"] = np.full(len(frame), "NaT", "datetime64[s]")
    frame = frame.loc[:, list(NAMES)]
    backwards = (frame.departure < frame.arrival).to_numpy()
    found.refuse(backwards, '"departure" is before "arrival"', "swap or fix them")
    refusals = tuple(found.refusals)
    if not refusals:
        _note_oddities(frame, found)
        frame = frame.sort_values(by=["site", "arrival", "station"], kind="stable")
        frame = frame.astype({"site": "category", "station": "category"}).reset_index(drop=True)
    return Checked(source, frame, refusals, tuple(found.notes))


def _columns(raw: Any) -> dict[str, Any]:
    """The columns by our names; what drivers stated may sit inside ACN's userInputs."""
    there = {str(column).strip().lower(): column for column in raw.columns}
    columns: dict[str, Any] = {}
    for name, others in NAMES.items():
        for known in (name, *others):
            if name not in columns and known.lower() in there:
                columns[name] = raw[there[known.lower()]]
    if "userinputs" in there:
        stated = [_first_input(value) for value in raw[there["userinputs"]]]
        for name, field in (
            ("stated_departure", "requestedDeparture"),
            ("requested_kwh", "kWhRequested"),
        ):
            values = [str(entry.get(field) or "") for entry in stated]
            columns.setdefault(name, pd.Series(values, raw.index, dtype=object))
    return columns


def _first_input(value: Any) -> dict[str, Any]:
    """What a driver stated first: later changes were not known when the car came."""
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


def _zone(raw: Any, timezone: str | None, found: Findings) -> str | None:
    """The zone that was told, or that the file names for all its sessions, as ACN's does."""
    named = [column for column in raw.columns if str(column).strip().lower() == "timezone"]
    zones = [str(zone) for zone in raw[named[0]].dropna().unique() if str(zone)] if named else []
    zones = [timezone] if timezone is not None else zones
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


def _names(column: Any, name: str, found: Findings) -> Any:
    if column is None:
        found.notes.append(f'{found.source}: no column "{name}"; all sessions count as one {name}')
        return "garage"
    text = column.astype(object).where(column.notna(), "").map(str).str.strip()
    found.refuse((text == "").to_numpy(), f'column "{name}" is empty', f"name the {name}")
    return text


def _energies(column: Any, name: str, found: Findings, *, needed: bool) -> Any:
    if column is None:
        return np.nan
    text = column.astype(object).where(column.notna(), "").map(str).str.strip()
    gap = text.str.lower().isin(_MISSING).to_numpy()
    values = np.asarray(pd.to_numeric(text.where(~gap), errors="coerce"), float)
    what = f'column "{name}"'
    if needed:
        found.refuse(gap, f"{what} is missing", "fill it in, or drop the session")
    found.refuse(
        np.isnan(values) & ~gap, f"{what} is not a number", "write energy in kWh as 12.5", text
    )
    found.refuse(np.isinf(values), f"{what} is infinite", "energy must be finite")
    found.refuse(np.isfinite(values) & (values < 0), f"{what} is negative", "energy must be >= 0")
    return values


def _note_oddities(frame: pd.DataFrame, found: Findings) -> None:
    by_arrival = frame.sort_values("arrival", kind="stable")
    latest = by_arrival.groupby(["site", "station"], observed=True).departure.transform(
        lambda departures: departures.cummax().shift()
    )
    overlaps = (by_arrival.arrival < latest).reindex(frame.index).to_numpy()
    found.note(
        overlaps,
        "a car arrives before the one at its station has left",
        "the earlier one stays until it leaves",
    )
    hours = (frame.departure - frame.arrival).dt.total_seconds().to_numpy() / 3600
    found.note(hours > 24, "a stay lasts over 24 hours", "it is cut at midnight of its first day")
    found.note(
        frame.delivered_kwh.to_numpy() > hours * RATE_KW * 1.000001,
        f"more was taken on average than {RATE_KW} kW can give",
        "the need is cut to what they can",
    )
    early = (frame.stated_departure < frame.arrival).to_numpy()
    found.note(early, "the stated departure is before the arrival", "it is used as stated")
    half = (frame.stated_departure.isna() != frame.requested_kwh.isna()).to_numpy()
    found.note(
        half, "only one of stated_departure and requested_kwh is there", "neither counts as stated"
    )
