"""Instruments that come late or go early: read, never held while absent, accounted for to the cent."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.composition import EqualShares, PartialTrading
from apportion.domains.portfolio import Costs, Market, Prices, SimulatedMarket
from apportion.domains.portfolio.backtest import _walk_one as walked
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.policy import Recurrent
from apportion.problem import check_problem, rollout
from apportion.tasks import Task

FULL = SimulatedMarket.draw(universe=5, days=80, seed=7).prices
WINDOW = 6
POLICY = eqx.tree_at(
    lambda p: p.score.of_features, Recurrent(3, 4, key=jax.random.key(0)), 3 * jnp.ones(4)
)
EVERYONE = Task.of([range(5)])[0]


def cut(spans: dict[int, tuple[int, int]]) -> Prices:
    """The prices with these columns there from one row to another only."""
    close, high, low = (np.array(series) for series in (FULL.close, FULL.high, FULL.low))
    for column, (first, last) in spans.items():
        for series in (close, high, low):
            series[:first, column] = np.nan
            series[last + 1 :, column] = np.nan
    return replace(FULL, close=close, high=high, low=low)


PARTLY = cut({1: (30, 79), 2: (0, 50), 4: (20, 60)})
# As a backtest has it, which then shares its programs.
MARKET = Market.of(PARTLY, window=WINDOW, costs=Costs(0.0025, exact=True))


def by_hand(prices: Prices, targets: np.ndarray, eta: float, cost: float):
    """Wealth, in money and pieces: sell what is delisted at its last close, then trade towards the
    target; what the market charges is found by bisection.
    """
    there = ~np.isnan(prices.close)
    wealth, path = 1.0, []
    open_now = there[WINDOW - 1] & there[WINDOW]
    worth = open_now / open_now.sum()
    for row in range(WINDOW, len(prices.dates)):
        listed = there[row - 1] & there[row]
        shares = worth / worth.sum()
        target = np.where(listed, targets, 0) / targets[listed].sum()
        wanted = shares + eta * (target - shares)
        wanted = np.where(listed, wanted, 0) / wanted[listed].sum()
        low, high = 0.0, 1.0
        for _ in range(60):
            left = (low + high) / 2
            sold = np.maximum(shares - left * wanted, 0).sum()
            bought = np.maximum(left * wanted - shares, 0).sum()
            # What is sold, less its commission, pays for what is bought with its own.
            low, high = (left, high) if sold * (1 - cost) >= bought / (1 - cost) else (low, left)
        growth = np.where(listed, prices.close[row] / prices.close[row - 1], 0.0)
        worth = wealth * left * wanted * np.where(listed, growth, 0.0)
        wealth = worth.sum()
        path.append(wealth)
    return np.array(path)


@pytest.mark.parametrize(
    ("late", "eta"),
    [
        *(({}, eta) for eta in (1.0, 0.3, 0.0)),
        *(({1: (30, 79), 2: (0, 50), 3: (20, 60)}, eta) for eta in (1.0, 0.3, 0.0)),
        ({1: (0, 0), 2: (79, 79), 3: (40, 41)}, 0.3),
        ({1: (5, 6), 2: (6, 7)}, 1.0),
    ],
)
def test_wealth_is_that_of_a_plain_loop_and_what_is_not_listed_is_never_held(late, eta):
    prices = cut(late)
    targets = {"first": lambda y: jnp.tile(jnp.array([0.1, 0.6, 0.1, 0.1, 0.1]), (len(y), 1))}
    lazy = PartialTrading(EqualShares(), eta)
    result = backtest_strategies(
        prices, {"lazy": lazy, "policy": POLICY}, baselines=targets, window=WINDOW, cost=0.0025
    )
    wealth = np.cumprod(1 + result.net["lazy"])
    np.testing.assert_allclose(wealth, by_hand(prices, np.ones(5), eta, 0.0025), rtol=2e-5)
    assert (np.cumprod(1 + result.gross["lazy"]) >= wealth - 1e-12).all()
    there = ~np.isnan(prices.close)
    listed = (there[1:] & there[:-1])[WINDOW - 1 :]
    for name, shares in result.allocations.items():
        assert (shares[~listed] == 0).all(), name
        np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
        assert np.isfinite(result.net[name]).all()


def test_an_absent_instrument_changes_nobodys_share():
    """Before its listing a market with the instrument is one without it."""
    few = Task.of([range(5), [0, 2, 3, 4]])[1]
    with_it, without = (walked(POLICY, MARKET, task) for task in (EVERYONE, few))
    days = 30 - WINDOW + 1  # the period after its first close, on row 30, is the first to hold it
    shares = np.asarray(with_it.allocations)
    np.testing.assert_allclose(
        shares[:days, [0, 2, 3, 4]], without.allocations[:days, :4], atol=1e-6
    )
    assert shares[days, 1] > 0
    np.testing.assert_allclose(with_it.log_return[:days], without.log_return[:days], atol=1e-6)


def test_a_walk_is_the_rollout_and_the_problem_keeps_the_interface():
    market = MARKET
    # Entities 1 and 4 both come late: a task of them alone has days with nobody there.
    tasks = Task.of([[1, 4], [0, 1, 2], [2, 4, 3], range(5)])
    check_problem(market, tasks)
    follow = eqx.filter_jit(rollout)
    for task in tasks:
        walk = walked(POLICY, market, task)
        path = follow(market, POLICY, task, key=jax.random.key(0))
        np.testing.assert_allclose(walk.log_return, path.rewards, atol=1e-6)
        np.testing.assert_allclose(walk.allocations, path.allocations, atol=1e-6)
        assert np.isfinite(np.asarray(walk.log_return)).all()
    alone = walked(POLICY, market, tasks[0])
    empty = 20 - WINDOW + 1
    assert (np.asarray(alone.log_return)[:empty] == 0).all()
    assert np.asarray(alone.allocations)[empty].tolist() == [0, 1, 0, 0, 0]
