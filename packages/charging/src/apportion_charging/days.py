"""Sessions of one site by day, as arrays (days, stations, sessions).

A session fills whole periods: its arrival is rounded up, its departure down. A session that spans
midnight appears on each of its days, and counts on the first. Its need is the delivered energy, or
less if the car could not have taken it in those periods. Days are 24 hours of the zone's standard
time, so clock changes have no effect. Days without a car are omitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import jax
import numpy as np
import pandas as pd
from numpy.typing import DTypeLike

from apportion.domains.tables import as_day
from apportion.errors import InputError
from apportion_charging.garage import (
    REAL,
    TAPER_END_A,
    TAPER_START_SHARE,
    Garage,
    Physics,
    Stations,
)
from apportion_charging.sessions import count, localize_times
from apportion_charging.site import Site, Tariff


@dataclass(frozen=True, eq=False)
class Days:
    """Days of one site with at least one car.

    Examples
    --------
    >>> from apportion_charging.sessions import read_sessions
    >>> from apportion_charging.site import embedded_site
    >>> days = Days.of(read_sessions(), "jpl", embedded_site("jpl"))
    >>> days = days.between("2019-05-01", "2019-12-31")
    >>> len(days.stations), days.garage.arrival.shape[:2] == (len(days), 52)
    (52, True)
    """

    site: str
    dates: np.ndarray
    """Days, ascending, as datetime64[D]."""
    stations: tuple[str, ...]
    wiring: Stations
    garage: Garage
    """NumPy arrays (days, stations, sessions)."""
    physics: Physics = REAL
    prices: Tariff | None = None

    @classmethod
    def of(
        cls,
        frame: pd.DataFrame,
        site: str,
        description: Site,
        *,
        physics: Physics = REAL,
    ) -> "Days":
        """Create all days of a site from sessions, as returned by `read_sessions`.

        Raises
        ------
        InputError
            If there is no such site, a station is not described, or no day is left.
        """
        rows = frame.loc[frame.site == site].sort_values(by="arrival", kind="stable")
        if rows.empty:
            known = ", ".join(sorted(frame.site.astype(str).unique()))
            raise InputError(f'site "{site}": no session is from there; the sites are {known}')
        names = tuple(description.stations)
        station = pd.Index(names).get_indexer(rows.station.astype(str))
        if (station < 0).any():
            unknown = rows.station.astype(str)[station < 0].iloc[0]
            raise InputError(
                f'site "{site}": its description has no station "{unknown}"; add it to the TOML file'
            )
        wiring = make_stations(description)
        dates, garage = _table(rows, station, wiring, description.timezone, physics)
        return cls(site, dates, names, wiring, garage, physics, description.prices)

    def __len__(self) -> int:
        return len(self.dates)

    def _chosen(self, rows: np.ndarray) -> "Days":
        garage = jax.tree.map(lambda x: x[rows], self.garage)
        return replace(self, dates=self.dates[rows], garage=garage)

    def between(
        self, start: str | np.datetime64 | None = None, end: str | np.datetime64 | None = None
    ) -> "Days":
        """Select the days from `start` to `end`, both included.

        Raises
        ------
        InputError
            If no day is left.
        """
        first = self.dates[0] if start is None else as_day(start)
        last = self.dates[-1] if end is None else as_day(end)
        rows = (self.dates >= first) & (self.dates <= last)
        if not rows.any():
            raise InputError(
                f'site "{self.site}": no day with a car from {first} to {last}; its days are '
                f"{self.dates[0]} to {self.dates[-1]}"
            )
        return self._chosen(rows)

    def at(self, stations: Sequence[int] | np.ndarray) -> "Days":
        """Select stations by position, in this order."""
        places = np.asarray(stations, int)
        names = tuple(self.stations[place] for place in places)
        garage = jax.tree.map(lambda x: x[:, places], self.garage)
        return replace(self, stations=names, garage=garage, wiring=self.wiring.at(places))

    @property
    def joins(self) -> np.ndarray:
        """Whether each day has a car from the previous day, after which it must be simulated."""
        follows = np.append(False, np.diff(self.dates).astype(int) == 1)
        return follows & (self.garage.there & (self.garage.arrival < 0)).any((1, 2))

    @property
    def over(self) -> np.datetime64:
        """Last day that later sessions cannot change; the day before the first if there is none.

        A car that stays beyond the last day with an arrival shares the feeder with unknown cars,
        and its energy counts on its first day.
        """
        begins = self.garage.begins
        later = np.where(begins, (self.garage.departure - 1) // self.physics.periods, 0)
        last = self.dates[begins.any((1, 2))][-1]
        open_days = self.dates[self.dates + later.max((1, 2)).astype("timedelta64[D]") > last]
        return min(open_days[0] - 1, last) if len(open_days) else last

    def summary(self) -> str:
        """Describe the days in one line."""
        begins = self.garage.begins
        needed = float((self.garage.need_kwh * begins).sum())
        return (
            f"{self.site}: {count(len(self), 'day')} from {self.dates[0]} to {self.dates[-1]}, "
            f"{count(len(self.stations), 'station')}, needed {needed:,.0f} kWh in "
            f"{count(int(begins.sum()), 'session')}"
        )


def make_stations(description: Site, one_phase: Mapping[str, int] | None = None) -> Stations:
    """Convert a site's wiring to arrays in single precision; `one_phase` as in `Site.wiring`."""
    wiring, single = description.wiring(one_phase), one_phase or {}
    own = {name: len(station.phases) for name, station in description.stations.items()}
    phases = np.array([1 if name in single else number for name, number in own.items()])
    own, above = (wiring.max_a, wiring.min_a, phases, wiring.kw_per_a), (wiring.load, wiring.limit)
    return Stations(*(np.asarray(x, np.float32) for x in (*own, *(x[1:] for x in above))))


