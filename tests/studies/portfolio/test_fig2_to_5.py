"""Figures 2 to 5 and the recipe: the whole road on a tiny grid, and the reading of given tables."""

import json
from dataclasses import replace

import equinox as eqx
import jax
import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio import KnownTruth
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.variants import score_variants
from apportion.errors import InputError
from apportion.statistics import bootstrap
from apportion.studies import paper_scale
from apportion.studies.portfolio import fig2, fig3, fig4, fig5, recipe, recipe_runs
from apportion.studies.portfolio import grid as market_grid
from apportion.studies.portfolio.scale import PAPER, Scale
from apportion.studies.portfolio.tables import cells, over_experiments_and_years

TINY = PortfolioSettings.paper(
    tasks=4, task_size=3, window=6, batch=12, hidden=4, learning_rate=1e-2, steps=12
)
GRID = Scale(
    settings=TINY,
    experiments=2,
    years=(2001, 2002),
    counts=(4,),
    held_out=4,
    single_tasks=2,
    shown=2,
    checkpoints=3,
)


RECIPE = recipe.Scale(
    replace(TINY, members=2, tracking=15.0, steps=6),
    experiments=1,
    years=2,
    held_out=4,
    shown=2,
    checkpoints=2,
)


@pytest.fixture(scope="module")
def prices():
    return KnownTruth.draw(universe=10, days=1090, seed=5).prices


@pytest.fixture(scope="module")
def grid(prices) -> pd.DataFrame:
    return market_grid.compute(prices, GRID.within(prices))


def test_the_grid_has_every_cell_of_every_method_once(grid):
    means = grid[grid.task == -1]
    counts = means.groupby(["method", "tasks", "tested", "step"]).size()
    assert (counts == 4).all()  # 2 experiments x 2 years
    steps = means.groupby(["method", "tasks"]).step.unique()
    assert sorted(steps[("mtl", 4)]) == [4, 8, 12]
    # Single-task policies are also tested where the paper's protocol has them: s / T.
    assert sorted(steps[("stl", 1)]) == [1, 2, 3, 4, 8, 12]
    assert np.isfinite(grid.gain).all()


def test_a_grid_policy_is_the_one_trained_and_walked_alone(prices, grid):
    """Lazy Equal CRP, computed for one cell by plain means, is the grid's."""
    from apportion.composition import EqualShares, PartialTrading
    from apportion.domains.portfolio.backtest import backtest
    from apportion.tasks import draw_tasks, split_entities

    seen, _ = split_entities(10, 4, seed=1)
    gains = []
    for task in draw_tasks(seen, 3, 4, seed=1)[:2].members:
        some = prices.select([prices.tickers[int(i)] for i in task])
        lazy = {"lazy": PartialTrading(EqualShares(), 0.1)}
        result = backtest(some, lazy, start="2002-01-01", end="2002-12-31", window=6)
        gains.append(result.against("lazy").value)
    row = grid[
        (grid.method == "lazy-equal-crp") & (grid.experiment == 1) & (grid.year == 2002)
    ].set_index("tested")
    assert row.loc["own", "log_gain"] == pytest.approx(np.mean(gains), abs=2e-5)


