"""Years to test on, what is chosen on them, and what is decided next: trust must be earned."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio import SimulatedMarket
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import (
    draw_portfolio_tasks,
    next_allocation,
    train_portfolio,
)
from apportion.domains.portfolio.validation import Years, best_variant
from apportion.errors import InputError

PRICES = SimulatedMarket.draw(universe=5, days=1000, seed=2).prices
TINY = PortfolioSettings(
    tasks=3,
    task_size=3,
    steps=6,
    members=2,
    window=6,
    batch=12,
    hidden=4,
    learning_rate=1e-2,
    trust=1.0,
    trade_fraction=0.5,
)


def votes(learned: list[float], equal: list[float]) -> pd.DataFrame:
    rows = [
        (k, 0.1, 100, year, gain)
        for k, gains in ((0.0, equal), (0.5, learned))
        for year, gain in enumerate(gains)
    ]
    return pd.DataFrame(rows, columns=["k", "eta", "steps", "year", "sharpe_gain"])


@pytest.mark.parametrize(
    ("learned", "equal", "k"),
    [
        ([0.3, 0.2, 0.1], [0.02, 0.03, 0.2], 0.5),  # best on average and in most years
        ([2.0, -0.1, -0.1], [0.02, 0.03, 0.02], 0.0),  # one lucky year
        ([-0.1, 0.0, 0.1], [0.2, 0.2, 0.2], 0.0),
    ],
)
def test_trust_is_earned_by_winning_most_years(learned, equal, k):
    assert best_variant(votes(learned, equal)).k == k


def test_equal_shares_are_trained_least():
    """They learn nothing: which checkpoint they are read at says nothing."""
    table = pd.concat([votes([-1.0] * 3, [0.1] * 3).assign(steps=s) for s in (100, 200, 300)])
    table.loc[table.steps == 300, "sharpe_gain"] += 1e-7
    choice = best_variant(table)
    assert (choice.k, choice.steps) == (0.0, 100)
    assert "no learned policy had the better Sharpe ratio in most of 0-2" in choice.summary()


SETTINGS = replace(TINY, held_out=1)


@pytest.fixture(scope="module")
def trained():
    return train_portfolio(PRICES, SETTINGS)


def test_every_member_is_updated_and_instruments_are_held_out(trained):
    assert len(trained.unseen) == 1
    assert trained.unseen[0] not in np.asarray(trained.tasks.members)
    assert np.asarray(trained.training.state.step).tolist() == [6, 6]
    assert len(trained.training.metrics) == 2 * 6
    alone = draw_portfolio_tasks(5, replace(SETTINGS, method="stl"))[-1]
    assert len(alone) == 1


def test_the_next_allocation_is_what_a_backtest_does_next(trained):
    """Tomorrow's shares from a file cut today are those of a backtest that has tomorrow."""
    day = PRICES.dates[700]
    cut = PRICES.until(day)
    ahead = backtest_strategies(PRICES, {"policy": trained.policy}, start=day, end=day, window=6)
    np.testing.assert_allclose(
        next_allocation(trained.policy, cut, window=6), ahead.allocations["policy"][0], atol=1e-6
    )


@pytest.mark.parametrize("year", [2000, 2010])
def test_years_without_days_in_them_or_before_them_are_refused(year):
    with pytest.raises(InputError, match=f"walk-forward year {year}: "):
        Years.of(PRICES, [year], before=10)
