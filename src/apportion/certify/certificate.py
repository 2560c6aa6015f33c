"""Has a policy earned its place? A verdict on its paired gains over a baseline, at any time.

Two gamblers bet on the means of blocks of gains (see `betting`): one that the policy is better, one that it
is worse. `certified` once the first has 2/alpha, `harmful` once the second has, `not yet` before.

The null: given all blocks before it, the expected mean of a block, counted at bound / sqrt(block) at most,
is 0 or less (for `harmful`: 0 or more). Where it holds, each verdict has probability alpha / 2 at most,
even if one asks after every period and stops at the best moment. Dependent gains can break it although
their mean over all time is 0. So no verdict falls before `FEWEST_BLOCKS`, nor while blocks are seen to
depend on the two before, and weaker dependence raises the wealth that is needed. Dependence slower than
the record, or on earlier blocks alone, is not seen; docs/certificates.md has the rates.
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
    """What a policy gained over a baseline in each period, both on the same things.

    Examples
    --------
    >>> gains = Gains(np.array([0.3, np.nan, 0.1]), -1.0, 1.0)
    >>> gains.certify().verdict
    'not yet'
    """

    values: np.ndarray
    """One a period, in order; NaN where it is missing."""
    low: float
    """The least a gain can be. Like `high` it must be known before the first gain is seen."""
    high: float
    periods: np.ndarray | None = None
    """What each period is called, such as its day; numbers from 1 by default."""
    policy: str = "policy"
    baseline: str = "baseline"
    period: str = "period"
    """What a period is: a day, a week, a federation."""
    unit: str = "a period"
    """What a gain is a hundredth of, after "points"."""
    clipped: int = 0
    """Gains that were beyond the bounds and are counted at them."""
    beyond: np.ndarray | None = None
    """How far each loss was beyond its bound; 0 where it was not, None where none was."""
    site: str | None = None
    """The fingerprint of the one place they are of; None where they speak of many."""
    block: int = 28
    """Consecutive periods whose mean is one bet, unless `certify` is given another number: 28 for days,
    13 for weeks, 1 only where periods are independent by construction."""

    def __post_init__(self) -> None:
        values = np.asarray(self.values, float)
        if values.ndim != 1:
            raise InputError(f"gains: shape {values.shape}; one number a period is needed")
        if not -np.inf < self.low < 0 < self.high < np.inf:
            raise InputError(
                f"gains: bounds {self.low:g} and {self.high:g}; 0 must lie between them"
            )
        there = values[~np.isnan(values)]
        outside = (there < self.low) | (there > self.high)
        if outside.any():
            raise InputError(
                f"gains: {there[outside][0]:g} is outside [{self.low:g}, {self.high:g}]; give the "
                "bounds that hold for every gain, or clip the gains (Gains.within)"
            )
        if self.periods is not None and len(self.periods) != len(values):
            raise InputError(f"gains: {len(values)} of them in {len(self.periods)} periods")

    @classmethod
    def within(cls, values: np.ndarray | Sequence[float], bound: float, **named: Any) -> "Gains":
        """Gains counted at `bound` or -`bound` at most: the claim is then about the mean of these.

        Choose it before you look, where what is beyond does not matter or does not happen. Losses beyond
        it are reported, and nothing is certified while they, counted in full, outweigh the gains so far.
        """
        values = np.asarray(values, float)
        clipped = int((np.abs(values) > bound).sum())
        beyond = np.maximum(-bound - values, 0.0)
        return cls(
            np.clip(values, -bound, bound), -bound, bound, clipped=clipped, beyond=beyond, **named
        )

    def certify(self, *, alpha: float = 0.05, block: int | None = None) -> "Certificate":
        """The verdict on these gains.

        Parameters
        ----------
        alpha
            How likely a wrong verdict may be, over all times at which one might ask.
        block
            Consecutive periods whose mean is one bet, `Gains.block` by default: long enough that the mean
            of a block says little of the next. Missing periods are left out of their block's mean, a block
            without any is skipped, and the last one waits until it is complete.
        """
        block = self.block if block is None else block
        if not 0 < alpha < 1:
            raise InputError(f"alpha is {alpha:g}; it must be above 0 and below 1")
        if block < 1:
            raise InputError(f"block is {block}; it must be at least 1 period")
        return Certificate(self, alpha, block, *_block_means(self.values, block))

    @property
    def losses_beyond(self) -> int:
        """Losses that were beyond the bound and are counted at it."""
        return 0 if self.beyond is None else int((self.beyond > 0).sum())

    @property
    def in_full(self) -> np.ndarray:
        """The mean gain up to each period, with losses beyond the bound in full; 0 before the first."""
        return _running_mean(
            self.values if self.beyond is None else self.values - np.nan_to_num(self.beyond)
        )

    def labels(self) -> np.ndarray:
        """What each period is called."""
        return np.arange(1, len(self.values) + 1) if self.periods is None else self.periods


def _block_means(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean of each complete block that has any gain, and the place of its last period.

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
    """The two bets after every block, the bounds on the mean gain, and the verdict.

    Made by `Gains.certify`. What it says of a time does not change with what comes after.
    """

    gains: Gains
    alpha: float
    block: int
    means: np.ndarray
    """The mean gain of each block."""
    ends: np.ndarray
    """The place of each block's last period."""

    @property
    def threshold(self) -> float:
        """What a gambler must have: two are watched, so 2/alpha."""
        return 2 / self.alpha

    @property
    def bet_bound(self) -> tuple[float, float]:
        """What a bet counts at least and at most; means of independent gains shrink by that root."""
        return self.gains.low / np.sqrt(self.block), self.gains.high / np.sqrt(self.block)

    @cached_property
    def counted(self) -> np.ndarray:
        """The mean gain of each block within `bet_bound`."""
        return np.clip(self.means, *self.bet_bound)

    @cached_property
    def log_better(self) -> np.ndarray:
        """Logarithm of the wealth of the bet that the policy is better, after each block."""
        return log_wealth(self.counted, 0.0, self.bet_bound[0])

    @cached_property
    def log_worse(self) -> np.ndarray:
        """Logarithm of the wealth of the bet that the policy is worse."""
        return log_wealth(-self.counted, 0.0, -self.bet_bound[1])

    @cached_property
    def bounds(self) -> MeanBounds:
        """Lower and upper bound on the mean of bets as counted after each block."""
        return bounds(self.counted, *self.bet_bound, self.alpha)

    @cached_property
    def _excess(self) -> np.ndarray:
        """Autocorrelation at lag 1, and at lags 1 and 2 together, beyond what independent bets have."""
        lags = np.stack([_autocorrelations(self.counted, lag) for lag in (1, 2)])
        return np.cumsum(lags, axis=0)

    @property
    def autocorrelation(self) -> np.ndarray:
        """How far bets foretold the next, -1 to 1, after each block; 0 on average if independent."""
        return self._excess[0]

    @property
    def autocorrelated(self) -> np.ndarray:
        """Whether that, or the sum over two lags, is more than one in twenty independent records has."""
        seen = np.arange(1, len(self.means) + 1)
        most = 1.645 * np.sqrt(np.array([[1], [2]]) / (seen + 4))
        return np.any(self._excess > most, axis=0)

    @property
    def log_needed(self) -> np.ndarray:
        """Logarithm of the wealth that is needed after each block.

        The mean of dependent bets varies as that of fewer independent ones, 1 + 2 (sum of
        autocorrelations) times fewer. The logarithm of the wealth is proportional to their number.
        """
        return np.log(self.threshold) * (1 + 2 * np.maximum(self._excess.max(0), 0.0))

    @cached_property
    def _won(self) -> tuple[np.ndarray, np.ndarray]:
        """After each block, whether the policy may be called better, and worse."""
        may = (np.arange(1, len(self.means) + 1) >= FEWEST_BLOCKS) & ~self.autocorrelated
        better, worse = (
            (log >= self.log_needed) & may for log in (self.log_better, self.log_worse)
        )
        # What a bet counts at most must not hide losses or gains that outweigh all others.
        below = _running_mean(self.gains.values)[self.ends] < 0
        return better & (self.gains.in_full[self.ends] > 0), worse & below

    @cached_property
    def decided(self) -> int | None:
        """The block that brought the verdict, which stays; None before there is one."""
        return min((int(np.argmax(own)) for own in self._won if own.any()), default=None)

    @property
    def verdict(self) -> CertificateVerdict:
        """The first one. `changed` says whether later gains contradict it."""
        if self.decided is None:
            return "not yet"
        return "certified" if self._won[0][self.decided] else "harmful"

    @cached_property
    def trust(self) -> float:
        """How far these bets now justify following the policy, 0 to 1; it can fall after the verdict."""
        earned = trust(self.counted, self.bet_bound[0], self.alpha)
        return float(earned[-1]) if len(earned) else 0.0

    @property
    def changed(self) -> bool:
        """Whether no one mean fits all gains, or the opposite verdict has followed the first."""
        return bool(self.bounds.changed.any() or all(own.any() for own in self._won))

    @property
    def reason(self) -> str | None:
        """Why no verdict can fall yet, whatever the wealth; None where one can, or has."""
        if self.decided is not None:
            return None
        if len(self.means) < FEWEST_BLOCKS:
            return f"{FEWEST_BLOCKS} bets are needed to see whether they are independent"
        seen = f"bets are autocorrelated ({self.autocorrelation[-1]:+.2f} from one to the next)"
        return f"{seen}: bet on longer blocks (--block)" if self.autocorrelated[-1] else None

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """The verdict and what it rests on, in a few lines."""
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
            lines.append("  the gains have changed over time: no one mean fits them all")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The contract of `apportion certify --json`."""
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
        """A row for each bet."""
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
        """The wealth of both bets, and below it the mean gain with its bounds."""
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
        above.set_ylabel("wealth; dashed: what is needed")
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
        # By bets and not by days: a record may have long gaps.
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
    """The mean of the values so far, without those that are missing; 0 before the first."""
    seen = np.cumsum(~np.isnan(values))
    return np.cumsum(np.nan_to_num(values)) / np.maximum(seen, 1)


def _autocorrelations(values: np.ndarray, lag: int) -> np.ndarray:
    """The autocorrelation of all values so far, less what independent values have on average (below 0).

    It is 0 where all values are the same.

    >>> _autocorrelations(np.array([1.0, -1.0, 1.0, -1.0]), 1).round(2).tolist()
    [0.0, 0.0, -0.33, -0.5]
    """
    if len(values) <= lag:
        return np.zeros(len(values))
    # From the first value on: sums of squares of large values with a small spread would be inexact.
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
"""Bets before any verdict: among fewer, dependence is not seen."""
_MOST = 690.0
"""Beyond this a wealth is shown as e^690: larger ones are no floating-point numbers."""


def _wealth(logarithm: float) -> float:
    return float(np.exp(min(logarithm, _MOST)))