def test_figures_3_and_4_are_read_from_the_grid(grid, tmp_path):
    for study in (fig3.from_table(grid, {}), fig4.from_table(grid, {})):
        study.save(tmp_path / study.name)
        verdicts = json.loads((tmp_path / study.name / "verdict.json").read_text())
        assert len(verdicts) >= 5
        assert (tmp_path / study.name / "figure.png").stat().st_size > 5000
        assert any("lazy" in text.lower() for text in study.readings)
        assert any("survivorship" in text for text in study.readings)


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
                ("lazy-equal-crp", 0, 0.3),
                ("volatility-tilt", 0, 1.0),
            ):
                for tested in ("own", "held-out"):
                    row = [method, tasks, experiment, year, tested, 100, -1, gain, 0.0, 0.0]
                    rows.append(row)
    names = [
        "method",
        "tasks",
        "experiment",
        "year",
        "tested",
        "step",
        "task",
        "gain",
        "log_gain",
        "sharpe_gain",
    ]
    table = pd.DataFrame(rows, columns=names)
    verdicts = {v.claim.split(" (")[0]: v for v in fig4.from_table(table).verdicts}
    assert verdicts["MTL with 30 tasks beats STL at equal updates per policy"].holds
    assert verdicts["MTL with 30 tasks beats STL at equal updates per policy"].n == 42
    assert not verdicts["P-MTL beats MTL with 30 tasks"].holds
    assert not verdicts["P-MTL with 30 tasks beats Equal CRP"].holds


def test_years_are_resampled_as_a_whole():
    """A year's common shock does not average out over experiments."""
    shared = np.tile(np.random.default_rng(0).standard_normal(7), (20, 1))
    careful, careless = over_experiments_and_years(shared), bootstrap(shared.ravel())
    assert careful.high - careful.low > 3 * (careless.high - careless.low)


def test_the_paper_grid_refuses_data_that_cannot_carry_it(prices):
    with pytest.raises(InputError, match="none of the test years 2013 to 2019"):
        PAPER.within(prices)
    with pytest.raises(InputError, match="too few for 18 held-out"):
        replace(PAPER, years=(2002,)).within(prices)


def test_figure_2_watches_runs_and_correlates(prices):
    settings = replace(TINY, steps=200)
    study = fig2.from_table(fig2.compute(prices.until("2000-06-01"), settings, runs=2))
    assert len(study.table) == 2 * 4
    assert len(study.verdicts) == 4
    assert (study.table.score > 0).all()
    assert len(study.plot().axes) == 3


def test_correlation_at_equal_training_time_is_none_where_time_explains_all():
    rng = np.random.default_rng(1)
    time = np.arange(400.0)
    x, y = (time + 30 * rng.standard_normal(400) for _ in range(2))
    assert fig2.rank_correlation(x, y) > 0.8
    assert abs(fig2.rank_correlation(x, y, time)) < 0.15


@pytest.mark.slow
def test_figure_5_draws_the_task_with_the_largest_gap(prices):
    settings = replace(TINY, held_out=4)
    study = fig5.from_table(fig5.compute(prices, settings, watched=2))
    table = study.table
    total = table.groupby(["method", "task"]).over_equal.sum().unstack("method")
    best = (total["pmtl"] - total[fig5.METHODS[2]]).idxmax()
    assert table[table.drawn].task.unique().tolist() == [best]
    shares = table[table.drawn][[c for c in table if c.startswith("share ")]]
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    assert len(study.plot().axes) == 3


@pytest.fixture(scope="module")
def recipe_table(prices) -> pd.DataFrame:
    return recipe.compute(prices, RECIPE)


def test_the_recipe_with_no_trust_is_lazy_rebalancing(recipe_table):
    """k = 0 learns nothing: all checkpoints and team sizes agree, and eta = 1 gains nothing."""
    nothing = recipe_table[recipe_table.k == 0]
    assert set(nothing.reward) == {"tracking", "paper"}
    spread = nothing.groupby(["year", "tested", "eta"]).log_gain.agg(np.ptp)
    assert spread.max() < 1e-4
    assert nothing[nothing.eta == 1].log_gain.abs().max() < 1e-6


