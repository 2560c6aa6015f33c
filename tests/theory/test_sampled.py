"""LSPI from sampled moves: every kind of sample is a sample of what it says."""

import numpy as np
import pytest

from apportion.theory.mdp import MDP, random_family
from apportion.theory.sampled import (
    independent_draws,
    limit,
    lspi_from_moves,
    one_path,
    separate_paths,
)

FAMILY = random_family(states=4, actions=2, tasks=3, spread=0.6, gamma=0.7, runs=2, seed=3)
POLICY = np.array([[0, 1, 0, 1], [1, 1, 0, 0]])


def learn(sampling, features, samples=50, iterations=15):
    rng = np.random.default_rng(0)
    return lspi_from_moves(
        FAMILY, features, sampling, samples=samples, iterations=iterations, rng=rng
    )


def test_without_noise_and_with_all_features_the_average_is_solved():
    found, (policy, value) = learn(limit, np.eye(4)), FAMILY.average().optimal()
    np.testing.assert_array_equal(found.policies[:, -1], policy)
    np.testing.assert_allclose(found.values[:, -1], value)


@pytest.mark.parametrize("sampling", [one_path, independent_draws])
def test_moves_and_rewards_are_those_of_the_average(sampling):
    moves = sampling(FAMILY, POLICY, 4000, np.random.default_rng(1))
    chain, reward = FAMILY.average().under(POLICY)
    visits = moves.counts.sum(-1)
    assert (visits.sum(-1) == 3 * 4000).all()
    # 12,000 moves, 1,000 or more from each state: five standard errors are 0.08.
    np.testing.assert_allclose(moves.counts / visits[..., None], chain, atol=0.08)
    np.testing.assert_allclose(moves.rewards, visits * reward)


def test_a_path_visits_states_as_the_stationary_distribution_says():
    moves = one_path(FAMILY, POLICY, 4000, np.random.default_rng(2))
    share = moves.counts.sum(-1) / 12_000
    np.testing.assert_allclose(share, FAMILY.average().stationary(POLICY), atol=0.03)


def test_separate_paths_weigh_the_tasks_kernels_by_their_visits():
    moves = separate_paths(FAMILY, POLICY, 4000, np.random.default_rng(3))
    chain, reward = FAMILY.under(POLICY[:, None])
    visits = FAMILY.stationary(POLICY[:, None])
    total = visits.sum(1)
    expected = (visits[..., None] * chain).sum(1) / total[..., None]
    np.testing.assert_allclose(moves.counts / moves.counts.sum(-1)[..., None], expected, atol=0.08)
    expected = (visits * reward).sum(1) / 3
    np.testing.assert_allclose(moves.rewards / 12_000, expected, atol=0.03)


def test_a_path_whose_move_is_certain_is_followed():
    ring = MDP(np.roll(np.eye(3), 1, axis=1)[None, None, :, None], np.ones((1, 1, 3, 1)), 0.5)
    moves = one_path(ring, np.zeros((1, 3), int), 30, np.random.default_rng(0))
    np.testing.assert_array_equal(moves.counts[0], 10 * np.roll(np.eye(3), 1, axis=1))


def test_one_constant_feature_gives_the_mean_reward_of_the_policy():
    found = learn(limit, np.ones((4, 1)), iterations=1)
    average, policy = FAMILY.average(), found.policies[:, 0]
    mean = (average.stationary(policy) * average.under(policy)[1]).sum(-1) / 0.3
    np.testing.assert_allclose(found.values[:, 0], np.repeat(mean[:, None], 4, 1))
