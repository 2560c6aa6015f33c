"""Figure 3: gain over Equal CRP of learned policies on tasks of instruments never trained on.

Every policy learns from the days before a test year and is walked through that year, net of costs.
Claims: multi-task policies beat Equal CRP on such instruments; more tasks transfer better.
"""

from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.studies.portfolio.grid import Progress, compute
from apportion.studies.portfolio.scale import PAPER, QUICK, SURVIVORSHIP, describe
from apportion.studies.portfolio.tables import (
    cells,
    judge,
    over_experiments_and_years,
    reading,
    task_counts,
)
from apportion.studies.study import Study, Verdict


def run(
    *,
    prices: Prices | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Train the grid of experiments and show what transfers to held-out instruments."""
    prices = embedded_prices() if prices is None else prices
    chosen = (PAPER if scale == "paper" else QUICK).seeded(seed).within(prices)
    table = compute(prices, chosen, progress=progress)
    return from_table(table, describe(prices, chosen))


def from_table(table: Any, settings: dict | None = None) -> Study:
    """The study from a computed grid."""
    table = table[(table.tested == "held-out") & (table.task == -1)].reset_index(drop=True)
    counts = task_counts(table)
    few, many = counts[0], counts[-2] if len(counts) > 2 else counts[-1]
    last = int(table.year.max())

    def final(method: str, tasks: int | None, column: str = "gain") -> Any:
        return cells(table, method, tasks, "held-out", column=column)

    verdicts: list[Verdict] = []
    for method in ("mtl", "pmtl"):
        gains = final(method, many)
        name = method.upper().replace("PMTL", "P-MTL")
        verdicts += [
            judge(f"{name} with {many} tasks beats Equal CRP in {last}", gains[[last]], paper=True),
            judge(f"{name} with {many} tasks beats Equal CRP over all years", gains, paper=False),
        ]
    if few < many:
        verdicts.append(
            judge(
                f"{many} tasks transfer better than {few} (MTL)",
                final("mtl", many) - final("mtl", few),
                paper=False,
            )
        )
    verdicts.append(
        judge(
            f"MTL with {many} tasks transfers better than STL at equal updates",
            final("mtl", many) - final("stl", None),
            paper=False,
        )
    )
    readings = (
        reading("Lazy Equal CRP, which learns nothing", final("lazy-equal-crp", None)),
        reading(
            "A tilt to volatile instruments, which learns nothing", final("volatility-tilt", None)
        ),
        reading(f"MTL with {many} tasks", final("mtl", many)),
        reading("its Sharpe ratio over Equal CRP's", final("mtl", many, "sharpe_gain"), "a year"),
        reading(f"P-MTL less MTL with {many} tasks", final("pmtl", many) - final("mtl", many)),
        SURVIVORSHIP,
    )
    return Study(
        "fig3",
        "Figure 3: gain over Equal CRP on instruments never trained on",
        table,
        tuple(verdicts),
        lambda: draw(table),
        readings,
        settings or {},
    )


def draw(table: Any) -> Figure:
    """Bars like the paper's (mean and standard deviation over experiments), and years beside them."""
    counts = task_counts(table)
    bars = [("stl", None, "STL")]
    bars += [
        (m, t, f"{'P-' if m == 'pmtl' else ''}MTL {t}") for t in counts for m in ("mtl", "pmtl")
    ]
    bars.append(("lazy-equal-crp", None, "lazy CRP"))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    last = int(table.year.max())
    colours = {
        "stl": "0.6",
        "mtl": "C0",
        "pmtl": "C1",
        "lazy-equal-crp": "C2",
        "volatility-tilt": "C3",
    }
    for axes, title in ((left, f"{last}, as in the paper"), (right, "mean over all test years")):
        for place, (method, tasks, _) in enumerate(bars):
            gains = cells(table, method, tasks, "held-out")
            colour = colours[method]
            if axes is left:
                value, error = gains[last].mean(), gains[last].std()
                axes.bar(place, value, yerr=error, color=colour, capsize=3)
            else:
                e = over_experiments_and_years(gains)
                ends = np.array([[e.value - e.low], [e.high - e.value]])
                axes.bar(place, e.value, yerr=ends, color=colour, capsize=3)
                axes.scatter(
                    np.full(gains.shape[1], place), gains.mean(axis=0), s=9, color="k", zorder=3
                )
        axes.axhline(0, color="k", linewidth=0.8)
        axes.set_xticks(range(len(bars)), [name for *_, name in bars], rotation=40, ha="right")
        axes.set_title(title)
    left.set_ylabel("points a year over Equal CRP, net")
    left.set_xlabel("bars: standard deviation over experiments")
    right.set_xlabel("bars: 95 % interval over experiments and years; dots: years")
    return figure
