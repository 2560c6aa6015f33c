"""How the portfolio studies read their rows, on tables made up by hand."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio.record import LAZY
from apportion.studies.portfolio import fig4, fig5, recipe
from apportion.studies.portfolio.grid import TILT
from apportion.studies.portfolio.tables import by_experiment_and_year, few_and_many

COLUMNS = ["method", "tasks", "experiment", "year", "tested", "step", "task", "gain"]


def grid_of(gains):
    """Three experiments and years, on both kinds of task; gains by method, tasks and step."""
    rows = [
        [method, tasks, experiment, year, tested, step, -1, gain + 0.01 * experiment * year]
        for (method, tasks, step), gain in gains.items()
        for experiment, year, tested in product(range(3), range(1, 4), ("own", "held-out"))
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
    """Three tasks over half a year; the multi-task policy gains most over the single-task one on task 1."""
    dates = pd.bdate_range("2019-01-01", "2019-06-28").astype(str)
    rng = np.random.default_rng(0)
    rows = []
    for place, method in enumerate(fig5.METHODS):
        for task in range(3):
            gain = 0.001 * (2 - place) * (task == 1) + 0.0001 * rng.normal(size=len(dates))
            frame = pd.DataFrame({"method": method, "task": task, "date": dates})
            deviation = 0.1 + 0.01 * task + 0.01 * rng.random(len(dates))
            shares = {"share A": 0.5, "share B": 0.5}
            rows.append(frame.assign(over_equal=gain, deviation=deviation, **shares))
    return pd.concat(rows, ignore_index=True)


def test_figure_5_draws_the_task_where_the_multi_task_policy_gains_most(year):
    study = fig5.conclude(year, {})
    assert set(study.table[study.table.drawn].task) == {1}


def test_figure_5_counts_tasks_and_months_and_keeps_the_mean_over_days(year):
    by_month = fig5.by_task_and_month(year, "deviation")
    for method, values in by_month.items():
        assert values.shape == (3, 6)
        days = year[year.method == method].deviation
        assert values.mean() == pytest.approx(days.mean())
    verdicts = fig5.conclude(year, {}).verdicts
    assert {verdict.n for verdict in verdicts} == {3}
    grown = [v.estimate for v in verdicts if "grows more than stl (equal" in v.claim]
    totals = year.groupby(["method", "task"]).over_equal.sum().groupby("method").mean()
    assert grown == pytest.approx([totals["pmtl"] - totals[fig5.METHODS[2]]])
