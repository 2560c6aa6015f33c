"""Has a policy earned its place? A verdict on its paired gains over a baseline, at any time.

Two gamblers bet on the gains (see `betting`): one that their mean is above 0, one that it is below.
`certified` once the first has 2/alpha, `harmful` once the second has, `not yet` before. Either is wrong
with probability alpha at most, even if one asks after every period and stops at the best moment. No
verdict falls while bets are seen to be autocorrelated, which would make it wrong more often.
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
        it are reported, and nothing is certified while they, counted in full, outweigh all gains.
        """
        values = np.asarray(values, float)
        clipped = int((np.abs(values) > bound).sum())
        beyond = np.maximum(-bound - values, 0.0)
        return cls(
            np.clip(values, -bound, bound), -bound, bound, clipped=clipped, beyond=beyond, **named
        )

    def certify(self, *, alpha: float = 0.05, block: int = 1) -> "Certificate":
        """The verdict on these gains.

        Parameters
        ----------
        alpha
            How likely a wrong verdict may be, over all times at which one might ask.
        block
            Consecutive periods whose mean is one bet, for gains that are autocorrelated: long enough that
            the mean of a block says little of the next. Missing periods are left out of their block's
            mean, a block without any is skipped, and the last one waits until it is complete.
        """
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
    def in_full(self) -> float:
        """The mean gain with losses beyond the bound in full; infinite where there are none."""
        if self.beyond is None or not self.losses_beyond:
            return np.inf
        return float(np.nanmean(self.values - np.nan_to_num(self.beyond)))

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

    @cached_property
    def log_better(self) -> np.ndarray:
        """Logarithm of the wealth of the bet that the policy is better, after each block."""
        return log_wealth(self.means, 0.0, self.gains.low)

    @cached_property
    def log_worse(self) -> np.ndarray:
        """Logarithm of the wealth of the bet that the policy is worse."""
        return log_wealth(-self.means, 0.0, -self.gains.high)

    @cached_property
    def bounds(self) -> MeanBounds:
        """Lower and upper bound on the mean gain after each block."""
        return bounds(self.means, self.gains.low, self.gains.high, self.alpha)

    @cached_property
    def autocorrelation(self) -> np.ndarray:
        """How far each bet foretold the next, -1 to 1, among the last hundred after each block."""
        return _autocorrelations(self.means, _RECENT)

    @cached_property
    def autocorrelated(self) -> np.ndarray:
        """Whether that is more than chance makes of bets that foretell nothing, at 5 %."""
        seen = np.minimum(np.arange(1, len(self.means) + 1), _RECENT)
        return self.autocorrelation > 1.645 / np.sqrt(seen) - 1 / seen

    @cached_property
    def _won(self) -> tuple[np.ndarray, np.ndarray]:
        """After each block, whether the policy may be called better, and worse."""
        better, worse = (
            (log >= np.log(self.threshold)) & ~self.autocorrelated
            for log in (self.log_better, self.log_worse)
        )
        return better & (self.gains.in_full > 0), worse

    @cached_property
    def decided(self) -> int | None:
        """The block that brought the verdict; None before there is one."""
        return max((int(np.argmax(own)) for own in self._won if own.any()), default=None)

    @property
    def verdict(self) -> CertificateVerdict:
        """The newest one, where gains that change over time have brought both."""
        if self.decided is None:
            return "not yet"
        better = self._won[0]
        return "certified" if better.any() and np.argmax(better) == self.decided else "harmful"

    @cached_property
    def trust(self) -> float:
        """How far these bets now justify following the policy, 0 to 1; it can fall after the verdict."""
        return float(trust(self.means, self.gains.low, self.alpha)[-1]) if len(self.means) else 0.0

    @property
    def changed(self) -> bool:
        """Whether no one mean fits all gains."""
        return bool(self.bounds.changed.any())

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
            f"  mean gain {100 * self.means.mean():+.3f} points of {g.unit}, within "
            f"[{100 * lower:+.3f}, {100 * upper:+.3f}] at any time, alpha {self.alpha:g}",
            f"  {n} bets of {self.block} {g.period}{'s' * (self.block > 1)} each, {labels[0]} to "
            f"{labels[self.ends[-1]]}; wealth for better "
            f"{_wealth(self.log_better[-1]):.3g}, for worse {_wealth(self.log_worse[-1]):.3g}, needed "
            f"{self.threshold:g}",
            f"  trust earned so far {self.trust:.0%}",
            f"  a gain counts as {100 * g.low:+g} to {100 * g.high:+g} points; {g.clipped} of "
            f"{int((~np.isnan(g.values)).sum())} were beyond",
        ]
        if g.beyond is not None and g.losses_beyond:
            worst = 100 * (g.low - np.nanmax(g.beyond))
            lines[-1] += (
                f", {g.losses_beyond} of them losses, the worst of {worst:+.3g} points; with losses in "
                f"full the mean gain is {100 * g.in_full:+.3f}"
            )
        if self.autocorrelated[-1]:
            lines.append(
                f"  bets are autocorrelated ({self.autocorrelation[-1]:+.2f} from one to the next), and no "
                f"verdict falls on them; bet on longer blocks{self._longer()}"
            )
        if self.changed:
            lines.append("  the gains have changed over time: no one mean fits them all")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The contract of `apportion certify --json`."""
        g, some = self.gains, len(self.means) > 0
        labels = g.labels()
        return {
            "verdict": self.verdict,
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
            "mean": float(self.means.mean()) if some else None,
            "lower": float(self.bounds.lower[-1]) if some else g.low,
            "upper": float(self.bounds.upper[-1]) if some else g.high,
            "bound": [g.low, g.high],
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
                "needed": self.threshold,
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
        above.axhline(self.threshold, color="black", linestyle="--", linewidth=1)
        if self.decided is not None:
            above.axvline(self.decided + 1, color="black", linestyle=":", linewidth=1)
        above.set_yscale("log")
        above.set_ylabel(f"wealth; the verdict falls at {self.threshold:g}")
        above.set_title(
            f"{g.policy} against {g.baseline}: {self.verdict}{self._when()}",
            loc="left",
            fontsize=11,
        )
        above.legend(frameon=False, fontsize=9)
        below.fill_between(bets, 100 * self.bounds.lower, 100 * self.bounds.upper, alpha=0.2)
        below.plot(bets, 100 * np.cumsum(self.means) / bets)
        below.axhline(0, color="black", linewidth=1)
        below.set_ylabel(f"mean gain, points\nof {g.unit}", fontsize=9)
        # By bets and not by days: a record may have long gaps.
        shown = np.unique(np.linspace(0, max(len(bets) - 1, 0), 7).round().astype(int))[: len(bets)]
        below.set_xticks(bets[shown], [str(day) for day in g.labels()[self.ends[shown]]])
        below.set_xlabel(f"{g.period} of the bet")
        for axes in (above, below):
            axes.grid(alpha=0.3)
        return figure

    def _longer(self) -> str:
        """The shortest blocks, of those tried, whose means foretell nothing."""
        for times in (2, 3, 5, 7, 10, 14, 20, 30, 50):
            made = self.gains.certify(alpha=self.alpha, block=times * self.block)
            if len(made.means) > 2 and not made.autocorrelated[-1]:
                return f": {made.block} {self.gains.period}s each are far enough apart"
        return ""

    def _when(self) -> str:
        if self.decided is None:
            return ""
        return f", since {self.gains.labels()[self.ends[self.decided]]} (bet {self.decided + 1})"


def _autocorrelations(values: np.ndarray, recent: int) -> np.ndarray:
    """The autocorrelation from one value to the next among the last `recent`, after each value; 0 where
    they are all the same.

    >>> _autocorrelations(np.array([1.0, -1.0, 1.0, -1.0]), 100).round(2).tolist()
    [0.0, -0.5, -0.67, -0.75]
    """
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - recent, 0)
    count = ends - starts
    # Sums up to each value, and of products with the one before.
    sums, squares = (np.append(0.0, np.cumsum(x)) for x in (values, values**2))
    products = np.append(0.0, np.cumsum(values[1:] * values[:-1]))
    total = sums[ends] - sums[starts]
    mean = total / count
    spread = squares[ends] - squares[starts] - count * mean**2
    both = products[ends - 1] - products[starts]
    inner = mean * (2 * total - values[starts] - values[ends - 1])
    covariance = both - inner + (count - 1) * mean**2
    some = spread > 1e-9 * np.maximum(squares[ends] - squares[starts], 1e-300)
    return np.where(some, covariance / np.where(some, spread, 1.0), 0.0)


_RECENT = 100
"""Bets among which autocorrelation is looked for: gains that change for good are not autocorrelated."""
_MOST = 690.0
"""Beyond this a wealth is shown as e^690: larger ones are no floating-point numbers."""


def _wealth(logarithm: float) -> float:
    return float(np.exp(min(logarithm, _MOST)))
