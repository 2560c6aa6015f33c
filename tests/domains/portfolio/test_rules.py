"""The rules of a portfolio: what cannot be met is refused in a sentence before any work."""

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio.rules import Rules, rebalancing_days
from apportion.domains.portfolio.settings import PortfolioJob, PortfolioSettings
from apportion.errors import InputError
from apportion.runs.settings import read_settings, to_toml

TICKERS = ("A", "B", "C", "D", "E")


def test_rules_that_the_instruments_cannot_meet_are_refused():
    PortfolioSettings(max_weight=0.1, task_size=10)
    PortfolioSettings(min_weight=0.1, task_size=10)
    Rules(max_weight=0.2).check(TICKERS)
    with pytest.raises(InputError, match="max_weight 0.15: 5 instruments .* at least 0.2"):
        Rules(max_weight=0.15).check(TICKERS)
    with pytest.raises(InputError, match="min_weight 0.3: 5 instruments .* at most 0.2"):
        Rules(min_weight=0.3).check(TICKERS)
    with pytest.raises(InputError, match='"cash" is among the prices'):
        Rules(cash=True).check(("cash", "A"))


def test_rebalancing_days_are_the_first_of_their_week_or_month():
    days = pd.bdate_range("2024-01-01", "2024-03-15").drop("2024-01-15")  # a holiday on a Monday
    dates = days.to_numpy().astype("datetime64[D]")
    weekly = dates[rebalancing_days(dates, "weekly")]
    assert str(weekly[2]) == "2024-01-16"
    firsts = {}
    for day in dates.tolist():
        firsts.setdefault(day.isocalendar()[:2], day)
    assert weekly.tolist() == list(firsts.values())
    monthly = dates[rebalancing_days(dates, "monthly")]
    assert monthly.astype(str).tolist() == ["2024-01-01", "2024-02-01", "2024-03-01"]
    assert rebalancing_days(dates, "daily").all()
    # Days to come say nothing about days before them.
    for rebalance in ("weekly", "monthly"):
        whole = rebalancing_days(dates, rebalance)
        np.testing.assert_array_equal(rebalancing_days(dates[:20], rebalance), whole[:20])


def test_rules_are_described_and_kept_in_settings(tmp_path):
    rules = Rules(max_weight=0.5, max_turnover=0.25, rebalance="weekly", cash=True)
    assert not Rules(rebalance="weekly").bind_shares
    assert rules.describe() == (
        "at most 50% each, at most 0.25 traded at a time, cash where it likes, rebalanced weekly"
    )
    settings = PortfolioJob(**asdict(rules))
    (tmp_path / "s.toml").write_text(to_toml(settings, "portfolio"))
    again = PortfolioJob(**read_settings(tmp_path / "s.toml", "portfolio", PortfolioJob))
    assert again == settings
    assert again.rules == rules
