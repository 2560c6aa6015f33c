"""Comparison of the three methods and Equal CRP on daily prices."""

import numpy as np
import pandas as pd

from apportion.domains.demonstration import budgets_note, compare_methods, levels_of
from apportion.domains.domain import Demonstration
from apportion.domains.portfolio.market import Costs, Market
from apportion.domains.portfolio.prices import embedded_prices
from apportion.domains.portfolio.record import TRADING_DAYS
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.errors import InputError
from apportion.learners.direct import Direct
from apportion.memory import Replay
from apportion.policy import Recurrent
from apportion.runs.progress import Progress

_REPETITIONS, _TESTED_TASKS, _TESTED_YEARS = 4, 8, 6
"""Repetitions, test tasks in each, and test years of 252 days at the end of the prices."""


def demonstrate_portfolio(seed: int, progress: Progress) -> Demonstration:
    """Train on the days before the test years, and test on held-out instruments."""
    settings = PortfolioSettings.paper(
        tasks=20,
        task_size=5,
        held_out=8,
        window=8,
        batch=32,
        hidden=12,
        learning_rate=3e-3,
        seed=seed,
    )
    try:
        prices, source = embedded_prices(), "The 20 stocks included in skfolio"
    except InputError:
        prices = SimulatedMarket.draw(universe=20, days=12 * TRADING_DAYS, seed=seed).prices
        source = "20 simulated instruments (install skfolio to use the 20 stocks included in it)"
    days = _TESTED_YEARS * TRADING_DAYS
    start, costs = prices.dates[-days], Costs(settings.cost)
    market = Market.of(prices.until(start), window=settings.window, costs=costs)
    later = Market.of(prices, start=start, window=settings.window, costs=costs)
    rewards, shares, tested = compare_methods(
        market,
        later,
        [np.arange(len(prices.tickers))] * _REPETITIONS,
        lambda key: Recurrent(market.prices.shape[-1], settings.hidden, key=key),
        Direct(settings.batch, settings.learning_rate),
        settings,
        task_size=settings.task_size,
        held_out=settings.held_out,
        tested=_TESTED_TASKS,
        rule="Equal CRP",
        replay=Replay(
            length=market.horizon,
            warm_up=market.horizon,
            recency=settings.recency,
            act_periods=settings.act_periods,
        ),
        progress=progress,
    )
    tables = {
        name: 100 * TRADING_DAYS * table.reshape(len(table), _TESTED_YEARS, -1).mean(2)
        for name, table in rewards.items()
    }
    names = pd.Index(tested[0, 0].names(prices.tickers))
    return Demonstration(
        "Wealth among instruments",
        f"Each day wealth is allocated to the {settings.task_size} instruments of a task; the commission "
        f"is {settings.cost:.2%} of the value traded. Which shares give the largest growth? Equal CRP "
        "restores equal shares every day.",
        "log growth per year, net of costs (%)",
        levels_of(tables),
        pd.DataFrame(shares, pd.Index(prices.dates[-days:], name="day"), names).iloc[:TRADING_DAYS],
        (
            f"{source}: {settings.tasks} training tasks from {len(prices.tickers) - settings.held_out} "
            f"instruments on days before {start}, {_TESTED_TASKS} test tasks from the other "
            f"{settings.held_out} on the {days} days after that.",
            budgets_note(_REPETITIONS),
            f"The independent units are {_REPETITIONS} repetitions (held-out instruments, tasks and "
            f"parameters) crossed with {_TESTED_YEARS} years; n is the smaller number.",
        ),
    )
