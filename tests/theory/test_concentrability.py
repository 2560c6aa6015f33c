"""c(m), C', C'' and C against brute force."""

from itertools import product

import numpy as np
import pytest

from apportion.errors import InputError
from apportion.theory import concentrability, every_policy, random_family, stationary_constant


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


def test_a_uniform_chain_has_no_concentration():
    uniform = np.full(4, 0.25)
    result = concentrability(np.full((4, 3, 4), 0.25), 0.9, sigma=uniform, mu=uniform)
    assert abs(result.first - 1) < 1e-9
    assert abs(result.second - 1) < 1e-9
    assert abs(stationary_constant(np.full((4, 3, 4), 0.25), uniform) - 1) < 1e-9


@pytest.mark.parametrize("gamma", [0.3, 0.9])
def test_a_coarser_cut_gives_a_larger_constant_never_a_smaller_one(gamma):
    family = random_family(states=4, actions=3, tasks=30, spread=1, gamma=gamma, concentration=0.3)
    rng = np.random.default_rng(1)
    sigma, mu = rng.dirichlet(np.ones(4), (2, 30))
    fine = concentrability(family.kernel, gamma, sigma=sigma, mu=mu, precision=1e-14)
    coarse = concentrability(family.kernel, gamma, sigma=sigma, mu=mu, precision=1e-2)
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


def test_mu_without_support_is_infinite_and_says_where():
    kernel = np.zeros((2, 1, 2))
    kernel[0, 0, 1] = kernel[1, 0, 1] = 1
    reached = concentrability(kernel, 0.5, sigma=np.array([1.0, 0]), mu=np.array([1.0, 0]))
    assert reached.first == np.inf
    assert reached.second == np.inf
    assert "no mass on state 1, but sigma's paths reach it in 1 steps" in reached.reason
    itself = concentrability(kernel, 0.5, sigma=np.array([0.5, 0.5]), mu=np.array([1.0, 0]))
    assert "sigma itself has mass there" in itself.reason


def test_mu_without_support_where_no_path_goes_is_harmless():
    kernel = np.eye(2)[:, None]
    safe = concentrability(kernel, 0.5, sigma=np.array([1.0, 0]), mu=np.array([1.0, 0]))
    assert safe.reason is None
    assert abs(safe.first - 1) < 1e-9


def test_what_is_not_a_distribution_is_refused_by_name():
    with pytest.raises(InputError, match="mu: the weights sum to 2"):
        concentrability(np.eye(2)[:, None], 0.5, sigma=np.array([0.5, 0.5]), mu=np.ones(2))
    with pytest.raises(InputError, match="sigma: 3 weights for 2 states"):
        concentrability(np.eye(2)[:, None], 0.5, sigma=np.ones(3) / 3, mu=np.ones(2) / 2)
