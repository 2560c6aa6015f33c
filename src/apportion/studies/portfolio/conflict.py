"""Priorities where tasks conflict: what is right in most of them is wrong in the others.

A simulated market in which the moves of most instruments are taken back the next day, and those of the
others go on; 24 of 32 tasks are of the former, 8 of the latter, and nothing tells a policy which it is
in. Each rule of drawing tasks is held against uniform drawing at equal updates, on later days of
instruments never seen: by the camp that fares worse, and by how much runs differ. Claims: priorities
serve the worst tasks better, and runs differ less. A cell is a rule and a seed of the market.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.priority import Priority
from apportion.statistics import compare
from apportion.studies.engine import Cell, Plan, Progress, Rows
from apportion.studies.portfolio.prioritisation import (
    DAYS,
    HELD_OUT,
    PAPERS_RULE,
    RULES,
    SETTINGS,
    UNIFORM,
    over_equal,
    split_days,
    train_in,
)
from apportion.studies.portfolio.tables import by_cell
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes
from apportion.tasks import Tasks, TaskSets, draw_tasks
from apportion.trees import stack

CAMPS = {"most": (24, -0.2), "others": (8, 0.2)}
"""Tasks of each camp, and the autocorrelation of its instruments' moves."""
TRAINED = 30
"""Instruments of each camp that tasks are drawn from."""
TRIED = tuple(rule for rule in RULES if rule.beta is not None)


def plan(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """A cell for each rule and seed: 3 markets of 300 updates (quick), 12 of 1,000 (paper)."""
    seeds, steps = (12, 1000) if scale == "paper" else (3, 300)
    return sized_plan(replace(SETTINGS, steps=steps, seed=seed), seeds)


def sized_plan(settings: PortfolioSettings, seeds: int) -> Plan:
    """The plan of any size."""
    cells = [
        Cell(f"{place}-{seed}", {"rule": rule.name, "seed": seed}, rule.scorer)
        for place, rule in enumerate(TRIED)
        for seed in range(settings.seed, settings.seed + seeds)
    ]
    about = {"seeds": seeds, "camps": {name: list(camp) for name, camp in CAMPS.items()}}
    settings_about = about | dict(vars(settings))
    return Plan("conflict", tuple(cells), partial(compute, settings), conclude, settings_about)


def compute(settings: PortfolioSettings, cells: Sequence[Cell], progress: Progress) -> Rows:
    """Log growth a year over Equal CRP of each cell, on held-out instruments of each camp."""
    by_name = {rule.name: rule for rule in TRIED}
    rules = [by_name[cell["rule"]] for cell in cells]
    s = replace(settings, scorer=rules[0].scorer)
    seeds = [cell["seed"] for cell in cells]
    known = {seed: make_world(seed, s) for seed in dict.fromkeys(seeds)}
    train, test, own = zip(*(known[seed][:3] for seed in seeds), strict=True)
    # The first parameters of a market are the same for all rules, the draws are each rule's own.
    policy_keys = jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))
    places = jnp.asarray([TRIED.index(rule) for rule in rules])
    alphas, betas = jnp.asarray([(rule.alpha, rule.beta) for rule in rules]).T
    policies = train_in(
        stack(train),
        TaskSets.of(own),
        s,
        policy_keys=policy_keys,
        run_keys=jax.vmap(jax.random.fold_in)(policy_keys, places),
        selection=Priority(alphas, betas, s.smoothing, s.selection().initial),
    )
    frames = []
    for camp in CAMPS:
        tasks = TaskSets.of([known[seed][3][camp] for seed in seeds])
        growth = over_equal(policies, stack(test), tasks)
        columns = {"place": np.arange(len(cells)), "camp": camp, "growth": growth}
        frames.append(pd.DataFrame(columns))
    progress(f"{s.scorer}: {len(cells)} runs of {s.steps} updates", 1.0)
    yield from by_cell(cells, pd.concat(frames))


def make_world(
    seed: int, settings: PortfolioSettings
) -> tuple[Market, Market, Tasks, dict[str, Tasks]]:
    """Training and test market, tasks of both camps, and held-out tasks of each camp."""
    each = TRAINED + HELD_OUT
    truth = SimulatedMarket.draw(
        universe=each * len(CAMPS),
        days=DAYS,
        seed=seed,
        autocorrelation=np.repeat([phi for _, phi in CAMPS.values()], each),
    )
    drawn, unseen = [], {}
    for place, (camp, (count, _)) in enumerate(CAMPS.items()):
        first = place * each
        drawn.append(draw_tasks(np.arange(first, first + TRAINED), 5, count, seed=seed))
        rest = np.arange(first + TRAINED, first + each)
        unseen[camp] = draw_tasks(rest, 5, 8, seed=seed)
    return *split_days(truth, settings), drawn[0].joined(drawn[1]), unseen


@concludes("conflict", "Priorities where tasks conflict: the camp that fares worse")
def conclude(rows: Any, settings: dict[str, Any]) -> Conclusion:
    """The study from its rows."""
    table = rows[["rule", "camp", "seed", "growth"]].reset_index(drop=True)
    uniform = _worst(table, UNIFORM.name)
    verdicts = []
    for rule in TRIED:
        if rule != UNIFORM:
            own = _worst(table, rule.name)
            paper = rule.name.startswith(PAPERS_RULE)
            claim = f"{rule.name}: serves the camp that fares worse better than uniform drawing"
            verdicts.append(Verdict.of(claim, compare(own, uniform), paper=paper))
            claim = f"{rule.name}: runs differ less (distance from their median, uniform's less its own)"
            gap = compare(_distance(uniform), _distance(own))
            verdicts.append(Verdict.of(claim, gap, paper=paper))
    notes = tuple(
        f"{rule.name}: {_growths(table, rule.name, 'most').mean():+.3f} log growth a year over Equal CRP "
        f"with most, {_growths(table, rule.name, 'others').mean():+.3f} with the others."
        for rule in TRIED
    )
    return table, verdicts, lambda: plot(table), notes


def _growths(table: Any, rule: str, camp: str) -> np.ndarray:
    own = table[(table.rule == rule) & (table.camp == camp)]
    return own.sort_values("seed").growth.to_numpy()


def _worst(table: Any, rule: str) -> np.ndarray:
    """The growth of each run in the camp where it fares worse."""
    return np.minimum(*(_growths(table, rule, camp) for camp in CAMPS))


def _distance(values: np.ndarray) -> np.ndarray:
    return np.abs(values - np.median(values))


def plot(table: Any) -> Figure:
    """Growth of every run in each camp, by rule."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, len(CAMPS), sharey=True)
    for axes, (camp, (count, _)) in zip(panels, CAMPS.items(), strict=True):
        for place, rule in enumerate(TRIED):
            values = _growths(table, rule.name, camp)
            axes.plot(values, np.full(len(values), place), ".", color="0.6")
            axes.plot(values.mean(), place, "o", color="C0")
        axes.axvline(0, color="k", linewidth=0.8)
        axes.set_xlabel("log growth a year over Equal CRP")
        axes.set_title(f"{camp}: {count} of 32 tasks (grey: each run)", fontsize=10)
    panels[0].set_yticks(range(len(TRIED)), [rule.name for rule in TRIED])
    panels[0].invert_yaxis()
    return figure
