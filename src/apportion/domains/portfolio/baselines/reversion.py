"""Online portfolio selection that follows the loser: prices are expected to come back.

Same shape as `online`: relatives (time, entities) to target allocations, row n having seen rows
before n only. Before the first row prices are taken to have stood still. PAMR, CWMR, OLMAR, RMR
and Anticor, each as its paper has it.
"""

from statistics import NormalDist

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from apportion.domains.portfolio.baselines.online import Allocations, Relatives, Shares, follow

# The authors' own bound on a passive-aggressive step, for days on which nearly nothing moved.
_LONGEST_STEP = 1e5
# The same for the Lagrange multiplier of confidence-weighted reversion.
_LARGEST_MULTIPLIER = 1e7


def project(values: Shares) -> Shares:
    """The point of the simplex nearest to `values` (Duchi et al. 2008).

    >>> [round(float(share), 3) for share in project(jnp.array([0.8, 0.6, -2.0]))]
    [0.6, 0.4, 0.0]
    """
    falling = jnp.sort(values)[::-1]
    excess = (jnp.cumsum(falling) - 1) / jnp.arange(1, values.shape[0] + 1, dtype=values.dtype)
    kept = jnp.sum(falling > excess)
    shares = jnp.maximum(values - excess[kept - 1], 0.0)
    return shares / shares.sum()


def _towards(shares: Shares, prediction: Shares, target: float, longest: float = jnp.inf) -> Shares:
    """The smallest step along the centred prediction that earns `target` on it, then the simplex."""
    mean = prediction.mean()
    direction = prediction - mean
    norm = direction @ direction
    short = jnp.maximum(target - shares @ prediction, 0.0)
    # What is below the mean's rounding error is no direction.
    apart = norm > shares.shape[0] * (8 * jnp.finfo(shares.dtype).eps * mean) ** 2
    step = jnp.where(apart, short / jnp.where(apart, norm, 1.0), 0.0)
    return project(shares + jnp.minimum(step, longest) * direction)


def pamr(relatives: Relatives, epsilon: float = 0.5) -> Allocations:
    """Passive-aggressive mean reversion (Li et al. 2012): lose what the last period rewarded.

    Shares that would have earned more than `epsilon` move away from the last relatives, just far
    enough to have earned `epsilon`.

    Examples
    --------
    >>> pamr(jnp.array([[1.1, 0.9], [1.0, 1.0]])).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """

    def update(shares, memory, y):
        return _towards(shares, -y, -epsilon, _LONGEST_STEP), memory

    return follow(update, None, relatives)


def olmar(relatives: Relatives, epsilon: float = 10.0, window: int = 5) -> Allocations:
    """Moving-average reversion (Li & Hoi 2012, OLMAR-1): the next price is expected to be the mean
    of the last `window` ones, and shares move until they would earn `epsilon` on it.

    As in the authors' programs, the last relatives stand in for the expected ones until more than
    `window` of them have been seen.
    """

    def update(shares, memory, y):
        recent, seen = memory
        recent = jnp.concatenate([recent[1:], y[None]])
        # p_{n-i} / p_n is the product of the last i inverse relatives.
        back = jnp.cumprod(1 / recent[::-1], axis=0)
        expected = jnp.where(seen >= window, (1 + back.sum(0)) / window, y)
        return _towards(shares, expected, epsilon), (recent, seen + 1)

    recent = jnp.ones((window - 1, relatives.shape[1]), relatives.dtype)
    return follow(update, (recent, 0), relatives)


def rmr(
    relatives: Relatives, epsilon: float = 5.0, window: int = 5, tolerance: float = 1e-6
) -> Allocations:
    """Robust median reversion (Huang et al. 2013): OLMAR with the L1-median of the last prices."""

    def update(shares, memory, y):
        prices, seen = memory
        prices = jnp.concatenate([prices[1:], prices[-1:] * y])
        expected = jnp.where(seen >= window, median(prices, tolerance) / prices[-1], y)
        return _towards(shares, expected, epsilon), (prices, seen + 1)

    return follow(update, (jnp.ones((window, relatives.shape[1]), relatives.dtype), 0), relatives)


