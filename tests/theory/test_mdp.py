"""Finite MDPs: values, policies, and what is refused."""

import numpy as np
import pytest

from apportion.errors import InputError
from apportion.theory import MDP, every_policy, random_family


def test_policy_iteration_finds_the_best_of_all_policies_in_every_state():
    mdp = random_family(states=4, actions=3, tasks=20, spread=1.0, gamma=0.8, seed=3)
    policies = every_policy(4, 3)[:, None]
    best = mdp.value(policies).max(0)
    policy, value = mdp.optimal()
    np.testing.assert_allclose(value, best, atol=1e-12)
    np.testing.assert_allclose(mdp.value(policy), best, atol=1e-12)


def test_a_policys_value_is_its_operators_fixed_point_and_its_chain_keeps_rho():
    mdp = random_family(states=5, actions=2, tasks=3, spread=0.5, gamma=0.9)
    policy = np.array([0, 1, 0, 1, 1])
    value = mdp.value(policy)
    np.testing.assert_allclose(mdp.operator(policy, value), value, atol=1e-12)
    rho = mdp.stationary(policy)
    kernel, _ = mdp.under(policy)
    np.testing.assert_allclose(rho.sum(-1), 1, atol=1e-12)
    np.testing.assert_allclose(np.einsum("tx,txy->ty", rho, kernel), rho, atol=1e-12)


def test_the_average_mdp_is_the_mean_and_spread_moves_tasks_apart_in_proportion():
    family = random_family(states=3, actions=2, tasks=4, spread=0.7, gamma=0.5, runs=2)
    average = family.average()
    np.testing.assert_allclose(average.reward, family.reward.mean(1))
    np.testing.assert_allclose(average.kernel, family.kernel.mean(1))
    gaps = [
        np.ptp(
            random_family(states=3, actions=2, tasks=4, spread=s, gamma=0.5).reward, axis=0
        ).max()
        for s in (0.1, 0.2, 0.4)
    ]
    np.testing.assert_allclose(np.divide(gaps, gaps[0]), [1, 2, 4])


@pytest.mark.parametrize(
    ("kernel", "reward", "gamma", "says"),
    [
        (np.full((2, 1, 2), 0.4), np.zeros((2, 1)), 0.5, r"row at \(0, 0\).*sums to 0.8"),
        (np.full((2, 1, 2), 0.5), np.zeros((2, 1)), 1.0, r"gamma: 1.0 is outside \(0, 1\)"),
        (np.full((2, 1, 2), 0.5), np.zeros((2, 1)), 0.0, r"gamma: 0.0 is outside"),
        (np.full((2, 1, 2), 0.5), np.full((2, 1), np.nan), 0.5, "reward: 2 values are not finite"),
        (np.array([[[1.5, -0.5]], [[0.5, 0.5]]]), np.zeros((2, 1)), 0.5, r"\(0, 0, 1\) is -0.5"),
    ],
)
def test_what_is_not_an_mdp_is_refused_with_its_place(kernel, reward, gamma, says):
    with pytest.raises(InputError, match=says):
        MDP(kernel, reward, gamma)


def test_a_single_mdp_is_no_family_and_several_recurrent_classes_have_no_one_rho():
    single = MDP(np.full((2, 1, 2), 0.5), np.zeros((2, 1)), 0.5)
    with pytest.raises(InputError, match="stack tasks along a leading axis"):
        single.average()
    absorbing = MDP(np.eye(2)[:, None], np.zeros((2, 1)), 0.5)
    with pytest.raises(InputError, match="several recurrent classes"):
        absorbing.stationary(np.zeros(2, int))