def test_a_single_seed_is_the_mean_over_all_seeds_each_alone(prices, recipe_table):
    growths = []

    def watch(team, *where):
        growth, sharpe = score_variants(team, *where)
        growths.append((team, np.asarray(growth)))
        return growth, sharpe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_runs, "score_variants", watch)
        table = recipe.compute(prices, RECIPE, rewards=["paper"])
    pd.testing.assert_frame_equal(
        table, recipe_table[recipe_table.reward == "paper"].reset_index(drop=True)
    )
    # Own tasks, then held-out ones; the team, then each of its members.
    sizes = [jax.tree.leaves(eqx.filter(team, eqx.is_array))[0].shape[1] for team, _ in growths]
    assert sizes == [2, 2, 1, 1, 1, 1] * 2
    first, second = (growth for _, growth in growths[-4:-2])
    assert np.abs(first - second).max() > 0
    gains = [100 * (g - g[:, 3:4]).mean(-1) for g in (first, second)]  # (k, eta) = (0, 1) is fourth
    row = table[(table.steps == 6) & (table.members == 1) & (table.tested == "own")]
    np.testing.assert_allclose(row.log_gain, np.mean(gains, 0).ravel(), atol=1e-5)


def test_choices_never_look_at_the_year_they_are_made_for(recipe_table):
    years = range(2010, 2016)
    table = pd.concat(
        [recipe_table[recipe_table.year == 2001].assign(year=y) for y in years], ignore_index=True
    )
    rng = np.random.default_rng(0)
    table["sharpe_gain"] = rng.standard_normal(len(table))
    later = table.copy()
    later.loc[later.year >= 2014, "sharpe_gain"] = rng.standard_normal((later.year >= 2014).sum())
    picks = [
        recipe.chosen(t).query("year <= 2014")[["year", "k", "eta", "steps"]]
        for t in (table, later)
    ]
    pd.testing.assert_frame_equal(*picks)
    assert set(recipe.chosen(table).query("year < 2013").k) == {0.0}
    # Rows of the paper's reward take no part in a choice.
    plain = table.reward == "paper"
    assert set(recipe.chosen(table).reward) == {"tracking"}
    assert len(recipe.from_table(table).verdicts) == 18
    assert len(recipe.from_table(table[~plain]).verdicts) == 16
    claims = [verdict.claim for verdict in recipe.from_table(table[plain]).verdicts]
    assert len(claims) == 6
    assert sum("a single seed of it" in claim for claim in claims) == 2


def test_cells_are_experiments_by_years(grid):
    table = cells(grid, "mtl", 4, "own")
    assert table.shape == (2, 2)
    assert list(table.columns) == [2001, 2002]


def test_tables_trained_in_several_goes_are_drawn_together(prices, grid, recipe_table, tmp_path):
    nothing = grid.method.isin(["lazy-equal-crp", "volatility-tilt"])
    for name, part in (("grid_1", grid.method == "stl"), ("grid_2", grid.tasks == 4)):
        grid[nothing | part].to_csv(tmp_path / f"{name}.csv", index=False)
        (tmp_path / f"{name}.json").write_text('{"device": "some"}')
    for reward, seconds in (("tracking", 3.5), ("paper", 2.0)):
        file = tmp_path / f"recipe_second.{reward}.csv"
        recipe_table[recipe_table.reward == reward].to_csv(file, index=False)
        said = recipe.describe(prices, RECIPE, rewards=[reward]) | {"seconds": seconds}
        file.with_suffix(".json").write_text(json.dumps(said))
    studies = paper_scale.draw(tmp_path)
    assert [study.name for study in studies] == ["fig3", "fig4", "recipe"]
    assert len(studies[1].table) == len(grid)
    assert len(studies[2].table) == len(recipe_table)
    assert set(studies[2].settings["rewards"]) == {"tracking", "paper"}
    assert studies[2].settings["seconds"] == 5.5
    assert studies[2].settings["held_out"] == 4
    for folder in ("fig3", "fig4", "recipe_second"):
        assert (tmp_path / folder / "verdict.json").exists()
        assert (tmp_path / folder / "settings.json").exists()


def test_the_command_asks_for_prices(tmp_path):
    with pytest.raises(SystemExit):
        paper_scale.main(["grid", "--out", str(tmp_path)])