def median(points: Float[Array, "window entities"], tolerance: float = 1e-6) -> Shares:
    """The point with the least sum of distances to `points`, by Vardi and Zhang's iteration.

    It stops when a step is shorter than `tolerance` times the point's norm, or after 500 steps.
    """

    def unfinished(carry):
        now, before, steps = carry
        moved = jnp.linalg.norm(now - before) > tolerance * jnp.linalg.norm(before)
        return (steps < 500) & (moved | (steps == 0))

    def step(carry):
        now, _, steps = carry
        distance = jnp.linalg.norm(points - now, axis=1)
        apart = distance > 0
        pull = jnp.where(apart, 1 / jnp.where(apart, distance, 1.0), 0.0)
        away = jnp.where(apart.any(), pull @ points / jnp.maximum(pull.sum(), 1e-30), now)
        # Standing on a point, the others must pull harder than it holds.
        strength = jnp.linalg.norm(pull @ (points - now))
        held = jnp.sum(~apart) / jnp.maximum(strength, 1e-30)
        stay = jnp.minimum(held, 1.0).astype(points.dtype)
        return (1 - stay) * away + stay * now, now, steps + 1

    mean = points.mean(0)
    return jax.lax.while_loop(unfinished, step, (mean, mean, 0))[0]


def cwmr(relatives: Relatives, epsilon: float = -0.5, confidence: float = 0.95) -> Allocations:
    """Confidence-weighted mean reversion (Li et al. 2011, the deviation variant).

    Shares are normal with mean mu and diagonal covariance Sigma; each period both move as little as
    they can so that, with the given confidence, the log return would have been below `epsilon`, and
    Sigma is scaled back to a trace of 1/m^2.
    """
    m = relatives.shape[1]
    phi = NormalDist().inv_cdf(confidence)

    def update(mu, sigma, y):
        centre = (sigma @ y) / sigma.sum()
        growth = mu @ y
        variance = sigma @ y**2
        # The paper's quadratic a s^2 + b s + c = 0, arranged so that nothing cancels.
        spread = (sigma @ (y - centre) ** 2) / growth**2
        half = variance * phi**2 / 2
        a = spread * (spread + 2 * half)
        gap = epsilon - jnp.log(growth)
        rise = jnp.sqrt((gap * half) ** 2 + 2 * half * a)
        step = (rise - gap * (spread + half)) / jnp.where(a > 0, a, 1.0)
        step = jnp.where(a > 0, jnp.clip(step, 0.0, _LARGEST_MULTIPLIER), 0.0)
        lean = step * phi * variance
        sharper = step * phi * (lean + jnp.sqrt(lean**2 + 4 * variance)) / (2 * variance)
        mu = mu - step * sigma * (y - centre) / growth
        sigma = 1 / (1 / sigma + sharper * y**2)
        return project(mu), sigma / (m**2 * sigma.sum())

    return follow(update, jnp.full(m, 1 / m**2, relatives.dtype), relatives)


def anticor(relatives: Relatives, window: int = 30) -> Allocations:
    """Anticor (Borodin et al. 2004): shares move from what rose to what it has lately led.

    Correlations are between each entity's log relatives in the window before last and each other's
    in the last one; until both windows are full, shares drift with prices.
    """
    m = relatives.shape[1]

    def update(shares, memory, y):
        recent, seen = memory
        recent = jnp.concatenate([recent[1:], jnp.log(y)[None]])
        held = shares * y / (shares @ y)
        moved = transfer(
            held, lagged_correlation(recent[:window], recent[window:]), recent[window:].mean(0)
        )
        return jnp.where(seen + 1 >= 2 * window, moved, held), (recent, seen + 1)

    return follow(update, (jnp.zeros((2 * window, m), relatives.dtype), 0), relatives)


def lagged_correlation(
    earlier: Float[Array, "window entities"], later: Float[Array, "window entities"]
) -> Float[Array, "entities entities"]:
    """Correlation of entity i's earlier with entity j's later values; 0 where one stood still."""
    first, second = earlier - earlier.mean(0), later - later.mean(0)
    scale = jnp.sqrt((first**2).sum(0)[:, None] * (second**2).sum(0))
    return jnp.where(scale > 0, first.T @ second / jnp.where(scale > 0, scale, 1.0), 0.0)


def transfer(
    held: Shares, correlation: Float[Array, "entities entities"], growth: Shares
) -> Shares:
    """Anticor's move: each entity gives its share away to those that claim it.

    Entity j claims from i where i grew more and correlates with j's later values; negative
    autocorrelation of either adds to the claim.
    """
    against = jnp.maximum(-jnp.diagonal(correlation), 0.0)
    entitled = (growth[:, None] >= growth) & (correlation > 0)
    claim = jnp.where(entitled, correlation + against[:, None] + against, 0.0)
    total = claim.sum(1)
    given = jnp.where(total > 0, held / jnp.where(total > 0, total, 1.0), 0.0)[:, None] * claim
    return held + given.sum(0) - given.sum(1)
