"""Figures 3 and 4: the cells of the grid, the training arguments of each method, and the tables."""

import re
from dataclasses import replace
from functools import cache
from itertools import product

import jax
import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio import SimulatedMarket
from apportion.domains.portfolio.backtest import backtest_strategies, lazy_rebalancing
from apportion.domains.portfolio.record import LAZY
from apportion.errors import InputError
from apportion.tasks import draw_tasks, split_entities
from apportion_studies.portfolio import fig3_4
from apportion_studies.portfolio.experiments import share_of_years
from apportion_studies.portfolio.fig3_4 import _SCALES, _GridSize

NOTHING = "lazy-crp-0"


@pytest.fixture(scope="module")
def prices():
    """Prices of two test years, one year for validation and one for training."""
    return SimulatedMarket.draw(universe=10, days=1455, seed=5).prices


@pytest.fixture(scope="module")
def plan(prices, tiny, sized):
    size = _GridSize(
        settings=tiny,
        experiments=2,
        years=(2002, 2003),
        counts=(2, 4),
        held_out=4,
        long=1,
        # As many as own tasks, so that one program walks both.
        shown=4,
        epoch=2,
        epochs=2,
        mark=1,
        replicates=(2, 1),
    )
    return sized(fig3_4, size, prices=prices)


@pytest.fixture(scope="module")
def cells(plan, compute) -> dict[str, pd.DataFrame]:
    """Rows of lazy Equal CRP and of a single-task policy for each task."""
    return compute(plan, [cell for cell in plan.cells if cell.program in (NOTHING, "stl-4")])


@pytest.fixture(scope="module")
def table(cells) -> pd.DataFrame:
    return pd.concat(cells.values(), ignore_index=True)


def test_the_grid_tests_every_cell_at_every_step(plan, table):
    programs = dict.fromkeys(cell.program for cell in plan.cells)
    several = ["mtl-4", "pmtl-4", "stl-4", "mtl-2", "pmtl-2", "stl-1"]
    assert list(programs) == [*several, NOTHING]
    found = table[table.method == "stl"].groupby(["tested", "step", "epoch"]).size()
    # 2 experiments, 3 years and 4 own tasks; the first year is for validation.
    assert found.to_dict() == {
        (tested, step, epoch): count
        for (tested, count), (step, epoch) in product(
            (("own", 24), ("held-out", 6)), ((1, 0.5), (2, 1.0), (4, 2.0))
        )
    }
    assert np.isfinite(table.gain).all()
    assert set(table[table.method == LAZY].year) == {2002, 2003}


def test_every_policy_is_tested_at_common_marks_and_at_its_epochs():
    paper = _SCALES["paper"]
    assert sorted(paper.marks("stl", 30)) == [150, 300, 600, 900]
    for method, count in (("mtl", 5), ("stl", 2), ("mtl", 30)):
        marks = paper.marks(method, count)
        assert {150, 300, 600, 1200, 2400, 4500} <= marks
        assert all(step % paper.mark == 0 for step in marks)
    assert max(paper.marks("mtl", 30)) == 27_000
    assert len(paper.marks("mtl", 30)) == 3 + 8 + 1
    seeds = [paper.seeds("pmtl", *where) for where in ((5, 2012), (30, 2017), (30, 2018))]
    assert seeds == [3, 1, 3]


@pytest.mark.parametrize(("name", "runs"), [("pmtl-2-1-2001-1", 1), ("stl-4-0-2002-0", 4)])
def test_a_cell_alone_learns_from_the_same(plan, alone_is_given_the_same, name, runs):
    parts = ("tasks", "policy_keys", "run_keys", "lengths")
    alone_is_given_the_same(fig3_4, plan, name, parts, runs)


@pytest.fixture(scope="module")
def run(plan, given):
    """Training arguments for the cells of a program."""

    @cache
    def of(program: str) -> dict:
        return given(fig3_4, plan, [cell for cell in plan.cells if cell.program == program])

    return of


def own_tasks(experiment: int) -> np.ndarray:
    seen, _ = split_entities(10, 4, seed=experiment)
    return np.asarray(draw_tasks(seen, 3, 4, seed=experiment).members)


