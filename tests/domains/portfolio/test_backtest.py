"""The backtest against plain accounting, the contract of its JSON, its metrics, and gains by week."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion.composition import EqualShares, PartialTrading
from apportion.domains.portfolio import SimulatedMarket, record
from apportion.domains.portfolio.allocation import TrainedPolicy
from apportion.domains.portfolio.backtest import backtest_strategies, weekly_gains
from apportion.errors import InputError
from apportion.policy import Recurrent
from apportion.runs.policy_file import save_policy

PRICES = SimulatedMarket.draw(universe=5, days=120, seed=4).prices
LAZY = PartialTrading(EqualShares(), 0.1)
START = str(PRICES.dates[50])


def first_only(y):
    return jnp.eye(1, y.shape[1])[jnp.zeros(len(y), int)]


@pytest.fixture(scope="module")
def policy():
    return Recurrent(3, 6, key=jax.random.key(1))


@pytest.fixture(scope="module")
def result(policy):
    return backtest_strategies(
        PRICES,
        {"policy": policy, "lazy-equal-crp": LAZY},
        baselines={"first": first_only},
        start=START,
        window=8,
        cost=0.0025,
    )


def test_the_first_period_ends_on_the_first_trading_day_on_or_after_start(result):
    assert result.dates[0] == np.datetime64(START)
    assert result.net["first"][0] == pytest.approx(
        (1 - 2 * 0.0025 * 0.8) * PRICES.relatives()[50, 0] - 1, abs=1e-5
    )


def test_the_result_shows_itself_and_json_is_the_contract(result):
    told = json.loads(json.dumps(result.to_json()))
    about = {"start", "end", "periods", "trained_until", "in_sample_periods", "hindsight"}
    assert set(told) == {*about, "net", "gross"}
    assert (told["start"], told["periods"]) == (START, 70)
    keys = {"wealth", "annual_return", "volatility", "sharpe", "max_drawdown", "turnover"}
    for side in ("net", "gross"):
        assert set(told[side]) == {"policy", "lazy-equal-crp", "first", "equal-crp"}
        assert all(set(values) == keys for values in told[side].values())

    # Periods that the policy was trained on are counted.
    assert told["in_sample_periods"] == 0
    day = str(result.dates[4])
    assert replace(result, trained_until=day).to_json()["in_sample_periods"] == 5
    assert "lazy-equal-crp" in result.summary()
    frame = result.to_frame().set_index("strategy")
    assert (frame.wealth_low <= frame.wealth).all()
    assert (frame.wealth <= frame.wealth_high).all()
    assert len(result.plot().axes[0].lines) == 4
    assert result.against("equal-crp").value == 0


def test_metrics_of_a_known_path():
    returns = np.array([0.1, -0.2, 0.05, 0.3])
    assert record.wealth(returns) == pytest.approx(1.1 * 0.8 * 1.05 * 1.3)
    assert record.annual_return(returns) == pytest.approx(record.wealth(returns) ** 63 - 1)
    assert record.max_drawdown(returns) == pytest.approx(0.2)
    assert record.volatility(returns) == pytest.approx(returns.std(ddof=1) * 252**0.5)
    assert record.sharpe(returns) == pytest.approx(returns.mean() / returns.std(ddof=1) * 252**0.5)
    assert np.isnan(record.sharpe(np.zeros(5)))


def test_metrics_have_intervals_in_their_own_units():
    returns = 0.001 + 0.01 * np.random.default_rng(1).standard_normal(504)
    turnover = np.full(504, 0.02)
    days, net = np.arange(504).astype("datetime64[D]"), {"some": returns}
    tested = record.Backtest(days, (), 0.0, net, net, {"some": turnover}, {})
    found, values = tested.intervals("some"), tested.measures["net"]["some"]
    assert values.keys() - found.keys() == {"volatility", "max_drawdown"}
    for name, estimate in found.items():
        assert estimate.value == pytest.approx(values[name])
        assert estimate.low <= estimate.value <= estimate.high
    growth = found["log_growth"]
    assert found["wealth"].low == pytest.approx(np.exp(2 * growth.low))
    assert found["annual_return"].high == pytest.approx(np.expm1(growth.high))
    assert found["turnover"].low == pytest.approx(0.02)
    assert growth.n == 24


@pytest.fixture(scope="module")
def weekdays():
    """Trading days from a Monday on, three of them missing as on holidays."""
    drawn = SimulatedMarket.draw(universe=5, days=120).prices
    days = pd.bdate_range("2020-01-06", periods=len(drawn.dates) + 3).delete([42, 43, 57])
    return replace(drawn, dates=days.to_numpy().astype(drawn.dates.dtype))


def about(weekdays, **changes) -> dict:
    facts = {"job": "portfolio", "window": 8, "channels": 1, "cost": 0.0025}
    return facts | {"last": str(weekdays.dates[30])} | changes


@pytest.fixture(scope="module")
def equal(weekdays):
    return TrainedPolicy.of(EqualShares(), about(weekdays))


def test_a_gain_is_the_weeks_difference_in_log_growth_net_of_costs(weekdays, equal):
    gains = weekly_gains(equal, weekdays, "lazy-crp", bound=1.0)
    tested = backtest_strategies(
        replace(weekdays, high=None, low=None),
        {"lazy": LAZY},
        start=str(weekdays.dates[31]),
        window=8,
    )
    gap = pd.Series(
        np.log1p(tested.net["equal-crp"]) - np.log1p(tested.net["lazy"]),
        pd.DatetimeIndex(tested.dates),
    )
    # The last day is no Friday, so that its week is not over.
    assert gap.index[-1].weekday() < 4
    weeks = gap.resample("W-SUN").sum()[:-1]
    assert gains.values == pytest.approx(weeks.to_numpy(), abs=1e-12)
    days = gap.index.to_series().resample("W-SUN").last()[:-1]
    assert gains.labels().tolist() == days.dt.date.tolist()


def test_every_kind_of_baseline_is_followed(weekdays, equal, tmp_path):
    assert not weekly_gains(equal, weekdays, "equal-crp").values.any()
    for name in ("buy-and-hold", "momentum"):
        assert weekly_gains(equal, weekdays, name).values.any()
    save_policy(LAZY, tmp_path, about(weekdays, last=str(weekdays.dates[60])))
    other = weekly_gains(equal, weekdays, str(tmp_path))
    assert other.labels()[0] > weekdays.dates[60]


def test_what_cannot_be_compared_is_refused(weekdays, equal, tmp_path):
    with pytest.raises(InputError, match="a certificate needs later days"):
        weekly_gains(replace(equal, last=str(weekdays.dates[-1])), weekdays, "lazy-crp")
    save_policy(EqualShares(), tmp_path, about(weekdays, window=9))
    with pytest.raises(InputError, match="another window or other price series"):
        weekly_gains(equal, weekdays, str(tmp_path))
    with pytest.raises(InputError, match="greedy: its allocation in period 0"):
        backtest_strategies(PRICES, {}, baselines={"greedy": lambda y: jnp.ones_like(y)}, window=8)
