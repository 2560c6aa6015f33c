"""Both theorems' formulas by hand, and small cases in which the tighter one is met with equality."""

import numpy as np
import pytest

from apportion.theory.concentrability import concentrability
from apportion.theory.distance import task_distance
from apportion.theory.estimation import LearningError
from apportion.theory.mdp import MDP
from apportion.theory.theorem import TransferConstants

CONSTANTS = TransferConstants(gamma=0.5, reward_bound=3.0, first=9.0, second=4.0, distance=0.01)
ERROR = LearningError(0.1, 0.2)
NONE = LearningError(0.0, 0.0)


def test_every_term_of_theorem_1_prime_is_that_of_its_formula():
    terms = CONSTANTS.theorem_1_prime(ERROR, iterations=3)
    # 2 g / (1 - g)^2 = 4, times sqrt(4) = 2
    assert terms.approximation == pytest.approx(0.8)
    assert terms.estimation == pytest.approx(1.6)
    # 2 x 3 x .5^3 / .5
    assert terms.propagation == pytest.approx(1.5)
    # 2 x .01 x sqrt(9) / .5
    assert terms.task_distance == pytest.approx(0.12)
    assert terms.total == pytest.approx(0.8 + 1.6 + 1.5 + 0.12)


def test_every_term_of_theorem_1_is_that_of_its_formula():
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
