"""Simulated market with known conditional mean returns.

Log returns are r = 0.0003 + 0.008 f + mu + vol e, with a common factor f, a regime mu = +-0.001
that lasts 30 days on average (momentum), and e, an AR(1) process with phi = -0.2 (reversal). An
instrument without signal has mu = 0 and phi = 0.
"""

from dataclasses import dataclass

import numpy as np

from apportion.domains.portfolio.prices import Prices

DRIFT, FACTOR, REGIME, DURATION, REVERSAL = 0.0003, 0.008, 0.001, 30, -0.2
_VOLATILITY = (0.01, 0.02)
_OVERNIGHT = 0.3


@dataclass(frozen=True, eq=False)
class SimulatedMarket:
    """Prices, and the conditional mean of each daily log return given the past.

    Examples
    --------
    >>> truth = SimulatedMarket.draw(universe=4, days=50, seed=1)
    >>> truth.prices.close.shape, truth.means.shape
    ((50, 4), (50, 4))
    """

    prices: Prices
    """Simulated closes, highs and lows."""
    means: np.ndarray
    """E[r_{i,n} | the past, the regimes], (time, universe)."""

    @classmethod
    def draw(
        cls,
        *,
        universe: int = 40,
        days: int = 1150,
        seed: int = 0,
        informative: np.ndarray | None = None,
        volatility: np.ndarray | None = None,
        autocorrelation: float | np.ndarray = REVERSAL,
    ) -> "SimulatedMarket":
        """Simulate a market.

        Parameters
        ----------
        universe, days : int
            Number of instruments and days.
        seed : int
            Seed of the simulation.
        informative : bool array, optional
            Which instruments carry signal; by default all.
        volatility : array, optional
            Daily volatility of each instrument; by default uniform between 1 % and 2 %.
        autocorrelation : float or array
            Autocorrelation of e for instruments with signal: reversal below 0, continuation above 0.
        """
        rng = np.random.default_rng(seed)
        signal = np.ones(universe, bool) if informative is None else np.asarray(informative, bool)
        vol = rng.uniform(*_VOLATILITY, universe) if volatility is None else np.asarray(volatility)
        phi = np.where(signal, autocorrelation, 0.0)
        turns = rng.random((days, universe)) < 1 / DURATION
        start = rng.choice([-1.0, 1.0], universe)
        mu = np.where(signal, REGIME * start * np.cumprod(np.where(turns, -1.0, 1.0), axis=0), 0.0)
        shocks = rng.standard_normal((days, universe))
        e = np.empty((days, universe))
        previous = shocks[0] / np.sqrt(1 - phi**2)
        means = np.empty((days, universe))
        for day in range(days):
            means[day] = DRIFT + mu[day] + vol * phi * previous
            e[day] = previous = phi * previous + shocks[day]
        factor = FACTOR * rng.standard_normal((days, 1))
        returns = DRIFT + factor + mu + vol * e
        close = 100 * np.exp(np.cumsum(returns, axis=0))
        open_ = np.concatenate([np.full((1, universe), 100.0), close[:-1]]) * np.exp(
            _OVERNIGHT * vol * rng.standard_normal(close.shape)
        )
        stretch = np.abs(rng.standard_normal((2, days, universe))) * vol / 2
        high = np.maximum(open_, close) * np.exp(stretch[0])
        low = np.minimum(open_, close) * np.exp(-stretch[1])
        dates = np.datetime64("2000-01-03", "D") + np.arange(days, dtype="timedelta64[D]")
        tickers = tuple(f"X{i:03d}" for i in range(universe))
        return cls(Prices(dates, tickers, close, high, low), means)
