"""Forecasts of need, stay and later arrivals, from the data known when a car arrives.

`Predictor` is a least-squares regression of the logarithms of need and stay on the driver's
statements and the hour of arrival. `EarlierDays` corrects it, because drivers return with similar
requests: it adds the weighted mean residual of earlier sessions with a similar request, stated stay
and hour. It also averages the need of cars that arrive after each quarter of an hour, over recent
days of the same kind (weekday or weekend). A forecast only uses days before the car's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from apportion.errors import InputError
from apportion_charging.days import Days
from apportion_charging.garage import QUARTERS, Garage
from apportion_charging.sessions import count

_LEAST_KWH = 0.5
_LEAST_HOURS = 0.25
_FORGOTTEN_DAYS = 300
"""Age in days above which sessions are ignored."""
_RECALLED = 20_000
"""Number of newest requests that are compared, to bound the cost in large garages."""
_LAST_DAYS = 20
"""Number of days of the same kind that are averaged: about a month of weekdays."""
_NEAR = (0.03, 0.1, 1.0)
"""Length scales of the distance between requests: log request, log stay, hour."""
_FADES_DAYS = 60.0
"""Time constant of the weight of earlier sessions."""
_PRIOR = 0.5
"""Weight of the uncorrected regression, as a number of sessions."""


class _Medians(NamedTuple):
    """Medians of the training days, used if a driver states nothing."""

    requested_kwh: float
    stay_hours: float
    """Hours from arrival to the stated departure."""

    @classmethod
    def of(cls, *training: Garage) -> "_Medians":
        """Compute medians over all sites, of needs and stays if no driver states any."""

        def joined(name: str) -> np.ndarray:
            return np.concatenate([np.ravel(getattr(garage, name)) for garage in training])

        begins = joined("begins")
        requested = joined("requested_kwh")[joined("said_energy") & begins]
        stated = joined("stated_departure") - joined("arrived")
        stays = stated[joined("said_departure") & begins]
        medians = (
            np.median(requested if len(requested) else joined("need_kwh")[begins]),
            np.median(stays if len(stays) else joined("stay_hours")[begins]),
        )
        return cls(*np.array(medians, np.float32).tolist())


@dataclass(frozen=True, eq=False)
class Predictor:
    """Coefficients of the two regressions, and defaults for missing values."""

    need: np.ndarray
    stay: np.ndarray
    medians: _Medians
    """Defaults for missing statements."""
    to_come_kwh: np.ndarray
    """Mean need per station of later arrivals, by quarter of an hour; used without earlier days."""

    @classmethod
    def fit(cls, *training: Days) -> "Predictor":
        """Fit the regressions by least squares to the days of one or several sites."""
        garages = [days.garage for days in training]
        medians = _Medians.of(*garages)
        x = np.concatenate([_features(garage, medians)[garage.begins] for garage in garages])
        if len(x) < x.shape[1]:
            raise InputError(
                f"predictions: {count(len(x), 'session')} cannot fix {x.shape[1]} coefficients; give "
                "more days"
            )
        needs = [_log(garage.need_kwh[garage.begins], _LEAST_KWH) for garage in garages]
        stays = [_log(garage.stay_hours[garage.begins], _LEAST_HOURS) for garage in garages]
        need, *_ = np.linalg.lstsq(x, np.concatenate(needs))
        stay, *_ = np.linalg.lstsq(x, np.concatenate(stays))
        usual = np.mean([_sum_later_needs(garage).mean(0) for garage in garages], 0)
        return cls(need, stay, medians, usual)

    def apply(self, garage: Garage) -> Garage:
        """Add predictions without recall to the sessions (days, stations, sessions)."""
        x, there = _features(garage, self.medians), garage.there
        # Avoid a matrix product, whose rounding may depend on the number of days.
        departure = garage.arrived + np.exp((x * self.stay).sum(-1))
        need, departure = (
            np.where(there, predicted, 0).astype(np.float32)
            for predicted in (np.exp((x * self.need).sum(-1)), departure)
        )
        usual = garage.arrived + np.float32(self.medians.stay_hours)
        asked = np.logical_or(garage.said_energy, ~there)
        stated = np.logical_or(garage.said_departure, ~there)
        return replace(
            garage,
            requested_kwh=np.where(asked, garage.requested_kwh, np.float32(self.medians[0])),
            stated_departure=np.where(stated, garage.stated_departure, usual),
            predicted_need_kwh=need,
            predicted_departure=departure,
            recalled_need_kwh=need,
            recalled_departure=departure,
            familiarity=np.zeros_like(need),
            to_come_kwh=np.zeros((*need.shape[:2], QUARTERS), np.float32),
        )

    def to_dict(self) -> dict[str, list[float]]:
        """Return plain numbers to save with a policy."""
        return {
            "need": self.need.tolist(),
            "stay": self.stay.tolist(),
            "medians": list(self.medians),
            "to_come_kwh": self.to_come_kwh.tolist(),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Predictor":
        """Create a predictor from what `to_dict` returned.

        Raises
        ------
        InputError
            If the numbers do not form a valid predictor.
        """
        shapes = {"need": (9,), "stay": (9,), "medians": (2,), "to_come_kwh": (QUARTERS,)}
        try:
            found = {name: np.asarray(saved[name], float) for name in shapes}
        except (KeyError, TypeError, ValueError):
            found = {}
        sound = [x.shape == shapes[name] and np.isfinite(x).all() for name, x in found.items()]
        if not found or not all(sound):
            raise InputError(
                "the policy's file has no valid predictions of needs and stays; train it again"
            )
        medians = _Medians(*found["medians"].tolist())
        return cls(found["need"], found["stay"], medians, found["to_come_kwh"])


@dataclass(frozen=True, eq=False)
class EarlierDays:
    """Statistics of one site's days at all stations, for the forecasts of later days.

    Examples
    --------
    >>> from apportion_charging.sessions import read_sessions
    >>> from apportion_charging.site import embedded_site
    >>> days = Days.of(read_sessions(), "jpl", embedded_site("jpl"))
    >>> days = days.between("2019-05-01", "2019-06-30")
    >>> garage = EarlierDays.of(days, Predictor.fit(days)).apply(days.garage, days.dates)
    >>> same = garage.recalled_need_kwh == garage.predicted_need_kwh
    >>> bool(same[0].all()), bool(same[-1].all())
    (True, False)
    """

    predictor: Predictor
    day: np.ndarray
    """Days since 1970, ascending."""
    to_come_kwh: np.ndarray
    """Result of `_sum_later_needs`, (days, quarters)."""
    request_day: np.ndarray
    """Day of each session with a stated energy and departure, ascending."""
    requests: np.ndarray
    """Log request, log stay and hour of arrival, each divided by its length scale in `_NEAR`."""
    remainders: np.ndarray
    """Residuals of the regressions of log need and log stay, (sessions, 2)."""

    @classmethod
    def of(cls, days: Days | None, predictor: Predictor) -> "EarlierDays":
        """Collect the statistics of these days; None means that there are no earlier days."""
        if days is None:
            return cls(predictor, *(np.zeros((0, *n)) for n in ((), (QUARTERS,), (), (3,), (2,))))
        garage, day = predictor.apply(days.garage), days.dates.astype(int)
        said = garage.begins & garage.said_energy & garage.said_departure
        need = _log(garage.need_kwh, _LEAST_KWH) - _log(garage.predicted_need_kwh, _LEAST_KWH)
        stay = _log(garage.stay_hours, _LEAST_HOURS) - _log(
            garage.predicted_departure - garage.arrived, _LEAST_HOURS
        )
        return cls(
            predictor,
            day,
            _sum_later_needs(garage),
            np.broadcast_to(day[:, None, None], said.shape)[said],
            _requests(garage)[said],
            np.stack([need, stay], -1)[said],
        )

    def apply(
        self, garage: Garage, dates: np.ndarray, stations: np.ndarray | None = None
    ) -> Garage:
        """Add all forecasts to sessions (days, stations, sessions), using the days before each.

        The predictions are corrected at all stations, or only at the given indices.
        """
        garage = self.predictor.apply(garage)
        said = garage.there & garage.said_energy & garage.said_departure
        if stations is not None:
            said = said & np.isin(np.arange(said.shape[1]), stations)[:, None]
        requests = _requests(garage)
        expected, to_come = np.zeros((*said.shape, 3)), np.zeros((len(dates), QUARTERS), np.float32)
        for row, today in enumerate(dates.astype(int)):
            expected[row][said[row]] = self._similar(today, requests[row][said[row]])
            past = _past(self.day, today)
            alike = _is_weekend(self.day[past]) == _is_weekend(today)
            last = self.to_come_kwh[past][alike][-_LAST_DAYS:]
            to_come[row] = last.mean(0) if len(last) else self.predictor.to_come_kwh
        factor = np.exp(expected[..., :2])
        stay = (garage.predicted_departure - garage.arrived) * factor[..., 1]
        return replace(
            garage,
            recalled_need_kwh=(garage.predicted_need_kwh * factor[..., 0]).astype(np.float32),
            recalled_departure=(garage.arrived + stay).astype(np.float32),
            familiarity=expected[..., 2].astype(np.float32),
            to_come_kwh=np.repeat(to_come[:, None], said.shape[1], 1),
        )

    def _similar(self, today: int, requests: np.ndarray) -> np.ndarray:
        """Return the mean residuals of similar earlier requests, and their weight (below 1)."""
        past = _past(self.request_day, today)
        past = slice(max(past.start, past.stop - _RECALLED), past.stop)
        age = (today - self.request_day[past]) / _FADES_DAYS
        apart = np.broadcast_to(age, (len(requests), len(age)))
        for own, theirs in zip(requests.T, self.requests[past].T, strict=True):
            apart = apart + np.abs(own[:, None] - theirs)
        likeness = np.exp(-apart)
        weight = likeness.sum(1, keepdims=True)
        return np.concatenate([likeness @ self.remainders[past], weight], 1) / (weight + _PRIOR)


def add_forecasts(
    days: Days,
    predictor: Predictor,
    recall: bool = False,
    *,
    only: Days | None = None,
    stations: np.ndarray | None = None,
) -> Days:
    """Add predictions to the days of one site and, with `recall`, corrections by earlier days.

    To save time, `only` restricts the result to some days, and `stations` the corrections.
    """
    some = days if only is None else only
    if not recall:
        return replace(some, garage=predictor.apply(some.garage))
    earlier = EarlierDays.of(days, predictor)
    return replace(some, garage=earlier.apply(some.garage, some.dates, stations))


def _sum_later_needs(garage: Garage) -> np.ndarray:
    """Return the mean need per station of cars that arrive after each quarter, (days, quarters)."""
    days, stations, _ = garage.arrival.shape
    arriving = np.zeros((days, QUARTERS))
    quarter = np.clip(np.ceil(4 * garage.arrived).astype(int), 0, QUARTERS - 1)
    needed = np.where(garage.begins, garage.need_kwh, 0)
    np.add.at(arriving, (np.arange(days)[:, None, None], quarter), needed)
    after = arriving[:, :0:-1].cumsum(1)[:, ::-1]
    return np.pad(after, ((0, 0), (0, 1))) / stations


def _is_weekend(day: Any) -> Any:
    # The first day of 1970 was a Thursday.
    return (np.asarray(day) + 3) % 7 >= 5


def _past(days: np.ndarray, today: int) -> slice:
    return slice(*np.searchsorted(days, (today - _FORGOTTEN_DAYS, today)))


def _log(values: Any, least: float) -> np.ndarray:
    return np.log(np.maximum(values, least, dtype=float))


def _features(garage: Garage, medians: _Medians) -> np.ndarray:
    """Compute the features known on arrival, (days, stations, sessions, features)."""
    requested = np.where(garage.said_energy, garage.requested_kwh, medians.requested_kwh)
    stated = garage.stated_departure - garage.arrived
    stay = np.where(garage.said_departure, stated, medians.stay_hours)
    angle = 2 * np.pi * (garage.arrived + garage.clock_hours[..., None]).astype(float) / 24
    return np.stack(
        [
            np.ones_like(angle),
            _log(requested, _LEAST_KWH),
            _log(stay, _LEAST_HOURS),
            garage.said_energy.astype(float),
            garage.said_departure.astype(float),
            np.sin(angle),
            np.cos(angle),
            np.sin(2 * angle),
            np.cos(2 * angle),
        ],
        -1,
    )


def _requests(garage: Garage) -> np.ndarray:
    columns = (
        _log(garage.requested_kwh, _LEAST_KWH),
        _log(garage.stated_departure - garage.arrived, _LEAST_HOURS),
        (garage.arrived + garage.clock_hours[..., None]) % 24,
    )
    return np.stack([x / near for x, near in zip(columns, _NEAR, strict=True)], -1)
