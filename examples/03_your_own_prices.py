"""From a file of daily closes to a backtest on later years and the next allocation."""

import sys
import tempfile
from pathlib import Path

from apportion.domains.portfolio import SimulatedMarket, load_prices
from apportion.domains.portfolio.allocation import next_allocation
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.domains.portfolio.baselines import BASELINES
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio

if len(sys.argv) > 1:
    path = Path(sys.argv[1])
else:
    # Without a file, simulate a market and write it to one.
    path = Path(tempfile.mkdtemp()) / "prices.csv"
    SimulatedMarket.draw(universe=12, days=900, seed=0).prices.to_frame().to_csv(path)
prices = load_prices(path)
print(prices.summary())

# Train on the days before the cut, test on those after it.
cut = prices.dates[int(0.7 * len(prices.dates))]
settings = PortfolioSettings.paper(
    tasks=20, task_size=5, steps=800, window=8, batch=32, learning_rate=1e-3, cost=5e-4
)
trained = train_portfolio(prices.until(cut), settings)
result = backtest_strategies(
    prices,
    {"policy": trained.policy},
    baselines={name: BASELINES[name] for name in ("exponentiated-gradient", "olmar")},
    start=cut,
    window=settings.window,
    cost=settings.cost,
)
print(result.summary())

shares = next_allocation(trained.policy, prices, window=settings.window)
print(f"for the day after {prices.dates[-1]}:")
for ticker, share in zip(prices.tickers, shares, strict=True):
    print(f"  {ticker:8} {share:.2%}")
