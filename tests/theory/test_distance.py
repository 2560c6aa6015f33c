"""Concentrability against brute force; task distance: exact, and from above."""

from itertools import product

import numpy as np
import pytest

from apportion.errors import InputError
from apportion.theory import distance, every_policy, random_family
from apportion.theory.distance import (
    concentrability,
    distance_by_enumeration,
    distance_upper_bound,
    stationary_constant,
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


def brute_force(kernel, sigma, mu, m):
    """c(m) over every sequence of m policies."""
    states, actions = kernel.shape[:2]
    chains = [kernel[np.arange(states), policy] for policy in every_policy(states, actions)]
    best = 0.0
    for sequence in product(chains, repeat=m):
        start = sigma
        for chain in sequence:
            start = start @ chain
        best = max(best, (start / mu).max())
    return best


def test_dynamic_programming_equals_brute_force_over_all_policy_sequences():
    rng = np.random.default_rng(0)
    for seed in range(5):
        kernel = random_family(
            states=3, actions=2, tasks=1, spread=0, gamma=0.5, concentration=0.4, seed=seed
        ).kernel[0]
        sigma, mu = rng.dirichlet(np.ones(3), 2)
        result = concentrability(kernel, 0.5, sigma=sigma, mu=mu)
        for m in range(4):
            assert abs(result.coefficients[m] - brute_force(kernel, sigma, mu, m)) < 1e-10
        steps = np.arange(len(result.coefficients))
        second = 0.5**2 * (steps * 0.5 ** (steps - 1.0) * result.coefficients).sum()
        assert result.second == pytest.approx(second, rel=1e-6)


@pytest.mark.parametrize("gamma", [0.3, 0.9])
def test_a_coarser_cut_gives_a_larger_constant_never_a_smaller_one(gamma, monkeypatch):
    family = random_family(states=4, actions=3, tasks=30, spread=1, gamma=gamma, concentration=0.3)
    rng = np.random.default_rng(1)
    sigma, mu = rng.dirichlet(np.ones(4), (2, 30))
    fine = concentrability(family.kernel, gamma, sigma=sigma, mu=mu)
    monkeypatch.setattr(distance, "_CUT", 1e-2)
    coarse = concentrability(family.kernel, gamma, sigma=sigma, mu=mu)
    assert (coarse.first >= fine.first - 1e-9).all()
    assert (coarse.second >= fine.second - 1e-9).all()
    assert (coarse.first <= 1.2 * fine.first).all()


def test_the_coverage_constant_equals_enumeration_over_all_policies():
    for seed in range(8):
        family = random_family(states=5, actions=2, tasks=1, spread=0, gamma=0.5, seed=seed)
        mu = np.random.default_rng(seed).dirichlet(np.ones(5))
        enumerated = (mu / family[0].stationary(every_policy(5, 2))).max()
        assert abs(stationary_constant(family.kernel[0], mu) - enumerated) < 1e-6 * enumerated


def test_a_state_a_policy_can_avoid_makes_the_coverage_constant_infinite():
    kernel = np.zeros((2, 2, 2))
    kernel[:, 0, 0] = kernel[:, 1, 1] = 1
    assert stationary_constant(kernel, np.array([0.5, 0.5])) == np.inf


def test_mu_without_support_is_infinite_unless_no_path_goes_there():
    kernel = np.zeros((2, 1, 2))
    kernel[0, 0, 1] = kernel[1, 0, 1] = 1
    reached = concentrability(kernel, 0.5, sigma=np.array([1.0, 0]), mu=np.array([1.0, 0]))
    assert reached.first == np.inf
    assert reached.second == np.inf
    safe = concentrability(np.eye(2)[:, None], 0.5, sigma=np.array([1.0, 0]), mu=np.array([1.0, 0]))
    assert abs(safe.first - 1) < 1e-9


def test_what_is_no_distribution_or_matches_nothing_is_refused():
    small, other = (
        random_family(states=2, actions=2, tasks=2, spread=0.1, gamma=gamma) for gamma in (0.7, 0.6)
    )
    with pytest.raises(InputError, match="must share all three"):
        task_distance(small[0], other[0], np.ones(2) / 2)
    with pytest.raises(InputError, match="mu: the weights sum to 2"):
        concentrability(np.eye(2)[:, None], 0.5, sigma=np.array([0.5, 0.5]), mu=np.ones(2))
    with pytest.raises(InputError, match="sigma: 3 weights for 2 states"):
        concentrability(np.eye(2)[:, None], 0.5, sigma=np.ones(3) / 3, mu=np.ones(2) / 2)
