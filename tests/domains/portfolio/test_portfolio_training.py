"""Years to test on, what is chosen on them, and what is decided next: trust must be earned."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio import SimulatedMarket
from apportion.domains.portfolio.allocation import next_allocation
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import draw_portfolio_tasks
from apportion.domains.portfolio.validation import Years, best_variant
from apportion.errors import InputError
from apportion.policy import Recurrent

PRICES = SimulatedMarket.draw(universe=5, days=1000, seed=2).prices


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
    assert "trust 0 (0 is equal shares)" in choice.summary()


def test_instruments_are_held_out_of_every_task():
    settings = PortfolioSettings(tasks=3, task_size=3, held_out=1)
    seen, unseen, tasks = draw_portfolio_tasks(5, settings)
    assert sorted([*seen, *unseen]) == list(range(5))
    assert len(unseen) == 1
    assert tasks.members.shape == (3, 3)
    assert unseen[0] not in np.asarray(tasks.members)
    assert len(draw_portfolio_tasks(5, replace(settings, method="stl"))[-1]) == 1


def test_the_next_allocation_is_what_a_backtest_does_next():
    """Tomorrow's shares from a file cut today are those of a backtest that has tomorrow."""
    policy, day = Recurrent(3, 4, key=jax.random.key(0)), PRICES.dates[700]
    ahead = backtest_strategies(PRICES, {"policy": policy}, start=day, end=day, window=6)
    shares = np.asarray(next_allocation(policy, PRICES.until(day), window=6))
    np.testing.assert_allclose(shares, ahead.allocations["policy"][0], atol=1e-6)
    assert np.ptp(shares) > 1e-4


@pytest.mark.parametrize("year", [2000, 2010])
def test_years_without_days_in_them_or_before_them_are_refused(year):
    with pytest.raises(InputError, match=f"walk-forward year {year}: "):
        Years.of(PRICES, [year], before=10)
