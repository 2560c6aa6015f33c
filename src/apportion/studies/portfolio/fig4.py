"""Figure 4: learning curves of STL, MTL and P-MTL, and the fraction of tasks that gain over STL.

Both protocols are drawn: the paper's, where an epoch gives each task the same number of updates, so
that a multi-task policy gets T times those of a single-task one, and equal updates per policy.
Claims: P-MTL learns faster and better than STL, 30 tasks beat 5, P-MTL beats MTL.
"""

from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.studies.portfolio.grid import Progress, compute
from apportion.studies.portfolio.scale import PAPER, QUICK, SURVIVORSHIP, describe
from apportion.studies.portfolio.tables import cells, interquartile, judge, reading, task_counts
from apportion.studies.study import Study, Verdict

COLOURS = {"stl": "0.5", "mtl": "C0", "pmtl": "C1"}
NAMES = {"stl": "STL", "mtl": "MTL", "pmtl": "P-MTL"}


def run(
    *,
    prices: Prices | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Train the grid of experiments and show how learning went."""
    prices = embedded_prices() if prices is None else prices
    chosen = (PAPER if scale == "paper" else QUICK).seeded(seed).within(prices)
    table = compute(prices, chosen, progress=progress)
    return from_table(table, describe(prices, chosen))


def from_table(table: Any, settings: dict | None = None) -> Study:
    """The study from a computed grid."""
    counts = task_counts(table)
    few, many = counts[0], counts[-2] if len(counts) > 2 else counts[-1]
    steps = int(table.step.max())

    def final(method: str, tasks: int | None, tested: str = "own", step: int | None = None) -> Any:
        return cells(table, method, tasks, tested, step=step)

    verdicts: list[Verdict] = [
        judge(
            f"{NAMES[method]} with {many} tasks beats STL at equal updates per policy",
            final(method, many) - final("stl", None),
            paper=False,
        )
        for method in ("mtl", "pmtl")
    ]
    matched = [t for t in counts if steps // t in set(table[table.method == "stl"].step)]
    verdicts += [
        judge(
            f"P-MTL with {t} tasks beats STL under the paper's protocol ({steps} updates against "
            f"{steps // t})",
            final("pmtl", t) - final("stl", None, step=steps // t),
            paper=True,
        )
        for t in matched
    ]
    if few < many:
        verdicts += [
            judge(
                f"{many} tasks beat {few} on own tasks (P-MTL)",
                final("pmtl", many) - final("pmtl", few),
                paper=True,
            ),
            judge(
                f"{many} tasks beat {few} on held-out instruments (MTL)",
                final("mtl", many, "held-out") - final("mtl", few, "held-out"),
                paper=False,
            ),
        ]
    verdicts += [
        judge(
            f"P-MTL beats MTL with {many} tasks",
            final("pmtl", many) - final("mtl", many),
            paper=True,
        ),
        judge(f"P-MTL with {many} tasks beats Equal CRP", final("pmtl", many), paper=True),
    ]
    readings = (
        reading("Lazy Equal CRP, which learns nothing", final("lazy-equal-crp", None)),
        reading(
            "A tilt to volatile instruments, which learns nothing", final("volatility-tilt", None)
        ),
        *(reading(f"MTL with {t} tasks, own tasks", final("mtl", t)) for t in counts),
        reading("STL, own tasks, at equal updates", final("stl", None)),
        "The paper's protocol gives a multi-task policy T times the updates of a single-task one; "
        "the comparison at equal updates removes that advantage.",
        SURVIVORSHIP,
    )
    return Study(
        "fig4",
        "Figure 4: learning curves and the fraction of tasks that gain over STL",
        table,
        tuple(verdicts),
        lambda: draw(table),
        readings,
        settings or {},
    )


def draw(table: Any) -> Figure:
    """Top: the paper's protocol; bottom: equal updates; right: the fraction-of-tasks curves."""
    counts = task_counts(table)
    figure = Figure(figsize=(4 * (len(counts) + 1), 7), layout="constrained")
    grid = figure.subplots(2, len(counts) + 1, sharey=False)
    steps = int(table.step.max())
    for column, count in enumerate(counts):
        for row, protocol in enumerate(("the paper's protocol", "equal updates")):
            axes = grid[row, column]
            for method in ("stl", "mtl", "pmtl"):
                _curve(axes, table, method, count, stretch=count if row == 0 else 1, upto=steps)
            axes.axhline(0, color="k", linewidth=0.8)
            axes.set_title(f"{count} tasks, {protocol}", fontsize=10)
            axes.set_xlabel("updates of the multi-task policy" if row == 0 else "updates")
            axes.locator_params(axis="x", nbins=4)
        grid[0, column].sharey(grid[1, column])
    for row in range(2):
        grid[row, 0].set_ylabel("points a year over Equal CRP")
    grid[0, 0].legend(fontsize=8)
    _fractions(grid[0, -1], table, counts)
    _years(grid[1, -1], table, counts)
    return figure


def _curve(axes: Axes, table: Any, method: str, count: int, stretch: int, upto: int):
    rows = table[(table.method == method) & (table.tested == "own") & (table.task == -1)]
    rows = rows[rows.tasks == (1 if method == "stl" else count)]
    band = interquartile(rows)
    x = band.index.to_numpy(float) * (stretch if method == "stl" else 1)
    keep = x <= upto
    axes.plot(x[keep], band["mean"][keep], color=COLOURS[method], label=NAMES[method])
    axes.fill_between(
        x[keep], band["low"][keep], band["high"][keep], color=COLOURS[method], alpha=0.2
    )


def _fractions(axes: Axes, table: Any, counts) -> None:
    """For each fraction of tasks, the gain over STL that they reach at least (equal updates)."""
    pair = ["experiment", "year", "task"]
    single = table[(table.method == "stl") & (table.task >= 0)].set_index(pair)["gain"]
    for count, line in zip(counts, ("--", "-", ":"), strict=False):
        for method in ("mtl", "pmtl"):
            rows = table[(table.method == method) & (table.tasks == count) & (table.task >= 0)]
            gap = (rows.set_index(pair)["gain"] - single).dropna().sort_values(ascending=False)
            fraction = np.arange(1, len(gap) + 1) / max(len(gap), 1)
            label = f"{NAMES[method]} {count}"
            axes.plot(gap, fraction, line, color=COLOURS[method], label=label, linewidth=1)
    axes.axvline(0, color="k", linewidth=0.8)
    axes.set_title("tasks that gain at least x over STL", fontsize=10)
    axes.set_xlabel("points a year over STL, equal updates")
    axes.set_ylabel("fraction of tasks")
    axes.legend(fontsize=7)


def _years(axes: Axes, table: Any, counts) -> None:
    """Every test year by itself: one good year is not a pattern."""
    many = counts[-2] if len(counts) > 2 else counts[-1]
    for method, tasks in (("stl", None), ("mtl", many), ("pmtl", many)):
        gains = cells(table, method, tasks, "own").mean(axis=0)
        axes.plot(gains.index, gains, "o-", color=COLOURS[method], markersize=4)
    axes.axhline(0, color="k", linewidth=0.8)
    axes.set_title(f"by test year ({many} tasks, equal updates)", fontsize=10)
    axes.set_xticks([int(year) for year in sorted(table.year.unique())])
    axes.tick_params(axis="x", rotation=45)
