"""Anytime-valid bounds on a mean by betting (Waudby-Smith and Ramdas 2024).

A gambler starts with 1 and stakes a part f of it on every gain g_n >= low, against "the mean is at most
m": K_n(m) = K_{n-1}(m) (1 + f (g_n - m) / (m - low)). Where that is true the game is fair or worse, and
the wealth ever reaches c with probability at most 1/c, however often one looks (Ville). The money is
spread over several stakes, and those which have won weigh more in the next bet: a bet that only the past
decides. A second gambler bets the other way; a mean m at which either has 2/alpha is out.
"""

from dataclasses import dataclass

import numpy as np

_STAKES = 0.95 * 0.5 ** np.arange(6)
"""The stakes f; all below 1, so that no single loss ends a game."""
_SHARES = _STAKES / _STAKES.sum()
"""The part of the money on each stake: most on the largest, for means of blocks are small."""
_MEANS = 1000
"""Means tried between the ends of the range; 0 is tried besides."""


def log_wealth(gains: np.ndarray, mean: float | np.ndarray, low: float) -> np.ndarray:
    """The logarithm of the wealth after each gain of one who bets that the mean is above `mean`.

    For the bet that it is below: `log_wealth(-gains, -mean, -high)`. Of several means, a row each.

    >>> np.exp(log_wealth(np.array([0.5, -0.5]), 0.0, -1.0)).round(3).tolist()
    [1.322, 0.869]
    """
    mean = np.asarray(mean, float)[..., None]
    odds = (np.asarray(gains, float) - mean) / (mean - low)
    each = np.cumsum(np.log1p(_STAKES * odds[..., None]), axis=-2)
    most = each.max(-1)
    return most + np.log((_SHARES * np.exp(each - most[..., None])).sum(-1))


def trust(gains: np.ndarray, low: float, alpha: float) -> np.ndarray:
    """The share of trust after each gain, log K_n / log(1/alpha) from 0 to 1.

    Mix the policy and the baseline by it: if the policy is never better, P(trust ever reaches s) <=
    alpha^s.

    The wealth K_n is kept from growing beyond 1/alpha, so that trust can be lost as soon as won.

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
    """A confidence sequence: with probability 1 - alpha the mean is within all of it at once."""

    lower: np.ndarray
    upper: np.ndarray
    changed: np.ndarray
    """Where no one mean fits all that came before: the gains have changed, and the bounds are those
    of the sum so far, no longer the tightest ever seen."""


def bounds(gains: np.ndarray, low: float, high: float, alpha: float) -> MeanBounds:
    """Bounds on the mean after each gain, of gains in [low, high]; both ends are valid together.

    They are as tight as the best seen so far, and only rounded outwards, to a thousandth of the range.

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
    """The largest mean that is out from below after each gain, or `low`."""
    means = np.union1d(np.linspace(low, high, _MEANS + 1)[1:-1], [0.0])
    found = np.full(len(gains), float(low))
    # Means are tried together, as many as fit into the cache.
    for some in np.array_split(means, 1 + len(means) * len(gains) // 4000):
        out = log_wealth(gains, some, low) >= np.log(2 / alpha)
        # The wealth falls with the mean that is bet against: what is out is out below, too.
        if not out.any():
            break
        found = np.maximum(found, np.where(out, some[:, None], low).max(0))
    return found
