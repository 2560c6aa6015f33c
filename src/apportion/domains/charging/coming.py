"""What is still to come today, by the days before: a feeder kept free for cars that will not come is
wasted, and one given away before they come is missed.

Of every earlier day it is known what the cars that came after each period took. The mean of the last
working days, over the site's stations, is what is expected today.
"""

from dataclasses import dataclass, replace

import numpy as np

from apportion.domains.charging.days import Days
from apportion.domains.charging.garage import PERIODS

FORGOTTEN_DAYS = 300
"""What is so old counts no more."""
_LAST = 20
"""Working days that count, about a month."""


@dataclass(frozen=True, eq=False)
class Coming:
    """What was still to come on the days of one site.

    Examples
    --------
    >>> from apportion.domains.charging.sessions import read_sessions
    >>> days = Days.of(read_sessions(), "jpl").between("2019-05-01", "2019-06-30")
    >>> expected = Coming.of(days, usual=np.zeros(PERIODS)).recall(days).to_come_kwh
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
    def of(cls, days: Days, usual: np.ndarray) -> "Coming":
        """All of these days, over all of these stations."""
        return cls(days.dates.astype(int), still_to_come(days), usual)

    @classmethod
    def nothing(cls, usual: np.ndarray) -> "Coming":
        """Of a garage without a past."""
        return cls(np.zeros(0, int), np.zeros((0, PERIODS)), usual)

    def recall(self, days: Days) -> Days:
        """The days with what is expected to come, by the days before each."""
        expected = np.array([self._expect(today) for today in days.dates.astype(int)])
        return replace(days, to_come_kwh=expected.astype(np.float32))

    def _expect(self, today: int) -> np.ndarray:
        past = slice(*np.searchsorted(self.day, (today - FORGOTTEN_DAYS, today)))
        last = self.kwh[past][-_LAST:]
        return last.mean(0) if len(last) else self.usual


def still_to_come(days: Days) -> np.ndarray:
    """What cars that came after each period needed, in the mean of the stations: (days, periods)."""
    arriving = np.zeros((len(days), PERIODS))
    np.add.at(arriving, (np.arange(len(days))[:, None, None], days.arrival), days.need_kwh)
    after = arriving[:, :0:-1].cumsum(1)[:, ::-1]
    return np.pad(after, ((0, 0), (0, 1))) / len(days.stations)
