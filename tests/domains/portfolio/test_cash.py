"""Cash, and commissions by instrument and side: in training, in a backtest and on the command line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apportion.domains.portfolio.commissions import rates_of, read_commissions
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from apportion.cli import main
from apportion.composition import EqualShares
from apportion.domains.portfolio import Costs, SimulatedMarket
from apportion.domains.portfolio.backtest import backtest_strategies
from apportion.domains.portfolio.rules import Rules
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import next_allocation, train_portfolio
from apportion.errors import InputError
from apportion.policy import Policy

PRICES = SimulatedMarket.draw(universe=5, days=160).prices
TINY = {"tasks": 3, "task_size": 3, "steps": 4, "members": 2, "window": 8, "batch": 16, "hidden": 4}
SHARES = st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(lambda x: sum(x) > 0.1)
RATES = st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), min_size=4, max_size=4)


def simplex(values) -> np.ndarray:
    return np.asarray(values, float) / np.sum(values)


def left_over(mu: float, w: np.ndarray, a: np.ndarray, rates: np.ndarray) -> float:
    """What selling brings in beyond what buying takes."""
    sold, bought = np.maximum(w - mu * a, 0), np.maximum(mu * a - w, 0)
    return ((1 - rates[:, 1]) * sold).sum() - (bought / (1 - rates[:, 0])).sum()


@given(held=SHARES, wanted=SHARES, rates=RATES)
def test_the_exact_factor_by_instrument_and_side_conserves_money(held, wanted, rates):
    w, a, rates = simplex(held), simplex(wanted), np.array(rates)
    with jax.enable_x64(True):
        costs = Costs(rates, exact=True)
        mu = float(costs.cost_factor(jnp.asarray(w), jnp.asarray(a)))
    assert mu == pytest.approx(brentq(left_over, 0.5, 1.0 + 1e-9, (w, a, rates)), abs=1e-9)


@given(held=SHARES, wanted=SHARES, rate=st.floats(0, 0.1))
def test_equal_rates_for_each_cost_what_one_rate_does(held, wanted, rate):
    w, a = jnp.asarray(simplex(held)), jnp.asarray(simplex(wanted))
    for exact in (False, True):
        for cash in (False, True):
            for each in (np.full(4, rate), np.full((4, 2), rate)):
                one = Costs(rate, exact=exact, cash=cash).cost_factor(w, a)
                many = Costs(each, exact=exact, cash=cash).cost_factor(w, a)
                assert many == pytest.approx(float(one), abs=1e-6)


def test_rates_by_entity_have_a_finite_gradient():
    w, a = jnp.asarray(simplex([3, 1, 4, 2])), jnp.asarray(simplex([1, 3, 2, 4]))
    costs = Costs(np.array([[0.0, 0.01], [0.02, 0.0], [0.01, 0.01], [0.0, 0.0]]), exact=True)
    with jax.enable_x64(True):
        w, a = w.astype(float), a.astype(float)
        slope = jax.grad(lambda a: costs.cost_factor(w, a))(a)
        for i in range(4):
            step = jnp.eye(4)[i] * 1e-6
            gap = costs.cost_factor(w, a + step) - costs.cost_factor(w, a - step)
            assert float(slope[i]) == pytest.approx(float(gap) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("rate", [np.array([0.1, 0.6]), np.array([-0.1, 0.0]), np.nan])
def test_rates_outside_their_range_are_refused(rate):
    with pytest.raises(InputError, match="commission"):
        Costs(rate)


def test_a_file_of_commissions_is_read_by_ticker_and_side(tmp_path):
    file = tmp_path / "costs.csv"
    file.write_text("ticker,buy,sell\n000001,0.001,0.002\nNA,0,0.003\n")
    np.testing.assert_array_equal(rates_of(file, ("NA", "000001")), [[0, 0.003], [0.001, 0.002]])
    file.write_text("Ticker, Cost\nA,0.001\n")
    assert read_commissions(file) == {"A": [0.001, 0.001]}


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
    # Five sixths are sold on the first day, and nothing moves after it.
    assert result.net["policy"][0] == pytest.approx(-0.0025 * 5 / 6, abs=1e-7)
    np.testing.assert_allclose(result.net["policy"][1:], 0, atol=1e-7)
    for name in ("free", "equal-crp"):
        np.testing.assert_allclose(result.allocations[name][:, 0], 0, atol=1e-6)
    plain = backtest_strategies(PRICES, {}, window=8)
    np.testing.assert_allclose(result.gross["equal-crp"], plain.gross["equal-crp"], atol=1e-6)
    np.testing.assert_allclose(result.net["equal-crp"][1:], plain.net["equal-crp"][1:], atol=1e-6)


def test_what_is_dear_to_trade_costs_more_in_a_backtest():
    cheap = {ticker: [0.0, 0.0] for ticker in PRICES.tickers}
    dear = cheap | {PRICES.tickers[0]: [0.01, 0.01]}
    free, paid = (backtest_strategies(PRICES, {}, window=8, cost=cost) for cost in (cheap, dear))
    np.testing.assert_allclose(free.net["equal-crp"], free.gross["equal-crp"], atol=1e-12)
    traded = np.abs(np.diff(paid.allocations["equal-crp"], axis=0)).sum()
    assert traded < 1e-4  # Equal shares again each day: only drift is traded back.
    lost = np.log1p(free.net["equal-crp"]).sum() - np.log1p(paid.net["equal-crp"]).sum()
    assert 0 < lost < 0.01 * paid.turnover["equal-crp"].sum()
    with pytest.raises(InputError, match="4 of 5 tickers have no cost"):
        backtest_strategies(PRICES, {}, window=8, cost={PRICES.tickers[0]: [0.0, 0.0]})


def test_a_policy_is_trained_with_cash_and_asked_for_its_next_allocation():
    settings = PortfolioSettings(**TINY, cash=True, max_weight=0.2)
    done = train_portfolio(PRICES, settings)
    rules = Rules.of(settings)
    shares = np.asarray(next_allocation(done.policy, PRICES, window=8, rules=rules))
    assert shares.shape == (6,)
    assert shares.sum() == pytest.approx(1, abs=1e-6)
    # Five instruments of at most a fifth would leave no cash; the policy starts near equal shares.
    assert 0.05 < shares[0] < 0.5
    result = backtest_strategies(PRICES, {"policy": done.policy}, window=8, rules={"policy": rules})
    assert (result.allocations["policy"][:, 1:] <= 0.2 + 1e-5).all()
    with pytest.raises(InputError, match='"cash" is among the prices'):
        rules.check(("cash", "A"))


def test_cash_and_a_file_of_costs_on_the_command_line(tmp_path, capfd):
    PRICES.to_frame().to_csv(tmp_path / "prices.csv")
    rows = [f"{ticker},0.001,0.002" for ticker in PRICES.tickers]
    (tmp_path / "costs.csv").write_text("\n".join(["ticker,buy,sell", *rows]))
    run, until = tmp_path / "run", str(PRICES.dates[120])

    def command(*arguments: object) -> dict:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert left.value.code == 0, err
        return json.loads(out)

    small = [
        word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    given = ("--prices", tmp_path / "prices.csv", "--cost", tmp_path / "costs.csv", "--cash")
    trained = command(
        "train", "portfolio", *given, "--until", until, "--out", run, "--json", "--quiet", *small
    )
    assert json.loads((run / "policy.json").read_text())["about"]["cost"][PRICES.tickers[0]] == [
        0.001,
        0.002,
    ]
    again = command("backtest", run, "--json")
    assert again["net"] == trained["results"]["net"]
    free = command("backtest", run, "--cost", "0", "--json")
    assert free["net"]["policy"]["wealth"] == pytest.approx(free["gross"]["policy"]["wealth"])
    assert free["net"]["policy"]["wealth"] > again["net"]["policy"]["wealth"]
    told = command("allocate", run, "--json")["allocation"]
    assert list(told) == ["cash", *PRICES.tickers]
    (tmp_path / "today.json").write_text('{"cash": 1.0}')
    held = command("allocate", run, "--holdings", tmp_path / "today.json", "--json")["allocation"]
    assert held["cash"] == pytest.approx(0.9, abs=0.05)