def only_days_before_test_years(found: dict, prices, each) -> None:
    """Check that the market ends before the last test year, and each run's days before its own."""
    firsts = [prices.row(f"{year}-01-01") for year in (2001, 2002, 2003)]
    assert found["market"].prices.shape[0] == firsts[-1]
    ends = np.asarray(found["lengths"]) + found["market"].window
    assert ends.tolist() == np.repeat(firsts * 2, each).tolist()


def keys_of(found: dict, name: str) -> np.ndarray:
    return np.asarray(jax.random.key_data(found[name]))


def test_multi_task_methods_differ_by_alpha_alone(run, prices):
    """An epoch is 2 updates per task, so two epochs of 4 tasks are 16 updates."""
    uniform, found = run("mtl-4"), run("pmtl-4")
    assert (uniform["settings"].prioritisation, found["settings"].prioritisation) == (0.0, 0.5)
    assert replace(uniform["settings"], method="pmtl") == found["settings"]
    assert (found["settings"].steps, run("pmtl-2")["settings"].steps) == (16, 8)
    # Two training seeds with few tasks, and with many tasks in the last two years.
    only_days_before_test_years(found, prices, [1, 2, 2] * 2)
    for experiment in range(2):
        for tasks in found["tasks"].members[5 * experiment : 5 * experiment + 5]:
            np.testing.assert_array_equal(tasks, own_tasks(experiment))
    for name in ("policy_keys", "run_keys"):
        np.testing.assert_array_equal(keys_of(uniform, name), keys_of(found, name))
        few = keys_of(run("pmtl-2"), name)
        assert len(np.unique(few, axis=0)) == 12
        np.testing.assert_array_equal(np.delete(few, (1, 7), axis=0), keys_of(found, name))


def test_a_single_task_policy_is_given_one_task(run, prices):
    """Each of the many tasks has a policy; one for the first task gets the updates of few tasks."""
    found, longer = run("stl-4"), run("stl-1")
    assert found["settings"].prioritisation == 0
    assert (found["settings"].steps, longer["settings"].steps) == (4, 8)
    assert found["tasks"].members.shape == (2 * 3 * 4, 1, 3)
    for experiment in range(2):
        here = np.asarray(found["tasks"].members[12 * experiment : 12 * experiment + 12, 0])
        np.testing.assert_array_equal(here, np.tile(own_tasks(experiment), (3, 1)))
        first = np.asarray(longer["tasks"].members[2 * experiment, 0])
        np.testing.assert_array_equal(first, own_tasks(experiment)[0])
    only_days_before_test_years(found, prices, 4)
    # It has the same first parameters as the multi-task policies of its pair.
    several = keys_of(run("mtl-2"), "policy_keys")[::2]
    np.testing.assert_array_equal(keys_of(found, "policy_keys"), np.repeat(several, 4, axis=0))


def test_lazy_rebalancing_is_the_one_backtested_alone(prices, table):
    """The grid's rows of lazy Equal CRP equal those of a plain backtest, in one cell."""
    seen, _ = split_entities(10, 4, seed=1)
    gains = []
    for task in draw_tasks(seen, 3, 4, seed=1)[:2]:
        some = prices.select(task.names(prices.tickers))
        days = {"start": "2002-01-01", "end": "2002-12-31", "window": 6}
        result = backtest_strategies(some, {LAZY: lazy_rebalancing()}, **days)
        gains.append(result.against(LAZY).value)
    cell = table[(table.method == LAZY) & (table.experiment == 1) & (table.year == 2002)]
    own = cell[cell.tested == "own"].set_index("task").gain
    assert own.loc[[0, 1]].to_numpy() == pytest.approx(100 * np.array(gains), abs=2e-3)


def test_the_paper_grid_refuses_data_that_cannot_carry_it(prices):
    with pytest.raises(InputError, match="none of the test years 2013 to 2019"):
        fig3_4.fig3_4(scale="paper", prices=prices)
    with pytest.raises(InputError, match="too few for 18 held-out"):
        replace(_SCALES["paper"], years=(2002,)).within(prices)