def _standard_time(times: Any, zone: str | None, *, later: bool = False) -> np.ndarray:
    """Convert times to the zone's standard time, as datetime64[s], or keep them without a zone.

    An hour that the clock repeats is read as the first or, with `later`, as the second.
    """
    times = localize_times(times, zone, later=later)
    if times.dt.tz is not None:
        own = ZoneInfo(zone or str(times.dt.tz))
        times = times.dt.tz_convert(own)
        # Clocks change at quarters of an hour, so look up each quarter once.
        quarter, quarters = pd.factorize(times.dt.tz_convert("UTC").dt.floor("15min"))
        clocks = [time.tz_convert(own).to_pydatetime(warn=False) for time in quarters]
        summer = [own.dst(clock) or timedelta(0) for clock in clocks]
        ahead = np.array([*summer, timedelta(0)], "timedelta64[s]")[quarter]
        times = times.dt.tz_localize(None) - ahead
    return times.to_numpy().astype("datetime64[s]")


def _summer_hours(dates: np.ndarray, zone: str | None) -> np.ndarray:
    """Return the hours of daylight saving time on each day."""
    if zone is None:
        return np.zeros(len(dates), np.float32)
    noon = pd.Series(dates.astype("datetime64[s]") + np.timedelta64(12, "h"))
    ahead = noon - _standard_time(noon, zone)
    return (ahead.dt.total_seconds().to_numpy() / 3600).astype(np.float32)


def _table(
    rows: pd.DataFrame,
    station: np.ndarray,
    wiring: Stations,
    zone: str | None,
    physics: Physics,
) -> tuple[np.ndarray, Garage]:
    """Arrange rows, sorted by arrival, in arrays by day, station and session."""
    times = {
        name: _standard_time(rows[name], zone, later=name != "arrival")
        for name in ("arrival", "departure", "stated_departure")
    }
    first_day = times["arrival"].min().astype("datetime64[D]")
    hours = {
        name: (time - first_day.astype("datetime64[s]")) / np.timedelta64(3600, "s")
        for name, time in times.items()
    }
    first = np.ceil(hours["arrival"] / physics.period_hours - 1e-9).astype(np.int64)
    last = np.floor(hours["departure"] / physics.period_hours + 1e-9).astype(np.int64)
    # If two cars are at one station in the same period, the earlier one occupies it.
    busy = pd.Series(last).groupby(station).cummax().groupby(station).shift(fill_value=0)
    first = np.maximum(first, busy.to_numpy())
    car_a = _car_amperes(rows, station, wiring)
    most_kw = car_a * wiring.kw_per_a[station]
    if physics.taper:
        # The taper slows the last part: the current falls with the remaining need.
        falls = np.log(np.maximum(car_a / TAPER_END_A, 1.001)) / (
            1 - TAPER_END_A / np.maximum(car_a, 2.002)
        )
        most_kw = most_kw / (TAPER_START_SHARE + (1 - TAPER_START_SHARE) * falls)
    stay = np.maximum(last - first, 0) * physics.period_hours
    need = np.minimum(rows.delivered_kwh.to_numpy(), stay * most_kw)
    whole = np.flatnonzero(last > first)
    days_here = (last[whole] - 1) // physics.periods - first[whole] // physics.periods + 1
    session = np.repeat(whole, days_here)
    later = np.arange(len(session)) - np.repeat(np.cumsum(days_here) - days_here, days_here)
    day = first[session] // physics.periods + later
    dates, row = np.unique(day, return_inverse=True)
    group = pd.Series(row * len(wiring.max_a) + station[session])
    place = group.groupby(group).cumcount().to_numpy()
    shape = (len(dates), len(wiring.max_a), int(place.max(initial=0)) + 1)
    where = (row, station[session], place)

    def spread(values: Any, dtype: DTypeLike = np.float32) -> np.ndarray:
        full = np.zeros(shape, dtype)
        full[where] = values
        return full

    def clock(name: str) -> np.ndarray:
        return spread(np.nan_to_num(hours[name][session]) - 24.0 * day)

    asked = rows.requested_kwh.notna().to_numpy()
    stated = rows.stated_departure.notna().to_numpy()
    calendar = first_day + dates.astype("timedelta64[D]")
    garage = Garage(
        arrival=spread(first[session] - day * physics.periods, np.int32),
        departure=spread(last[session] - day * physics.periods, np.int32),
        arrived=clock("arrival"),
        need_kwh=spread(need[session]),
        car_a=spread(car_a[session]),
        car_share=spread(1.0),
        requested_kwh=spread(np.nan_to_num(rows.requested_kwh.to_numpy())[session]),
        stated_departure=np.where(spread(stated[session], np.bool_), clock("stated_departure"), 0),
        said_energy=spread(asked[session], np.bool_),
        said_departure=spread(stated[session], np.bool_),
        number=spread(session, np.int32),
        stay_hours=spread((hours["departure"] - hours["arrival"])[session]),
        clock_hours=np.repeat(_summer_hours(calendar, zone)[:, None], shape[1], 1),
    )
    return calendar, garage


def _car_amperes(rows: pd.DataFrame, station: np.ndarray, wiring: Stations) -> np.ndarray:
    """Return the maximum current of each session's car, from `max_kw` and its station's limit."""
    cable = wiring.max_a[station].astype(float)
    if "max_kw" not in rows:
        return cable
    return np.fmin(rows.max_kw.to_numpy() / wiring.kw_per_a[station], cable)
