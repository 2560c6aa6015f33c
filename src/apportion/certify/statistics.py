"""Estimates with t intervals over independent units, and the outcome of claims about them.

All comparisons in the package use these functions. They use t intervals over independent units, because
95 % percentile bootstraps of 3, 6, 10 or 12 units cover only 75, 86, 89 or 91 %. `benchmarks/coverage.py`
measures the coverage in the layout of every study.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import special

from apportion.errors import InputError

Outcome = Literal["holds", "does-not-hold", "not-established"]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A statistic with its confidence interval over n independent units."""

    value: float
    low: float
    high: float
    n: int
    error: float | None = None
    """Standard error, if the interval is a t interval."""
    freedom: float | None = None
    """Degrees of freedom of the t distribution."""

    def __str__(self) -> str:
        return f"{self.value:+.4g} [{self.low:+.4g}, {self.high:+.4g}] (n = {self.n})"

    @property
    def outcome(self) -> Outcome:
        """What may be said of the claim that it is above 0."""
        return outcome(self.low > 0, (self.low, self.high))

    @property
    def p(self) -> float | None:
        """Two-sided p-value of the null hypothesis 0, from the same t distribution as the interval."""
        return p_value(self, above=0.0)

    def to_dict(self) -> dict[str, float]:
        """Return the numbers for a table or JSON."""
        numbers = {"value": self.value, "low": self.low, "high": self.high, "n": self.n}
        return numbers if self.p is None else {**numbers, "p": self.p}


def outcome(holds: bool, interval: Sequence[float | None]) -> Outcome:
    """Return the outcome of a claim that a number is above 0; an interval around 0 decides nothing.

    >>> outcome(False, (-0.1, 0.3)), outcome(False, (-0.3, -0.1))
    ('not-established', 'does-not-hold')
    """
    if holds:
        return "holds"
    high = interval[1]
    return "does-not-hold" if high is not None and high < 0 else "not-established"


def judge(estimate: Estimate, *, above: float = -np.inf, below: float = np.inf) -> Outcome:
    """Return the outcome of the claim that the truth is between two bounds.

    >>> judge(Estimate(1.0, 0.5, 1.5, 9), above=0), judge(Estimate(1.0, 0.5, 1.5, 9), below=0.4)
    ('holds', 'does-not-hold')
    """
    if estimate.low > above and estimate.high < below:
        return "holds"
    outside = estimate.high < above or estimate.low > below
    return "does-not-hold" if outside else "not-established"


def in_words(outcome: str) -> str:
    """Return an outcome without hyphens.

    >>> in_words("not-established")
    'not established'
    """
    return outcome.replace("-", " ")


