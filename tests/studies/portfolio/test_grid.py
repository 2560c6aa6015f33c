"""Figures 3 and 4: the cells of their grid, what each method is given, and the reading of tables."""

import json
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio.backtest import backtest_strategies, lazy_rebalancing
from apportion.domains.portfolio.baselines.simple import BASELINES
from apportion.domains.portfolio.record import LAZY
from apportion.errors import InputError
from apportion.statistics import mean_over, over_rows_and_columns
from apportion.studies.cells import share_of
from apportion.studies.portfolio import fig3, fig4, grid
from apportion.studies.portfolio.grid import PAPER, TILT, GridSize, sized_plan
from apportion.studies.portfolio.tables import by_experiment_and_year
from apportion.studies.store import CellStore
from apportion.tasks import draw_tasks, split_entities


@pytest.fixture(scope="module")
def size(tiny) -> GridSize:
    return GridSize(
        settings=tiny,
        experiments=2,
        years=(2001, 2002),
        counts=(4,),
        held_out=4,
        single_tasks=2,
        shown=2,
        checkpoints=3,
    )


@pytest.fixture(scope="module")
def plans(prices, size):
    within = size.within(prices)
    studies = {"fig3": fig3, "fig4": fig4}
    return [sized_plan(name, study.conclude, prices, within) for name, study in studies.items()]


@pytest.fixture(scope="module")
def cells(plans, compute) -> dict[str, pd.DataFrame]:
    return compute(plans[0])


@pytest.fixture(scope="module")
def table(cells) -> pd.DataFrame:
    return pd.concat(cells.values(), ignore_index=True)


def test_the_grid_has_every_cell_of_every_method_once(plans, table):
    assert list(dict.fromkeys(table.cell)) == [cell.name for cell in plans[0].cells]
    means = table[table.task == -1]
    counts = means.groupby(["method", "tasks", "tested", "step"]).size()
    assert (counts == 4).all()  # 2 experiments x 2 years
    steps = means.groupby(["method", "tasks"]).step.unique()
    assert sorted(steps[("mtl", 4)]) == [4, 8, 12]
    # Single-task policies are also tested where the paper's protocol has them: s / T.
    assert sorted(steps[("stl", 1)]) == [1, 2, 3, 4, 8, 12]
    assert np.isfinite(table.gain).all()


def test_cells_of_one_program_are_those_trained_side_by_side(plans):
    programs = {cell.program for cell in plans[0].cells}
    assert programs == {"lazy-crp-0", "volatility-tilt-0", "mtl-pmtl-4", "stl-1"}
    together = [cell for cell in plans[0].cells if cell.program == "mtl-pmtl-4"]
    assert len(together) == 2 * 2 * 2


def test_both_figures_share_their_cells(plans, prices, size):
    assert plans[0].digest == plans[1].digest
    other = replace(size, settings=replace(size.settings, seed=1)).within(prices)
    assert sized_plan("fig3", fig3.conclude, prices, other).digest != plans[0].digest


@pytest.mark.parametrize("name", ["pmtl-4-1-2001", "stl-1-0-2002", "volatility-tilt-0-1-2002"])
def test_a_cell_alone_is_the_same_as_among_others(plans, cells, compute, name):
    """Up to rounding, which depends on the batch: 1.1e-4 points of a gain were measured."""
    cell = next(cell for cell in plans[0].cells if cell.name == name)
    alone = compute(plans[0], [cell])[name]
    pd.testing.assert_frame_equal(alone, cells[name], rtol=0, atol=5e-4)


class Enough(Exception):
    """Nothing is trained where it is raised."""


@pytest.fixture
def given(plans, monkeypatch):
    """What `train_policies` is given for the cells of a program."""

    def of(program: str) -> dict:
        seen: dict = {}

        def take_down(market, tasks, settings, **others):
            seen.update(market=market, tasks=tasks, settings=settings, **others)
            raise Enough

        monkeypatch.setattr(grid, "train_policies", take_down)
        cells = [cell for cell in plans[0].cells if cell.program == program]
        with pytest.raises(Enough):
            list(plans[0].compute(cells, lambda what, fraction: None))
        return seen

    return of


