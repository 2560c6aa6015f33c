"""Predictions that recall earlier days: drivers come again, and say the same.

Of every session the regression of `predictions` leaves a remainder in the logarithms of need and stay.
A later car at the same site is expected to leave the mean remainder of those whose request, stated stay
and hour of arrival were near its own, the nearer and the more recent the more. Only days before its own
count, so that everything used is known when the car arrives. How many such cars there were says how
far to believe it.
"""

from dataclasses import dataclass, replace

import numpy as np

from apportion.domains.charging.coming import FORGOTTEN_DAYS, Coming
from apportion.domains.charging.days import Days
from apportion.domains.charging.garage import PERIOD_HOURS
from apportion.domains.charging.predictions import LEAST_HOURS, LEAST_KWH, Predictor
from apportion.errors import InputError

_NEAR = (0.03, 0.1, 1.0)
"""What sets two statements apart by one: logarithms of request and stay, hours of the clock."""
_FADES_DAYS = 60.0
"""What is forgotten weighs less than a hundredth."""
_PRIOR = 0.5
"""Sessions' worth of trust in the regression alone."""


@dataclass(frozen=True, eq=False)
class Recollection:
    """Sessions of one site whose drivers stated something, by day.

    Examples
    --------
    >>> from apportion.domains.charging.predictions import Predictor
    >>> from apportion.domains.charging.sessions import read_sessions
    >>> days = Days.of(read_sessions(), "jpl").between("2019-05-01", "2019-06-30")
    >>> predictor = Predictor.fit(days)
    >>> predicted = predictor.apply(days)
    >>> recalled = Recollection.of(predicted).recall(predicted)
    >>> same = recalled.recalled_need_kwh == predicted.predicted_need_kwh
    >>> bool(same[0].all()), bool(same[-1].all())
    (True, False)
    """

    day: np.ndarray
    """Days since 1970, ascending."""
    statements: np.ndarray
    """Logarithms of request and stay, and the hour of arrival, each in what sets two apart by one."""
    remainders: np.ndarray
    """Of need and stay, in logarithms: what came less what the regression expected."""

    @classmethod
    def of(cls, days: Days) -> "Recollection":
        """All of these days, which have predictions (`Predictor.apply`), at all of these stations."""
        where = _said(days)
        need, departure = _predicted(days)
        need_left = _log(days.need_kwh, LEAST_KWH) - _log(need, LEAST_KWH)
        stay_left = _log(days.departure - days.arrived, 1.0) - _log(departure - days.arrived, 1.0)
        left = np.stack([need_left, stay_left], -1)
        return cls(_day(days)[where], _statements(days)[where], left[where])

    @classmethod
    def nothing(cls) -> "Recollection":
        """Of a garage without a past."""
        return cls(np.zeros(0, int), np.zeros((0, 3)), np.zeros((0, 2)))

    def recall(self, days: Days) -> Days:
        """Days that have predictions, with these mended by what is recalled, and how much that is."""
        where = _said(days)
        day, statements = _day(days)[where], _statements(days)[where]
        expected = np.zeros((*where.shape, 3))
        expected[where] = np.concatenate(
            [np.zeros((0, 3)), *(self._expect(d, statements[day == d]) for d in np.unique(day))]
        )
        factor = np.exp(expected[..., :2])
        need, departure = _predicted(days)
        stay = (departure - days.arrived) * factor[..., 1]
        return replace(
            days,
            recalled_need_kwh=(need * factor[..., 0]).astype(np.float32),
            recalled_departure=(days.arrived + stay).astype(np.float32),
            familiarity=expected[..., 2].astype(np.float32),
        )

    def _expect(self, today: int, statements: np.ndarray) -> np.ndarray:
        """The mean remainders of the like of these statements before today, and the weight of these in
        the mean, the rest being the prior's; 0 where there are none.
        """
        past = slice(*np.searchsorted(self.day, (today - FORGOTTEN_DAYS, today)))
        apart = np.broadcast_to(
            (today - self.day[past]) / _FADES_DAYS, (len(statements), len(self.day[past]))
        )
        for own, theirs in zip(statements.T, self.statements[past].T, strict=True):
            apart = apart + np.abs(own[:, None] - theirs)
        likeness = np.exp(-apart)
        weight = likeness.sum(1, keepdims=True)
        return np.concatenate([likeness @ self.remainders[past], weight], 1) / (weight + _PRIOR)


def memories(past: Days | None, predictor: Predictor) -> tuple[Recollection, Coming]:
    """What is kept of the days of a site, which have predictions: each mends later days by `recall`."""
    usual = predictor.to_come_kwh
    if past is None:
        return Recollection.nothing(), Coming.nothing(usual)
    return Recollection.of(past), Coming.of(past, usual)


def _predicted(days: Days) -> tuple[np.ndarray, np.ndarray]:
    if days.predicted_need_kwh is None or days.predicted_departure is None:
        raise InputError("charging: days without predictions recall nothing; see Predictor.apply")
    return days.predicted_need_kwh, days.predicted_departure


def _said(days: Days) -> np.ndarray:
    return days.stated & (days.departure > days.arrival)


def _day(days: Days) -> np.ndarray:
    return np.broadcast_to(days.dates.astype(int)[:, None, None], days.arrival.shape)


def _statements(days: Days) -> np.ndarray:
    hours = (days.stated_departure - days.arrived) * PERIOD_HOURS
    columns = (
        _log(days.requested_kwh, LEAST_KWH),
        _log(hours, LEAST_HOURS),
        days.arrived * PERIOD_HOURS,
    )
    return np.stack([x / near for x, near in zip(columns, _NEAR, strict=True)], -1)


def _log(values: np.ndarray, least: float) -> np.ndarray:
    return np.log(np.maximum(values, least, dtype=float))
