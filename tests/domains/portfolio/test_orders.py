"""Orders: money adds up, whole lots never overspend, and costs are those of a backtest."""

import json
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.cli import main
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.domains.portfolio.orders import Holdings, Sides, plan_orders, whole_lots
from apportion.domains.portfolio.rules import Rules, rebalancing_days
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.domains.portfolio.training import compose, untrained_policies
from apportion.runs.folder import Run
from apportion.runs.job import Outcome
from apportion.runs.runner import finish

NAMES = ("A", "B", "C", "D")
PRICES = replace(SimulatedMarket.draw(universe=4, days=60).prices, high=None, low=None)


def four(of: st.SearchStrategy) -> st.SearchStrategy[list]:
    return st.lists(of, min_size=4, max_size=4)


@st.composite
def plans(draw) -> dict:
    """Holdings, prices, targets and costs of all sizes, and lots or none."""
    rates = draw(four(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1))))
    amounts = draw(four(st.just(0.0) | st.floats(0, 1e4)))
    lots = draw(st.none() | four(st.sampled_from([0.1, 1.0, 10.0, 100.0])))
    shares = np.array(draw(four(st.floats(0, 1)))) + 0.01
    return {
        "prices": np.exp(draw(four(st.floats(-3, 7)))),
        "holdings": Holdings(np.array(amounts), draw(st.floats(1, 1e6)), counted=True),
        "target": np.append(draw(st.sampled_from([0.0, 0.3])), shares),
        "cost": dict(zip(NAMES, rates, strict=True)),
        "lots": None if lots is None else np.array(lots),
    }


@given(plans())
@settings(deadline=None, max_examples=150)
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
    for name, price, traded in zip(NAMES, prices, orders.units, strict=True):
        buy, sell = cost[name]
        money -= traded * price / (1 - buy) if traded > 0 else traded * price * (1 - sell)
    assert money == pytest.approx(orders.after[0], abs=1e-9 * value)
    assert money >= -1e-9 * value
    if plan["lots"] is not None:
        lots = orders.units / plan["lots"]
        np.testing.assert_allclose(lots, np.round(lots), atol=1e-6)
    else:
        np.testing.assert_allclose(orders.after / orders.after.sum(), orders.target, atol=1e-7)


@given(plans())
@settings(deadline=None, max_examples=100)
def test_whole_lots_are_within_a_lot_of_the_fractions_where_money_allows(plan):
    lots = np.ones(4) if plan["lots"] is None else plan["lots"]
    exact = plan_orders(NAMES, **plan | {"lots": None})
    whole = plan_orders(NAMES, **plan | {"lots": lots})
    above = (whole.units - exact.units) / lots
    assert above.max() < 1 + 1e-6
    odd = plan["holdings"].amounts % lots > 1e-6
    # Of what is held in odd lots some cannot be sold, and then less can be bought.
    if not odd.any():
        assert above.min() > -1 - 1e-6
        assert whole.after[0] >= exact.after[0] - 1e-9 * whole.before.sum()


def test_two_instruments_by_hand():
    """100 of A at 10, none of B at 20, halves, 1 % on either side.

    Sold x of A brings .99 x, which buys .99^2 x of B: 1000 - x = .9801 x, x = 505.0250...
    """
    held = Holdings(np.array([100.0, 0.0]), 0.0, counted=True)
    orders = plan_orders(("A", "B"), np.array([10.0, 20.0]), held, np.array([0, 0.5, 0.5]), 0.01)
    sold = 1000 / 1.9801
    np.testing.assert_allclose(orders.trades, [-sold, 1000 - sold], rtol=1e-12)
    np.testing.assert_allclose(orders.units, [-sold / 10, (1000 - sold) / 20], rtol=1e-12)
    assert orders.cost == pytest.approx(sold * 0.01 + 0.99 * sold * 0.01, rel=1e-12)
    # In lots of 10 units: 5.05 lots of A wanted sold, 2.47 of B bought. Down: 6 sold for 594, 2 bought
    # for 404.04; the larger remainder is A's, .95, and taking it back costs 99 of the 189.96.
    whole = plan_orders(
        ("A", "B"),
        np.array([10.0, 20.0]),
        held,
        np.array([0, 0.5, 0.5]),
        0.01,
        lots=np.full(2, 10.0),
    )
    np.testing.assert_array_equal(whole.units, [-50, 20])
    assert whole.after[0] == pytest.approx(500 * 0.99 - 400 / 0.99, rel=1e-12)


def test_sales_that_fall_short_cut_all_purchases_alike():
    # Half a lot cannot be sold, so its 50 are not there to buy with.
    each = Sides(np.array([100.0, 10.0, 10.0]), np.array([100.0, 10.0, 10.0]))
    lots = whole_lots(np.array([-0.5, 3.0, 2.0]), np.array([0.5, 0, 0]), 0.0, each)
    assert lots.tolist() == [0, 0, 0]
    lots = whole_lots(np.array([-1.5, 9.0, 6.0]), np.array([1.5, 0, 0]), 0.0, each)
    assert lots[0] == -1
    assert 8 <= lots[1:].sum() <= 10
    assert lots[1] > lots[2]


@pytest.mark.parametrize(
    "cost", [0.0025, {t: [0.001 * i, 0.002] for i, t in enumerate(PRICES.tickers)}]
)
def test_orders_cost_what_a_backtest_deducts_for_the_same_trade(cost, policy):
    result = backtest_strategies(PRICES, {"policy": policy}, window=8, cost=cost)
    close = PRICES.close[PRICES.row(result.dates[0]) - 1]
    # Backtests begin with equal shares.
    held = Holdings(1000 / close, 0.0, counted=True)
    wanted = np.append(0.0, result.allocations["policy"][0])
    orders = plan_orders(PRICES.tickers, close, held, wanted, cost)
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