def own_tasks(experiment: int) -> np.ndarray:
    seen, _ = split_entities(10, 4, seed=experiment)
    return np.asarray(draw_tasks(seen, 3, 4, seed=experiment).members)


def days_before(prices, year: int, window: int = 6) -> int:
    return prices.row(f"{year}-01-01") - window


def test_multi_task_methods_differ_by_alpha_alone(given, prices):
    """Runs are ordered by experiment, year and method: both methods of a pair share all the rest."""
    run = given("mtl-pmtl-4")
    np.testing.assert_allclose(run["selection"].alpha, [0.0, 0.5] * 4)
    np.testing.assert_allclose(run["selection"].beta, 1.0)
    np.testing.assert_allclose(run["selection"].initial, 1 - 1 / 3)
    years = [days_before(prices, year) for year in (2001, 2002)]
    assert np.asarray(run["lengths"]).tolist() == np.repeat(years * 2, 2).tolist()
    for experiment in range(2):
        for tasks in run["tasks"].members[4 * experiment : 4 * experiment + 4]:
            np.testing.assert_array_equal(tasks, own_tasks(experiment))
    for name in ("policy_keys", "run_keys"):
        keys = jax.random.key_data(run[name]).reshape(4, 2, -1)
        np.testing.assert_array_equal(keys[:, 0], keys[:, 1])
        assert len(np.unique(keys[:, 0], axis=0)) == 4


@pytest.mark.parametrize("program", ["mtl-pmtl-4", "stl-1"])
def test_no_day_of_a_test_year_is_in_the_market_trained_on(given, prices, program):
    run = given(program)
    # The market ends before the last test year; each run's length before its own.
    assert run["market"].prices.shape[0] == prices.row("2002-01-01")
    ends = np.asarray(run["lengths"]) + run["market"].window
    assert set(ends.tolist()) == {prices.row(f"{year}-01-01") for year in (2001, 2002)}


def test_a_single_task_policy_is_given_one_task(given, prices):
    run = given("stl-1")
    np.testing.assert_array_equal(run["selection"].alpha, 0.0)
    assert run["tasks"].members.shape == (2 * 2 * 2, 1, 3)
    for experiment in range(2):
        here = np.asarray(run["tasks"].members[4 * experiment : 4 * experiment + 4, 0])
        np.testing.assert_array_equal(here, np.tile(own_tasks(experiment)[:2], (2, 1)))
    years = [days_before(prices, year) for year in (2001, 2002)]
    assert np.asarray(run["lengths"]).tolist() == np.repeat(years * 2, 2).tolist()
    # It starts from the parameters that multi-task policies of its pair start from.
    several = given("mtl-pmtl-4")
    np.testing.assert_array_equal(
        jax.random.key_data(run["policy_keys"]), jax.random.key_data(several["policy_keys"])
    )


@pytest.mark.parametrize("name", [LAZY, TILT])
def test_a_grid_strategy_is_the_one_backtested_alone(prices, table, name):
    """What learns nothing, computed for one cell by plain means, is the grid's."""
    seen, _ = split_entities(10, 4, seed=1)
    gains = []
    for task in draw_tasks(seen, 3, 4, seed=1)[:2]:
        some = prices.select(task.names(prices.tickers))
        result = backtest_strategies(
            some,
            {LAZY: lazy_rebalancing()},
            baselines={TILT: BASELINES[TILT]},
            start="2002-01-01",
            end="2002-12-31",
            window=6,
        )
        gains.append(result.against(name).value)
    cell = table[(table.method == name) & (table.experiment == 1) & (table.year == 2002)]
    own = cell[cell.tested == "own"].set_index("task").log_gain
    assert own.loc[-1] == pytest.approx(np.mean(gains), abs=2e-5)
    assert own.loc[[0, 1]].to_numpy() == pytest.approx(np.array(gains), abs=2e-5)


