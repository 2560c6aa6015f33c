"""The gains by week that a portfolio policy is certified on."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from apportion.composition import EqualShares
from apportion.domains.portfolio.backtest import backtest_strategies, lazy_rebalancing, weekly_gains
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.errors import InputError
from apportion.runs.policy_file import save_policy


@pytest.fixture(scope="module")
def prices():
    """Trading days from a Monday on, three of them missing as on holidays."""
    drawn = SimulatedMarket.draw(universe=5, days=120).prices
    days = pd.bdate_range("2020-01-06", periods=len(drawn.dates) + 3).delete([42, 43, 57])
    return replace(drawn, dates=days.to_numpy().astype(drawn.dates.dtype))


@pytest.fixture(scope="module")
def about(prices):
    return {
        "job": "portfolio", "window": 8, "channels": 1, "cost": 0.0025, "last": str(prices.dates[30]),
    }  # fmt: skip


def test_a_gain_is_the_weeks_difference_in_log_growth_net_of_costs(prices, about):
    gains = weekly_gains(EqualShares(), about, prices, "lazy-crp", bound=1.0)
    tested = backtest_strategies(
        prices, {"lazy": lazy_rebalancing()}, start=str(prices.dates[31]), window=8, cost=0.0025
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


def test_asking_every_day_only_adds_weeks_that_are_over(prices, about):
    whole = weekly_gains(EqualShares(), about, prices, "lazy-crp")
    for rows in (101, 104, 106):
        some = weekly_gains(EqualShares(), about, prices.until(str(prices.dates[rows])), "lazy-crp")
        n = len(some.values)
        assert n < len(whole.values)
        assert some.values == pytest.approx(whole.values[:n], abs=1e-9)
        assert some.labels().tolist() == whole.labels()[:n].tolist()


def test_every_kind_of_baseline_is_followed(prices, about, tmp_path):
    assert not weekly_gains(EqualShares(), about, prices, "equal-crp").values.any()
    for name in ("buy-and-hold", "momentum"):
        assert weekly_gains(EqualShares(), about, prices, name).values.any()
    later = about | {"last": str(prices.dates[60])}
    save_policy(lazy_rebalancing(), tmp_path, later)
    other = weekly_gains(EqualShares(), about, prices, str(tmp_path))
    assert other.labels()[0] > prices.dates[60]


def test_what_cannot_be_compared_is_refused(prices, about, tmp_path):
    for name in ("best-crp", "lazy", str(tmp_path / "nowhere")):
        with pytest.raises(InputError, match="there is no baseline"):
            weekly_gains(EqualShares(), about, prices, name)
    trained = about | {"last": str(prices.dates[-1])}
    with pytest.raises(InputError, match="a certificate needs later days"):
        weekly_gains(EqualShares(), trained, prices, "lazy-crp")
    save_policy(EqualShares(), tmp_path, about | {"window": 9})
    with pytest.raises(InputError, match="reads other things"):
        weekly_gains(EqualShares(), about, prices, str(tmp_path))