@pytest.fixture(scope="module")
def policy():
    job = PortfolioJob(window=8, batch=16, hidden=4, members=1, task_size=2, k=1.0, eta=0.5)
    return compose(untrained_policies(1, job, jax.random.split(jax.random.key(0), 1)), job)


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory):
    """A folder with a finished run, one that trades monthly, and their prices."""
    folder = tmp_path_factory.mktemp("orders")
    PRICES.to_frame().to_csv(folder / "prices.csv")
    about = {
        "job": "portfolio", "window": 8, "channels": 1, "cost": 0.0025, "last": str(PRICES.dates[40]),
    }  # fmt: skip
    for name, rules in (("run", Rules()), ("monthly", Rules(rebalance="monthly"))):
        made = Run.create(
            folder / name, "portfolio", PortfolioJob(prices=folder / "prices.csv"), {}
        )
        finish(made, Outcome(policy, {}, "", about | {"rules": rules.to_dict()}, {}))
    return folder


@pytest.fixture
def allocate(run, capfd):
    def call(*arguments: object, name: str = "run") -> str:
        with pytest.raises(SystemExit) as left:
            main(["allocate", str(run / name), *map(str, arguments)])
        out, err = capfd.readouterr()
        assert left.value.code == 0, err
        return out

    return call


def test_orders_on_the_command_line_add_up_and_are_written(run, allocate):
    first, *_ = PRICES.tickers
    (run / "today.csv").write_text(f"ticker,quantity\n{first},500\ncash,1234.5\n")
    given = ("--holdings", run / "today.csv", "--lot", 1)
    told = json.loads(allocate(*given, "--json", "--out", run / "orders.json"))
    assert json.loads((run / "orders.json").read_text()) == told
    closes = dict(zip(PRICES.tickers, PRICES.close[-1], strict=True))
    orders = {row["ticker"]: row for row in told["orders"]}
    held = {ticker: 500.0 * (ticker == first) for ticker in closes}
    spent = 0.0
    for ticker, price in closes.items():
        units = orders[ticker]["units"]
        assert units == pytest.approx(round(units), abs=1e-9)
        assert orders[ticker]["price"] == pytest.approx(price)
        spent += units * price / 0.9975 if units > 0 else units * price * 0.9975
        held[ticker] += units
    assert told["cash"]["after"] == pytest.approx(1234.5 - spent, rel=1e-9)
    assert told["cash"]["after"] >= 0
    worth = sum(held[t] * closes[t] for t in closes) + told["cash"]["after"]
    assert told["value"]["before"] == pytest.approx(worth + told["value"]["cost"], rel=1e-9)
    assert told["value"]["before"] == pytest.approx(500 * closes[first] + 1234.5)
    # Half of the way, from all in one to about a quarter.
    assert orders[first]["target"] == pytest.approx(0.625, abs=0.1)
    assert set(told["assumed"]) == {"prices", "costs", "lot", "cash"}
    assert told["assumed"]["lot"] == "whole lots of 1"
    printed = allocate(*given, "--out", run / "orders.csv")
    assert f"wrote {run / 'orders.csv'}" in printed
    assert f"prices: the closes of {PRICES.dates[-1]}" in printed
    table = pd.read_csv(run / "orders.csv").set_index("ticker")
    assert table.loc["cash", "quantity"] == pytest.approx(told["cash"]["after"])
    # What is held when all is filled serves as the next day's holdings.
    again = json.loads(allocate("--holdings", run / "orders.csv", "--json"))
    assert again["value"]["before"] == pytest.approx(told["value"]["after"], rel=1e-9)


def test_orders_from_shares_are_shares_of_the_whole(run, allocate):
    (run / "shares.json").write_text(json.dumps({PRICES.tickers[0]: 1.0}))
    told = json.loads(allocate("--holdings", run / "shares.json", "--json"))
    assert told["value"]["before"] == 1
    assert "units" not in told["orders"][0]
    assert 1 - told["value"]["after"] == pytest.approx(told["value"]["cost"], rel=1e-6)
    assert "afterwards" in allocate("--holdings", run / "shares.json")


def test_a_portfolio_is_set_up_from_nothing_but_cash(run, allocate):
    (run / "cash.json").write_text('{"quantities": {}, "cash": 10000}')
    told = json.loads(allocate("--holdings", run / "cash.json", "--json"))
    assert told["cash"] == {"before": 10000, "after": 0}
    assert told["value"]["cost"] == pytest.approx(25, rel=1e-9)
    assert "set up from equal shares" in told["assumed"]["start"]


def test_nothing_is_traded_on_a_day_that_is_none_to_rebalance(run, allocate):
    assert not rebalancing_days(PRICES.dates, "monthly")[-1]
    (run / "some.json").write_text(json.dumps({"quantities": {PRICES.tickers[0]: 3}, "cash": 10}))
    told = json.loads(allocate("--holdings", run / "some.json", "--json", name="monthly"))
    assert {row["units"] for row in told["orders"]} == {0}
    assert told["cash"] == {"before": 10, "after": 10}
    assert told["value"]["cost"] == 0
    assert set(told["assumed"]) == {"prices", "costs", "lot", "day"}
    # From money alone a portfolio is set up on any day.
    (run / "cash.json").write_text('{"quantities": {}, "cash": 10000}')
    told = json.loads(allocate("--holdings", run / "cash.json", "--json", name="monthly"))
    assert told["cash"]["after"] == 0
