"""Sessions as days of a garage: arrays (days, stations, sessions) of one site's working days.

A session fills whole periods of 15 minutes: its arrival is rounded up, its departure down and cut at
midnight. Its need is what was delivered, or less where 6.656 kW could not give it in those periods.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
import pandas as pd
from numpy.typing import DTypeLike

from apportion.domains.charging.garage import PERIOD_HOURS, PERIODS, Garage
from apportion.domains.charging.sessions import RATE_KW, count
from apportion.domains.tables import as_day
from apportion.errors import InputError

WORKING = 0.3
"""A day with fewer sessions a station is no working day."""
_PERIOD = np.timedelta64(15 * 60, "s")


@dataclass(frozen=True, eq=False)
class Days:
    """The working days of one site.

    Examples
    --------
    >>> from apportion.domains.charging.sessions import read_sessions
    >>> days = Days.of(read_sessions(), "jpl").between("2019-05-01", "2019-12-31")
    >>> len(days.stations), days.garage.arrival.shape[:2] == (len(days), 52)
    (52, True)
    """

    site: str
    dates: np.ndarray
    """Days, ascending, as datetime64[D]."""
    stations: tuple[str, ...]
    garage: Garage
    """Arrays of NumPy (days, stations, sessions)."""

    @classmethod
    def of(cls, frame: pd.DataFrame, site: str) -> "Days":
        """Every working day of a site, of sessions as `read_sessions` gives them.

        Raises
        ------
        InputError
            Where there is no such site, or none of its days is a working day.
        """
        rows = frame.loc[frame.site == site].sort_values(by="arrival", kind="stable")
        if rows.empty:
            known = ", ".join(sorted(frame.site.astype(str).unique()))
            raise InputError(f'site "{site}": no session is from there; the sites are {known}')
        names = sorted(rows.station.astype(str).unique())
        days = rows.arrival.to_numpy().astype("datetime64[D]")
        dates, counts = np.unique(days, return_counts=True)
        working = dates[counts >= WORKING * len(names)]
        if not len(working):
            raise InputError(
                f'site "{site}": none of its {len(dates)} days has {WORKING} sessions a station or '
                f"more at its {len(names)} stations, so there is no working day; give more sessions"
            )
        on_working = np.isin(days, working)
        kept = rows.loc[on_working]
        day = np.searchsorted(working, days[on_working])
        station = pd.Index(names).get_indexer(kept.station.astype(str))
        garage = _whole_periods(kept, day, station, (len(working), len(names)))
        return cls(site, working, tuple(names), garage)

    def __len__(self) -> int:
        return len(self.dates)

    def between(
        self, start: str | np.datetime64 | None = None, end: str | np.datetime64 | None = None
    ) -> "Days":
        """The days from `start` to `end`, both included.

        Raises
        ------
        InputError
            Where no working day is left.
        """
        first = self.dates[0] if start is None else as_day(start)
        last = self.dates[-1] if end is None else as_day(end)
        rows = (self.dates >= first) & (self.dates <= last)
        if not rows.any():
            raise InputError(
                f'site "{self.site}": no working day from {first} to {last}; its working days are '
                f"{self.dates[0]} to {self.dates[-1]}"
            )
        garage = jax.tree.map(lambda x: x[rows], self.garage)
        return replace(self, dates=self.dates[rows], garage=garage)

    def at(self, stations: Sequence[int] | np.ndarray) -> "Days":
        """Some of the stations, by their places, in this order."""
        places = np.asarray(stations, int)
        names = tuple(self.stations[place] for place in places)
        garage = jax.tree.map(lambda x: x[:, places], self.garage)
        return replace(self, stations=names, garage=garage)

    def summary(self) -> str:
        """What the days are, in a line."""
        return (
            f"{self.site}: {count(len(self), 'working day')} from {self.dates[0]} to "
            f"{self.dates[-1]}, {count(len(self.stations), 'station')}, needed "
            f"{self.garage.need_kwh.sum():,.0f} kWh in "
            f"{count(int(self.garage.there.sum()), 'session')}"
        )


def _whole_periods(
    rows: pd.DataFrame, day: np.ndarray, station: np.ndarray, shape: tuple[int, int]
) -> Garage:
    """Rows, by arrival, as arrays (days, stations, sessions); those without a whole period are absent."""
    midnight = rows.arrival.to_numpy().astype("datetime64[D]").astype("datetime64[s]")
    since = {
        name: (rows[name].to_numpy().astype("datetime64[s]") - midnight) / _PERIOD
        for name in ("arrival", "departure", "stated_departure")
    }
    stated = rows.stated_departure.notna().to_numpy() & rows.requested_kwh.notna().to_numpy()
    first = np.ceil(since["arrival"]).astype(np.int32)
    last = np.minimum(np.floor(since["departure"]), PERIODS).astype(np.int32)
    whole = last > first
    group = pd.Series((day * shape[1] + station)[whole])
    number = group.groupby(group).cumcount().to_numpy()
    places = int(number.max(initial=0)) + 1
    where = (day[whole], station[whole], number)

    def spread(values: np.ndarray, dtype: DTypeLike = np.float32) -> np.ndarray:
        full = np.zeros((*shape, places), dtype)
        full[where] = values[whole]
        return full

    arrival, departure = spread(first, np.int32), spread(last, np.int32)
    for later in range(1, places):
        # Of two cars at one station in the same period the earlier stays.
        busy = departure[..., :later].max(-1)
        arrival[..., later] = np.maximum(arrival[..., later], busy)
    there = departure > arrival
    stay = np.where(there, departure - arrival, 0)
    need = np.minimum(spread(rows.delivered_kwh.to_numpy()), stay * RATE_KW * PERIOD_HOURS)
    garage = Garage(
        arrival,
        departure,
        arrived=spread(since["arrival"]),
        need_kwh=need.astype(np.float32),
        requested_kwh=spread(np.where(stated, rows.requested_kwh, 0)),
        stated_departure=spread(np.where(stated, since["stated_departure"], 0)),
        stated=spread(stated, np.bool_),
    )
    return jax.tree.map(lambda x: np.where(there, x, np.zeros((), x.dtype)), garage)
