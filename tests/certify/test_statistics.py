"""Estimates are the textbooks', and the intervals printed with each study cover as they say."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import programs
from apportion.certify.statistics import (
    Estimate,
    clustered_ratio,
    compare,
    holm,
    interval,
    judge,
    mean_over,
    of_means,
    over_blocks,
    over_rows_and_columns,
    p_value,
)
from apportion.errors import InputError

coverage = programs.benchmark("coverage")


def test_a_mean_has_students_interval_and_p_value():
    values = np.random.default_rng(0).normal(0.4, 1.0, 12)
    found, peer = mean_over(values), stats.ttest_1samp(values, 0.0)
    ends = peer.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high))
    assert found.p == pytest.approx(peer.pvalue)
    assert found.n == 12


def test_the_jackknife_of_a_mean_is_the_mean():
    values = np.random.default_rng(1).normal(size=9)
    plain, again = mean_over(values), of_means(values, lambda mean: mean)
    assert (again.value, again.low, again.high) == pytest.approx(
        (plain.value, plain.low, plain.high)
    )


def test_rows_and_columns_are_counted_by_the_rarer_and_both_widen_the_interval():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(10, 7))
    years, experiments = 3 * rng.normal(size=(1, 7)), 3 * rng.normal(size=(10, 1))
    found = {
        name: over_rows_and_columns(noise + shared)
        for name, shared in (("own", 0.0), ("years", years), ("both", years + experiments))
    }
    assert {estimate.n for estimate in found.values()} == {7}
    own, by_year, both = (found[name].error for name in ("own", "years", "both"))
    assert own < by_year < both
    # Where years alone differ, they are the units: the interval is theirs, nearly.
    alone = mean_over((noise + 100 * years).mean(0))
    again = over_rows_and_columns(noise + 100 * years)
    assert again.error == pytest.approx(alone.error, rel=1e-3)
    assert again.freedom == pytest.approx(6, rel=1e-2)


def test_one_row_or_column_is_a_plain_mean():
    values = np.random.default_rng(3).normal(size=8)
    for table in (values[None], values[:, None]):
        assert over_rows_and_columns(table) == mean_over(values)


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"above": 0.0}, "holds"),
        ({"above": 0.6}, "not-established"),
        ({"above": 1.6}, "does-not-hold"),
        ({"below": 0.4}, "does-not-hold"),
        ({"below": 2.0}, "holds"),
        ({"above": 0.0, "below": 2.0}, "holds"),
        ({"above": 0.0, "below": 1.2}, "not-established"),
        ({"above": 2.0, "below": 3.0}, "does-not-hold"),
    ],
)
def test_an_interval_decides_and_a_point_never_does(bounds, says):
    # 1 +- 0.5, 10 degrees of freedom
    estimate = Estimate(1.0, 0.5, 1.5, 11, 0.5 / stats.t.ppf(0.975, 10), 10)
    assert judge(estimate, **bounds) == says
    assert (p_value(estimate, **bounds) < 0.05) == (says != "not-established")


def test_holms_adjustment_is_the_textbooks():
    p = [0.01, 0.02, 0.022, 0.09]
    # 4 x .01, then 3 x .02, then 2 x .022 held up by the one before, then .09
    assert holm(p) == pytest.approx([0.04, 0.06, 0.06, 0.09])
    assert holm(p[::-1]) == pytest.approx([0.09, 0.06, 0.06, 0.04])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_a_record_of_one_day_has_no_interval_and_days_alone_are_blocks_of_one():
    assert over_blocks(np.mean, np.ones(1)).high == np.inf
    assert mean_over(np.array([3.0])).low == -np.inf
    days = np.array([0.3, -0.1, 0.4, 0.2])
    assert over_blocks(np.mean, days) == mean_over(days)


@pytest.mark.parametrize(
    ("values", "words"),
    [([], "non-empty"), ([1.0, np.nan], "1 are not finite"), ([[1.0]], "one-dim")],
)
def test_bad_samples_and_pairs_that_do_not_match_are_refused(values, words):
    with pytest.raises(InputError, match=words):
        mean_over(np.array(values))
    with pytest.raises(InputError, match="pairs must match"):
        compare(np.ones(3), np.ones(4))


def test_clusters_alike_in_size_are_a_plain_mean_and_two_clusterings_add_their_variances():
    gains, ones = np.random.default_rng(0).normal(1, 1, (30, 12)), np.ones((30, 12))
    by_row, by_column = ((gains.sum(axis), ones.sum(axis)) for axis in (1, 0))
    rows, columns, both = (
        clustered_ratio(*each) for each in ([by_row], [by_column], [by_row, by_column])
    )
    plain = mean_over(gains.mean(1))
    assert (rows.value, rows.low, rows.n) == pytest.approx((plain.value, plain.low, 30))
    assert both.error**2 == pytest.approx(rows.error**2 + columns.error**2)
    # Satterthwaite's, between those of the coarser clustering and those of both together.
    squares = rows.error**4 / 29 + columns.error**4 / 11
    assert (both.n, both.freedom) == (12, pytest.approx(both.error**4 / squares))
    assert 11 < both.freedom < 40


def test_clusters_without_size_are_none_and_one_cluster_has_no_interval():
    alone = clustered_ratio((np.array([3.0, 0.0]), np.array([2.0, 0.0])))
    assert (alone.value, alone.low, alone.n) == (1.5, -np.inf, 1)
    with pytest.raises(InputError, match="positive sum of sizes"):
        clustered_ratio((np.zeros(2), np.zeros(2)))


def test_the_middle_of_resampled_statistics_leaves_out_as_much_at_both_ends():
    assert interval(np.arange(1001.0)) == (25.0, 975.0)
    assert interval(np.array([np.nan, 1.0, np.inf])) == (1.0, 1.0)


LAYOUTS = {f"{layout.study}, {layout.units}": layout for layout in coverage.layouts()}
# One of each kind of estimate; the committed table has all of them.
MEASURED = (
    "fig1, 40 runs, a slope",
    "fig6, 12 seeds of 16 tasks",
    "recipe-sp500, 4 experiments x 22 years",
    "charging, 60 days",
    "charging, splits, 120 days x 54 of 54 x 5",
    "backtest, lead, 60 days, 0.1",
)


@pytest.mark.parametrize("name", MEASURED)
def test_an_interval_of_95_percent_covers_93_to_97(name):
    # 4000 draws tell a coverage to 0.35 points (one standard error).
    assert 0.93 <= coverage.measure(LAYOUTS[name], 4000, seed=1) <= 0.97


def test_the_committed_table_has_every_layout_and_is_within_the_tolerance():
    table = pd.read_csv(coverage.TABLE)
    named = [f"{study}, {units}" for study, units in zip(table.study, table.units, strict=True)]
    assert named == list(LAYOUTS)
    assert table.coverage.between(0.93, 0.97).all()
