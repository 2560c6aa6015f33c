"""Identical, independent entities with a symmetric reward have an equivariant optimum, and others not."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.theory.mdp import MDP
from apportion.theory.symmetry import EntityMDP, entity_mdp

WHOLE = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
PAIRS = [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)]


def random_kernels(rng, count, local, shares, identical):
    drawn = rng.dirichlet(np.ones(local), (1 if identical else count, local, shares))
    return np.broadcast_to(drawn, (count, local, shares, local))


def symmetric_reward(rng, local, levels):
    """What each entity earns alike, times what their states have in common."""
    table = rng.uniform(size=(local, len(levels)))

    def reward(states, shares):
        each = [table[x, levels.index(a)] for x, a in zip(states, shares, strict=True)]
        return sum(each) * (1 + max(states)) - 0.3 * np.prod(each)

    return reward


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_identical_independent_entities_with_a_symmetric_reward_have_an_equivariant_optimum(seed):
    rng = np.random.default_rng(seed)
    kernels = random_kernels(rng, 3, 2, 2, identical=True)
    reward = symmetric_reward(rng, 2, [0.0, 1.0])
    problem = entity_mdp(kernels, WHOLE, reward, rng.uniform(0.2, 0.95))
    assert problem.asymmetry() < 1e-9
    # By hand, too: an optimal choice moves with the entities to an optimal choice.
    values = problem.mdp.backup(problem.mdp.optimal()[1])
    for order in permutations(range(3)):
        for x, state in enumerate(problem.states):
            best = WHOLE[values[x].argmax()]
            there = problem.states.index(tuple(state[i] for i in order))
            moved = WHOLE.index(tuple(best[i] for i in order))
            assert values[there, moved] == pytest.approx(values[there].max(), abs=1e-9)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_entities_that_move_each_in_its_own_way_have_none(seed):
    rng = np.random.default_rng(seed)
    kernels = random_kernels(rng, 3, 2, 2, identical=False)
    problem = entity_mdp(kernels, WHOLE, symmetric_reward(rng, 2, [0.0, 1.0]), 0.8)
    assert problem.asymmetry() > 1e-4


def test_a_reward_that_prefers_an_entity_breaks_the_symmetry_of_identical_kernels():
    kernels = random_kernels(np.random.default_rng(0), 2, 2, 2, identical=True)

    def favour(states, shares):
        return 2 * shares[0] + shares[1]

    problem = entity_mdp(kernels, [(1.0, 0.0), (0.0, 1.0)], favour, 0.5)
    assert problem.asymmetry() == pytest.approx(1.0)


def test_factoring_is_not_needed_where_the_joint_kernel_treats_entities_alike():
    """Both entities move together by one coin: no product of kernels, and still equivariant."""
    rng = np.random.default_rng(1)
    independent = entity_mdp(
        random_kernels(rng, 2, 2, 2, identical=True),
        [(1.0, 0.0), (0.0, 1.0)],
        symmetric_reward(rng, 2, [0.0, 1.0]),
        0.8,
    )
    together = np.zeros((4, 2, 4))
    together[..., 0] = together[..., 3] = 0.5
    mixed = MDP(0.5 * independent.mdp.kernel + 0.5 * together, independent.mdp.reward, 0.8)
    coupled = EntityMDP(mixed, independent.states, independent.allocations)
    joint = mixed.kernel[1, 0].reshape(2, 2)
    assert np.abs(joint - np.outer(joint.sum(1), joint.sum(0))).max() > 0.05
    assert coupled.asymmetry() < 1e-9


def test_an_indivisible_resource_has_no_deterministic_equivariant_policy_at_all():
    kernels = np.full((2, 2, 2, 2), 0.5)
    problem = entity_mdp(
        kernels, [(1.0, 0.0), (0.0, 1.0)], lambda x, a: x[0] * a[0] + x[1] * a[1], 0.5
    )
    assert problem.asymmetry() == 0
    assert len(problem.equivariant_policies()) == 0
    assert problem.lost_by_equivariance() == np.inf


def test_where_concentrating_pays_the_best_equivariant_policy_is_worse_than_the_optimum():
    """Reward max_i a_i: identical entities, symmetric in all, and equal shares lose half of it for ever."""
    kernels = np.full((2, 1, 3, 1), 1.0)
    problem = entity_mdp(kernels, PAIRS, lambda states, shares: max(shares), 0.5)
    assert problem.asymmetry() == 0
    assert len(problem.equivariant_policies()) == 1
    assert problem.lost_by_equivariance() == pytest.approx((1 - 0.5) / (1 - 0.5))


@pytest.mark.parametrize("seed", range(5))
def test_where_spreading_pays_an_equivariant_policy_is_optimal(seed):
    rng = np.random.default_rng(seed)
    kernels = random_kernels(rng, 2, 2, 1, identical=True).repeat(3, 2)
    gain = rng.uniform(0.5, 2.0, 2)

    def concave(states, shares):
        return sum(gain[x] * np.sqrt(a) for x, a in zip(states, shares, strict=True))

    problem = entity_mdp(kernels, PAIRS, concave, 0.8)
    assert problem.asymmetry() < 1e-9
    assert problem.lost_by_equivariance() == pytest.approx(0, abs=1e-9)


def test_kernels_that_do_not_fit_the_shares_are_refused():
    with pytest.raises(InputError, match="3 shares, but the allocations hold 2"):
        entity_mdp(np.full((2, 2, 3, 2), 0.5), [(1.0, 0.0), (0.0, 1.0)], lambda x, a: 0.0, 0.5)
