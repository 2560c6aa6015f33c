"""The charging problem: the simulator's energies, the worth of a kWh, and the gradient."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from garages import STATIONS, days_of, opinionated, random_garage, walk_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.composition import EqualShares
from apportion.tasks import Task
from apportion_charging.problem import Charging
from apportion_charging.schedulers import SCHEDULERS, simulate

TASK = Task.of([list(range(STATIONS))])[0]


def walk(garage, policy=None, capacity_kw=8.0):
    """Return allocations and drawn kWh in every period of the day."""
    policy = opinionated() if policy is None else policy
    capacity = jnp.float32(capacity_kw)
    return walk_problem(Charging.of([days_of(garage)]), TASK, policy, jnp.int32(0), capacity)


def test_a_kwh_is_worth_less_where_more_is_needed_and_the_same_at_one_site():
    """Per station and day, the total need is then worth the same at both sites."""
    one, other = days_of(random_garage(0)), days_of(random_garage(1), random_garage(2)).at(range(4))
    needs = [(own.garage.need_kwh * own.garage.begins).sum() for own in (one, other)]
    means = [needs[0] / STATIONS, needs[1] / 8]
    assert means[0] != pytest.approx(means[1], rel=0.1)
    worth = np.asarray(Charging.of([one, other]).worth)
    assert worth[0] * means[0] == pytest.approx(worth[-1] * means[1], rel=1e-5)
    assert set(worth[:STATIONS]) == {worth[0]}
    assert set(worth[STATIONS:]) == {worth[-1]}
    np.testing.assert_array_equal(Charging.of([one]).worth, 1.0)


@settings(max_examples=5)
@given(st.integers(0, 2**31))
def test_equal_shares_deliver_what_the_scheduler_of_that_name_does(seed):
    garage = random_garage(seed)
    garage = dataclasses.replace(garage, arrival=jnp.maximum(garage.arrival, 0))
    _, rewards = walk(garage, EqualShares(), 19.0)
    energy = simulate(days_of(garage), [SCHEDULERS["equal"]], 19.0).energy_kwh[0]
    assert float(rewards.sum()) == pytest.approx(float(energy.sum()), rel=2e-2, abs=1e-2)


def test_learning_sees_through_set_points():
    """The gradient is finite and not 0, because it is that of wishes; whole amperes have none."""

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(policy, problem):
        return walk_problem(problem, TASK, policy, jnp.int32(0), jnp.float32(9.0))[1].sum()

    for seed in range(3):
        leaves = jax.tree.leaves(
            gradient(opinionated(), Charging.of([days_of(random_garage(seed))]))
        )
        sizes = [float(jnp.abs(leaf).max()) for leaf in leaves]
        assert np.isfinite(sizes).all()
        assert max(sizes) > 1e-4
