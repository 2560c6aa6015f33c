"""Figure 4: learning curves of STL, MTL and P-MTL, and the fraction of tasks that gain over STL.

Both protocols are drawn: the paper's, where an epoch gives each task the same number of updates, so
that a multi-task policy gets T times those of a single-task one, and equal updates per policy.
Methods are compared on the same tasks. Claims: P-MTL learns faster and better than STL, 30 tasks beat 5,
P-MTL beats MTL.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.record import LAZY
from apportion.domains.settings import METHOD_NAMES
from apportion.studies.engine import Plan
from apportion.studies.portfolio.experiments import SURVIVORSHIP
from apportion.studies.portfolio.grid import COLUMNS, TILT, grid_plan
from apportion.studies.portfolio.tables import (
    COLOURS,
    by_experiment_and_year,
    few_and_many,
    first_tasks,
    interquartile,
    note,
    summary,
    task_counts,
    verdict_above_zero,
)
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes


def plan(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """The grid of experiments, to show how learning went."""
    return grid_plan("fig4", conclude, scale=scale, seed=seed, prices=prices)


@concludes("fig4", "Figure 4: learning curves and the fraction of tasks that gain over STL")
def conclude(rows: Any, settings: dict[str, Any]) -> Conclusion:
    """The study from the rows of the grid."""
    table = rows[COLUMNS]
    return summary(table), _verdicts(table), lambda: plot(table), _notes(table)


def _verdicts(table: pd.DataFrame) -> list[Verdict]:
    _, many = few_and_many(table)
    counts, steps = task_counts(table), int(table.step.max())
    same = _tasks_of_single_policies(table)

    def own(method: str, tasks: int | None = None, step: int | None = None) -> pd.DataFrame:
        return by_experiment_and_year(same, method, tasks, "own", step=step)

    def held_out(tasks: int) -> pd.DataFrame:
        return by_experiment_and_year(table, "mtl", tasks, "held-out")

    claims = [
        (
            f"{METHOD_NAMES[method]} with {many} tasks beats STL at equal updates per policy",
            own(method, many) - own("stl"),
            False,
        )
        for method in ("mtl", "pmtl")
    ]
    seen = set(table[table.method == "stl"].step)
    claims += [
        (
            f"P-MTL with {t} tasks beats STL under the paper's protocol ({steps} updates against "
            f"{steps // t})",
            own("pmtl", t) - own("stl", step=steps // t),
            True,
        )
        for t in counts
        if steps // t in seen
    ]
    for few, more in pairwise(counts):
        both = first_tasks(table, few)
        last = [by_experiment_and_year(both, "pmtl", count, "own") for count in (more, few)]
        claims += [
            (f"{more} tasks beat {few} on own tasks (P-MTL)", last[0] - last[1], True),
            (
                f"{more} tasks beat {few} on held-out instruments (MTL)",
                held_out(more) - held_out(few),
                False,
            ),
        ]
    for count in counts:
        ends = {m: by_experiment_and_year(table, m, count, "own") for m in ("mtl", "pmtl")}
        claims += [
            (f"P-MTL beats MTL with {count} tasks", ends["pmtl"] - ends["mtl"], True),
            (f"P-MTL with {count} tasks beats Equal CRP", ends["pmtl"], True),
        ]
    claims += [
        (
            f"P-MTL with {many} tasks learns faster than {METHOD_NAMES[other]} (mean of all "
            "checkpoints, equal updates)",
            _along(same, "pmtl", many) - _along(same, other, many),
            True,
        )
        for other in ("mtl", "stl")
    ]
    return [verdict_above_zero(claim, gap, paper=paper) for claim, gap, paper in claims]


def _tasks_of_single_policies(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the tasks that have a single-task policy, for every method and step."""
    single: Any = table[(table.method == "stl") & (table.task >= 0)]
    return first_tasks(table, single.task.nunique())


def _along(same: pd.DataFrame, method: str, tasks: int) -> pd.DataFrame:
    """The mean over the checkpoints of multi-task policies: the higher, the sooner a curve has risen."""
    steps = sorted(same[same.method == "mtl"].step.unique())
    count = 1 if method == "stl" else tasks
    every = [by_experiment_and_year(same, method, count, "own", step=int(step)) for step in steps]
    return sum(every[1:], start=every[0]) / len(every)


