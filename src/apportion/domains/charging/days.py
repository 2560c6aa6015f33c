"""Sessions as days of a garage: arrays (days, stations, sessions) of one site's working days.

A session fills whole periods of 15 minutes: its arrival is rounded up, its departure down and cut at
midnight. Its need is what was delivered, or less where 6.656 kW could not give it in those periods.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import jax.numpy as jnp
import numpy as np
import pandas as pd
from numpy.typing import DTypeLike

from apportion.domains.calendar import as_day
from apportion.domains.charging.garage import PERIOD_HOURS, PERIODS, Garage, Medians
from apportion.domains.charging.sessions import RATE_KW, choose_site
from apportion.domains.charging.times import count
from apportion.errors import InputError
from apportion.tasks import split_entities

WORKING = 0.3
"""A day with fewer sessions a station is no working day."""
_PERIOD = np.timedelta64(15 * 60, "s")


@dataclass(frozen=True, eq=False)
class Days:
    """The working days of one site; `Garage` says what the arrays mean.

    An absent session is 0 in every array.

    Examples
    --------
    >>> from apportion.domains.charging.sessions import read_sessions
    >>> days = Days.of(read_sessions(), "jpl").between("2019-05-01", "2019-12-31")
    >>> len(days.stations), days.arrival.shape[:2] == (len(days), 52)
    (52, True)
    """

    site: str
    dates: np.ndarray
    """Days, ascending, as datetime64[D]."""
    stations: tuple[str, ...]
    arrival: np.ndarray
    departure: np.ndarray
    arrived: np.ndarray
    need_kwh: np.ndarray
    requested_kwh: np.ndarray
    stated_departure: np.ndarray
    stated: np.ndarray
    predicted_need_kwh: np.ndarray | None = None
    predicted_departure: np.ndarray | None = None
    recalled_need_kwh: np.ndarray | None = None
    recalled_departure: np.ndarray | None = None
    familiarity: np.ndarray | None = None
    to_come_kwh: np.ndarray | None = None
    """(days, periods): of the whole site, also where only some of its stations are here."""
    dropped: int = 0
    """Sessions of the site without one whole period of their own."""

    @classmethod
    def of(cls, frame: pd.DataFrame, site: str) -> "Days":
        """Every working day of a site, of sessions as `read_sessions` gives them.

        Raises
        ------
        InputError
            Where there is no such site, or none of its days is a working day.
        """
        rows = choose_site(frame, site).sort_values(by="arrival", kind="stable")
        names = sorted(rows.station.astype(str).unique())
        place = {name: number for number, name in enumerate(names)}
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
        station = np.array([place[str(name)] for name in kept.station])
        arrays, lost = _whole_periods(kept, day, station, (len(working), len(names)))
        return cls(site, working, tuple(names), **arrays, dropped=lost)

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
        return replace(self._map(lambda x: x[rows]), dates=self.dates[rows])

    def at(self, stations: Sequence[int] | np.ndarray) -> "Days":
        """Some of the stations, by their places, in this order."""
        places = np.asarray(stations, int)
        names = tuple(self.stations[place] for place in places)
        some = replace(self, to_come_kwh=None)._map(lambda x: x[:, places])
        return replace(some, stations=names, to_come_kwh=self.to_come_kwh)

    def garage(self) -> Garage:
        """The arrays as compiled code takes them, (days, stations, sessions)."""
        return Garage(**{name: jnp.asarray(x) for name, x in self._arrays().items()})

    def medians(self) -> Medians:
        """What stands in for what was not stated: to be taken of training days alone."""
        there = self.departure > self.arrival
        said = there & self.stated
        if said.any():
            requested = self.requested_kwh[said]
            stays = (self.stated_departure - self.arrived)[said]
        else:
            requested = self.need_kwh[there]
            stays = (self.departure - self.arrival)[there]
        return Medians(
            jnp.float32(np.median(requested)), jnp.float32(np.median(stays) * PERIOD_HOURS)
        )

    def summary(self) -> str:
        """What the days are, in a line."""
        there = int((self.departure > self.arrival).sum())
        return (
            f"{self.site}: {count(len(self), 'working day')} from {self.dates[0]} to "
            f"{self.dates[-1]}, {count(len(self.stations), 'station')}, needed "
            f"{self.need_kwh.sum():,.0f} kWh in {count(there, 'session')}"
        )

    def _arrays(self) -> dict[str, np.ndarray]:
        names = (field.name for field in fields(Garage))
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def _map(self, function) -> "Days":
        return replace(self, **{name: function(x) for name, x in self._arrays().items()})


def split_stations(
    stations: int, held_out: float = 0.3, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Stations to train on and stations never seen in training, a share `held_out` of all.

    >>> seen, unseen = split_stations(52)
    >>> len(seen), len(unseen)
    (36, 16)
    """
    if not 0 <= held_out < 1:
        raise InputError(f"held-out {held_out}: it is a share of the stations, 0 <= share < 1")
    return split_entities(stations, round(held_out * stations), seed=seed)


def _whole_periods(
    rows: pd.DataFrame, day: np.ndarray, station: np.ndarray, shape: tuple[int, int]
) -> tuple[dict[str, np.ndarray], int]:
    """Rows, by arrival, as arrays (days, stations, sessions), and how many have no whole period."""
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
    arrays = {
        "arrival": arrival,
        "departure": departure,
        "arrived": spread(since["arrival"]),
        "need_kwh": need.astype(np.float32),
        "requested_kwh": spread(np.where(stated, rows.requested_kwh, 0)),
        "stated_departure": spread(np.where(stated, since["stated_departure"], 0)),
        "stated": spread(stated, np.bool_),
    }
    arrays = {name: np.where(there, x, np.zeros((), x.dtype)) for name, x in arrays.items()}
    return arrays, len(rows) - int(there.sum())