def p_value(estimate: Estimate, *, above: float = -np.inf, below: float = np.inf) -> float | None:
    """Return the level at which `judge` begins to decide: 1 - p is the widest interval that does.

    For a bound on one side it is the two-sided p-value of that bound.
    """
    if estimate.error is None or estimate.freedom is None:
        return None
    margin = min(abs(estimate.value - above), abs(below - estimate.value))
    if estimate.error == 0:
        return 0.0 if margin > 0 else 1.0
    return float(2 * special.stdtr(estimate.freedom, -margin / estimate.error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, float)
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted.tolist()


def mean_over(values: np.ndarray) -> Estimate:
    """Return the mean of independent values with its t interval, which is infinite for one value.

    >>> str(mean_over(np.array([1.0, 2.0, 3.0])))
    '+2 [-0.4841, +4.484] (n = 3)'
    """
    values = np.asarray(values, float)
    if values.ndim != 1 or len(values) == 0:
        raise InputError(f"values: shape {values.shape}; pass a non-empty one-dimensional array")
    if not np.isfinite(values).all():
        raise InputError(f"values: {np.count_nonzero(~np.isfinite(values))} are not finite")
    n = len(values)
    error = float(values.std(ddof=1)) / np.sqrt(n) if n > 1 else np.inf
    return _t_estimate(float(values.mean()), error, n - 1, n)


def of_means(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """Estimate a smooth function of the mean over independent units (the first axis) by the jackknife.

    `statistic` takes one mean, or several stacked along the first axis. For a positive quantity, estimate
    its logarithm and transform the interval back. A minimum is not smooth; estimate its terms instead.

    >>> found = of_means(np.array([[1.0, 2.0], [3.0, 2.0], [2.0, 3.0]]), lambda m: m[..., 0] / m[..., 1])
    >>> round(found.value, 3), found.n
    (0.857, 3)
    """
    values = np.asarray(values, float)
    n = len(values)
    value = float(statistic(values.mean(0)))
    if n < 2:
        return _t_estimate(value, np.inf, 0, n)
    without = np.asarray(statistic((values.sum(0) - values) / (n - 1)))
    return _t_estimate(value, float(without.std()) * np.sqrt(n - 1), n - 1, n)


def _t_estimate(value: float, error: float, freedom: float, n: int) -> Estimate:
    """Return a value with its t interval, which is infinite without degrees of freedom."""
    if freedom <= 0 or not np.isfinite(error):
        return Estimate(value, -np.inf, np.inf, n)
    reach = float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * float(error)
    return Estimate(value, value - reach, value + reach, n, float(error), float(freedom))


def compare(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Compare paired experiments by the mean of their differences.

    Parameters
    ----------
    first, second : array of shape (experiments,)
        Results of both methods in the same experiments, such as rewards per task or per seed.

    Returns
    -------
    Estimate
        Mean of first - second with its 95 % t interval over the experiments.

    Raises
    ------
    InputError
        If the shapes differ, or values are missing or not finite.

    Examples
    --------
    >>> compare(np.array([2.0, 3.0, 5.0]), np.array([1.0, 2.0, 4.0])).value
    1.0
    """
    first, second = np.asarray(first, float), np.asarray(second, float)
    if first.shape != second.shape:
        raise InputError(
            f"paired comparison: shapes {first.shape} and {second.shape} differ; pairs must match"
        )
    return mean_over(first - second)


def over_rows_and_columns(table: np.ndarray) -> Estimate:
    """Estimate the mean of a table of two crossed random factors, such as experiments by years.

    The variance of the mean is MS(rows) + MS(columns) - MS(residual), over the number of cells. Its degrees
    of freedom are Satterthwaite's, but at least those of the factor with fewer levels; n is the number of
    these levels.

    >>> over_rows_and_columns(np.array([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])).n
    2
    """
    array = np.asarray(table, float)
    rows, columns = array.shape
    if min(rows, columns) < 2:
        return mean_over(array.ravel())
    mean, by_row, by_column = array.mean(), array.mean(1), array.mean(0)
    rest = array - by_row[:, None] - by_column + mean
    freedoms = np.array([rows - 1, columns - 1, (rows - 1) * (columns - 1)])
    squares = np.array([by_row.var() * array.size, by_column.var() * array.size, (rest**2).sum()])
    of_rows, of_columns, of_rest = squares / freedoms
    both = of_rows + of_columns - of_rest
    if both > of_rest:
        spread = float((squares**2 / freedoms**3).sum())
        freedom = max(both**2 / spread, min(rows, columns) - 1)
    else:
        # Neither factor has a visible effect, so cells are treated as independent.
        both, freedom = of_rest, freedoms[2]
    error = float(np.sqrt(both / array.size))
    return _t_estimate(float(mean), error, float(freedom), min(rows, columns))


def clustered_ratio(*clusterings: tuple[np.ndarray, np.ndarray]) -> Estimate:
    """Estimate sum(gains) / sum(sizes) with a cluster-robust interval.

    Each clustering is a pair (gains, sizes) of sums over clusters of the same data, such as days or
    stations. The ratio is linearised. The variances of the clusterings are added, which is conservative
    (Cameron, Gelbach and Miller 2011 subtract the variance of the intersections). The degrees of freedom
    are Satterthwaite's, and not fewer than the coarsest clustering has; n is the number of its clusters.

    Examples
    --------
    >>> gains = 1 + np.random.default_rng(0).normal(size=40)
    >>> clustered_ratio((gains, np.ones(40))).n
    40
    """
    variances, freedoms, ratio = [], [], None
    for gains, sizes in clusterings:
        gains, sizes = np.asarray(gains, float).ravel(), np.asarray(sizes, float).ravel()
        if gains.shape != sizes.shape or not sizes.sum() > 0:
            raise InputError(
                f"clusters: {gains.size} gains and {sizes.size} sizes with the sum {sizes.sum():g}; "
                "pass one gain and one size per cluster, with a positive sum of sizes"
            )
        # A cluster without size, such as a station in no task, does not count.
        gains, sizes = gains[sizes > 0], sizes[sizes > 0]
        ratio = float(gains.sum() / sizes.sum()) if ratio is None else ratio
        count = len(gains)
        rest = (gains - ratio * sizes) / sizes.sum()
        variances.append(count / max(count - 1, 1) * float((rest**2).sum()))
        freedoms.append(count - 1)
    assert ratio is not None, "at least one clustering is given"
    fewest, whole = min(freedoms), float(np.sum(variances))
    freedom = fewest
    if fewest > 0 and whole > 0:
        freedom = max(fewest, whole**2 / np.sum(np.square(variances) / np.array(freedoms)))
    return _t_estimate(ratio, float(np.sqrt(whole)), float(freedom), fewest + 1)


def over_blocks(statistic: Callable[..., Any], *records: np.ndarray, block: int = 21) -> Estimate:
    """Estimate a statistic of daily records by a block jackknife, since days can be autocorrelated.

    Records too short for six blocks are divided into six shorter blocks. n is the number of blocks.

    >>> over_blocks(np.mean, np.sin(np.arange(500.0))).n
    23
    """
    length = len(records[0])
    count = max(length // block, min(length, 6))
    value = float(statistic(*records))
    if count < 2:
        return _t_estimate(value, np.inf, 0, count)
    parts = np.array_split(np.arange(length), count)
    without = [float(statistic(*(np.delete(own, part) for own in records))) for part in parts]
    error = float(np.std(without)) * np.sqrt(count - 1)
    return _t_estimate(value, error, count - 1, count)


def interval(drawn: np.ndarray) -> tuple[float, float]:
    """Return the percentile interval of resampled statistics, without values that are not finite."""
    finite = drawn[np.isfinite(drawn)]
    if not len(finite):
        return float("nan"), float("nan")
    outside = round((1 - CONFIDENCE) / 2, 12)
    low, high = np.quantile(finite, [outside, 1 - outside])
    return float(low), float(high)
