"""The proof's lines on random pairs, and the counterexamples to the theorem as printed."""

import numpy as np

from apportion.theory import (
    MDP,
    LearningError,
    TransferConstants,
    concentrability,
    distance_by_enumeration,
    norm,
)
from apportion.theory.errata import check_lines


def test_true_lines_never_fail_and_false_ones_are_found_over_random_pairs():
    found = check_lines(600)
    true = found[found.source.isin(["corrected", "printed, true"])]
    false = found[found.source.isin(["printed", "mixed"])]
    assert len(true) == 7
    assert len(false) == 8
    assert (true.violations == 0).all(), true
    assert (false.violations > 0).all(), false


def theorem_1(mdp, first, distance):
    """Theorem 1 when LSPI makes no error: e = 0 and K is large."""
    constants = TransferConstants(mdp.gamma, float(mdp.reward_bound), first, 1.0, distance)
    return constants.theorem_1(LearningError(0.0, 0.0), 10_000).total


def truth(mdp, task, sigma):
    return float(norm(task.suboptimality(mdp.optimal()[0]), sigma))


def test_sigma_and_mu_as_printed_make_the_theorem_false_and_corrected_true():
    kernel = np.repeat(np.eye(2)[:, None], 2, 1)
    mdp = MDP(kernel, np.array([[0, 0], [0.5, 0.4]]), 0.1)
    task = MDP(kernel, np.array([[0, 0], [0.4, 0.5]]), 0.1)
    mu, sigma = np.array([1 - 1e-8, 1e-8]), np.array([0.5, 0.5])
    distance = float(distance_by_enumeration(task, mdp, mu))
    printed = concentrability(kernel, 0.1, sigma=mu, mu=sigma).first
    corrected = concentrability(kernel, 0.1, sigma=sigma, mu=mu).first
    measured = truth(mdp, task, sigma)
    np.testing.assert_allclose(measured, 0.0786, atol=1e-4)
    np.testing.assert_allclose(theorem_1(mdp, printed, distance), 1.5e-4, rtol=0.02)
    np.testing.assert_allclose(theorem_1(mdp, corrected, distance), 0.74, rtol=0.01)


def test_the_kernel_of_the_trained_mdp_makes_the_theorem_false_and_the_tasks_true():
    # M goes from 0 to 2, the task to 1, where mu hardly looks and only the task pays for action 1.
    kernel, kernel_t = np.zeros((3, 2, 3)), np.zeros((3, 2, 3))
    kernel[:, :, 2] = 1
    kernel_t[0, :, 1] = kernel_t[1:, :, 2] = 1
    reward_t = np.array([[0, 0], [0, 1], [0, 0]], float)
    mdp, task = MDP(kernel, np.zeros((3, 2)), 0.5), MDP(kernel_t, reward_t, 0.5)
    mu, sigma = np.array([0.5 - 1e-8, 1e-8, 0.5]), np.array([1.0, 0, 0])
    distance = float(distance_by_enumeration(task, mdp, mu))
    of_m = concentrability(kernel, 0.5, sigma=sigma, mu=mu).first
    of_task = concentrability(kernel_t, 0.5, sigma=sigma, mu=mu).first
    measured = truth(mdp, task, sigma)
    assert measured == 0.5
    assert theorem_1(mdp, of_m, distance) < 0.01
    assert theorem_1(mdp, of_task, distance) > measured
