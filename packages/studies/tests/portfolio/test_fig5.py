"""Figure 5: the test year of each task, and the choice of the task in the plot."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from apportion_studies.portfolio import fig5
from apportion_studies.portfolio.fig5 import _DRAWN, _EQUAL_UPDATES, _METHODS


@pytest.fixture(scope="module")
def plan(prices, tiny, sized):
    settings = replace(tiny, held_out=4)
    size = fig5._Size(settings, policies=2, watched=2, updates=3, epochs=(1, 2))
    return sized(fig5, size, prices=prices)


@pytest.mark.slow
def test_figure_5_draws_the_task_with_the_largest_gap_and_keeps_its_shares_alone(plan, compute):
    cells = compute(plan)
    marked = plan.keep(pd.concat(cells.values(), ignore_index=True))
    [study] = plan.conclude(marked, plan.settings)
    table = study.table
    assert "cell" not in table
    assert len(table) == 5 * 2 * 2
    total = table.set_index(["method", "policy", "task"]).over_equal.unstack("method")
    best = (total[_DRAWN[0]] - total[_DRAWN[1]]).idxmax()
    drawn = table[table.drawn]
    assert set(zip(drawn.policy, drawn.task, strict=True)) == {best}
    assert len(study.plot().axes) == 3
    shares = marked[[c for c in marked if c.startswith("share ")]]
    assert shares.shape[1] == 3
    np.testing.assert_allclose(shares[marked.drawn].sum(axis=1), 1, atol=1e-5)
    assert shares[~marked.drawn].isna().all(axis=None)
    # A single-task policy alone is the same up to rounding; shares differed by 5e-7.
    alone = compute(plan, plan.cells[-1:])
    assert list(alone) == ["task-1-1"]
    pd.testing.assert_frame_equal(alone["task-1-1"], cells["task-1-1"], rtol=0, atol=3e-6)


def test_policies_are_given_all_tasks_by_priority_or_one_each(plan, tiny, given):
    (several, by_priority), (singles, plain) = (
        (seen["tasks"], seen["settings"])
        for seen in (given(fig5, plan, cells) for cells in (plan.cells[:2], plan.cells[2:]))
    )
    assert several.members.shape[:2] == (2, tiny.tasks)
    assert (np.asarray(several.members[0]) != np.asarray(several.members[1])).any()
    assert by_priority.prioritisation == tiny.alpha
    assert plain.prioritisation == 0
    # Two epochs of three updates per task for four tasks. A single-task policy gets as many updates
    # as a multi-task policy in the first epoch.
    assert (by_priority.steps, plain.steps) == (24, 12)
    watched = np.asarray(several.members[:, :2]).reshape(4, -1)
    np.testing.assert_array_equal(singles.members[:, 0], watched)


@pytest.fixture(scope="module")
def year():
    """Three policies with one task each over half a year; the multi-task policy gains most over the
    single-task policy on the second task.
    """
    dates = pd.bdate_range("2019-01-01", "2019-06-28").astype(str)
    rng = np.random.default_rng(0)
    rows = []
    for place, method in enumerate(_METHODS):
        for task in range(3):
            gain = 0.001 * (4 - place) * (task == 1) + 0.0001 * rng.normal(size=len(dates))
            frame = pd.DataFrame({"method": method, "policy": task, "task": 0, "date": dates})
            deviation = 0.1 + 0.01 * task + 0.01 * rng.random(len(dates))
            shares = {"share A": 0.5, "share B": 0.5}
            rows.append(frame.assign(over_equal=gain, deviation=deviation, **shares))
    return fig5._mark_drawn(pd.concat(rows, ignore_index=True))


def concluded(rows):
    [figure] = fig5._conclude(rows, {"updates": 300, "epochs": [2, 12]})
    return figure


def test_deviating_pays_only_if_the_deviating_days_gain(year):
    """Gains of the multi-task policy follow its deviation, and those of the single-task do not."""
    days = year.groupby(["method", "policy"]).deviation
    further = year.deviation - days.transform("mean")
    multi = _DRAWN[0]
    led = year.assign(over_equal=year.over_equal + 0.1 * further * (year.method == multi))
    found = {v.claim.split(": strays")[0]: v for v in concluded(led).verdicts}
    assert found[multi].outcome == "holds"
    expected = 10.0 * further[year.method == multi].std() * year.date.nunique()
    assert found[multi].estimate == pytest.approx(expected, rel=0.1)
    assert found[_EQUAL_UPDATES].outcome == "not-established"


def test_figure_5_counts_policies_and_months_and_keeps_the_mean_over_days(year):
    by_month = fig5._by_policy_and_month(year, "deviation")
    for method, values in by_month.items():
        assert values.shape == (3, 6)
        days = year[year.method == method].deviation
        assert values.mean() == pytest.approx(days.mean())
    figure = concluded(year)
    # The task with the largest gain of the multi-task policy is drawn.
    assert set(figure.table[figure.table.drawn].policy) == {1}
    verdicts = figure.verdicts
    assert {verdict.n for verdict in verdicts} == {3}
    grown = [v.estimate for v in verdicts if f"grows more than {_DRAWN[1]}" in v.claim]
    totals = year.groupby(["method", "policy"]).over_equal.sum().groupby("method").mean()
    assert grown == pytest.approx([100 * (totals[_DRAWN[0]] - totals[_DRAWN[1]])])
