"""The practical policy: choices use earlier years only, and both rewards share the rest."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

from apportion_studies.portfolio import recipe
from apportion_studies.portfolio.recipe import _RecipeSize


@pytest.fixture(scope="module")
def plan(prices, tiny, sized):
    settings = replace(tiny, method="mtl", members=2, tracking_error_weight=15.0, steps=6)
    size = _RecipeSize(settings, experiments=1, years=2, held_out=4, shown=2, checkpoints=2)
    return sized(recipe, size, prices=prices)


@pytest.fixture(scope="module")
def table(plan, compute) -> pd.DataFrame:
    """Rows under the reward with a penalty, copied for the other reward."""
    cells = compute(plan, [cell for cell in plan.cells if cell["reward"] == "tracking"])
    own = pd.concat(cells.values(), ignore_index=True)
    return pd.concat([own, own.assign(reward="paper")], ignore_index=True)


def test_both_rewards_share_parameters_draws_and_tasks(
    plan, prices, given, alone_is_given_the_same
):
    parts = ("tasks", "policy_keys", "run_keys", "lengths")
    alone_is_given_the_same(recipe, plan, plan.cells[-1].name, parts, 2)
    seen = {}
    for cells in (plan.cells[:2], plan.cells[2:]):
        found = given(recipe, plan, cells)
        seen[float(found["market"].tracking)] = (found["tasks"], found)
    assert set(seen) == {15.0, 0.0}
    (tasks, tracked), (others, plain) = seen[15.0], seen[0.0]
    np.testing.assert_array_equal(tasks.members, others.members)
    assert tasks.members.shape == (2 * 2, 4, 3)  # 2 years with 2 members each
    for name in ("policy_keys", "run_keys"):
        keys = jax.random.key_data(tracked[name])
        assert len(np.unique(keys, axis=0)) == 4
        np.testing.assert_array_equal(keys, jax.random.key_data(plain[name]))
    years = [prices.row(f"{year}-01-01") - 6 for year in prices.years()[-2:]]
    assert np.asarray(tracked["lengths"]).tolist() == np.repeat(years, 2).tolist()


def test_choices_never_look_at_the_year_they_are_made_for(table):
    years = range(2010, 2016)
    table = pd.concat([table[table.year == 2001].assign(year=y) for y in years], ignore_index=True)
    rng = np.random.default_rng(0)
    table["sharpe_gain"] = rng.standard_normal(len(table))
    later = table.copy()
    later.loc[later.year >= 2014, "sharpe_gain"] = rng.standard_normal((later.year >= 2014).sum())
    picks = [
        recipe._chosen(t).query("year <= 2014")[["year", "k", "eta", "steps"]]
        for t in (table, later)
    ]
    pd.testing.assert_frame_equal(*picks)
    assert set(recipe._chosen(table).query("year < 2013").k) == {0.0}
    # Choices do not use rows of the paper's reward.
    assert set(recipe._chosen(table).reward) == {"tracking"}
    [figure] = recipe._conclude(table, {})
    assert len(figure.verdicts) == 14
    assert len(figure.table) == 2 * len(recipe._strategies(table))
    assert len(figure.plot().axes) == 4
