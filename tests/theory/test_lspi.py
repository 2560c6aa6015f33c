"""LSPI on finite MDPs in all its forms, against plain NumPy and closed forms."""

import jax
import numpy as np
import pytest

from apportion.theory import MDP, random_family
from apportion.theory.lspi import (
    in_float64,
    independent_draws,
    limit,
    lspi_finite,
    lspi_from_moves,
    lspi_paths,
    one_path,
    pathwise_lstd,
    separate_paths,
)
from apportion.theory.pooling import draw_counts

FAMILY = random_family(states=4, actions=2, tasks=3, spread=0.6, gamma=0.7, runs=2, seed=3)
POLICY = np.array([[0, 1, 0, 1], [1, 1, 0, 0]])


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
    np.testing.assert_allclose(found.action_values[0], features @ expected, rtol=1e-8)


def test_the_clip_binds_where_features_carry_a_value_to_a_state_not_visited():
    rows = np.array([0.9999, 0.0001])
    mdp = MDP(np.broadcast_to(rows, (1, 2, 1, 2)).copy(), np.ones((1, 2, 1)), 0.9)
    features = np.array([[1.0], [100.0]])
    found = lspi_paths(
        mdp.kernel, mdp.reward, features, 0.9, length=4, iterations=1, key=jax.random.key(0)
    )
    # Four rewards in the first state: theta = 4 / (4 - 3 x .9), and 100 theta in the other.
    np.testing.assert_allclose(found.values[0, 0], [4 / 1.3, 10.0])


def learn(sampling, features, samples=50, iterations=15):
    rng = np.random.default_rng(0)
    return lspi_from_moves(
        FAMILY, features, sampling, samples=samples, iterations=iterations, rng=rng
    )


def test_without_noise_and_with_all_features_the_average_is_solved():
    found, (policy, value) = learn(limit, np.eye(4)), FAMILY.average().optimal()
    np.testing.assert_array_equal(found.policies[:, -1], policy)
    np.testing.assert_allclose(found.values[:, -1], value)


@pytest.mark.parametrize(
    ("sampling", "share"),
    [(one_path, FAMILY.average().stationary(POLICY)), (independent_draws, np.full((2, 4), 1 / 4))],
)
def test_visits_moves_and_rewards_are_those_of_the_average(sampling, share):
    moves = sampling(FAMILY, POLICY, 4000, np.random.default_rng(1))
    chain, reward = FAMILY.average().under(POLICY)
    visits = moves.counts.sum(-1)
    assert (visits.sum(-1) == 3 * 4000).all()
    np.testing.assert_allclose(visits / 12_000, share, atol=0.03)
    # 12,000 moves, 1,000 or more from each state: five standard errors are 0.08.
    np.testing.assert_allclose(moves.counts / visits[..., None], chain, atol=0.08)
    np.testing.assert_allclose(moves.rewards, visits * reward)


def test_separate_paths_weigh_the_tasks_kernels_by_their_visits():
    moves = separate_paths(FAMILY, POLICY, 4000, np.random.default_rng(3))
    chain, reward = FAMILY.under(POLICY[:, None])
    visits = FAMILY.stationary(POLICY[:, None])
    total = visits.sum(1)
    expected = (visits[..., None] * chain).sum(1) / total[..., None]
    np.testing.assert_allclose(moves.counts / moves.counts.sum(-1)[..., None], expected, atol=0.08)
    expected = (visits * reward).sum(1) / 3
    np.testing.assert_allclose(moves.rewards / 12_000, expected, atol=0.03)
