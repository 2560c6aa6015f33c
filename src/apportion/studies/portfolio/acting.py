"""What acting in the loop is worth: memory that holds the policy's own allocations, or none acted.

Algorithm 1 acts n_e more periods in the drawn task after each update. Prices do not answer to what is
held, so memory can be full from the start and nothing need be acted: what is held enters by the costs
alone. In simulated markets whose truth is known, at a low and at a high cost, policies are trained with
n_e = 0, 1 and 8 from the same first parameters and at equal updates, and walked through later days on
instruments never seen. A cell is an n_e and a seed of the market.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.statistics import compare
from apportion.studies.engine import Cell, Plan, Progress, Rows
from apportion.studies.portfolio.prioritisation import (
    SETTINGS,
    TASKS,
    Case,
    make_world,
    over_equal,
    train_in,
)
from apportion.studies.portfolio.tables import by_cell
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes
from apportion.tasks import TaskSets
from apportion.trees import stack

ACTED = (0, 1, 8)
"""Periods acted after each update, n_e."""
COSTS = (0.0005, 0.0025)
LITTLE = 0.03
"""Log growth a year that is called little."""


def plan(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """A cell for each n_e and seed: 3 markets of 300 updates (quick), 10 of 1,000 (paper)."""
    seeds, steps = (10, 1000) if scale == "paper" else (3, 300)
    return sized_plan(replace(SETTINGS, method="mtl", steps=steps, seed=seed), seeds)


def sized_plan(settings: PortfolioSettings, seeds: int) -> Plan:
    """The plan of any size."""
    cells = [
        Cell(f"acted-{acted}-{seed}", {"acted": acted, "seed": seed}, f"acted-{acted}")
        for acted in ACTED
        for seed in range(settings.seed, settings.seed + seeds)
    ]
    about = {"seeds": seeds, "costs": list(COSTS), "acted": list(ACTED), **vars(settings)}
    return Plan("acting", tuple(cells), partial(compute, settings), conclude, about)


def compute(settings: PortfolioSettings, cells: Sequence[Cell], progress: Progress) -> Rows:
    """Log growth a year over Equal CRP on held-out instruments, of each cell at each cost."""
    acted = cells[0]["acted"]
    seeds = [cell["seed"] for cell in cells]
    frames = []
    for done, cost in enumerate(COSTS):
        s = replace(settings, cost=cost, act_periods=acted)
        worlds = [make_world(Case(TASKS, False), seed, s) for seed in seeds]
        train, test, own, unseen = zip(*worlds, strict=True)
        keys = jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))
        policies = train_in(stack(train), TaskSets.of(own), s, policy_keys=keys, run_keys=keys)
        growth = over_equal(policies, stack(test), TaskSets.of(unseen))
        columns = {"place": np.arange(len(cells)), "cost": cost, "growth": growth}
        frames.append(pd.DataFrame(columns))
        progress(f"{acted} acted, cost {cost:g}: {len(cells)} runs", (done + 1) / len(COSTS))
    yield from by_cell(cells, pd.concat(frames))


@concludes("acting", "Acting in the loop: memory of the policy's own allocations, or none acted")
def conclude(rows: Any, settings: dict[str, Any]) -> Conclusion:
    """The study from its rows."""
    table = rows[["acted", "cost", "seed", "growth"]].reset_index(drop=True)
    verdicts = []
    for cost in COSTS:
        none = _growths(table, 0, cost)
        for acted in ACTED[1:]:
            gain = compare(_growths(table, acted, cost), none)
            words = f"acting {acted} periods after each update, cost {1e4 * cost:g} bp"
            verdicts.append(Verdict.of(f"{words}: adds to growth on held-out instruments", gain))
            claim = f"{words}: is worth less than {LITTLE:g} of log growth a year"
            verdicts.append(Verdict.of(claim, gain, below=LITTLE, paper=False))
    notes = tuple(
        f"n_e = {acted}, cost {1e4 * cost:g} bp: {_growths(table, acted, cost).mean():+.3f} log growth a "
        "year over Equal CRP."
        for cost in COSTS
        for acted in ACTED
    )
    return table, verdicts, lambda: plot(table), notes


def _growths(table: Any, acted: int, cost: float) -> np.ndarray:
    own = table[(table.acted == acted) & np.isclose(table.cost, cost)]
    return own.sort_values("seed").growth.to_numpy()


def plot(table: Any) -> Figure:
    """A line for each market: its growth by n_e, at each cost."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, cost in zip(figure.subplots(1, len(COSTS), sharey=True), COSTS, strict=True):
        growths = np.stack([_growths(table, acted, cost) for acted in ACTED])
        axes.plot(range(len(ACTED)), growths, color="0.7", linewidth=0.8, marker=".")
        axes.plot(range(len(ACTED)), growths.mean(1), "o-", color="C0")
        axes.axhline(0, color="k", linewidth=0.8)
        axes.set_xticks(range(len(ACTED)), [str(acted) for acted in ACTED])
        axes.set_xlabel("periods acted after each update")
        axes.set_title(f"cost {1e4 * cost:g} basis points (grey: each market)", fontsize=10)
    figure.axes[0].set_ylabel("log growth a year over Equal CRP")
    return figure