def test_figures_3_and_4_are_read_from_the_grid(plans, table, tmp_path):
    for plan in plans:
        study = plan.conclude(table, plan.settings)
        study.save(tmp_path / study.name)
        verdicts = json.loads((tmp_path / study.name / "verdict.json").read_text())
        assert len(verdicts) >= 5
        assert (tmp_path / study.name / "figure.png").stat().st_size > 5000
        assert any("lazy" in text.lower() for text in study.notes)
        assert any("survivorship" in text for text in study.notes)
        assert "cell" not in study.table


def test_cells_computed_in_several_goes_are_concluded_together(plans, cells, table, tmp_path):
    """Shares of the cells, saved one after the other, are what all of them at once are."""
    store = CellStore(plans[0], tmp_path / "fig3").open()
    for share in ("1/2", "2/2"):
        assert store.missing()
        for cell in share_of(plans[0].cells, share):
            store.save(cell, cells[cell.name])
    pd.testing.assert_frame_equal(store.rows(), table)
    sibling = CellStore(plans[1], tmp_path / "fig4").open()
    sibling.adopt([tmp_path / "fig3"])
    assert not sibling.missing()
    studies = [
        plan.conclude(rows, plan.settings)
        for plan, rows in zip(plans, (store.rows(), sibling.rows()), strict=True)
    ]
    assert [study.name for study in studies] == ["fig3", "fig4"]
    means = table[table.task == -1]
    curves = means.groupby(["method", "tasks", "tested", "step"])
    assert len(studies[1].table) == curves.ngroups
    assert sorted(studies[1].table.gain) == pytest.approx(sorted(curves.gain.mean()))


COLUMNS = ["method", "tasks", "experiment", "year", "tested", "step", "task", "gain", "log_gain"]


def test_a_verdict_holds_only_where_its_whole_interval_does():
    rows = []
    for experiment in range(6):
        for year in range(2013, 2020):
            for method, tasks, gain in (
                ("stl", 1, -20 + experiment),
                ("mtl", 5, 1.0),
                ("mtl", 30, 4.0 + experiment / 10),
                ("pmtl", 5, 1.0),
                ("pmtl", 30, 4.0 - 6 * (year % 2)),
                (LAZY, 0, 0.3),
                (TILT, 0, 1.0),
            ):
                for tested, task in (("own", -1), ("own", 0), ("held-out", -1)):
                    rows.append([method, tasks, experiment, year, tested, 100, task, gain, 0.0])
    table = pd.DataFrame(rows, columns=COLUMNS).assign(sharpe_gain=0.0)
    verdicts = {v.claim.split(" (")[0]: v for v in fig4.conclude(table, {}).verdicts}
    assert verdicts["MTL with 30 tasks beats STL at equal updates per policy"].holds
    assert verdicts["MTL with 30 tasks beats STL at equal updates per policy"].n == 6
    assert not verdicts["P-MTL beats MTL with 30 tasks"].holds
    assert not verdicts["P-MTL with 30 tasks beats Equal CRP"].holds


def test_years_are_resampled_as_a_whole():
    """A year's common shock does not average out over experiments."""
    shared = np.tile(np.random.default_rng(0).standard_normal(7), (20, 1))
    careful, careless = over_rows_and_columns(shared), mean_over(shared.ravel())
    assert careful.high - careful.low > 3 * (careless.high - careless.low)


def test_the_paper_grid_refuses_data_that_cannot_carry_it(prices):
    with pytest.raises(InputError, match="none of the test years 2013 to 2019"):
        PAPER.within(prices)
    with pytest.raises(InputError, match="too few for 18 held-out"):
        replace(PAPER, years=(2002,)).within(prices)


def test_values_are_read_as_experiments_by_years(table):
    gains = by_experiment_and_year(table, "mtl", 4, "own")
    assert gains.shape == (2, 2)
    assert list(gains.columns) == [2001, 2002]
