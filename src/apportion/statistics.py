"""How sure are we: interquartile means, bootstrap intervals, paired comparisons.

Every comparison the package prints goes through here, on SciPy's bootstrap.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

from apportion.errors import InputError


@dataclass(frozen=True)
class Estimate:
    """A statistic with its confidence interval over n independent experiments."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:+.4g} [{self.low:+.4g}, {self.high:+.4g}] (n = {self.n})"

    @property
    def above_zero(self) -> bool:
        """The whole interval lies above 0."""
        return self.low > 0

    def to_dict(self) -> dict[str, float]:
        """Plain numbers, for a table or JSON."""
        return asdict(self)


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean of the middle half: as robust as the median, less wasteful.

    >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])))
    1.5
    """
    return stats.trim_mean(np.asarray(values, float), 0.25, axis=axis)


def bootstrap(
    values: np.ndarray,
    statistic: Callable[..., np.ndarray] = np.mean,
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Estimate:
    """A statistic of independent values with a bootstrap interval (percentile; one row, one experiment).

    Where there is only one value there is no interval: both ends are infinite.
    """
    values = _clean(values, "values")
    point = float(statistic(values, axis=0))
    if len(values) < 2:
        return Estimate(point, -np.inf, np.inf, len(values))
    if np.ptp(values) == 0:
        return Estimate(point, point, point, len(values))
    result = stats.bootstrap(
        (values,),
        statistic,
        axis=0,
        vectorized=True,
        confidence_level=confidence,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Estimate(point, float(interval.low), float(interval.high), len(values))


def compare(first: np.ndarray, second: np.ndarray, **options) -> Estimate:
    """Paired comparison: the mean of first - second over experiments that share everything else.

    >>> compare(np.array([2.0, 3.0, 5.0]), np.array([1.0, 2.0, 4.0])).value
    1.0
    """
    first, second = np.asarray(first, float), np.asarray(second, float)
    if first.shape != second.shape:
        raise InputError(
            f"paired comparison: {first.shape} against {second.shape} experiments; pairs must match"
        )
    return bootstrap(first - second, **options)


def _clean(values: np.ndarray, what: str) -> np.ndarray:
    values = np.asarray(values, float)
    if values.ndim != 1 or len(values) == 0:
        raise InputError(
            f"{what}: shape {values.shape}; a non-empty one-dimensional array is needed"
        )
    if not np.isfinite(values).all():
        raise InputError(f"{what}: {np.count_nonzero(~np.isfinite(values))} are not finite")
    return values