def _notes(table: pd.DataFrame) -> tuple[str, ...]:
    def own(method: str, tasks: int | None = None) -> pd.DataFrame:
        return by_experiment_and_year(table, method, tasks, "own")

    return (
        note("Lazy Equal CRP, which learns nothing", own(LAZY)),
        note("A tilt to volatile instruments, which learns nothing", own(TILT)),
        *(note(f"MTL with {t} tasks, own tasks", own("mtl", t)) for t in task_counts(table)),
        note("STL, own tasks, at equal updates", own("stl")),
        "The paper's protocol gives a multi-task policy T times the updates of a single-task one; "
        "the comparison at equal updates removes that advantage.",
        SURVIVORSHIP,
    )


def plot(table: Any) -> Figure:
    """Top: the paper's protocol; bottom: equal updates; right: the fraction-of-tasks curves."""
    counts, same = task_counts(table), _tasks_of_single_policies(table)
    figure = Figure(figsize=(4 * (len(counts) + 1), 7), layout="constrained")
    grid = figure.subplots(2, len(counts) + 1, sharey=False)
    steps = int(table.step.max())
    for column, count in enumerate(counts):
        for row, protocol in enumerate(("the paper's protocol", "equal updates")):
            axes = grid[row, column]
            for method in ("stl", "mtl", "pmtl"):
                _curve(axes, same, method, count, stretch=count if row == 0 else 1, upto=steps)
            axes.axhline(0, color="k", linewidth=0.8)
            axes.set_title(f"{count} tasks, {protocol}", fontsize=10)
            axes.set_xlabel("updates of the multi-task policy" if row == 0 else "updates")
            axes.locator_params(axis="x", nbins=4)
        grid[0, column].sharey(grid[1, column])
    for row in range(2):
        grid[row, 0].set_ylabel("points a year over Equal CRP")
    grid[0, 0].legend(fontsize=8)
    _fractions(grid[0, -1], table, counts)
    _years(grid[1, -1], same)
    return figure


def _curve(axes: Axes, table: Any, method: str, count: int, stretch: int, upto: int):
    rows = table[table.method == method]
    rows = rows[rows.tasks == (1 if method == "stl" else count)]
    band = interquartile(rows)
    x = band.index.to_numpy(float) * (stretch if method == "stl" else 1)
    keep = x <= upto
    axes.plot(x[keep], band["mean"][keep], color=COLOURS[method], label=METHOD_NAMES[method])
    axes.fill_between(
        x[keep], band["low"][keep], band["high"][keep], color=COLOURS[method], alpha=0.2
    )


def _fractions(axes: Axes, table: Any, counts) -> None:
    """For each fraction of tasks, the gain over STL that they reach at least (equal updates)."""
    pair = ["experiment", "year", "task"]
    last = table[table.step == table.step.max()]
    single = last[(last.method == "stl") & (last.task >= 0)].set_index(pair)["gain"]
    for count, line in zip(counts, ("--", "-", ":"), strict=False):
        for method in ("mtl", "pmtl"):
            rows = last[(last.method == method) & (last.tasks == count) & (last.task >= 0)]
            gap = (rows.set_index(pair)["gain"] - single).dropna().sort_values(ascending=False)
            fraction = np.arange(1, len(gap) + 1) / max(len(gap), 1)
            label = f"{METHOD_NAMES[method]} {count}"
            axes.plot(gap, fraction, line, color=COLOURS[method], label=label, linewidth=1)
    axes.axvline(0, color="k", linewidth=0.8)
    axes.set_title("tasks that gain at least x over STL", fontsize=10)
    axes.set_xlabel("points a year over STL, equal updates")
    axes.set_ylabel("fraction of tasks")
    axes.legend(fontsize=7)


def _years(axes: Axes, table: Any) -> None:
    """Every test year by itself: one good year is not a pattern."""
    _, many = few_and_many(table)
    for method, tasks in (("stl", None), ("mtl", many), ("pmtl", many)):
        gains = by_experiment_and_year(table, method, tasks, "own").mean(axis=0)
        axes.plot(gains.index, gains, "o-", color=COLOURS[method], markersize=4)
    axes.axhline(0, color="k", linewidth=0.8)
    axes.set_title(f"by test year ({many} tasks, equal updates)", fontsize=10)
    axes.set_xticks([int(year) for year in sorted(table.year.unique())])
    axes.tick_params(axis="x", rotation=45)
