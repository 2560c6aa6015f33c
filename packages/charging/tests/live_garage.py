"""A plain-Python garage for a live controller: charge points follow offers, cars have hidden needs.

It shares no code with the simulator. A step has any number of minutes. Each answer and the drawn
power are checked against the site's limits.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import pandas as pd

from apportion_charging.days import Days
from apportion_charging.site import Site, Station

KINDS = (
    Station(16.0, (1,)),
    Station(16.0),
    Station(32.0),
    Station(16.0, (2,)),
    Station(32.0, (3,)),
)


def check_limits(site: Site, told_a: dict[str, int], capacity_kw: float) -> None:
    """Assert whole amperes, 0 or at least the minimum, within cable, phase, branch and feeder."""
    assert set(told_a) == set(site.stations)
    power = 0.0
    for name, amperes in told_a.items():
        station = site.stations[name]
        assert type(amperes) is int
        assert amperes == 0 or station.min_a <= amperes <= station.max_a, (name, amperes)
        power += amperes * len(station.phases) * site.volts / 1000
    assert power <= min(capacity_kw, site.capacity_kw) + 1e-3
    parts = [(branch.limit_a, branch.stations) for branch in site.branches.values()]
    if site.feeder_a is not None:
        parts.append((site.feeder_a, tuple(site.stations)))
    for limit, names in parts:
        for phase in (1, 2, 3):
            on = [told_a[name] for name in names if phase in site.stations[name].phases]
            assert sum(on) <= limit + 1e-3


@dataclass
class Stay:
    """A car's stay: hidden need and limits, and the statements of its driver."""

    station: str
    comes: pd.Timestamp
    leaves: pd.Timestamp
    arrival: pd.Timestamp
    """Arrival as the controller reads it."""
    number: int
    need_kwh: float
    car_a: float
    share: float
    requested_kwh: float | None
    stated_departure: pd.Timestamp | None
    got_kwh: float = 0.0
    since_kwh: float = 0.0
    """Energy drawn since the last decision of the controller."""


def stays_of(days: Days) -> list[Stay]:
    """Return the cars of these days in whole periods, as in the backtest."""
    garage, stays = days.garage, []
    period = pd.Timedelta(hours=days.physics.period_hours)
    for day, station, place in zip(*np.nonzero(garage.begins), strict=True):
        at, midnight = (day, station, place), pd.Timestamp(days.dates[day])

        def hours(value, midnight=midnight) -> pd.Timestamp:
            return (midnight + pd.Timedelta(hours=float(value))).round("s")

        arrival = hours(garage.arrived[at])
        comes = midnight + int(garage.arrival[at]) * period
        leaves = midnight + int(garage.departure[at]) * period
        stays.append(
            Stay(
                days.stations[station],
                comes,
                leaves,
                arrival,
                int(garage.number[at]),
                *(float(x[at]) for x in (garage.need_kwh, garage.car_a, garage.car_share)),
                float(garage.requested_kwh[at]) if garage.said_energy[at] else None,
                hours(garage.stated_departure[at]) if garage.said_departure[at] else None,
            )
        )
    return sorted(stays, key=lambda stay: stay.comes)


def speaks(number: int, periods_here: int) -> bool:
    """Whether a session's meter reports in a period, with the random gaps of the backtest."""
    word = 2**32
    mixed = number * 2654435761 % word
    mixed = ((mixed ^ mixed >> 15) + periods_here * 2246822519) % word
    mixed = (mixed ^ mixed >> 13) * 3266489917 % word
    return ((mixed ^ mixed >> 16) >> 8) / 2**24 >= 0.02


def play(
    site: Site,
    stays: Collection[Stay],
    ask: Callable[[dict], dict[str, int]],
    minutes: int,
    *,
    silent: Callable[[str, pd.Timestamp], bool] = lambda name, time: False,
) -> float:
    """Ask every `minutes` and follow the answer in between; return the kWh that all cars drew."""
    waiting, here, told = sorted(stays, key=lambda stay: stay.comes)[::-1], {}, {}
    time, last = waiting[-1].comes.floor(f"{minutes}min"), max(stay.leaves for stay in stays)
    hours, step = minutes / 60, pd.Timedelta(minutes=minutes)
    zone = "" if site.timezone is None else "-08:00"
    total, rng = 0.0, np.random.default_rng(0)

    def tell(stay: Stay) -> dict:
        car = {"id": stay.station, "plugged": True, "arrival": f"{stay.arrival}{zone}"}
        car |= {"delivered_kwh": stay.got_kwh, "requested_kwh": stay.requested_kwh}
        if stay.stated_departure is not None:
            car["stated_departure"] = f"{stay.stated_departure}{zone}"
        known = stay.comes < time
        if minutes < 15:
            known &= rng.random() >= 0.02
        else:
            known &= speaks(stay.number, round((time - stay.comes) / step) - 1)
        return car | {"drawn_kw": stay.since_kwh / hours if known else None}

    while time < last:
        gone = [name for name, stay in here.items() if stay.leaves <= time]
        for name in gone:
            del here[name]
        while waiting and waiting[-1].comes <= time:
            stay = waiting.pop()
            here[stay.station] = stay
        if here or gone:
            stations = [
                tell(here[name]) if name in here else {"id": name, "plugged": False}
                for name in site.stations
                if not silent(name, time)
            ]
            answer = ask({"time": f"{time}{zone}", "stations": stations})
            check_limits(site, answer, site.capacity_kw)
            told |= {name: a for name, a in answer.items() if not silent(name, time)}
        drawn = 0.0
        for stay in here.values():
            station = site.stations[stay.station]
            kw_per_a = len(station.phases) * site.volts / 1000 * stay.share
            left = max(stay.need_kwh - stay.got_kwh, 0.0)
            past = max((1 - left / max(stay.need_kwh, 1e-6) - 0.8) / 0.2, 0.0)
            amperes = min(told.get(stay.station, 0), stay.car_a + (2.0 - stay.car_a) * past)
            stay.since_kwh = min(amperes * kw_per_a * hours, left)
            stay.got_kwh += stay.since_kwh
            drawn += stay.since_kwh
        assert drawn <= site.capacity_kw * hours + 1e-3
        total += drawn
        time += step
    return total
