"""Task distance: exact, from above, and from samples."""

import numpy as np
import pytest

from apportion.errors import InputError
from apportion.theory import (
    distance_by_enumeration,
    distance_upper_bound,
    empirical_distance,
    norm,
    random_family,
    task_distance,
)

MU = np.full(4, 0.25)


def test_the_upper_bound_is_never_below_the_exact_distance():
    for seed in range(40):
        spread = [0.02, 0.1, 0.5, 1.0][seed % 4]
        family = random_family(states=4, actions=3, tasks=2, spread=spread, gamma=0.8, seed=seed)
        average = family.average()
        exact = distance_by_enumeration(family[0], average, MU)
        upper = distance_upper_bound(family[0], average, MU)
        assert upper >= exact - 1e-12
        assert upper <= 8 * exact


def test_equal_tasks_are_at_no_distance_and_distance_grows_with_spread():
    found = []
    for spread in (0.0, 0.1, 0.2, 0.4):
        family = random_family(states=4, actions=2, tasks=3, spread=spread, gamma=0.7)
        found.append(task_distance(family[1], family.average(), MU).value)
    assert found[0] < 1e-12
    assert (np.diff(found) > 0).all()


def test_large_mdps_fall_back_on_the_upper_bound():
    family = random_family(states=30, actions=4, tasks=2, spread=0.1, gamma=0.7)
    found = task_distance(family[0], family.average(), np.full(30, 1 / 30))
    assert not found.exact
    assert 0 < found.value < np.inf


def test_mdps_that_do_not_match_are_refused():
    small = random_family(states=2, actions=2, tasks=2, spread=0.1, gamma=0.7)
    other = random_family(states=2, actions=2, tasks=2, spread=0.1, gamma=0.6)
    with pytest.raises(InputError, match="must share all three"):
        task_distance(small[0], other[0], np.ones(2) / 2)


def test_samples_bracket_the_bellman_difference_of_a_value_function():
    family = random_family(states=4, actions=2, tasks=5, spread=0.6, gamma=0.7, seed=2)
    average = family.average()
    policy, value = average.optimal()
    truth = norm(family.operator(policy, value) - average.operator(policy, value), MU)
    rng = np.random.default_rng(0)
    states = rng.integers(0, 4, (5, 4000))
    kernel, reward = family.under(policy)
    rows = np.take_along_axis(kernel, states[..., None], 1).cumsum(-1)
    following = (rng.uniform(size=(5, 4000, 1)) > rows[..., :-1]).sum(-1)
    rewards = np.take_along_axis(reward, states, 1)
    found = empirical_distance(rewards, value[states], value[following], gamma=0.7)
    assert (found.interval[:, 0] <= truth).all()
    assert (found.lower <= found.upper).all()
    assert (found.upper >= truth).all()
    mean = np.abs((family.operator(policy, value) - average.operator(policy, value)).mean(-1))
    assert ((found.interval[:, 0] <= mean) & (mean <= found.interval[:, 1])).sum() >= 4
    assert "task 4: distance between" in found.summary()


def test_one_task_alone_has_no_distance():
    with pytest.raises(InputError, match="at least two tasks"):
        empirical_distance(np.ones((1, 5)), np.ones((1, 5)), np.ones((1, 5)), gamma=0.9)
