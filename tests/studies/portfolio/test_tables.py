"""How the portfolio studies read their rows, on tables made up by hand."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio.record import LAZY
from apportion.studies.portfolio import fig3, fig4, fig5, recipe
from apportion.studies.portfolio.grid import TILT
from apportion.studies.portfolio.tables import by_experiment_and_year, few_and_many

COLUMNS = ["method", "tasks", "experiment", "year", "tested", "step", "task", "gain"]


def grid_of(gains):
    """Three experiments and years, on both kinds of task; gains by method, tasks and step."""
    rows = [
        [method, tasks, experiment, year, tested, step, task, gain + 0.01 * experiment * year]
        for (method, tasks, step), gain in gains.items()
        for experiment, year in product(range(3), range(1, 4))
        for tested, task in (("own", -1), ("own", 0), ("own", 1), ("held-out", -1))
    ]
    return pd.DataFrame(rows, columns=COLUMNS).assign(log_gain=0.0, sharpe_gain=0.0)


def test_values_are_those_of_the_last_step_unless_one_is_named():
    table = grid_of({("mtl", 5, 10): 1.0, ("mtl", 5, 20): 2.0})
    last = by_experiment_and_year(table, "mtl", 5, "own")
    assert last.loc[0, 1] == 2.0
    assert by_experiment_and_year(table, "mtl", 5, "own", step=10).loc[0, 1] == 1.0


@pytest.mark.parametrize(
    ("counts", "compared"), [((5, 30, 100), (5, 30)), ((5, 30), (5, 30)), ((7,), (7, 7))]
)
def test_the_second_of_three_numbers_of_tasks_is_compared(counts, compared):
    table = grid_of({("mtl", count, 10): 1.0 for count in counts})
    assert few_and_many(table) == compared


def test_methods_are_compared_on_the_tasks_that_both_were_tested_on():
    """The multi-task policy is 1 ahead on the single policy's own two tasks, and far behind on a third."""
    gains = {("stl", 1, 100): 0.0, ("mtl", 5, 100): 1.0, ("pmtl", 5, 100): 1.0}
    table = grid_of(gains | {(LAZY, 0, 100): 0.3, (TILT, 0, 100): 1.0})
    third = table[(table.method == "mtl") & (table.task == 1)].assign(task=2, gain=-50.0)
    table = pd.concat([table, third], ignore_index=True)
    table.loc[(table.method == "mtl") & (table.task == -1), "gain"] = -16.0
    found = {v.claim.split(" (")[0]: v.estimate for v in fig4.conclude(table, {}).verdicts}
    assert found["MTL with 5 tasks beats STL at equal updates per policy"] == pytest.approx(1.0)


def test_the_curve_that_rises_sooner_learns_faster():
    gains = {("stl", 1, 50): -9.0, ("stl", 1, 100): 5.0, ("mtl", 5, 50): 1.0, ("mtl", 5, 100): 5.0}
    gains |= {("pmtl", 5, 50): 3.0, ("pmtl", 5, 100): 5.0, (LAZY, 0, 100): 0.3, (TILT, 0, 100): 1.0}
    found = {v.claim.split(" (")[0]: v.estimate for v in fig4.conclude(grid_of(gains), {}).verdicts}
    assert found["P-MTL with 5 tasks learns faster than MTL"] == pytest.approx(1.0)
    assert found["P-MTL with 5 tasks learns faster than STL"] == pytest.approx(6.0)


def test_every_number_of_tasks_is_reported():
    gains = {(method, count, 10): 1.0 for method in ("mtl", "pmtl") for count in (5, 30, 100)}
    gains |= {("stl", 1, 10): 0.0, (LAZY, 0, 10): 0.3, (TILT, 0, 10): 1.0}
    table = grid_of(gains)
    for study in (fig3, fig4):
        claims = " ".join(v.claim for v in study.conclude(table, {}).verdicts)
        assert "with 100 tasks beats Equal CRP" in claims
        assert "100 tasks transfer better than 30" in claims or "100 tasks beat 30" in claims


