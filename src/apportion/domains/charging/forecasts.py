"""What is expected of cars: needs, stays, and what is still to come today; all known when a car arrives.

`Predictor` regresses the logarithms of need and stay on what drivers state and on the hour of arrival,
by least squares on training days alone. `SimilarSessions` corrects it by earlier days, since drivers come
again and ask for the same: a car is expected to leave the mean remainder of those whose request, stated
stay and hour of arrival were near its own, the nearer and the more recent the more. `ArrivalForecast`
tells what cars that came after each period took on the last working days: a feeder kept free for cars that
will not come is wasted, and one given away before they come is missed. Only days before a car's own count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from apportion.domains.charging.days import Days
from apportion.domains.charging.garage import PERIOD_HOURS, PERIODS, Garage, Medians
from apportion.domains.charging.sessions import count
from apportion.errors import InputError

_LEAST_KWH = 0.5
_LEAST_HOURS = PERIOD_HOURS
_FORGOTTEN_DAYS = 300
"""What is so old counts no more."""
_LAST_DAYS = 20
"""Working days whose arrivals count, about a month."""
_NEAR = (0.03, 0.1, 1.0)
"""What sets two requests apart by one: logarithms of request and stay, hours of the clock."""
_FADES_DAYS = 60.0
"""What is forgotten weighs less than a hundredth."""
_PRIOR = 0.5
"""Sessions' worth of trust in the regression alone."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """Coefficients of the two regressions, and what stands in for what is missing."""

    need: np.ndarray
    stay: np.ndarray
    medians: Medians
    """For statements."""
    to_come_kwh: np.ndarray
    """For earlier days: what was still to come after each period, in the mean of days and sites."""

    @classmethod
    def fit(cls, *training: Days) -> "Predictor":
        """Least squares on these days, which may be of several sites."""
        garages = [days.garage for days in training]
        medians = Medians.of(*garages)
        x = np.concatenate([_features(garage, medians)[garage.there] for garage in garages])
        if len(x) < x.shape[1]:
            raise InputError(
                f"predictions: {count(len(x), 'session')} cannot fix {x.shape[1]} coefficients; give "
                "more days"
            )
        needs = [np.maximum(garage.need_kwh[garage.there], _LEAST_KWH) for garage in garages]
        stays = [(g.departure - g.arrived)[g.there] * PERIOD_HOURS for g in garages]
        need, *_ = np.linalg.lstsq(x, np.log(np.concatenate(needs)))
        stay, *_ = np.linalg.lstsq(x, np.log(np.concatenate(stays)))
        usual = np.mean([still_to_come(garage).mean(0) for garage in garages], 0)
        return cls(need, stay, medians, usual)

    def apply(self, garage: Garage) -> Garage:
        """The sessions with predicted needs and departures."""
        x = _features(garage, self.medians)
        departure = garage.arrived + np.exp(x @ self.stay) / PERIOD_HOURS
        return replace(
            garage,
            predicted_need_kwh=np.where(garage.there, np.exp(x @ self.need), 0).astype(np.float32),
            predicted_departure=np.where(garage.there, departure, 0).astype(np.float32),
        )

    def to_dict(self) -> dict[str, list[float]]:
        """Plain numbers, to be saved with a policy."""
        medians = [float(self.medians.requested_kwh), float(self.medians.stay_hours)]
        return {
            "need": self.need.tolist(),
            "stay": self.stay.tolist(),
            "medians": medians,
            "to_come_kwh": self.to_come_kwh.tolist(),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Predictor":
        """The predictor that `to_dict` wrote.

        Raises
        ------
        InputError
            Where the numbers are not what a predictor has.
        """
        shapes = {"need": (8,), "stay": (8,), "medians": (2,), "to_come_kwh": (PERIODS,)}
        try:
            found = {name: np.asarray(saved[name], float) for name in shapes}
        except (KeyError, TypeError, ValueError):
            raise InputError(
                "the policy's file has no sound predictions of needs and stays; train it again"
            ) from None
        if any(x.shape != shapes[name] or not np.isfinite(x).all() for name, x in found.items()):
            raise InputError(
                "the policy's file has damaged predictions of needs and stays; train it again"
            )
        medians = Medians(*(jnp.float32(median) for median in found["medians"]))
        return cls(found["need"], found["stay"], medians, found["to_come_kwh"])


@dataclass(frozen=True, eq=False)
class SimilarSessions:
    """Sessions of one site whose drivers stated something, by day, and what the regression missed in them.

    Examples
    --------
    >>> from apportion.domains.charging.sessions import read_sessions
    >>> days = Days.of(read_sessions(), "jpl").between("2019-05-01", "2019-06-30")
    >>> predicted = add_forecasts(days, Predictor.fit(days))
    >>> corrected = SimilarSessions.of(predicted).apply(predicted.garage, days.dates)
    >>> same = corrected.recalled_need_kwh == predicted.garage.predicted_need_kwh
    >>> bool(same[0].all()), bool(same[-1].all())
    (True, False)
    """

    day: np.ndarray
    """Days since 1970, ascending."""
    requests: np.ndarray
    """Logarithms of request and stay, and the hour of arrival, each in what sets two apart by one."""
    remainders: np.ndarray
    """Of need and stay, in logarithms: what came less what the regression expected."""

    @classmethod
    def of(cls, days: Days | None) -> "SimilarSessions":
        """All of these days, which have predictions, at all stations; None is a garage without a past."""
        if days is None:
            return cls(np.zeros(0, int), np.zeros((0, 3)), np.zeros((0, 2)))
        garage = days.garage
        said = garage.stated & garage.there
        need, departure = _predicted(garage)
        need_left = _log(garage.need_kwh, _LEAST_KWH) - _log(need, _LEAST_KWH)
        stay_left = _log(garage.departure - garage.arrived, 1.0) - _log(
            departure - garage.arrived, 1.0
        )
        left = np.stack([need_left, stay_left], -1)
        return cls(_day(days.dates, garage)[said], _requests(garage)[said], left[said])

    def apply(self, garage: Garage, dates: np.ndarray) -> Garage:
        """Sessions of these dates with predictions corrected by earlier days, and how much that is."""
        said = garage.stated & garage.there
        day, requests = _day(dates, garage)[said], _requests(garage)[said]
        expected = np.zeros((*said.shape, 3))
        expected[said] = np.concatenate(
            [np.zeros((0, 3)), *(self._expect(d, requests[day == d]) for d in np.unique(day))]
        )
        factor = np.exp(expected[..., :2])
        need, departure = _predicted(garage)
        stay = (departure - garage.arrived) * factor[..., 1]
        return replace(
            garage,
            recalled_need_kwh=(need * factor[..., 0]).astype(np.float32),
            recalled_departure=(garage.arrived + stay).astype(np.float32),
            familiarity=expected[..., 2].astype(np.float32),
        )

    def _expect(self, today: int, requests: np.ndarray) -> np.ndarray:
        """The mean remainders of similar requests before today, and the weight of these in the mean, the
        rest being the prior's; 0 where there are none.
        """
        past = slice(*np.searchsorted(self.day, (today - _FORGOTTEN_DAYS, today)))
        apart = np.broadcast_to(
            (today - self.day[past]) / _FADES_DAYS, (len(requests), len(self.day[past]))
        )
        for own, theirs in zip(requests.T, self.requests[past].T, strict=True):
            apart = apart + np.abs(own[:, None] - theirs)
        likeness = np.exp(-apart)
        weight = likeness.sum(1, keepdims=True)
        return np.concatenate([likeness @ self.remainders[past], weight], 1) / (weight + _PRIOR)


@dataclass(frozen=True, eq=False)
class ArrivalForecast:
    """What was still to come on the days of one site.

    Examples
    --------
    >>> from apportion.domains.charging.sessions import read_sessions
    >>> days = Days.of(read_sessions(), "jpl").between("2019-05-01", "2019-06-30")
    >>> forecast = ArrivalForecast.of(days, usual=np.zeros(PERIODS))
    >>> expected = forecast.apply(days.garage, days.dates).to_come_kwh
    >>> expected.shape == (len(days), 96), bool((np.diff(expected) <= 0).all())
    (True, True)
    """

    day: np.ndarray
    """Days since 1970, ascending."""
    kwh: np.ndarray
    """(days, periods), as `still_to_come` has it."""
    usual: np.ndarray
    """(periods): what stands in where no earlier day is known."""

    @classmethod
    def of(cls, days: Days | None, usual: np.ndarray) -> "ArrivalForecast":
        """All of these days, over all of these stations; None is a garage without a past."""
        if days is None:
            return cls(np.zeros(0, int), np.zeros((0, PERIODS)), usual)
        return cls(days.dates.astype(int), still_to_come(days.garage), usual)

    def apply(self, garage: Garage, dates: np.ndarray) -> Garage:
        """Sessions of these dates with what is expected to come, by the days before each."""
        expected = np.array([self._expect(today) for today in np.ravel(dates).astype(int)])
        return replace(
            garage, to_come_kwh=expected.reshape(*dates.shape, PERIODS).astype(np.float32)
        )

    def _expect(self, today: int) -> np.ndarray:
        past = slice(*np.searchsorted(self.day, (today - _FORGOTTEN_DAYS, today)))
        last = self.kwh[past][-_LAST_DAYS:]
        return last.mean(0) if len(last) else self.usual


def still_to_come(garage: Garage) -> np.ndarray:
    """What cars that came after each period needed, in the mean of the stations: (days, periods)."""
    days, stations, _ = garage.arrival.shape
    arriving = np.zeros((days, PERIODS))
    np.add.at(arriving, (np.arange(days)[:, None, None], garage.arrival), garage.need_kwh)
    after = arriving[:, :0:-1].cumsum(1)[:, ::-1]
    return np.pad(after, ((0, 0), (0, 1))) / stations


def forecasters(past: Days | None, predictor: Predictor) -> tuple[SimilarSessions, ArrivalForecast]:
    """What is kept of a site's days, which have predictions, for later ones; None where none are known."""
    return SimilarSessions.of(past), ArrivalForecast.of(past, predictor.to_come_kwh)


def add_forecasts(days: Days, predictor: Predictor, recall: bool = False) -> Days:
    """Days of one site with predictions and, with `recall`, with what the days before each tell."""
    known = replace(days, garage=predictor.apply(days.garage))
    for forecaster in forecasters(known, predictor) if recall else ():
        known = replace(known, garage=forecaster.apply(known.garage, days.dates))
    return known


def _features(garage: Garage, medians: Medians) -> np.ndarray:
    """What is known on arrival, (days, stations, sessions, features)."""
    requested = np.where(garage.stated, garage.requested_kwh, float(medians.requested_kwh))
    hours = (garage.stated_departure - garage.arrived) * PERIOD_HOURS
    stay = np.where(garage.stated, hours, float(medians.stay_hours))
    angle = 2 * np.pi * garage.arrived.astype(float) / PERIODS
    return np.stack(
        [
            np.ones_like(angle),
            np.log(np.maximum(requested, _LEAST_KWH)),
            np.log(np.maximum(stay, _LEAST_HOURS)),
            garage.stated.astype(float),
            np.sin(angle),
            np.cos(angle),
            np.sin(2 * angle),
            np.cos(2 * angle),
        ],
        -1,
    )


def _predicted(garage: Garage) -> tuple[np.ndarray, np.ndarray]:
    if garage.predicted_need_kwh is None or garage.predicted_departure is None:
        raise InputError("charging: days without predictions recall nothing; see Predictor.apply")
    return np.asarray(garage.predicted_need_kwh), np.asarray(garage.predicted_departure)


def _day(dates: np.ndarray, garage: Garage) -> np.ndarray:
    return np.broadcast_to(dates.astype(int)[..., None, None], garage.arrival.shape)


def _requests(garage: Garage) -> np.ndarray:
    hours = (garage.stated_departure - garage.arrived) * PERIOD_HOURS
    columns = (
        _log(garage.requested_kwh, _LEAST_KWH),
        _log(hours, _LEAST_HOURS),
        garage.arrived * PERIOD_HOURS,
    )
    return np.stack([x / near for x, near in zip(columns, _NEAR, strict=True)], -1)


def _log(values: Any, least: float) -> np.ndarray:
    return np.log(np.maximum(values, least, dtype=float))
