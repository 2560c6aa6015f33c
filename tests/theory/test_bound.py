"""The calculator: both theorems' formulas by hand, every term, Lemma 4, and what makes a bound infinite."""

import numpy as np
import pytest

from apportion.errors import InputError
from apportion.theory import MDP, concentrability, random_family, task_distance
from apportion.theory.bound import (
    LearningConstants,
    LearningError,
    TransferConstants,
    error_bound,
    learning_error,
    samples_needed,
)

FAMILY = random_family(states=6, actions=3, tasks=8, spread=0.1, gamma=0.7)
CONSTANTS = TransferConstants(gamma=0.5, reward_bound=3.0, first=9.0, second=4.0, distance=0.01)
ERROR = LearningError(0.1, 0.2)
NONE = LearningError(0.0, 0.0)


def test_every_term_of_both_theorems_is_that_of_its_formula():
    terms = CONSTANTS.theorem_1_prime(ERROR, iterations=3)
    # 2 g / (1 - g)^2 = 4, times sqrt(4) = 2
    assert terms.approximation == pytest.approx(0.8)
    assert terms.estimation == pytest.approx(1.6)
    # 2 x 3 x .5^3 / .5
    assert terms.propagation == pytest.approx(1.5)
    # 2 x .01 x sqrt(9) / .5
    assert terms.task_distance == pytest.approx(0.12)
    assert terms.total == pytest.approx(0.8 + 1.6 + 1.5 + 0.12)
    terms = CONSTANTS.theorem_1(ERROR, iterations=3)
    # 2 / (1 - g)^2 = 8, times sqrt(4) = 2
    assert terms.approximation == pytest.approx(1.6)
    assert terms.estimation == pytest.approx(3.2)
    # 8 x .5^((3 - 1) / 2) x 3
    assert terms.propagation == pytest.approx(12.0)
    # 8 x 3 x .01 x sqrt(2 x 9)
    assert terms.task_distance == pytest.approx(0.24 * np.sqrt(18))


@pytest.mark.parametrize("gamma", [0.3, 0.9])
def test_two_opposite_tasks_lose_exactly_what_their_distance_allows(gamma):
    """One state, two actions that pay +-.2: the average task cannot tell them apart."""
    reward = 0.2 * np.array([[[1.0, -1.0]], [[-1.0, 1.0]]])
    family = MDP(np.ones((2, 1, 2, 1)), reward, gamma)
    average, here = family.average(), np.ones(1)
    policy = average.optimal()[0]
    lost = max(float(family[t].suboptimality(policy)[0]) for t in range(2))
    carried = concentrability(family.kernel[0], gamma, sigma=here, mu=here)
    distance = task_distance(family[0], average, here)
    assert distance.exact
    constants = TransferConstants(
        gamma, average.reward_bound, carried.first, carried.second, distance.value
    )
    bound = constants.theorem_1_prime(NONE, iterations=50).total
    assert lost == pytest.approx(0.4 / (1 - gamma))
    # The tail of the concentrability is cut, from above.
    assert lost == pytest.approx(bound, rel=1e-3)
    assert lost <= bound + 1e-12


def test_before_the_first_iteration_all_of_two_v_max_can_be_lost():
    mdp = MDP(np.ones((1, 2, 1)), np.array([[1.0, -1.0]]), 0.8)
    worst = float(mdp.suboptimality(np.array([1]))[0])
    constants = TransferConstants(0.8, mdp.reward_bound, 1.0, 1.0, 0.0)
    assert worst == pytest.approx(constants.theorem_1_prime(NONE, iterations=0).total)
    # Each iteration takes a factor of gamma off what may be lost.
    later = [constants.theorem_1_prime(NONE, iterations=k).total for k in (5, 6)]
    assert later[1] / later[0] == pytest.approx(0.8)
    assert later[0] / worst == pytest.approx(0.8**5)


def test_lemma_4_decides_whether_the_bound_is_finite_and_its_terms_add_up():
    result = error_bound(FAMILY, samples=1e6)
    assert not result.lemma_4_holds
    assert result.theorem_1.total == np.inf
    assert result.theorem_1_prime.total == np.inf
    assert 1e8 < result.samples_needed < 1e11
    assert "Lemma 4 does not hold" in result.summary()
    assert "vacuous" in result.summary()
    assert not result.to_frame().isna().any(axis=None)
    result = error_bound(FAMILY, samples=1e13, oracle_error=0.05)
    assert result.lemma_4_holds
    frame = result.to_frame().set_index("form")
    parts = frame[["approximation", "estimation", "propagation", "task_distance"]].sum(axis=1)
    np.testing.assert_allclose(parts, frame["total"])
    assert frame.total["Theorem 1'"] < frame.total["Theorem 1"]
    assert frame.total["Theorem 1', measured e"] < frame.total["Theorem 1, measured e"]


def test_the_estimation_term_falls_like_the_root_of_the_samples_of_all_tasks():
    near, far = (error_bound(FAMILY, samples=n).theorem_1_prime.estimation for n in (1e14, 1e16))
    # Up to logarithms: 1/sqrt(N T) over two decades is a factor of 10.
    assert 7 < near / far < 10


def test_lemma_4_turns_at_the_number_of_samples_it_asks_for():
    average = FAMILY.average()
    constants = LearningConstants.of(average, np.eye(6), np.full(6, 1 / 6))
    enough = samples_needed(constants, 20, 0.1)
    # d = 6, L = 1 and omega_mu = 1/6; delta is shared out among 4 K parts.
    lam = 2 * 7 * np.log(6 * np.e * enough) + 1 + np.log(18 * 80 / 0.1)
    asked = 288 * lam * 6 * constants.coverage * max(lam / constants.mixing, 1)
    assert enough == pytest.approx(asked, rel=1e-6)
    assert learning_error(constants, enough * 0.999, 20, 0.1).estimation == np.inf
    assert np.isfinite(learning_error(constants, enough * 1.001, 20, 0.1).estimation)


def test_features_that_miss_the_values_add_an_approximation_term():
    few = np.stack([np.ones(6), np.arange(6) / 6], 1)
    result = error_bound(FAMILY, samples=1e14, features=few)
    assert result.theorem_1.approximation > 0
    assert error_bound(FAMILY, samples=1e14).theorem_1.approximation == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samples": 0}, "both must be >= 1"),
        ({"samples": 100, "delta": 1.5}, r"delta: 1.5 is outside \(0, 1\)"),
        ({"samples": 100, "task": 8}, "not among the 8 tasks"),
        ({"samples": 100, "features": np.ones((5, 2))}, "one row per state"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        error_bound(FAMILY, **options)


def test_no_number_of_samples_is_enough_for_dependent_features_or_chains_that_do_not_mix():
    tasks = random_family(states=4, actions=2, tasks=3, spread=0.1, gamma=0.7)
    bound = error_bound(tasks, samples=1e6, features=np.ones((4, 2)))
    assert bound.samples_needed == np.inf
    # Every policy stays where it begins.
    still = MDP(np.broadcast_to(np.eye(4)[:, None], (3, 4, 2, 4)), tasks.reward, 0.7)
    bound = error_bound(still, samples=1e9)
    assert bound.samples_needed == bound.theorem_1.total == np.inf
