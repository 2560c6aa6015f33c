"""Orders: money adds up, whole lots never overspend, and costs are those of a backtest."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.composition import PartialTrading
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.domains.portfolio.orders import Holdings, plan_orders, read_holdings, whole_lots
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.errors import InputError
from apportion.policy import Recurrent

NAMES = ("A", "B", "C", "D")
PRICES = replace(SimulatedMarket.draw(universe=4, days=60).prices, high=None, low=None)


def four(of: st.SearchStrategy) -> st.SearchStrategy[list]:
    return st.lists(of, min_size=4, max_size=4)


@st.composite
def plans(draw) -> dict:
    """Holdings, prices, targets and costs of all sizes, and lots or none."""
    amounts = draw(four(st.just(0.0) | st.floats(0, 1e4)))
    shares = np.array(draw(four(st.floats(0, 1)))) + 0.01
    return {
        "prices": np.exp(draw(four(st.floats(-3, 7)))),
        "holdings": Holdings(np.array(amounts), draw(st.floats(1, 1e6)), counted=True),
        "target": np.append(draw(st.sampled_from([0.0, 0.3])), shares),
        "cost": draw(st.floats(0, 0.1)),
        "lot": draw(st.none() | st.sampled_from([0.1, 1.0, 10.0, 100.0])),
    }


@given(plans())
@settings(deadline=None, max_examples=60)
def test_value_before_is_value_after_and_cost_and_nothing_is_overspent(plan):
    prices, holdings, cost = plan["prices"], plan["holdings"], plan["cost"]
    orders = plan_orders(NAMES, **plan)
    value = float(holdings.amounts @ prices + holdings.cash)
    # Cash comes last, at a price of 1.
    units = orders.to_frame()["quantity"].to_numpy()
    after = float(units @ np.append(prices, 1.0))
    assert value == pytest.approx(after + orders.cost, rel=1e-9)
    assert units.min() >= 0
    assert orders.after.min() >= 0
    # What the broker's account says, trade by trade.
    money = holdings.cash
    for price, traded in zip(prices, orders.units, strict=True):
        money -= traded * price / (1 - cost) if traded > 0 else traded * price * (1 - cost)
    assert money == pytest.approx(orders.after[0], abs=1e-9 * value)
    assert money >= -1e-9 * value
    if plan["lot"] is not None:
        lots = orders.units / plan["lot"]
        np.testing.assert_allclose(lots, np.round(lots), atol=1e-6)
    else:
        np.testing.assert_allclose(orders.after / orders.after.sum(), orders.target, atol=1e-7)


@given(plans())
@settings(deadline=None, max_examples=40)
def test_whole_lots_are_within_a_lot_of_the_fractions_where_money_allows(plan):
    lot = plan["lot"] or 1.0
    exact = plan_orders(NAMES, **plan | {"lot": None})
    whole = plan_orders(NAMES, **plan | {"lot": lot})
    above = (whole.units - exact.units) / lot
    assert above.max() < 1 + 1e-6
    odd = plan["holdings"].amounts % lot > 1e-6
    # Of what is held in odd lots some cannot be sold, and then less can be bought.
    if not odd.any():
        assert above.min() > -1 - 1e-6
        assert whole.after[0] >= exact.after[0] - 1e-9 * whole.before.sum()


def test_two_instruments_in_lots_by_hand():
    """100 of A at 10, none of B at 20, halves, 1 % on either side, lots of 10.

    Sold x of A brings .99 x, which buys .99^2 x of B: 1000 - x = .9801 x, 5.05 lots of A and 2.47 of B.
    Down: 6 sold for 594, 2 bought for 404.04; the larger remainder is A's, .95, and taking it back costs 99
    of the 189.96.
    """
    held, halves = Holdings(np.array([100.0, 0.0]), 0.0, counted=True), np.array([0, 0.5, 0.5])
    whole = plan_orders(("A", "B"), np.array([10.0, 20.0]), held, halves, 0.01, lot=10.0)
    np.testing.assert_array_equal(whole.units, [-50, 20])
    assert whole.after[0] == pytest.approx(500 * 0.99 - 400 / 0.99, rel=1e-12)


def test_sales_that_fall_short_cut_all_purchases_alike():
    # Half a lot cannot be sold, so its 50 are not there to buy with.
    each = np.array([100.0, 10.0, 10.0])
    lots = whole_lots(np.array([-0.5, 3.0, 2.0]), np.array([0.5, 0, 0]), 0.0, each, each)
    assert lots.tolist() == [0, 0, 0]
    lots = whole_lots(np.array([-1.5, 9.0, 6.0]), np.array([1.5, 0, 0]), 0.0, each, each)
    assert lots[0] == -1
    assert 8 <= lots[1:].sum() <= 10
    assert lots[1] > lots[2]


def test_orders_cost_what_a_backtest_deducts_for_the_same_trade():
    policy = PartialTrading(Recurrent(1, 4, key=jax.random.key(0)), 0.5)
    result = backtest_strategies(PRICES, {"policy": policy}, window=8, cost=0.0025)
    close = PRICES.close[PRICES.row(result.dates[0]) - 1]
    # Backtests begin with equal shares.
    held = Holdings(1000 / close, 0.0, counted=True)
    wanted = np.append(0.0, result.allocations["policy"][0])
    orders = plan_orders(PRICES.tickers, close, held, wanted, 0.0025)
    kept = (1 + result.net["policy"][0]) / (1 + result.gross["policy"][0])
    assert 1 - kept > 0
    assert orders.cost / 4000 == pytest.approx(1 - kept, rel=1e-9, abs=1e-15)


def test_nothing_is_traded_where_it_is_held():
    held = Holdings(np.array([3.0, 0.0]), 7.0, counted=True)
    orders = plan_orders(
        ("A", "B"), np.array([2.0, np.nan]), held, np.array([0, 0.5, 0.5]), 0.01, hold=True
    )
    assert orders.cost == 0
    np.testing.assert_array_equal(orders.after, [7, 6, 0])
    assert orders.to_json()["orders"][1]["price"] is None


def test_holdings_are_read_in_the_order_of_the_tickers_and_the_rest_holds_nothing(tmp_path):
    table = tmp_path / "today.csv"
    table.write_text("ticker,share\nC,0.25\n A ,0.75\n")
    np.testing.assert_array_equal(read_holdings(table, NAMES[:3]).amounts, [0.75, 0, 0.25])
    table.write_text("Ticker, Quantity\ncash,12.5\nC,3\n")
    held = read_holdings(table, NAMES[:3], cash=True)
    assert (held.counted, held.cash) == (True, 12.5)
    # What is not held needs no price.
    np.testing.assert_array_equal(held.values(np.array([1, np.nan, 2])), [12.5, 0, 0, 6])
    # Cash must be named only where the policy may hold it.
    table.write_text("ticker,quantity\nA,1\n")
    assert read_holdings(table, NAMES[:3]).cash == 0
    with pytest.raises(InputError, match=r"today.csv: says nothing of cash"):
        read_holdings(table, NAMES[:3], cash=True)
    with pytest.raises(InputError, match='"cash" is among the prices'):
        read_holdings(table, ("A", "cash"))
