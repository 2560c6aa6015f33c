"""Anytime-valid test of whether a policy is better than a baseline, from paired gains.

Two bettors bet on the means of blocks of gains (see `betting`): one that the policy is better, one that it
is worse. The verdict is `certified` once the first has the wealth 2/alpha, `harmful` once the second has
it, and `not yet` before.

The null hypothesis: given all previous blocks, the expected mean of a block, clipped at bound /
sqrt(block), is at most 0 (for `harmful`: at least 0). Under it each verdict has probability at most
alpha / 2 at any stopping time. Dependent gains can violate the null although their long-run mean is 0.
Therefore no verdict is given before `FEWEST_BLOCKS` blocks, nor while blocks are significantly
autocorrelated at lags 1 and 2, and weaker autocorrelation raises the required wealth. Dependence at longer
lags is not detected; docs/certificates.md has the measured error rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.certify.betting import MeanBounds, bounds, log_wealth, trust
from apportion.errors import InputError

CertificateVerdict = Literal["certified", "not yet", "harmful"]


@dataclass(frozen=True, eq=False)
class Gains:
    """Paired gains of a policy over a baseline, one for each period.

    Examples
    --------
    >>> gains = Gains(np.array([0.3, np.nan, 0.1]), -1.0, 1.0)
    >>> gains.certify().verdict
    'not yet'
    """

    values: np.ndarray
    """One value per period, in order; NaN if missing."""
    low: float
    """Smallest possible gain. Like `high`, it must be fixed before the first gain is observed."""
    high: float
    periods: np.ndarray | None = None
    """Label of each period, such as its date; by default numbers from 1."""
    policy: str = "policy"
    baseline: str = "baseline"
    period: str = "period"
    """Name of a period, such as day, week or federation."""
    unit: str = "a period"
    """What the points refer to in "points of ..."."""
    clipped: int = 0
    """Number of gains outside the bounds, which are clipped to them."""
    beyond: np.ndarray | None = None
    """Amount by which each loss exceeds its bound, 0 if it does not; None without clipping."""
    site: str | None = None
    """Fingerprint of the site that the gains belong to; None if there are several."""
    block: int = 28
    """Consecutive periods whose mean is one bet, by default of `certify`: 28 for days, 13 for weeks, and 1
    only if periods are independent by construction."""

    def __post_init__(self) -> None:
        values = np.asarray(self.values, float)
        if values.ndim != 1:
            raise InputError(f"gains: shape {values.shape}; pass one number per period")
        if not -np.inf < self.low < 0 < self.high < np.inf:
            raise InputError(
                f"gains: bounds {self.low:g} and {self.high:g}; 0 must lie between them"
            )
        there = values[~np.isnan(values)]
        outside = (there < self.low) | (there > self.high)
        if outside.any():
            raise InputError(
                f"gains: {there[outside][0]:g} is outside [{self.low:g}, {self.high:g}]; pass bounds "
                "that hold for every gain, or clip the gains (Gains.within)"
            )
        if self.periods is not None and len(self.periods) != len(values):
            raise InputError(
                f"gains: {len(values)} gains for {len(self.periods)} periods; pass one each"
            )

    @classmethod
    def within(cls, values: np.ndarray | Sequence[float], bound: float, **named: Any) -> "Gains":
        """Clip gains to [-bound, bound]; the claim is then about the mean of the clipped gains.

        Choose the bound before looking at the data, such that larger gains are irrelevant or do not occur.
        Losses beyond it are reported, and the policy is not certified while the mean gain with these
        losses in full is negative.
        """
        values = np.asarray(values, float)
        clipped = int((np.abs(values) > bound).sum())
        beyond = np.maximum(-bound - values, 0.0)
        return cls(
            np.clip(values, -bound, bound), -bound, bound, clipped=clipped, beyond=beyond, **named
        )

    def certify(self, *, alpha: float = 0.05, block: int | None = None) -> "Certificate":
        """Test these gains.

        Parameters
        ----------
        alpha
            Probability of a wrong verdict, over all stopping times.
        block
            Consecutive periods whose mean is one bet, by default `Gains.block`; choose it so long that
            means of blocks are nearly independent. Missing periods are omitted from the mean, a block
            without any gain is skipped, and an incomplete last block is not used.
        """
        block = self.block if block is None else block
        if not 0 < alpha < 1:
            raise InputError(f"alpha is {alpha:g}; it must be above 0 and below 1")
        if block < 1:
            raise InputError(f"block is {block}; it must be at least 1 period")
        return Certificate(self, alpha, block, *_block_means(self.values, block))

    @property
    def losses_beyond(self) -> int:
        """Number of losses beyond the bound, which are clipped to it."""
        return 0 if self.beyond is None else int((self.beyond > 0).sum())

    @property
    def in_full(self) -> np.ndarray:
        """Mean gain up to each period with losses in full; 0 before the first gain."""
        return _running_mean(
            self.values if self.beyond is None else self.values - np.nan_to_num(self.beyond)
        )

    def labels(self) -> np.ndarray:
        """Return the label of each period."""
        return np.arange(1, len(self.values) + 1) if self.periods is None else self.periods


def _block_means(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each complete block with a gain, and the index of its last period.

    >>> means, ends = _block_means(np.array([1.0, 3.0, np.nan, np.nan, 5.0, np.nan, 7.0]), 2)
    >>> means.tolist(), ends.tolist()
    ([2.0, 5.0], [1, 5])
    """
    whole = len(values) // block
    table = np.asarray(values, float)[: whole * block].reshape(whole, block)
    some = ~np.isnan(table).all(1)
    ends = np.arange(1, whole + 1) * block - 1
    return np.nanmean(table[some], axis=1), ends[some]


