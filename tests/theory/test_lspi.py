"""LSPI in its three forms, against plain NumPy and closed forms."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np

from apportion.domains.synthetic import Examples, spaced_betas
from apportion.theory import MDP, draw_counts, random_family
from apportion.theory.lspi import (
    in_float64,
    lspi_finite,
    lspi_paths,
    lspi_simplex,
    pathwise_lstd,
    separate_basis,
    simplex_features,
    simplex_greedy,
    tied_basis,
)


def test_precision_is_double_inside_and_untouched_outside():
    before = jnp.ones(2).dtype
    assert in_float64(lambda x: x / 3)(np.ones(2)).dtype == np.float64
    assert jnp.ones(2).dtype == before == jnp.float32


def test_pathwise_lstd_is_the_formula_with_nothing_after_the_last_sample():
    rng = np.random.default_rng(0)
    features, rewards = rng.normal(size=(50, 4)), rng.normal(size=50)
    following = np.vstack([features[1:], np.zeros((1, 4))])
    expected = np.linalg.pinv(features.T @ (features - 0.8 * following)) @ features.T @ rewards
    found = in_float64(pathwise_lstd)(features, rewards, 0.8)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_long_paths_give_the_optimal_policy_and_its_value():
    family = random_family(states=5, actions=3, tasks=4, spread=1, gamma=0.7, seed=1)
    found = lspi_paths(
        family.kernel,
        family.reward,
        np.eye(5),
        0.7,
        length=20_000,
        iterations=6,
        key=jax.random.key(0),
    )
    assert found.policies.shape == (4, 7, 5)
    assert family.suboptimality(found.policies[:, -1]).max() < 0.01
    assert np.abs(found.values[:, -1] - family.value(found.policies[:, -2])).max() < 0.1


def test_exact_counts_give_policy_iterations_fixed_point():
    family = random_family(states=6, actions=3, tasks=5, spread=1, gamma=0.8, seed=2)
    visits = np.ones(family.reward.shape)
    features = np.eye(18).reshape(6, 3, 18)
    found = lspi_finite(visits, family.kernel, family.reward, features, 0.8, ridge=0.0)
    policy, value = family.optimal()
    np.testing.assert_allclose(found.action_values, family.backup(value), atol=1e-9)
    assert (found.policy == policy).all()


def test_lstd_q_from_counts_equals_lstd_q_from_the_samples():
    family = random_family(states=4, actions=2, tasks=1, spread=1, gamma=0.6, seed=5)
    rng = np.random.default_rng(3)
    features = rng.normal(size=(4, 2, 5))
    counts = draw_counts(family, 300, rng=rng)
    found = lspi_finite(
        counts.visits, counts.moves, counts.rewards, features, 0.6, iterations=1, ridge=1e-3
    )
    rows = [
        (x, a, y)
        for x in range(4)
        for a in range(2)
        for y in range(4)
        for _ in range(int(counts.moves[0, x, a, y]))
    ]
    x, a, y = np.array(rows).T
    phi, following = features[x, a], features[y, 0]
    rewards = (counts.rewards[0] / counts.visits[0])[x, a]
    matrix = phi.T @ (phi - 0.6 * following) / len(rows) + 1e-3 * np.eye(5)
    expected = np.linalg.solve(matrix, phi.T @ rewards / len(rows))
    np.testing.assert_allclose(found.parameters[0], expected, rtol=1e-9)


def test_more_samples_bring_the_action_values_closer_at_the_root_rate():
    family = random_family(states=6, actions=2, tasks=1, spread=0, gamma=0.7, runs=40)
    best = family.backup(family.optimal()[1])
    features = np.eye(12).reshape(6, 2, 12)
    rng = np.random.default_rng(0)
    errors = []
    for samples in (1000, 16_000):
        counts = draw_counts(family, samples, rng=rng)
        found = lspi_finite(counts.visits, counts.moves, counts.rewards, features, 0.7)
        errors.append(np.sqrt(((found.action_values - best) ** 2).mean()))
    assert 3 < errors[0] / errors[1] < 5


def examples(count, betas, seed):
    """Draws of the synthetic problem, in NumPy."""
    rng = np.random.default_rng(seed)
    states, following = rng.uniform(size=(2, count, len(betas)))
    shares = rng.dirichlet(np.ones(len(betas)), count)
    rewards = (states * shares - betas * shares * np.log(shares)).sum(-1)
    return Examples(states, shares, rewards + 0.02 * rng.normal(size=count), following)


def orbit(real):
    """All orderings of the entities of every example."""
    orders = np.array(list(permutations(range(real.states.shape[1]))))
    return Examples(
        np.concatenate([real.states[:, order] for order in orders]),
        np.concatenate([real.allocations[:, order] for order in orders]),
        np.tile(real.rewards, len(orders)),
        np.concatenate([real.next_states[:, order] for order in orders]),
    )


learn = in_float64(lambda real, basis: lspi_simplex(real, jnp.asarray(basis), 0.5))


def test_the_tied_model_is_the_average_over_all_orderings():
    real = examples(20, spaced_betas(5, 0.6), seed=1)
    tied = learn(real, tied_basis(5))
    averaged = learn(orbit(real), separate_basis(5))
    assert np.abs(tied - averaged).max() < 1e-8


def test_tied_parameters_make_an_equivariant_policy():
    theta = learn(examples(20, spaced_betas(5, 0.4), seed=2), tied_basis(5))
    greedy = in_float64(simplex_greedy)
    x = np.random.default_rng(3).uniform(size=5)
    order = np.array([3, 1, 0, 2, 4])
    np.testing.assert_allclose(greedy(theta, x[order]), greedy(theta, x)[order], atol=1e-12)


def test_the_greedy_allocation_has_the_largest_q_on_the_simplex():
    rng = np.random.default_rng(0)
    theta = np.concatenate([rng.normal(size=4), rng.uniform(0.1, 1, 4), rng.normal(size=5)])
    x = rng.uniform(size=4)

    @in_float64
    def values(theta, x, others):
        best = simplex_features(x, simplex_greedy(theta, x)) @ theta
        return best, simplex_features(jnp.broadcast_to(x, others.shape), others) @ theta

    best, others = values(theta, x, rng.dirichlet(np.ones(4), 3000))
    assert others.max() <= best + 1e-12


def test_values_are_clipped_at_their_bound():
    mdp = MDP(np.full((1, 3, 1, 3), 1 / 3), np.ones((1, 3, 1)), 0.9)
    found = lspi_paths(
        mdp.kernel, mdp.reward, np.eye(3), 0.9, length=4, iterations=3, key=jax.random.key(0)
    )
    assert np.abs(found.values).max() <= 10 + 1e-12
