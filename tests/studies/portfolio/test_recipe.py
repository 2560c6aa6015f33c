"""The practical policy walked forward: single seeds, choices that look back only, rewards apart."""

from dataclasses import replace

import equinox as eqx
import jax
import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio.validation import score_variants
from apportion.studies.cells import share_of
from apportion.studies.portfolio import recipe
from apportion.studies.portfolio.recipe import RecipeSize, sized_plan
from apportion.studies.store import CellStore


@pytest.fixture(scope="module")
def plan(prices, tiny):
    settings = replace(tiny, method="mtl", members=2, tracking_error_weight=15.0, steps=6)
    size = RecipeSize(settings, experiments=1, years=2, held_out=4, shown=2, checkpoints=2)
    return sized_plan(prices, size)


@pytest.fixture(scope="module")
def cells(plan, compute):
    return compute(plan)


@pytest.fixture(scope="module")
def table(cells) -> pd.DataFrame:
    return pd.concat(cells.values(), ignore_index=True)


def test_no_trust_is_lazy_rebalancing(table):
    """k = 0 learns nothing: all checkpoints and team sizes agree, and eta = 1 gains nothing."""
    nothing = table[table.k == 0]
    assert set(nothing.reward) == {"tracking", "paper"}
    spread = nothing.groupby(["year", "tested", "eta"]).log_gain.agg(np.ptp)
    assert spread.max() < 1e-4
    assert nothing[nothing.eta == 1].log_gain.abs().max() < 1e-6


def test_a_single_seed_is_the_mean_over_all_seeds_each_alone(plan, cells, compute):
    growths = []

    def watch(team, *where):
        growth, sharpe = score_variants(team, *where)
        growths.append((team, np.asarray(growth)))
        return growth, sharpe

    some = [cell for cell in plan.cells if cell["reward"] == "paper"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "score_variants", watch)
        again = compute(plan, some)
    for name, rows in again.items():
        pd.testing.assert_frame_equal(rows, cells[name])
    # Own tasks, then held-out ones; the team, then each of its members.
    sizes = [jax.tree.leaves(eqx.filter(team, eqx.is_array))[0].shape[1] for team, _ in growths]
    assert sizes == [2, 2, 1, 1, 1, 1] * 2
    first, second = (growth for _, growth in growths[-4:-2])
    assert np.abs(first - second).max() > 0
    gains = [100 * (g - g[:, 3:4]).mean(-1) for g in (first, second)]  # (k, eta) = (0, 1) is fourth
    table = pd.concat(again.values())
    row = table[(table.steps == 6) & (table.members == 1) & (table.tested == "own")]
    np.testing.assert_allclose(row.log_gain, np.mean(gains, 0).ravel(), atol=1e-5)


def test_a_cell_alone_is_the_same_as_among_others(plan, cells, compute):
    """Up to rounding, which depends on the batch: 4.4e-6 log points were measured."""
    name = plan.cells[-1].name
    alone = compute(plan, plan.cells[-1:])[name]
    pd.testing.assert_frame_equal(alone, cells[name], rtol=0, atol=3e-5)


def test_both_rewards_share_parameters_draws_and_tasks(plan, prices, monkeypatch):
    seen: dict = {}

    def take_down(market, tasks, settings, **others):
        seen[float(market.tracking)] = (tasks, others)
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "train_policies", take_down)
    for cells in (plan.cells[:2], plan.cells[2:]):
        with pytest.raises(KeyboardInterrupt):
            list(plan.compute(cells, lambda what, fraction: None))
    assert set(seen) == {15.0, 0.0}
    (tasks, given), (others, plain) = seen[15.0], seen[0.0]
    np.testing.assert_array_equal(tasks.members, others.members)
    assert tasks.members.shape == (2 * 2, 4, 3)  # 2 years with 2 members each
    for name in ("policy_keys", "run_keys"):
        keys = jax.random.key_data(given[name])
        assert len(np.unique(keys, axis=0)) == 4
        np.testing.assert_array_equal(keys, jax.random.key_data(plain[name]))
    years = [prices.row(f"{year}-01-01") - 6 for year in prices.years()[-2:]]
    assert np.asarray(given["lengths"]).tolist() == np.repeat(years, 2).tolist()


def test_choices_never_look_at_the_year_they_are_made_for(table):
    years = range(2010, 2016)
    table = pd.concat([table[table.year == 2001].assign(year=y) for y in years], ignore_index=True)
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
    assert len(recipe.conclude(table, {}).verdicts) == 18
    assert len(recipe.conclude(table[~plain], {}).verdicts) == 16
    claims = [verdict.claim for verdict in recipe.conclude(table[plain], {}).verdicts]
    assert len(claims) == 6
    assert sum("a single seed of it" in claim for claim in claims) == 2


def test_rewards_computed_in_several_goes_are_concluded_together(plan, cells, table, tmp_path):
    store = CellStore(plan, tmp_path).open()
    for share, reward in (("1/2", "tracking"), ("2/2", "paper")):
        assert store.missing()
        for cell in share_of(plan.cells, share):
            assert cell["reward"] == reward
            store.save(cell, cells[cell.name])
    study = plan.conclude(store.rows(), plan.settings)
    assert len(study.table) == 2 * len(recipe.strategies(table))
    assert set(study.settings["rewards"]) == {"tracking", "paper"}
    assert study.settings["held_out"] == 4
    study.save(tmp_path)
    assert (tmp_path / "verdict.json").exists()
    assert len(study.plot().axes) == 2
