import numpy as np
import pytest

from apportion.errors import InputError
from apportion.statistics import bootstrap, clustered_ratio, compare, interquartile_mean


def test_interquartile_mean_drops_a_quarter_at_each_end():
    values = np.array([100.0, 3, 1, 2, 4, -50, 5, 6])
    assert interquartile_mean(values) == pytest.approx(np.mean([2, 3, 4, 5]))


def test_bootstrap_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        estimate = bootstrap(rng.normal(1.0, 2.0, 40), resamples=400, seed=trial)
        hits += estimate.low <= 1.0 <= estimate.high
    # A percentile interval from 40 values covers a little less than the 95 % it says.
    assert 175 <= hits <= 199


def test_a_paired_comparison_sees_what_an_unpaired_one_would_not():
    rng = np.random.default_rng(1)
    level = rng.normal(0, 10, 30)
    estimate = compare(level + 1 + rng.normal(0, 0.3, 30), level)
    assert estimate.above_zero
    assert estimate.value == pytest.approx(1, abs=0.2)


def test_the_same_data_gives_the_same_interval():
    values = np.random.default_rng(2).normal(size=20)
    assert bootstrap(values) == bootstrap(values)


def test_one_experiment_has_no_interval():
    assert bootstrap(np.array([3.0])).low == -np.inf


@pytest.mark.parametrize(
    ("values", "words"),
    [([], "non-empty"), ([1.0, np.nan], "1 are not finite"), ([[1.0]], "one-dim")],
)
def test_bad_samples_are_refused(values, words):
    with pytest.raises(InputError, match=words):
        bootstrap(np.array(values))


def test_pairs_must_match():
    with pytest.raises(InputError, match="pairs must match"):
        compare(np.ones(3), np.ones(4))


@pytest.mark.parametrize("days", [20, 60])
def test_intervals_by_clusters_of_days_cover_what_they_claim(days):
    rng = np.random.default_rng(days)
    covered = 0
    for _ in range(3000):
        # A day's size varies, and what it does to one garage it does to all.
        sizes = rng.gamma(4.0, 1.0, (days, 1)) * rng.uniform(0.5, 1.5, (days, 6))
        effect = rng.normal(0.02, 0.05, (days, 1)) + rng.normal(0, 0.05, (days, 6))
        gains = sizes * effect
        found = clustered_ratio((gains.sum(1), sizes.sum(1)))
        covered += found.low <= 0.02 <= found.high
    # Taking all cells for independent would cover about two thirds.
    assert 0.93 <= covered / 3000 <= 0.97


def test_two_clusterings_are_wider_than_either_and_cover_both():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        gains = (
            1 + rng.normal(0, 1, (30, 1)) + rng.normal(0, 1, (1, 12)) + rng.normal(0, 1, (30, 12))
        )
        sizes = np.ones((30, 12))
        by_row, by_column = (gains.sum(1), sizes.sum(1)), (gains.sum(0), sizes.sum(0))
        both = clustered_ratio(by_row, by_column)
        covered += both.low <= 1 <= both.high
    one = clustered_ratio(by_row)
    assert both.high - both.low > one.high - one.low
    assert both.n == 12
    assert covered / 2000 >= 0.94


def test_clusters_without_size_are_none_and_one_cluster_has_no_interval():
    alone = clustered_ratio((np.array([3.0, 0.0]), np.array([2.0, 0.0])))
    assert (alone.value, alone.low, alone.n) == (1.5, -np.inf, 1)
    with pytest.raises(InputError, match="some size"):
        clustered_ratio((np.zeros(2), np.zeros(2)))
