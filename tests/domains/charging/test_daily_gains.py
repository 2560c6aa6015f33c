"""The gains by day that a charging policy is certified on."""

import jax
import numpy as np
import pandas as pd
import pytest

from apportion.domains.charging.backtest import POLICY, backtest_saved, daily_gains
from apportion.domains.charging.problem import CHANNELS
from apportion.domains.charging.schedulers import SCHEDULERS, fcfs
from apportion.domains.charging.sessions import read_sessions
from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.charging.training import Garages, facts_of
from apportion.policy import Pooled
from apportion.runs.policy_file import save_policy

SETTINGS = ChargingSettings(site=("jpl",), until="2021-05-31", task_size=5, held_out=0.0)
SOME = {"site": "jpl", "tasks": 2}


@pytest.fixture(scope="module")
def frame():
    found = read_sessions()
    return found[found.arrival > pd.Timestamp("2021-04-30")]


@pytest.fixture(scope="module")
def policy():
    return Pooled(CHANNELS, 4, key=jax.random.key(0))


@pytest.fixture(scope="module")
def saved(frame):
    return facts_of(Garages.of(frame, SETTINGS), SETTINGS)


def test_a_gain_is_the_difference_of_the_shares_of_the_days_need_after_training(
    policy, saved, frame
):
    gains = daily_gains(policy, saved, frame, "llf", **SOME)
    tested = backtest_saved(
        policy, saved, frame, peers={"llf": SCHEDULERS["llf"]}, optimum=False, **SOME
    )
    assert gains.labels().tolist() == tested.dates.tolist()
    assert str(gains.labels()[0]) > "2021-05-31"
    for day in range(len(tested.dates)):
        need = tested.need_kwh[:, day].sum(dtype=float)
        ours, theirs = (tested.drawn_kwh[n][:, day].sum(dtype=float) for n in (POLICY, "llf"))
        counted = np.clip((ours - theirs) / need, -0.05, 0.05)
        assert gains.values[day] == pytest.approx(counted, abs=1e-6)
    assert (gains.low, gains.high, gains.period) == (-0.05, 0.05, "day")


def test_a_narrower_bound_counts_large_gains_at_it(policy, saved, frame):
    wide = daily_gains(policy, saved, frame, "edf", bound=1.0, **SOME)
    narrow = daily_gains(policy, saved, frame, "edf", bound=0.001, **SOME)
    assert narrow.clipped == (np.abs(wide.values) > 0.001).sum() > 0
    assert narrow.values == pytest.approx(np.clip(wide.values, -0.001, 0.001))


def test_the_baseline_may_be_the_users_own(policy, saved, frame):
    named = daily_gains(policy, saved, frame, "fcfs", **SOME)
    own = daily_gains(policy, saved, frame, fcfs, **SOME)
    assert own.values.tolist() == named.values.tolist()


def test_against_another_run_only_days_after_both_were_trained_count(
    policy, saved, frame, tmp_path
):
    other = saved | {"until": {"jpl": "2021-07-15"}}
    save_policy(Pooled(CHANNELS, 4, key=jax.random.key(1)), tmp_path, other)
    gains = daily_gains(policy, saved, frame, str(tmp_path), **SOME)
    assert str(gains.labels()[0]) > "2021-07-15"
    assert np.abs(gains.values).max() > 0
