"""Charging as a problem: the same energies as the simulator's, each kWh by what it is worth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.composition import EqualShares
from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import Predictor, add_forecasts
from apportion.domains.charging.garage import PERIODS
from apportion.domains.charging.problem import Charging
from apportion.domains.charging.schedulers import SCHEDULERS, simulate_all
from apportion.domains.charging.sessions import read_sessions
from apportion.tasks import Task
from domains.charging.garages import (
    SESSIONS,
    STATIONS,
    opinionated,
    random_garage,
    stack,
    walk_problem,
)

TASK = Task.of([list(range(STATIONS))])[0]


def problem_of(garage) -> Charging:
    """A problem of one day."""
    return Charging(
        garage=jax.tree.map(lambda x: x[None], garage),
        days_of=jnp.ones(STATIONS, jnp.int32),
        worth=jnp.ones(STATIONS),
        capacity=jnp.array([0.1, 0.2], jnp.float32),
        universe=STATIONS,
        horizon=PERIODS,
    )


def walk(garage, policy=None, capacity_kw=8.0):
    """Allocations and kWh drawn in every period of the day."""
    policy = opinionated() if policy is None else policy
    capacity = jnp.float32(capacity_kw)
    return walk_problem(problem_of(garage), TASK, policy, jnp.int32(0), capacity)


def test_a_kwh_is_worth_less_where_more_is_needed_and_the_same_at_one_site():
    """Both sites' whole need is then worth as much a station and day."""
    frame = read_sessions()
    days = [Days.of(frame, site).between("2019-05-01", "2019-06-30") for site in ("caltech", "jpl")]
    predictor = Predictor.fit(*days)
    days = [add_forecasts(own, predictor) for own in days]
    worth = np.asarray(Charging.of(days).worth)
    first = len(days[0].stations)
    means = [own.garage.need_kwh.sum((1, 2)).mean() / len(own.stations) for own in days]
    assert means[0] < means[1]
    assert worth[0] * means[0] == pytest.approx(worth[first] * means[1], rel=1e-5)
    assert set(worth[:first]) == {worth[0]}
    assert set(worth[first:]) == {worth[first]}
    np.testing.assert_array_equal(Charging.of(days[:1]).worth, 1.0)


def test_a_policy_is_shown_what_is_recalled_in_place_of_what_is_predicted():
    garage, zeros = random_garage(2), jnp.zeros((STATIONS, SESSIONS))
    blind = dataclasses.replace(garage, predicted_need_kwh=zeros, predicted_departure=zeros)
    forgetful = dataclasses.replace(garage, recalled_need_kwh=zeros)
    recalled, unpredicted, forgot = (np.asarray(walk(g)[0]) for g in (garage, blind, forgetful))
    np.testing.assert_array_equal(recalled, unpredicted)
    assert np.abs(recalled - forgot).max() > 1e-3


@given(st.integers(0, 2**31))
def test_equal_shares_deliver_what_the_scheduler_of_that_name_does(seed):
    garage = random_garage(seed)
    _, rewards = walk(garage, EqualShares(), 9.0)
    energy = simulate_all(stack(garage), [SCHEDULERS["equal"]], 9.0)[0]
    assert float(rewards.sum()) == pytest.approx(float(energy.sum()), rel=1e-4, abs=1e-3)
