"""Measured suboptimality against both theorems, with all features and with few."""

import numpy as np
import pandas as pd
import pytest

from apportion.studies.theory import bound
from studies.toys import perform


@pytest.fixture(scope="module")
def tasks():
    frames = [bound.measure_tasks(spread, 20, seed) for seed, spread in enumerate(bound.SPREADS)]
    return pd.concat(frames, ignore_index=True)


def test_both_theorems_hold_in_every_run_and_the_tighter_one_is_below(tasks):
    assert len(tasks) == 100 * 8
    assert (tasks.measured <= tasks.theorem_1_prime_total + 1e-9).all()
    assert (tasks.theorem_1_prime_total <= tasks.theorem_1_total + 1e-9).all()
    figure = bound._conclude_bound(tasks, 0)
    assert all(verdict.holds for verdict in figure.verdicts)
    assert "Lemma 4 asks for" in figure.summary()
    assert len(figure.plot().axes) == 2


@pytest.mark.slow
def test_no_bound_is_broken_at_paper_size(tmp_path):
    study = perform(bound.bound(scale="paper"), tmp_path).study
    assert len(study.figure("bound").table) == 500 * 8
    exact = [v for figure in study.figures for v in figure.verdicts if v.exact]
    assert len(exact) == 6
    assert all(verdict.holds for verdict in exact)


def test_one_broken_run_is_enough_to_break_a_theorem_and_a_family_counts_once(tasks):
    measured = tasks.measured.to_numpy(copy=True)
    # Two tasks of one family.
    measured[:2] = 1.1 * tasks.theorem_1_prime_total[:2]
    plain, prime, order, _ = bound._conclude_bound(tasks.assign(measured=measured), 0).verdicts
    assert (prime.outcome, prime.estimate, prime.n) == ("does-not-hold", 0.01, 100)
    assert plain.outcome == order.outcome == "holds"
    assert all(verdict.exact and verdict.p is None for verdict in (plain, prime, order))


def test_the_features_are_orthonormal_under_the_uniform_distribution():
    features = bound.cosines(6)
    np.testing.assert_allclose(features.T @ features / 6, np.eye(6), atol=1e-12)


@pytest.mark.parametrize("sampling", bound.SAMPLINGS)
def test_few_features_err_more_and_break_no_bound(sampling):
    few, all_of_them = (bound.measure_features(sampling, d, 0.4, runs=4, seed=5) for d in (2, 6))
    assert (few.e > 2 * all_of_them.e).all()
    for found in (few, all_of_them):
        assert (found.theorem_1_prime <= 1).all()
        assert (found.theorem_1 <= found.theorem_1_prime).all()
