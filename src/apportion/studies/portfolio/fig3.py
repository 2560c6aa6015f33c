"""Figure 3: gain over Equal CRP of learned policies on tasks of instruments never trained on.

Every policy learns from the days before a test year and is walked through that year, net of costs.
Claims: multi-task policies beat Equal CRP on such instruments; more tasks transfer better.
"""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.record import LAZY
from apportion.domains.settings import METHOD_NAMES
from apportion.statistics import over_rows_and_columns
from apportion.studies.engine import Plan
from apportion.studies.portfolio.experiments import SURVIVORSHIP
from apportion.studies.portfolio.grid import COLUMNS, TILT, grid_plan
from apportion.studies.portfolio.tables import (
    COLOURS,
    by_experiment_and_year,
    few_and_many,
    note,
    summary,
    task_counts,
    verdict_above_zero,
)
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes


def plan(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """The grid of experiments, to show what transfers to held-out instruments."""
    return grid_plan("fig3", conclude, scale=scale, seed=seed, prices=prices)


@concludes("fig3", "Figure 3: gain over Equal CRP on instruments never trained on")
def conclude(rows: Any, settings: dict[str, Any]) -> Conclusion:
    """The study from the rows of the grid."""
    table = rows[(rows.tested == "held-out") & (rows.task == -1)][COLUMNS].reset_index(drop=True)
    return summary(table), _verdicts(table), lambda: plot(table), _notes(table)


def _final(table: pd.DataFrame, method: str, tasks: int | None = None, column: str = "gain") -> Any:
    return by_experiment_and_year(table, method, tasks, "held-out", column=column)


def _verdicts(table: pd.DataFrame) -> list[Verdict]:
    _, many = few_and_many(table)
    counts, last = task_counts(table), int(table.year.max())
    verdicts = []
    for method, count in product(("mtl", "pmtl"), counts):
        gains = _final(table, method, count)
        beats = f"{METHOD_NAMES[method]} with {count} tasks beats Equal CRP"
        verdicts += [
            verdict_above_zero(f"{beats} in {last}", gains[[last]], paper=True),
            verdict_above_zero(f"{beats} over all years", gains, paper=False),
        ]
    for few, more in pairwise(counts):
        gap = _final(table, "mtl", more) - _final(table, "mtl", few)
        claim = f"{more} tasks transfer better than {few} (MTL)"
        verdicts.append(verdict_above_zero(claim, gap, paper=False))
    gap = _final(table, "mtl", many) - _final(table, "stl")
    claim = f"MTL with {many} tasks transfers better than STL at equal updates"
    return [*verdicts, verdict_above_zero(claim, gap, paper=False)]


def _notes(table: pd.DataFrame) -> tuple[str, ...]:
    _, many = few_and_many(table)
    mtl = _final(table, "mtl", many)
    return (
        note("Lazy Equal CRP, which learns nothing", _final(table, LAZY)),
        note("A tilt to volatile instruments, which learns nothing", _final(table, TILT)),
        note(f"MTL with {many} tasks", mtl),
        note(
            "its Sharpe ratio over Equal CRP's", _final(table, "mtl", many, "sharpe_gain"), "a year"
        ),
        note(f"P-MTL less MTL with {many} tasks", _final(table, "pmtl", many) - mtl),
        SURVIVORSHIP,
    )


def plot(table: Any) -> Figure:
    """Bars like the paper's (mean and standard deviation over experiments), and years beside them."""
    bars = [("stl", None, "STL", COLOURS["stl"])]
    bars += [
        (method, count, f"{METHOD_NAMES[method]} {count}", COLOURS[method])
        for count in task_counts(table)
        for method in ("mtl", "pmtl")
    ]
    bars.append((LAZY, None, "lazy CRP", "C2"))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    last = int(table.year.max())
    for place, (method, tasks, _, colour) in enumerate(bars):
        gains = _final(table, method, tasks)
        left.bar(place, gains[last].mean(), yerr=gains[last].std(), color=colour, capsize=3)
        e = over_rows_and_columns(gains.to_numpy())
        ends = np.array([[e.value - e.low], [e.high - e.value]])
        right.bar(place, e.value, yerr=ends, color=colour, capsize=3)
        right.scatter(np.full(gains.shape[1], place), gains.mean(axis=0), s=9, color="k", zorder=3)
    for axes, title in ((left, f"{last}, as in the paper"), (right, "mean over all test years")):
        axes.axhline(0, color="k", linewidth=0.8)
        axes.set_xticks(range(len(bars)), [name for _, _, name, _ in bars], rotation=40, ha="right")
        axes.set_title(title)
    left.set_ylabel("points a year over Equal CRP, net")
    left.set_xlabel("bars: standard deviation over experiments")
    right.set_xlabel("bars: 95 % interval over experiments and years; dots: years")
    return figure