@dataclass(frozen=True, eq=False)
class Certificate:
    """Wealth of both bets after every block, bounds on the mean gain, and the verdict.

    `Gains.certify` returns it. Values at one time do not depend on later gains.
    """

    gains: Gains
    alpha: float
    block: int
    means: np.ndarray
    """Mean gain of each block."""
    ends: np.ndarray
    """Index of the last period of each block."""

    @property
    def threshold(self) -> float:
        """Required wealth of independent bets, 2/alpha because there are two bettors."""
        return 2 / self.alpha

    @property
    def bet_bound(self) -> tuple[float, float]:
        """Smallest and largest value of a bet, bound / sqrt(block)."""
        return self.gains.low / np.sqrt(self.block), self.gains.high / np.sqrt(self.block)

    @cached_property
    def counted(self) -> np.ndarray:
        """Mean gain of each block, clipped to `bet_bound`."""
        return np.clip(self.means, *self.bet_bound)

    @cached_property
    def log_better(self) -> np.ndarray:
        """Log-wealth of the bet that the policy is better, after each block."""
        return log_wealth(self.counted, 0.0, self.bet_bound[0])

    @cached_property
    def log_worse(self) -> np.ndarray:
        """Log-wealth of the bet that the policy is worse, after each block."""
        return log_wealth(-self.counted, 0.0, -self.bet_bound[1])

    @cached_property
    def bounds(self) -> MeanBounds:
        """Bounds on the mean of the clipped bets, after each block."""
        return bounds(self.counted, *self.bet_bound, self.alpha)

    @cached_property
    def _excess(self) -> np.ndarray:
        """Autocorrelation at lag 1 and its sum over lags 1 and 2, minus the mean under independence."""
        lags = np.stack([_autocorrelations(self.counted, lag) for lag in (1, 2)])
        return np.cumsum(lags, axis=0)

    @property
    def autocorrelation(self) -> np.ndarray:
        """Autocorrelation of the bets at lag 1, after each block; 0 on average if independent."""
        return self._excess[0]

    @property
    def autocorrelated(self) -> np.ndarray:
        """Whether the autocorrelation at lag 1, or its sum over two lags, is significant at 5 %."""
        seen = np.arange(1, len(self.means) + 1)
        most = 1.645 * np.sqrt(np.array([[1], [2]]) / (seen + 4))
        return np.any(self._excess > most, axis=0)

    @property
    def log_needed(self) -> np.ndarray:
        """Logarithm of the required wealth after each block.

        Autocorrelation divides the effective number of bets by 1 + 2 (sum of autocorrelations), and the
        log-wealth is proportional to that number.
        """
        return np.log(self.threshold) * (1 + 2 * np.maximum(self._excess.max(0), 0.0))

    @cached_property
    def _won(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether the policy is certified, and whether it is harmful, after each block."""
        may = (np.arange(1, len(self.means) + 1) >= FEWEST_BLOCKS) & ~self.autocorrelated
        better, worse = (
            (log >= self.log_needed) & may for log in (self.log_better, self.log_worse)
        )
        # Clipping must not hide losses or gains that outweigh all others.
        below = _running_mean(self.gains.values)[self.ends] < 0
        return better & (self.gains.in_full[self.ends] > 0), worse & below

    @cached_property
    def decided(self) -> int | None:
        """Index of the block that decides the verdict, which is final; None if there is none yet."""
        return min((int(np.argmax(own)) for own in self._won if own.any()), default=None)

    @property
    def verdict(self) -> CertificateVerdict:
        """The first verdict; `changed` reports whether later gains contradict it."""
        if self.decided is None:
            return "not yet"
        return "certified" if self._won[0][self.decided] else "harmful"

    @cached_property
    def trust(self) -> float:
        """Current trust in the policy, from 0 to 1; it can fall after the verdict."""
        earned = trust(self.counted, self.bet_bound[0], self.alpha)
        return float(earned[-1]) if len(earned) else 0.0

    @property
    def changed(self) -> bool:
        """Whether no single mean is consistent with all gains, or both verdicts have occurred."""
        return bool(self.bounds.changed.any() or all(own.any() for own in self._won))

    @property
    def reason(self) -> str | None:
        """Why no verdict is possible yet at any wealth; None if there is one or it is possible."""
        if self.decided is not None:
            return None
        if len(self.means) < FEWEST_BLOCKS:
            return f"{FEWEST_BLOCKS} bets are needed to see whether they are independent"
        seen = f"bets are autocorrelated ({self.autocorrelation[-1]:+.2f} from one to the next)"
        return f"{seen}: bet on longer blocks (--block)" if self.autocorrelated[-1] else None

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Return the verdict and its evidence in a few lines."""
        g, n = self.gains, len(self.means)
        lines = [f"{self.verdict}: {g.policy} against {g.baseline}{self._when()}"]
        if not n:
            return f"{lines[0]}\n  no complete block of {self.block} {g.period}s so far"
        lower, upper, labels = self.bounds.lower[-1], self.bounds.upper[-1], g.labels()
        lines += [
            f"  mean gain {100 * self.counted.mean():+.3f} points of {g.unit}, within "
            f"[{100 * lower:+.3f}, {100 * upper:+.3f}] at any time, alpha {self.alpha:g}",
            f"  {n} bets of {self.block} {g.period}{'s' * (self.block > 1)} each, {labels[0]} to "
            f"{labels[self.ends[-1]]}; wealth for better "
            f"{_wealth(self.log_better[-1]):.3g}, for worse {_wealth(self.log_worse[-1]):.3g}, needed "
            f"{_wealth(self.log_needed[-1]):.3g}",
            f"  trust earned so far {self.trust:.0%}",
            f"  a gain counts as {100 * g.low:+g} to {100 * g.high:+g} points; {g.clipped} of "
            f"{int((~np.isnan(g.values)).sum())} were beyond",
        ]
        if g.beyond is not None and g.losses_beyond:
            worst = 100 * (g.low - np.nanmax(g.beyond))
            lines[-1] += (
                f", {g.losses_beyond} of them losses, the worst of {worst:+.3g} points; with losses in "
                f"full the mean gain is {100 * g.in_full[-1]:+.3f}"
            )
        if self.block > 1:
            low, high = 100 * self.bet_bound[0], 100 * self.bet_bound[1]
            lines.append(
                f"  a bet counts as {low:+.3g} to {high:+.3g} points; with bets in full the mean gain is "
                f"{100 * self.means.mean():+.3f}"
            )
        if self.reason is not None:
            lines.append(f"  {self.reason}")
        if self.changed:
            lines.append("  the gains have changed over time: no single mean fits them all")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the result of `apportion certify --json`."""
        g, some = self.gains, len(self.means) > 0
        labels = g.labels()
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "policy": g.policy,
            "against": g.baseline,
            "alpha": self.alpha,
            "decided": None if self.decided is None else str(labels[self.ends[self.decided]]),
            "start": str(labels[0]) if len(labels) else None,
            "end": str(labels[-1]) if len(labels) else None,
            "period": g.period,
            "periods": int((~np.isnan(g.values)).sum()),
            "block": self.block,
            "bets": len(self.means),
            "mean": float(self.counted.mean()) if some else None,
            "lower": float(self.bounds.lower[-1]) if some else self.bet_bound[0],
            "upper": float(self.bounds.upper[-1]) if some else self.bet_bound[1],
            "bound": [g.low, g.high],
            "bet_bound": [float(bound) for bound in self.bet_bound],
            "clipped": g.clipped,
            "losses_beyond": g.losses_beyond,
            "autocorrelation": float(self.autocorrelation[-1]) if some else None,
            "autocorrelated": bool(some and self.autocorrelated[-1]),
            "site": g.site,
            "changed": self.changed,
            "trust": self.trust,
            "wealth": {
                "better": _wealth(self.log_better[-1]) if some else 1.0,
                "worse": _wealth(self.log_worse[-1]) if some else 1.0,
                "needed": _wealth(self.log_needed[-1]) if some else self.threshold,
            },
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row per bet."""
        return pd.DataFrame(
            {
                "period": self.gains.labels()[self.ends],
                "gain": self.means,
                "better": np.exp(np.minimum(self.log_better, _MOST)),
                "worse": np.exp(np.minimum(self.log_worse, _MOST)),
                "lower": self.bounds.lower,
                "upper": self.bounds.upper,
            }
        )

    def plot(self) -> Figure:
        """Plot the wealth of both bets, and below it the mean gain with its bounds."""
        g, bets = self.gains, np.arange(1, len(self.means) + 1)
        figure = Figure(figsize=(8, 5.5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for name, wealth in (("better", self.log_better), ("worse", self.log_worse)):
            path = np.exp(np.clip(np.append(0.0, wealth), -23, _MOST))
            above.plot(np.append(0, bets), path, label=f"bet that the {g.policy} is {name}")
        needed = np.exp(np.minimum(self.log_needed, _MOST))
        above.plot(bets, needed, color="black", linestyle="--", linewidth=1)
        if self.decided is not None:
            above.axvline(self.decided + 1, color="black", linestyle=":", linewidth=1)
        above.set_yscale("log")
        above.set_ylabel("wealth (dashed: required)")
        above.set_title(
            f"{g.policy} against {g.baseline}: {self.verdict}{self._when()}",
            loc="left",
            fontsize=11,
        )
        above.legend(frameon=False, fontsize=9)
        below.fill_between(bets, 100 * self.bounds.lower, 100 * self.bounds.upper, alpha=0.2)
        below.plot(bets, 100 * np.cumsum(self.counted) / bets)
        below.axhline(0, color="black", linewidth=1)
        below.set_ylabel(f"mean gain, points\nof {g.unit}", fontsize=9)
        # The axis counts bets and not days, because a record can have long gaps.
        shown = np.unique(np.linspace(0, max(len(bets) - 1, 0), 7).round().astype(int))[: len(bets)]
        below.set_xticks(bets[shown], [str(day) for day in g.labels()[self.ends[shown]]])
        below.set_xlabel(f"{g.period} of the bet")
        for axes in (above, below):
            axes.grid(alpha=0.3)
        return figure

    def _when(self) -> str:
        if self.decided is None:
            return ""
        return f", since {self.gains.labels()[self.ends[self.decided]]} (bet {self.decided + 1})"


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Return the running mean without missing values; 0 before the first value."""
    seen = np.cumsum(~np.isnan(values))
    return np.cumsum(np.nan_to_num(values)) / np.maximum(seen, 1)


def _autocorrelations(values: np.ndarray, lag: int) -> np.ndarray:
    """Return the running autocorrelation minus its mean for independent values, which is negative.

    It is 0 if all values are equal.

    >>> _autocorrelations(np.array([1.0, -1.0, 1.0, -1.0]), 1).round(2).tolist()
    [0.0, 0.0, -0.33, -0.5]
    """
    if len(values) <= lag:
        return np.zeros(len(values))
    # Shift by the first value, since sums of squares of large values with a small spread are inexact.
    values = values - values[0]
    seen = np.arange(1, len(values) + 1)
    sums, squares = np.cumsum(values), np.cumsum(values**2)
    products = np.append(np.zeros(lag), np.cumsum(values[lag:] * values[:-lag]))
    without_last = np.append(np.zeros(lag), sums[:-lag])
    without_first = sums - sums[np.minimum(seen, lag) - 1]
    mean, pairs = sums / seen, np.maximum(seen - lag, 0)
    spread = squares - seen * mean**2
    covariance = products - mean * (without_first + without_last) + pairs * mean**2
    some = (spread > 1e-9 * squares) & (pairs > 0)
    expected = -pairs / (seen * np.maximum(seen - 1, 1))
    return np.where(some, covariance / np.where(some, spread, 1.0) - expected, 0.0)


FEWEST_BLOCKS = 20
"""Number of bets before any verdict; with fewer, autocorrelation is not detected."""
_MOST = 690.0
"""Largest log-wealth that is converted to a float; e^710 overflows."""


def _wealth(logarithm: float) -> float:
    return float(np.exp(min(logarithm, _MOST)))