def grid_of(gains):
    """Make rows of three experiments, three years and one before; gains by method, tasks and step.

    An arm is tested on as many own tasks as it has, and on held-out ones. Multi-task policies have
    two training seeds, whose gains differ by 1 point a year.
    """
    ends = {key[:2]: max(step for *arm, step in gains if tuple(arm) == key[:2]) for key in gains}
    rows = [
        [method, tasks, experiment, year, seed, tested, step, 2 * step / max(ends[method, tasks], 1), task,
         gain + 0.01 * experiment * year + (seed - 0.5 if "mtl" in method else 0)]
        for (method, tasks, step), gain in gains.items()
        for experiment, year in product(range(3), (2016, 2017, 2018, 2019))
        for seed in range(2 if "mtl" in method else 1)
        for tested, task in [("held-out", -1), *(("own", task) for task in range(tasks or 4))]
    ]  # fmt: skip
    columns = [
        "method",
        "tasks",
        "experiment",
        "year",
        "replicate",
        "tested",
        "step",
        "epoch",
        "task",
    ]
    table = pd.DataFrame(rows, columns=[*columns, "gain"]).assign(sharpe=0.9, equal_sharpe=1.2)
    return table.astype({"replicate": int, "task": int, "epoch": float})


@pytest.fixture
def gains():
    """Gains of each method with 2 and 5 tasks; 40 updates are the equal updates."""
    found = {(LAZY, 0, 0): 0.3}
    found |= {("stl", 5, 10): -1.0, ("stl", 5, 20): 0.0, ("stl", 1, 20): -2.0, ("stl", 1, 40): -9.0}
    for method, more in (("mtl", 0.0), ("pmtl", 0.5)):
        found |= {(method, 2, 20): 1.0 + more, (method, 2, 40): 2.0}
        found |= {(method, 5, 40): 3.0, (method, 5, 100): 7.0 + more}
    return found


def by_claim(figure):
    """Return a figure's verdicts by claim without years; the one over all years is kept."""
    return {re.sub(r", (in|over) 20.*", "", one.claim): one for one in figure.verdicts}


def verdicts_of(table):
    return by_claim(fig3_4._conclude(table, {})[1])


def test_each_claim_names_its_protocol_and_its_years(gains):
    """Equal epochs give a multi-task policy T times as many updates as a single-task policy."""
    transfer, own, protocols = fig3_4._conclude(grid_of(gains), {})
    found = by_claim(own)
    for claim, gap in (
        ("MTL with 5 tasks beats STL at equal epochs (100 updates against 20)", 7.0),
        ("P-MTL with 2 tasks beats STL at equal epochs (40 updates against 20)", 2.0),
        ("P-MTL with 2 tasks learns faster than STL at equal epochs (mean of all 2)", 2.25),
        ("5 tasks beat 2 (P-MTL) at equal epochs (100 updates against 40)", 5.5),
        ("P-MTL beats MTL with 5 tasks", 0.5),
        ("P-MTL with 2 tasks learns faster than MTL (mean of all epochs)", 0.25),
    ):
        assert found[claim].estimate == pytest.approx(gap), claim
    claims = [verdict.claim for verdict in own.verdicts]
    assert claims[0].endswith(", in 2019 (points a year)")
    assert claims[1].endswith(", over 2017 to 2019 (points a year)")
    better = found["P-MTL with 2 tasks beats STL at equal epochs (40 updates against 20)"]
    assert list(better.levels) == ["P-MTL with 2 tasks", "STL"]
    assert np.diff(list(better.levels.values())) == pytest.approx([-2.0])
    single = "STL at equal epochs (100 updates against 20)"
    moved = by_claim(transfer)[f"MTL with 5 tasks transfers better than {single}"]
    assert moved.estimate == pytest.approx(7.0)
    updates = by_claim(protocols)[
        "P-MTL with 5 tasks beats STL on own tasks at equal updates (40 each)"
    ]
    assert updates.estimate == pytest.approx(12.0)
    for figure, count, rows in (
        (transfer, 2, len(gains)),
        (own, 3, len(gains)),
        (protocols, 3, 78),
    ):
        assert len(figure.plot().axes) == count
        assert len(figure.table) == rows


def test_sharpe_ratios_below_equal_crps_are_reported_for_every_case(gains):
    *figures, _ = fig3_4._conclude(grid_of(gains), {})
    found = [one for figure in figures for one in figure.verdicts if "Sharpe" in one.claim]
    assert len(found) == 8
    for verdict in found:
        assert verdict.estimate == pytest.approx(-0.3)
        assert verdict.outcome == "does-not-hold"
        assert list(verdict.levels.values()) == pytest.approx([0.9, 1.2])