def test_under_the_papers_protocol_a_single_task_has_its_share_of_the_updates():
    gains = {("stl", 1, 20): 0.0, ("stl", 1, 100): -20.0, ("mtl", 5, 100): 1.0}
    gains |= {("pmtl", 5, 100): 3.0, (LAZY, 0, 100): 0.3, (TILT, 0, 100): 1.0}
    found = {v.claim: v.estimate for v in fig4.conclude(grid_of(gains), {}).verdicts}
    protocol, equal = (
        next(value for claim, value in found.items() if words in claim)
        for words in ("the paper's protocol (100 updates against 20)", "P-MTL with 5 tasks beats STL at")
    )  # fmt: skip
    assert protocol == pytest.approx(3.0)
    assert equal == pytest.approx(23.0)


def test_the_recipes_strategies_are_the_variants_they_are_called():
    rows = [
        [reward, e, y, tested, members, 6, k, eta, 0.0, 0.0]
        for reward, e, y, tested, members, (k, eta) in product(
            recipe.REWARDS, range(2), (2001, 2002), ("own", "held-out"), (2, 1), recipe.VARIANTS
        )
    ]
    found = recipe.strategies(pd.DataFrame(rows, columns=recipe.COLUMNS))
    said = {
        recipe.LAZY: (0.0, 0.1, 2),
        recipe.PRACTICAL: (0.5, 0.1, 2),
        recipe.TEAM: (1.0, 1.0, 2),
        recipe.SEED: (1.0, 1.0, 1),
        recipe.PAPER_TEAM: (1.0, 1.0, 2),
    }
    for name, (k, eta, members) in said.items():
        rows = found[name]
        assert set(zip(rows.k, rows.eta, rows.members, strict=True)) == {(k, eta, members)}
        assert set(rows.reward) == {"paper" if name == recipe.PAPER_TEAM else "tracking"}


@pytest.fixture(scope="module")
def year():
    """Three policies with a task each over half a year; the multi-task policy gains most over the
    single-task one on the second.
    """
    dates = pd.bdate_range("2019-01-01", "2019-06-28").astype(str)
    rng = np.random.default_rng(0)
    rows = []
    for place, method in enumerate(fig5.METHODS):
        for task in range(3):
            gain = 0.001 * (2 - place) * (task == 1) + 0.0001 * rng.normal(size=len(dates))
            frame = pd.DataFrame({"method": method, "policy": task, "task": 0, "date": dates})
            deviation = 0.1 + 0.01 * task + 0.01 * rng.random(len(dates))
            shares = {"share A": 0.5, "share B": 0.5}
            rows.append(frame.assign(over_equal=gain, deviation=deviation, **shares))
    return pd.concat(rows, ignore_index=True)


def test_figure_5_draws_the_task_where_the_multi_task_policy_gains_most(year):
    study = fig5.conclude(year, {})
    assert set(study.table[study.table.drawn].policy) == {1}


def test_figure_5_says_that_straying_pays_only_where_it_does(year):
    """The multi-task policy's gains follow its deviation; the single-task one's do not."""
    days = year.groupby(["method", "policy"]).deviation
    further = year.deviation - days.transform("mean")
    led = year.assign(over_equal=year.over_equal + 0.1 * further * (year.method == "pmtl"))
    found = {v.claim.split(" strays")[0]: v for v in fig5.conclude(led, {}).verdicts}
    assert found["pmtl"].outcome == "holds"
    expected = 0.1 * further[year.method == "pmtl"].std() * year.date.nunique()
    assert found["pmtl"].estimate == pytest.approx(expected, rel=0.1)
    assert found[fig5.METHODS[2]].outcome == "not-established"


def test_figure_5_counts_policies_and_months_and_keeps_the_mean_over_days(year):
    by_month = fig5.by_policy_and_month(year, "deviation")
    for method, values in by_month.items():
        assert values.shape == (3, 6)
        days = year[year.method == method].deviation
        assert values.mean() == pytest.approx(days.mean())
    verdicts = fig5.conclude(year, {}).verdicts
    assert {verdict.n for verdict in verdicts} == {3}
    grown = [v.estimate for v in verdicts if "grows more than stl (equal" in v.claim]
    totals = year.groupby(["method", "policy"]).over_equal.sum().groupby("method").mean()
    assert grown == pytest.approx([totals["pmtl"] - totals[fig5.METHODS[2]]])
