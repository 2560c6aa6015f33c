"""Figure 5: the year of each watched task, and which of them is drawn."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from apportion.studies.portfolio import fig5
from apportion.studies.portfolio.fig5 import METHODS, WatchedTasks, sized_plan


@pytest.fixture(scope="module")
def plan(prices, tiny):
    return sized_plan(prices, WatchedTasks(replace(tiny, held_out=4), policies=2, watched=2))


@pytest.fixture(scope="module")
def cells(plan, compute):
    return compute(plan)


@pytest.mark.slow
def test_figure_5_draws_the_task_with_the_largest_gap(plan, cells):
    study = plan.conclude(pd.concat(cells.values(), ignore_index=True), plan.settings)
    table = study.table
    assert "cell" not in table
    assert len(table) == 3 * 2 * 2
    total = table.set_index(["method", "policy", "task"]).over_equal.unstack("method")
    best = (total["pmtl"] - total[METHODS[2]]).idxmax()
    drawn = table[table.drawn]
    assert set(zip(drawn.policy, drawn.task, strict=True)) == {best}
    assert len(study.plot().axes) == 3


@pytest.mark.slow
def test_a_single_task_policy_alone_is_the_same_as_among_others(plan, cells, compute):
    """Up to rounding, which depends on the batch: 5e-7 of a share were measured."""
    alone = compute(plan, plan.cells[-1:])
    assert list(alone) == ["task-1-1"]
    pd.testing.assert_frame_equal(alone["task-1-1"], cells["task-1-1"], rtol=0, atol=3e-6)


@pytest.mark.slow
def test_shares_are_kept_for_the_drawn_task_alone(cells):
    marked = fig5.mark_drawn(pd.concat(cells.values(), ignore_index=True))
    shares = marked[[c for c in marked if c.startswith("share ")]]
    assert shares.shape[1] == 3
    np.testing.assert_allclose(shares[marked.drawn].sum(axis=1), 1, atol=1e-5)
    assert shares[~marked.drawn].isna().all(axis=None)


def test_policies_are_given_all_tasks_by_priority_or_one_each(plan, tiny, monkeypatch):
    seen: list = []

    def take_down(market, tasks, settings, **others):
        seen.append((tasks, settings))
        raise KeyboardInterrupt

    monkeypatch.setattr(fig5, "train_policies", take_down)
    for cells in (plan.cells[:2], plan.cells[2:]):
        with pytest.raises(KeyboardInterrupt):
            list(plan.compute(cells, lambda what, fraction: None))
    (several, by_priority), (singles, plain) = seen
    assert several.members.shape[:2] == (2, tiny.tasks)
    assert (np.asarray(several.members[0]) != np.asarray(several.members[1])).any()
    assert by_priority.prioritisation == tiny.alpha
    assert plain.prioritisation == 0
    # Equal updates: the multi-task policy's, of which one task's share is the paper's protocol.
    assert by_priority.updates == plain.updates == 12
    watched = np.asarray(several.members[:, :2]).reshape(4, -1)
    np.testing.assert_array_equal(singles.members[:, 0], watched)
