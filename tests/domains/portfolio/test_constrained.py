"""Portfolios within rules: every day of a walk, in training, from the command line."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.composition import Ensemble, EqualShares, PartialTrading, ShrunkToEqual
from apportion.domains.portfolio import Costs, Market, SimulatedMarket
from apportion.domains.portfolio.backtest import _walk_one as walk_once
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.domains.portfolio.constrained import constrain
from apportion.domains.portfolio.rules import Rules, rebalancing_days
from apportion.domains.portfolio.training import next_allocation
from apportion.policy import Policy, Recurrent
from apportion.problem import check_problem
from apportion.tasks import Task

PRICES = SimulatedMarket.draw(universe=6, days=120, seed=5).prices
NAMES = PRICES.tickers
CASES = {
    "weights": Rules(max_weight=0.25, min_weight=0.08),
    "all": Rules(max_weight=0.45, min_weight=0.02, max_turnover=0.2),
}
EVERYONE = Task.of([range(6)])[0]


def opinionated(seed: int) -> Policy:
    """A policy that trades much: its shares are far from equal and change daily."""
    policy = Recurrent(3, 6, key=jax.random.key(seed))
    return eqx.tree_at(lambda p: p.score.of_features, policy, 4 * jnp.ones(6))


INSIDE = PartialTrading(ShrunkToEqual(Ensemble.of([opinionated(1), opinionated(2)]), 0.9), 0.8)


def market(rules: Rules, prices=PRICES) -> Market:
    """As a backtest has it, which then shares its programs."""
    return Market.of(prices, window=8, costs=Costs(0.0025, exact=True), rules=rules)


def test_every_day_of_a_walk_is_within_the_rules_whatever_the_order_of_tickers():
    rules, free = CASES["all"], walk_once(INSIDE, market(Rules()), EVERYONE)
    walk = walk_once(constrain(INSIDE, rules), market(rules), EVERYONE)
    shares = np.asarray(walk.allocations, float)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    assert shares.max() <= rules.max_weight + 1e-6
    assert shares.min() >= rules.min_weight - 1e-6
    assert np.asarray(walk.turnover).max() <= rules.max_turnover + 1e-6
    # Without the rules the same policy breaks them all.
    shares = np.asarray(free.allocations)
    assert shares.max() > rules.max_weight
    assert shares.min() < rules.min_weight
    assert np.asarray(free.turnover).max() > rules.max_turnover
    order = np.array([3, 5, 1, 0, 4, 2])
    moved = market(rules, PRICES.select([NAMES[i] for i in order]))
    again = walk_once(constrain(INSIDE, rules), moved, EVERYONE)
    np.testing.assert_allclose(again.allocations, walk.allocations[:, order], atol=1e-5)


def test_a_task_too_small_for_its_rules_stays_whole():
    """Two instruments cannot both stay below 45 %: the limit gives way, no more."""
    rules = CASES["all"]
    tasks = Task.of([[0, 1, 2], [3, 5], range(6)])
    check_problem(market(rules), tasks)
    three, two, _ = (
        np.asarray(walk_once(constrain(INSIDE, rules), market(rules), task).allocations)
        for task in tasks
    )
    np.testing.assert_allclose(three.sum(-1), 1, atol=1e-5)
    assert three.max() <= 0.45 + 1e-6
    np.testing.assert_allclose(two, np.tile([0.5, 0.5, 0, 0, 0, 0], (len(two), 1)), atol=1e-6)


@pytest.mark.parametrize("rebalance", ["weekly", "monthly"])
def test_nothing_is_traded_between_rebalancing_days(rebalance):
    rules = replace(CASES["all"], rebalance=rebalance)
    walk = walk_once(constrain(INSIDE, rules), market(rules), EVERYONE)
    turnover, shares = np.asarray(walk.turnover), np.asarray(walk.allocations)
    # The period that ends on a row was decided on the row before it.
    decided = rebalancing_days(PRICES.dates, rebalance)[7:-1]
    entered = np.append(True, decided[1:])
    assert (turnover[~entered] == 0).all()
    assert (turnover[entered] > 1e-3).all()
    assert shares[entered].max() <= rules.max_weight + 1e-6


def test_strategies_without_rules_are_as_without_those_of_others():
    rules = replace(CASES["all"], rebalance="monthly")
    both = {"policy": constrain(INSIDE, rules), "free": INSIDE}
    result = backtest_strategies(PRICES, both, window=8, rules={"policy": rules})
    assert "rebalanced monthly; all other strategies are unconstrained" in result.summary()
    free = backtest_strategies(PRICES, {"free": INSIDE}, window=8)
    assert "unconstrained" not in free.summary()
    for name in ("free", "equal-crp"):
        np.testing.assert_array_equal(result.net[name], free.net[name])


def test_a_gradient_sees_every_day_until_the_next_trade():
    """Monthly: what is decided on one day earns on all the days it is held."""
    rules = Rules(rebalance="monthly")
    days = market(rules)
    first = jnp.full(6, 1 / 6)

    def total(wanted):
        state, earned = days.reset(EVERYONE, key=jax.random.key(0)), 0.0
        for _ in range(5):
            step = days.step(EVERYONE, state, wanted, key=jax.random.key(0))
            state, earned = step.state, earned + step.reward
        return earned

    # The first period is traded, the four after it are held (no month begins in them).
    assert not rebalancing_days(PRICES.dates, "monthly")[8:12].any()
    slope = np.asarray(jax.jit(jax.grad(total))(first))
    y = PRICES.relatives()[8:13].prod(0)
    # Shares sum to 1, so a slope that all have in common, such as the commission's, says nothing.
    held = y / y.mean()
    np.testing.assert_allclose(slope - slope.mean(), held - held.mean(), atol=1e-4)


def test_the_next_allocation_holds_where_no_day_to_rebalance_is():
    rules = replace(CASES["weights"], rebalance="weekly")
    policy = constrain(INSIDE, rules)
    held = np.array([0.3, 0.1, 0.1, 0.2, 0.2, 0.1])
    starts = rebalancing_days(PRICES.dates, "weekly")
    for row in range(100, 106):
        cut = PRICES.until(PRICES.dates[row + 1])
        shares = np.asarray(next_allocation(policy, cut, window=8, held=held, rules=rules))
        assert np.allclose(shares, held, atol=1e-7) == (not starts[row])
    # Where nothing is held a portfolio is set up, whichever day it is.
    fresh = np.asarray(next_allocation(policy, cut, window=8, rules=rules))
    assert np.abs(fresh - 1 / 6).max() > 1e-3


class AllCash(Policy):
    def encode(self, history, mask):
        return ()

    def allocate(self, features, held, mask, bounds=None):
        return jnp.zeros_like(held).at[0].set(1.0)


def test_cash_is_kept_whole_and_the_others_hold_none_of_it():
    result = backtest_strategies(
        PRICES, {"policy": AllCash(), "free": EqualShares()}, window=8, rules={"policy": Rules(cash=True)}
    )  # fmt: skip
    assert result.tickers == ("cash", *PRICES.tickers)
    # Six sevenths are sold on the first day, and nothing moves after it.
    assert result.net["policy"][0] == pytest.approx(-0.0025 * 6 / 7, abs=1e-7)
    np.testing.assert_allclose(result.net["policy"][1:], 0, atol=1e-7)
    for name in ("free", "equal-crp"):
        np.testing.assert_allclose(result.allocations[name][:, 0], 0, atol=1e-6)
    plain = backtest_strategies(PRICES, {}, window=8)
    np.testing.assert_allclose(result.gross["equal-crp"], plain.gross["equal-crp"], atol=1e-6)
    np.testing.assert_allclose(result.net["equal-crp"][1:], plain.net["equal-crp"][1:], atol=1e-6)