def test_methods_are_compared_on_the_tasks_that_both_were_tested_on(gains):
    """The longer single-task policy has only the first task; MTL is far behind on the others."""
    table = grid_of(gains)
    several = table.method.isin(["mtl", "pmtl"]) & (table.task > 0) & (table.step == 40)
    table.loc[several, "gain"] -= 50.0
    found = by_claim(fig3_4._conclude(table, {})[2])
    claim = "MTL with 5 tasks beats STL on own tasks at equal updates (40 each)"
    assert found[claim].estimate == pytest.approx(12.0)


def test_every_arm_is_stopped_where_it_was_best_in_the_year_before(gains):
    """STL is best after 20 updates, except in 2018 after 10, which are used in 2019."""
    table = grid_of(gains)
    single = (
        (table.method == "stl") & (table.tasks == 5) & (table.step == 10) & (table.tested == "own")
    )
    table.loc[single & (table.year == 2018), "gain"] += 5.0
    # Gains on held-out instruments have no effect on stopping.
    table.loc[(table.tested == "held-out") & (table.step == 10), "gain"] += 99.0
    known = fig3_4._Arms.of(table)
    read = known.protocols(table)[fig3_4._STOPPED]
    steps = read[(read.method == "stl")].groupby("year").step.unique()
    assert {year: list(step) for year, step in steps.items()} == {
        2017: [20],
        2018: [20],
        2019: [10],
    }
    assert set(read[(read.method == "mtl") & (read.tasks == 5)].step) == {100}
    assert set(read.tasks) == {2, 5}


def test_a_fraction_of_tasks_gains_at_least_so_much(gains):
    """The gains of 5 tasks over STL fall from task to task; P-MTL is ahead of MTL by 0 to 4."""
    table = grid_of(gains)
    ends = (table.step == 100) & (table.task >= 0)
    for method, slope in (("mtl", -3.0), ("pmtl", -2.0)):
        own = ends & (table.method == method)
        table.loc[own, "gain"] = slope * table.task[own]
    known = fig3_4._Arms.of(table)
    own = known.protocols(table)[fig3_4._EPOCHS].query("tested == 'own'")
    curve = fig3_4._over_single(own, ("mtl", 5), known)
    assert curve.columns.tolist() == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert np.diff(curve.iloc[0]) == pytest.approx([-3.0] * 4)
    found = verdicts_of(table)
    [gains_more] = [v for claim, v in found.items() if claim.startswith("from 30% of 5 tasks on")]
    assert gains_more.estimate == pytest.approx(2.5)
    assert gains_more.holds


def test_the_claim_of_little_help_fails_if_few_tasks_gain_much():
    """P-MTL gains 2 points more than MTL on four of twenty tasks, and the same on the others."""
    gains = {("stl", 20, 1): 0.0, ("stl", 1, 1): 0.0, ("mtl", 2, 1): 0.0, ("pmtl", 2, 1): 0.0}
    gains |= {("mtl", 20, 1): 0.0, ("pmtl", 20, 1): 0.0, (LAZY, 0, 0): 0.3}
    table = grid_of(gains)
    best = (table.method == "pmtl") & (table.tasks == 20) & table.task.isin([3, 8, 11, 19])
    table.loc[best, "gain"] += 2.0
    found = verdicts_of(table)
    [little] = [v for claim, v in found.items() if claim.startswith("up to 20% of 20 tasks")]
    [more] = [v for claim, v in found.items() if claim.startswith("from 30% of 20 tasks on")]
    assert (little.estimate, more.estimate) == pytest.approx((2.0, 0.0))
    assert little.outcome == "does-not-hold"


def test_the_share_of_years_is_of_the_variance_of_the_mean():
    """Years have variance 12, experiments do not differ, and noise has variance 16/9."""
    alternating, halves = np.array([1, -1, 1, -1]), np.array([1, 1, -1, -1])
    gap = 3.0 * halves + np.outer(halves, alternating)
    years, rest = (12 - 16 / 9 / 4) / 4, 16 / 9 / 16
    assert share_of_years(gap) == pytest.approx(years / (years + rest))
