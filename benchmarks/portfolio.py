"""How fast portfolios are trained and walked: gradient steps a second, and days a second.

One learner and several side by side, at the paper's size and at two smaller ones, after compilation.
"""

import time

import jax

from apportion.composition import EqualShares
from apportion.domains.portfolio import Market, SimulatedMarket
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio
from apportion.domains.portfolio.walk import walk_tasks
from apportion.tasks import draw_tasks
from apportion.training import Chunks

SIZES = {
    "H31 B109 m10": (PortfolioSettings.paper(tasks=30), 40),
    "H16 B50 m10": (PortfolioSettings.paper(tasks=30, window=16, batch=50), 100),
    "H8 B32 m5": (PortfolioSettings.paper(tasks=30, task_size=5, window=8, batch=32), 300),
}


def steps_per_second(prices, settings: PortfolioSettings, steps: int, members: int) -> float:
    """Gradient steps a second, all learners together, in the second half of the run."""
    settings = PortfolioSettings(**(vars(settings) | {"steps": 2 * steps, "members": members}))
    marks = []
    chunks = Chunks(steps, on_chunk=lambda _: marks.append(time.perf_counter()))
    train_portfolio(prices, settings, chunks=chunks)
    return members * steps / (marks[1] - marks[0])


def main() -> None:
    prices = SimulatedMarket.draw(universe=50, days=1000, seed=0).prices
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for name, (settings, steps) in SIZES.items():
        rates = [steps_per_second(prices, settings, steps, members) for members in (1, 4)]
        print(f"train {name:14} {rates[0]:8.0f} steps/s alone, {rates[1]:8.0f} with 4 side by side")
    market = Market.of(prices, window=31)
    tasks = draw_tasks(50, 10, 30, seed=0)
    jax.block_until_ready(walk_tasks(EqualShares(), market, tasks))
    start = time.perf_counter()
    jax.block_until_ready(walk_tasks(EqualShares(), market, tasks))
    days = len(tasks) * market.horizon
    print(f"walk  equal shares  {days / (time.perf_counter() - start):8.0f} task-days/s")


if __name__ == "__main__":
    main()
