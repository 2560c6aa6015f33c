"""Figure 2: recorded single-task runs, and correlations at equal training time."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

from apportion.tasks import draw_tasks, split_entities
from apportion_studies.portfolio import fig2


@pytest.fixture(scope="module")
def plan(prices, tiny, sized):
    size = (2, replace(tiny, method="stl", steps=800, held_out=3))
    return sized(fig2, size, prices=prices.until("2001-02-01"))


@pytest.mark.slow
def test_figure_2_watches_runs_and_correlates(plan, compute, alone_is_given_the_same):
    cells = compute(plan)
    [study] = plan.conclude(pd.concat(cells.values(), ignore_index=True), plan.settings)
    assert len(study.table) == 2 * 16
    assert len(study.verdicts) == 4
    assert (study.table.score > 0).all()
    assert len(study.plot().axes) == 3
    parts = ("tasks", "policy_keys", "run_keys")
    alone_is_given_the_same(fig2, plan, "run-1", parts)


def test_a_watched_run_is_given_its_own_task_and_keeps_no_old_score(plan, given, prices):
    seen = given(fig2, plan, plan.cells)
    known, unknown = split_entities(10, 3)
    tasks = np.asarray(seen["tasks"].members[:, 0])
    np.testing.assert_array_equal(tasks, draw_tasks(known, 3, 2).members)
    assert not set(tasks.ravel()) & set(unknown)
    # The last year is left for testing.
    assert seen["market"].prices.shape[0] == len(prices.until("2001-01-01").dates)
    assert float(seen["priority"].alpha) == 0.0
    assert float(seen["priority"].smoothing) == 0.0
    keys = jax.random.key_data(seen["run_keys"])
    np.testing.assert_array_equal(keys, jax.random.key_data(seen["policy_keys"]))


@pytest.mark.parametrize("bends", [False, True])
def test_what_time_explains_is_no_correlation_at_equal_time_and_the_rest_is(bends):
    """Removing only a straight line would leave a correlation of .6 between two similar curves."""
    rng = np.random.default_rng(2)
    time = np.arange(400.0)
    common = np.minimum(time, 100) + 50 * np.sin(time / 60) if bends else time
    x, y = (common + 20 * rng.standard_normal(400) for _ in range(2))
    assert fig2._rank_correlation(x, y) > 0.5
    assert abs(fig2._rank_correlation(x, y, time)) < 0.15
    assert fig2._rank_correlation(x, x + 5 * rng.standard_normal(400), time) > 0.8


def test_the_watched_score_is_what_updates_left_and_never_the_first_priority():
    """A run is drawn with 1, the initial priority, and then with the score of the update before."""
    steps = np.arange(1, 101)
    drawn = np.concatenate([[1.0], 0.001 * steps[:-1]])
    runs = [
        pd.DataFrame({"run": run, "step": steps, "score": drawn, "gradient_norm": steps * 1.0})
        for run in range(2)
    ]
    found = fig2._watched(pd.concat(runs).sample(frac=1, random_state=0))
    assert found.step.tolist() == [50, 100, 50, 100]
    np.testing.assert_allclose(found.score, [0.05, 0.099] * 2)
    # Scores of the minibatches of steps 1 and 51.
    np.testing.assert_allclose(found.batch_score, [0.001, 0.051] * 2)
    np.testing.assert_allclose(found.gradient_norm, [1, 51] * 2)
