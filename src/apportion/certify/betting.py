"""Anytime-valid bounds on a mean by betting (Waudby-Smith and Ramdas 2024).

A bettor with the initial wealth 1 stakes the fraction f on every gain g_n >= low, against the null "the
mean is at most m": K_n(m) = K_{n-1}(m) (1 + f (g_n - m) / (m - low)). Under the null the wealth is a
supermartingale, so P(K_n ever reaches c) <= 1/c at any stopping time (Ville). The wealth is divided between
several stakes, and those that have won get more weight in the next bet. A second bettor bets on the
opposite; a mean m is rejected if either has 2/alpha.
"""

from dataclasses import dataclass

import numpy as np

_STAKES = 0.95 * 0.5 ** np.arange(6)
"""The stakes f; all are below 1, so that no single loss takes the whole wealth."""
_SHARES = _STAKES / _STAKES.sum()
"""Initial wealth of each stake; the largest gets most, because means of blocks are small."""
_MEANS = 1000
"""Number of intervals of the grid of means; 0 is added to the grid."""


def log_wealth(gains: np.ndarray, mean: float | np.ndarray, low: float) -> np.ndarray:
    """Return the log-wealth after each gain of the bet that the mean is above `mean`.

    For the opposite bet, use `log_wealth(-gains, -mean, -high)`. Several means give one row each.

    >>> np.exp(log_wealth(np.array([0.5, -0.5]), 0.0, -1.0)).round(3).tolist()
    [1.322, 0.869]
    """
    mean = np.asarray(mean, float)[..., None]
    odds = (np.asarray(gains, float) - mean) / (mean - low)
    each = np.cumsum(np.log1p(_STAKES * odds[..., None]), axis=-2)
    most = each.max(-1)
    return most + np.log((_SHARES * np.exp(each - most[..., None])).sum(-1))


def trust(gains: np.ndarray, low: float, alpha: float) -> np.ndarray:
    """Return the trust after each gain: log K_n / log(1/alpha), clipped to [0, 1].

    Use it to mix the policy with the baseline. If the policy is never better, P(trust ever reaches s) <=
    alpha^s. The wealth K_n is capped at 1/alpha, so that trust falls as fast as it rises.

    >>> trust(np.repeat([0.5, -0.5], [12, 9]), -1.0, 0.05)[[4, 11, 20]].round(2).tolist()
    [0.51, 1.0, 0.0]
    """
    each, shares = np.log(_SHARES), []
    for gain in gains:
        each = each + np.log1p(_STAKES * gain / -low)
        wealth = np.logaddexp.reduce(each)
        beyond = max(wealth + np.log(alpha), 0.0)
        each = each - beyond
        shares.append((wealth - beyond) / -np.log(alpha))
    return np.clip(np.array(shares, float), 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class MeanBounds:
    """Confidence sequence: with probability 1 - alpha it contains the mean at all times."""

    lower: np.ndarray
    upper: np.ndarray
    changed: np.ndarray
    """Whether no single mean is consistent with all gains so far; the bounds are then those of the current
    wealth instead of the tightest so far."""


def bounds(gains: np.ndarray, low: float, high: float, alpha: float) -> MeanBounds:
    """Return bounds on the mean after each gain, for gains in [low, high]; both hold jointly.

    They are the running intersection, rounded outwards to a thousandth of the range.

    >>> found = bounds(np.full(60, 0.5), -1.0, 1.0, 0.05)
    >>> bool(found.lower[-1] > 0 and found.upper[-1] >= 0.5)
    True
    """
    gains = np.asarray(gains, float)
    below = _below(gains, low, high, alpha)
    above = -_below(-gains, -high, -low, alpha)
    tightest = np.maximum.accumulate(below), np.minimum.accumulate(above)
    changed = tightest[0] > tightest[1]
    return MeanBounds(
        np.where(changed, below, tightest[0]), np.where(changed, above, tightest[1]), changed
    )


def _below(gains: np.ndarray, low: float, high: float, alpha: float) -> np.ndarray:
    """Return the largest mean that is rejected from below after each gain, or `low`."""
    means = np.union1d(np.linspace(low, high, _MEANS + 1)[1:-1], [0.0])
    found = np.full(len(gains), float(low))
    # In blocks of means that fit into the cache.
    for some in np.array_split(means, 1 + len(means) * len(gains) // 4000):
        out = log_wealth(gains, some, low) >= np.log(2 / alpha)
        # The wealth decreases with the mean, so if none of these is rejected, no larger one is.
        if not out.any():
            break
        found = np.maximum(found, np.where(out, some[:, None], low).max(0))
    return found
