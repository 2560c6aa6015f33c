"""Allocations within limits and cash, holdings, and the trades between them."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.composition import EqualShares, PartialTrading
from apportion.domains.portfolio import Costs, Market, SimulatedMarket
from apportion.domains.portfolio.allocation import (
    TrainedPolicy,
    allocate_next,
    next_allocation,
    read_holdings,
)
from apportion.domains.portfolio.backtest import _walk_one as walk_once
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import compose
from apportion.errors import InputError
from apportion.policy import Policy, Recurrent
from apportion.problem import check_problem
from apportion.simplex import Head
from apportion.tasks import Task

PRICES = SimulatedMarket.draw(universe=6, days=120, seed=5).prices
HEAD = Head(floor=0.02, cap=0.45)
SETTINGS = PortfolioSettings(
    trust=0.9, trade_fraction=0.8, min_weight=0.02, max_weight=0.45, max_turnover=0.2
)


def opinionated(key) -> Policy:
    """A policy that trades much: its shares are far from equal and change daily."""
    policy = Recurrent(3, 6, key=key)
    return eqx.tree_at(lambda p: p.score.of_features, policy, 4 * jnp.ones(6))


MEMBERS = eqx.filter_vmap(opinionated)(jax.random.split(jax.random.key(0), 2))
LIMITED = compose(MEMBERS, SETTINGS)
FREE = compose(MEMBERS, replace(SETTINGS, min_weight=0.0, max_weight=1.0, max_turnover=2.0))


def market(head: Head, prices=PRICES) -> Market:
    """As a backtest has it, which then shares its programs."""
    return Market.of(prices, window=8, costs=Costs(0.0025, exact=True), head=head)


def test_every_day_of_a_walk_is_within_limits_whatever_the_order_of_tickers():
    bounded, unbounded = market(HEAD), market(Head())
    walk = walk_once(LIMITED, bounded, bounded.everything())
    shares = np.asarray(walk.allocations, float)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    assert shares.max() <= 0.45 + 1e-6
    assert shares.min() >= 0.02 - 1e-6
    assert np.asarray(walk.turnover).max() <= 0.2 + 1e-6
    # Without limits the same policy exceeds them all.
    free = walk_once(FREE, unbounded, unbounded.everything())
    assert np.asarray(free.allocations).max() > 0.45
    assert np.asarray(free.allocations).min() < 0.02
    assert np.asarray(free.turnover).max() > 0.2
    order = np.array([3, 5, 1, 0, 4, 2])
    moved = market(HEAD, PRICES.select([PRICES.tickers[i] for i in order]))
    again = walk_once(LIMITED, moved, moved.everything())
    np.testing.assert_allclose(again.allocations, walk.allocations[:, order], atol=1e-5)


def test_a_task_too_small_for_its_limits_stays_whole():
    """Two instruments cannot both stay below 45 %: the limit gives way, no more."""
    tasks = Task.of([[0, 1, 2], [3, 5], range(6)])
    check_problem(market(HEAD), tasks)
    three, two, _ = (
        np.asarray(walk_once(LIMITED, market(HEAD), task).allocations) for task in tasks
    )
    assert three.max() <= 0.45 + 1e-6
    np.testing.assert_allclose(two, np.tile([0.5, 0.5, 0, 0, 0, 0], (len(two), 1)), atol=1e-6)


def test_limits_that_the_instruments_cannot_meet_are_refused():
    PortfolioSettings(max_weight=0.1, task_size=10)
    with pytest.raises(InputError, match=r"max_weight 0.15: 6 instruments .* at least 0.1667"):
        market(Head(cap=0.15))
    with pytest.raises(InputError, match=r"min_weight 0.3: 6 instruments .* at most 0.1667"):
        market(Head(floor=0.3))
    named = replace(PRICES, tickers=("cash", *PRICES.tickers[1:]))
    with pytest.raises(InputError, match='"cash" is among the prices'):
        Market.of(named, window=8, costs=Costs(cash=True))


class AllCash(Policy):
    def encode(self, history, mask):
        return ()

    def allocate(self, features, held, mask, bounds=None):
        return jnp.zeros_like(held).at[0].set(1.0)


class NotFinite(AllCash):
    def allocate(self, features, held, mask, bounds=None):
        return held * jnp.nan


def test_shares_that_are_not_finite_are_refused():
    with pytest.raises(InputError, match="allocation has numbers that are not finite"):
        next_allocation(NotFinite(), PRICES, window=8)
    with pytest.raises(InputError, match=r"broken: its allocation in period 0 is \[nan"):
        backtest_strategies(PRICES, {"broken": NotFinite()}, window=8)


def test_other_strategies_have_no_limits_and_no_cash():
    both = {"policy": LIMITED, "cash": AllCash(), "free": EqualShares()}
    heads = {"policy": HEAD, "cash": Head(cash=True)}
    result = backtest_strategies(PRICES, both, window=8, heads=heads)
    assert result.tickers == ("cash", *PRICES.tickers)
    # Six sevenths are sold on the first day, and nothing moves after it.
    assert result.net["cash"][0] == pytest.approx(-0.0025 * 6 / 7, abs=1e-7)
    np.testing.assert_allclose(result.net["cash"][1:], 0, atol=1e-7)
    plain = backtest_strategies(PRICES, {"free": EqualShares()}, window=8)
    for name in ("free", "equal-crp"):
        assert (result.allocations[name][:, 0] == 0).all()
        np.testing.assert_allclose(result.net[name], plain.net[name], atol=1e-12)


def test_holdings_are_read_in_the_order_of_the_tickers(tmp_path):
    table, names = tmp_path / "today.csv", ("A", "B", "C")
    table.write_text("ticker,share\nC,0.25\n A ,0.75\n")
    np.testing.assert_array_equal(read_holdings(table, names)[0], [0, 0.75, 0, 0.25])
    table.write_text("Ticker, Quantity\ncash,12.5\nC,3\n")
    amounts, counted = read_holdings(table, names, cash=True)
    assert counted
    np.testing.assert_array_equal(amounts, [12.5, 0, 0, 3])
    with pytest.raises(InputError, match='"cash" is among the prices'):
        read_holdings(table, ("A", "cash"))
    table.write_text("ticker,quantity\nC,3\n")
    np.testing.assert_array_equal(read_holdings(table, names)[0], [0, 0, 0, 3])
    with pytest.raises(InputError, match='has no row "cash", but the policy can hold cash'):
        read_holdings(table, names, cash=True)


def test_trades_lead_from_the_holdings_to_the_shares(tmp_path):
    """Half of the way from one instrument to equal shares; money is invested too."""
    about = {"job": "portfolio", "window": 8, "channels": 1, "cost": 0.0025, "last": "2000-01-01"}
    trained = TrainedPolicy.of(PartialTrading(EqualShares(), 0.5), about)
    first, file = PRICES.tickers[0], tmp_path / "held.csv"
    file.write_text(f"ticker,quantity\n{first},500\ncash,1234.5\n")
    result = allocate_next(trained, PRICES, file)
    assert list(result.to_json()) == ["date", "allocation", "trades"]
    assert result.shares[first] == pytest.approx(7 / 12)
    trades = result.to_frame().set_index("ticker")
    assert list(trades.index) == [*PRICES.tickers, "cash"]
    value = 500 * PRICES.close[-1, 0] + 1234.5
    assert trades["money"][first] == pytest.approx(value * 7 / 12 - 500 * PRICES.close[-1, 0])
    assert trades["money"]["cash"] == pytest.approx(-1234.5)
    assert trades["money"].sum() == pytest.approx(0, abs=1e-6)
    assert (trades["share"] - trades["held"]).tolist() == trades["trade"].tolist()
    assert "money" in result.summary()
    # The written shares serve as the next holdings, and shares have no money.
    shares = allocate_next(trained, PRICES).to_frame()
    shares.to_csv(file, index=False)
    again = allocate_next(trained, PRICES, file)
    assert list(again.to_frame()) == ["ticker", "share", "held", "trade"]
    assert again.to_frame()["held"].tolist() == pytest.approx(shares["share"].tolist())
    # Money alone starts from equal shares.
    file.write_text("ticker,quantity\ncash,600\n")
    money = allocate_next(trained, PRICES, file).to_frame()["money"]
    assert money.tolist() == pytest.approx([100] * 6 + [-600])
    for wrong in ({"window": 0}, {"cost": 0.7}, {"rules": {"rebalance": "weekly"}}):
        with pytest.raises(InputError, match="saved with the policy is invalid"):
            TrainedPolicy.of(EqualShares(), about | wrong)
