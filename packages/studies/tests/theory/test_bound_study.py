"""Measured suboptimality against both theorems, with all features and with few."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion_studies.theory import bound

COMMITTED = Path(__file__).parents[4] / "docs" / "results" / "bound"


def test_both_theorems_hold_in_every_run_and_the_tighter_one_is_below():
    tasks = bound._measure_tasks(0.4, 20, 0)
    assert len(tasks) == 20 * 8
    assert (tasks.measured <= tasks.theorem_1_prime_total + 1e-9).all()
    assert (tasks.theorem_1_prime_total <= tasks.theorem_1_total + 1e-9).all()
    assert tasks.measured.max() > 0


def test_one_broken_run_is_enough_to_break_a_theorem_and_a_family_counts_once():
    rows = pd.read_parquet(COMMITTED / "rows.parquet")
    tasks = rows[rows.figure == "bound"]
    measured = tasks.measured.to_numpy(copy=True)
    # Two tasks of one family.
    measured[:2] = 1.1 * tasks.theorem_1_prime_total[:2]
    figure = bound._conclude_bound(tasks.assign(measured=measured), 0)
    plain, prime, order, _ = figure.verdicts
    assert (prime.outcome, prime.estimate, prime.n) == ("does-not-hold", 0.002, 500)
    assert plain.outcome == order.outcome == "holds"
    assert all(verdict.exact and verdict.p is None for verdict in (plain, prime, order))
    assert len(figure.plot().axes) == 1


def test_the_features_are_orthonormal_under_the_uniform_distribution():
    features = bound._cosines(6)
    np.testing.assert_allclose(features.T @ features / 6, np.eye(6), atol=1e-12)


@pytest.mark.parametrize("sampling", ["one path", "no noise"])
def test_few_features_err_more_and_break_no_bound(sampling):
    few, all_of_them = (bound._measure_features(sampling, d, 0.4, runs=4, seed=5) for d in (2, 6))
    assert (few.e > 2 * all_of_them.e).all()
    for found in (few, all_of_them):
        assert (found.theorem_1_prime <= 1).all()
        assert (found.theorem_1 <= found.theorem_1_prime).all()
