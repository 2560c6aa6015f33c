"""Acceptance criteria of Figure 1, at 20 seeds."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion.domains.synthetic import spaced_betas
from apportion_studies.theory import fig1
from learning import optimised

COMMITTED = Path(__file__).parents[4] / "docs" / "results" / "fig1"


@pytest.mark.slow
def test_permuting_helps_where_entities_are_alike_and_leaves_a_gap_where_they_differ(monkeypatch):
    monkeypatch.setattr(fig1, "SIZES", (20, 100, 2000))
    with optimised():
        rows = pd.concat([fig1._measure(epsilon, runs=20, seed=0) for epsilon in (0.0, 0.8)])
    regret = rows.groupby(["epsilon", "arm", "samples"]).regret.mean()
    for epsilon in (0.0, 0.8):
        real, permuted, tied = (regret[epsilon, arm] for arm in fig1._ARMS)
        assert permuted[20] == real[20]
        assert real[2000] <= 0.02 * real[20]
        assert fig1.log_slope(real[[100, 2000]].to_numpy(), np.array([100, 2000])) <= -0.7
        assert 0.9 * tied[20] <= permuted[2000] <= 1.6 * tied[20]
        assert permuted[100] > 1.3 * tied[20]
    assert regret[0.0, "permuted", 2000] <= 0.05 * regret[0.0, "permuted", 20]
    near, far = (regret[e, "permuted", 2000] - regret[e, "real", 2000] for e in (0.0, 0.8))
    assert near <= 0.015
    assert far >= max(0.08, 10 * near)


def test_the_picture_has_the_three_panels_and_the_precise_rate_is_the_claim_that_fails():
    [figure] = fig1._conclude(pd.read_parquet(COMMITTED / "rows.parquet"), {})
    titles = [axis.get_title() for axis in figure.plot().axes]
    assert titles == ["ε = 0.8", "ε = 0", "gap at N = 2000"]
    failed = [verdict.claim for verdict in figure.verdicts if verdict.outcome != "holds"]
    # Three claims about the bound on this problem fail: its form, its size and its rate.
    assert len(failed) == 3
    for claim, words in zip(failed, ("like eps", "2 V_max", "1/sqrt(NT)"), strict=True):
        assert words in claim
    assert "the order of m, not exponential" in figure.summary()


def test_what_is_left_of_the_bound_is_by_hand_what_the_theorems_say():
    """By hand: gamma = 1/2, C' = C'' = 1, K = 5, 8 (R_max / 4 + 3 sqrt(2) eps), and Theorem 1'."""
    betas, largest = spaced_betas(10, 0.8), 1 + 0.5 * np.log(10)
    eps = fig1._ordering_distance(betas)
    first, second, trivial = fig1._least_bounds(0.8)
    np.testing.assert_allclose(first, 8 * (largest / 4 + 3 * np.sqrt(2) * eps))
    np.testing.assert_allclose(second, largest / 8 + 4 * eps)
    # The largest reward of random allocations is just below the bound on rewards.
    shares = np.random.default_rng(0).dirichlet(np.ones(10), 10_000)
    rewards = 1 - (betas * shares * np.log(shares)).sum(1)
    assert rewards.max() < trivial / 4 < 1.2 * rewards.max()
    # The ten offsets and the bias are dependent, so no sample size suffices for Lemma 4.
    assert fig1._examples_asked(fig1.separate_basis(10)) == np.inf
    assert 2000 < fig1._examples_asked(fig1.tied_basis(10)) < np.inf


def test_a_slope_and_equivalent_samples_are_read_off_a_power_law():
    sizes = np.array(fig1.SIZES, float)
    np.testing.assert_allclose(fig1.log_slope(3 * sizes**-1.1, sizes), -1.1)
    for number, found in ((300, 300), (9000, 2000)):
        np.testing.assert_allclose(fig1.equivalent_samples(1 / sizes, np.array(1 / number)), found)


def test_the_theorems_distance_is_proportional_to_the_range_of_the_betas():
    for spread in (0.0, 0.1, 0.8):
        found = fig1._ordering_distance(spaced_betas(10, spread))
        np.testing.assert_allclose(found, 0.468 * spread, rtol=1e-3)
