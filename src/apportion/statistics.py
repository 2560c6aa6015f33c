"""How sure are we: interquartile means, bootstrap intervals, paired comparisons.

Every comparison the package prints goes through here, on SciPy's bootstrap.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from scipy import stats

from apportion.errors import InputError

Outcome = Literal["holds", "does-not-hold", "not-established"]


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

    @property
    def outcome(self) -> Outcome:
        """What may be said of the claim that it is above 0."""
        return outcome(self.above_zero, (self.low, self.high))

    def to_dict(self) -> dict[str, float]:
        """Plain numbers, for a table or JSON."""
        return asdict(self)


def outcome(holds: bool, interval: Sequence[float | None]) -> Outcome:
    """What may be said of a claim that a number is above 0: an interval around 0 establishes nothing.

    >>> outcome(False, (-0.1, 0.3)), outcome(False, (-0.3, -0.1))
    ('not-established', 'does-not-hold')
    """
    if holds:
        return "holds"
    high = interval[1]
    return "does-not-hold" if high is not None and high < 0 else "not-established"


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


def over_rows_and_columns(table: np.ndarray, *, resamples: int = 4000, seed: int = 0) -> Estimate:
    """The mean over a table of two crossed factors, such as experiments by years, both resampled."""
    array = np.asarray(table, float)
    rows, columns = array.shape
    rng = np.random.default_rng(seed)
    row = rng.integers(0, rows, (resamples, rows, 1))
    column = rng.integers(0, columns, (resamples, 1, columns))
    low, high = interval(array[row, column].mean((1, 2)))
    if array.size == 1:
        low, high = -np.inf, np.inf
    return Estimate(float(array.mean()), low, high, array.size)


def clustered_ratio(
    *clusterings: tuple[np.ndarray, np.ndarray], confidence: float = 0.95
) -> Estimate:
    """sum(gains) / sum(sizes), with an interval that is robust to clusters.

    Each clustering is the same whole cut another way, such as by day and by station: what each cluster
    gained, and its size. The ratio is linearised; each clustering's variance is that of its clusters'
    sums, and they are added, which errs on the side of width (Cameron, Gelbach and Miller 2011 take
    off that of the single cells). The t distribution has as many degrees of freedom as the coarsest
    clustering has clusters, less one.

    Examples
    --------
    >>> gains = 1 + np.random.default_rng(0).normal(size=40)
    >>> clustered_ratio((gains, np.ones(40))).n
    40
    """
    variance, units, ratio = 0.0, np.inf, None
    for gains, sizes in clusterings:
        gains, sizes = np.asarray(gains, float).ravel(), np.asarray(sizes, float).ravel()
        if gains.shape != sizes.shape or not sizes.sum() > 0:
            raise InputError(
                f"clusters: {gains.size} gains of {sizes.size} sizes that sum to {sizes.sum():g}; "
                "each cluster needs both, and some size"
            )
        # A cluster of no size, such as a station in no task, is none.
        gains, sizes = gains[sizes > 0], sizes[sizes > 0]
        ratio = float(gains.sum() / sizes.sum()) if ratio is None else ratio
        count = len(gains)
        rest = (gains - ratio * sizes) / sizes.sum()
        variance += count / max(count - 1, 1) * float((rest**2).sum())
        units = min(units, count)
    assert ratio is not None, "at least one clustering is given"
    if units < 2:
        return Estimate(ratio, -np.inf, np.inf, int(units))
    reach = float(stats.t.ppf(0.5 + confidence / 2, units - 1)) * float(np.sqrt(variance))
    return Estimate(ratio, ratio - reach, ratio + reach, int(units))


def block_days(length: int, *, resamples: int = 1000, block: int = 21, seed: int = 0) -> np.ndarray:
    """Days of each resample of a record: blocks of consecutive days, the last followed by the first."""
    block = min(block, length)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, length, (resamples, -(-length // block)))
    days = (starts[..., None] + np.arange(block)) % length
    return days.reshape(resamples, -1)[:, :length]


def interval(drawn: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Both ends of the middle part of resampled statistics; what is not finite is left out."""
    finite = drawn[np.isfinite(drawn)]
    if not len(finite):
        return float("nan"), float("nan")
    outside = round((1 - confidence) / 2, 12)
    low, high = np.quantile(finite, [outside, 1 - outside])
    return float(low), float(high)


def _clean(values: np.ndarray, what: str) -> np.ndarray:
    values = np.asarray(values, float)
    if values.ndim != 1 or len(values) == 0:
        raise InputError(
            f"{what}: shape {values.shape}; a non-empty one-dimensional array is needed"
        )
    if not np.isfinite(values).all():
        raise InputError(f"{what}: {np.count_nonzero(~np.isfinite(values))} are not finite")
    return values
