"""A policy worth having: does it beat Equal CRP net of costs, and does it beat lazy rebalancing?

The recipe: an ensemble of 4 seeds trained with a penalty on tracking error, shrunk half-way to equal
shares (k = 0.5), trading a tenth of the way each day (eta = 0.1). Walk-forward over years, on own
tasks and on tasks of held-out instruments, beside the same trained on the paper's own reward. A single
seed is the mean over all seeds, each taken alone. `chosen` takes k, eta and the checkpoint that earlier
test years favour by Sharpe ratio, on own tasks; no year takes part in a choice made for it.
"""

from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.validation import pick
from apportion.studies.portfolio.grid import Progress
from apportion.studies.portfolio.recipe_runs import (
    PAPER,
    PLAIN,
    QUICK,
    SECOND,
    TRACKING,
    Scale,
    compute,
    describe,
)
from apportion.studies.portfolio.scale import SURVIVORSHIP
from apportion.studies.portfolio.tables import over_experiments_and_years, reading
from apportion.studies.study import Study, Verdict

VALIDATION = 3
"""Years that must have been seen before a choice is made; until then equal shares are chosen."""
LAZY, RECIPE, CHOSEN = "lazy Equal CRP", "the recipe", "chosen by validation"
TEAM, SEED = "ensemble, daily", "one seed, daily"
PAPER_TEAM, PAPER_SEED = "paper's policy, ensemble, daily", "paper's policy, one seed, daily"


def run(
    *,
    prices: Prices | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Measure the recipe walk-forward; at paper scale the embedded stocks use their own size."""
    data = embedded_prices() if prices is None else prices
    size = QUICK if scale == "quick" else at_paper_scale(data)
    table = compute(data, size, seed=seed, progress=progress)
    return from_table(table, describe(data, size, seed=seed))


def at_paper_scale(prices: Prices) -> Scale:
    """The size that the number of instruments allows."""
    return PAPER if len(prices.tickers) > 30 else SECOND


def chosen(table: Any) -> pd.DataFrame:
    """For each test year the rows of the variant that earlier test years favour on own tasks."""
    table = table[table.reward == TRACKING]
    team = table[table.members == table.members.max()]
    own = team[team.tested == "own"]
    parts = []
    for year in sorted(team.year.unique()):
        before = own[own.year < year]
        if before.year.nunique() < VALIDATION:
            k, eta, steps = 0.0, 0.1, int(team.steps.max())
        else:
            means = before.groupby(["k", "eta", "steps", "year"]).sharpe_gain.mean()
            choice = pick(means.reset_index())
            k, eta, steps = choice.k, choice.eta, choice.steps
        parts.append(
            team[(team.year == year) & (team.k == k) & (team.eta == eta) & (team.steps == steps)]
        )
    return pd.concat(parts, ignore_index=True)


def from_table(table: Any, settings: dict | None = None) -> Study:
    """The study from a computed table; with one reward's rows alone it says what those say."""
    verdicts: list[Verdict] = []
    readings = []
    by_strategy = strategies(table)

    def claim(words: str, values: pd.DataFrame) -> None:
        estimate = over_experiments_and_years(values)
        verdicts.append(Verdict.of(words, estimate, holds=estimate.above_zero, paper=False))

    for kind in ("own", "held-out"):
        frames = {name: _cells(rows, kind) for name, rows in by_strategy.items()}
        for name in (LAZY, RECIPE, CHOSEN):
            for column, unit in (("log_gain", "log points a year"), ("sharpe_gain", "Sharpe")):
                if name in by_strategy:
                    gains = _cells(by_strategy[name], kind, column)
                    claim(f"{name} beats Equal CRP on {kind} tasks ({unit})", gains)
        for ahead, behind, words in (
            (RECIPE, LAZY, "the recipe beats lazy Equal CRP"),
            (TEAM, SEED, "the ensemble beats a single seed"),
            (
                PAPER_TEAM,
                PAPER_SEED,
                "the ensemble of the paper's policy beats a single seed of it",
            ),
        ):
            if ahead in frames:
                gap = frames[ahead] - frames[behind]
                claim(f"{words} on {kind} tasks (log points a year)", gap)
        readings += [
            reading(f"{name}, {kind} tasks, over Equal CRP", frames[name], "log points a year")
            for name in (SEED, TEAM, PAPER_SEED, PAPER_TEAM)
            if name in frames
        ]
    variants = len(table[["reward", "k", "eta", "steps", "members"]].drop_duplicates())
    readings += [
        f"{variants} variants of reward, k, eta, checkpoint and ensemble were looked at.",
        "Lazy Equal CRP needs no learning: it moves a tenth of the way back to equal shares a day.",
        "A single seed is the mean over all seeds of the ensemble, each taken alone.",
        SURVIVORSHIP,
    ]
    return Study(
        "recipe",
        "A policy worth having: walk-forward over years, net of costs",
        table,
        tuple(verdicts),
        lambda: draw(table),
        tuple(readings),
        settings or {},
    )


def strategies(table: Any) -> dict[str, Any]:
    """The rows of each strategy that is compared, of the rewards that are in the table."""
    steps, team = table.steps.max(), table.members.max()
    last = table[table.steps == steps]
    rewards = [reward for reward in (TRACKING, PLAIN) if (last.reward == reward).any()]

    def rows(reward: str, k: float, eta: float, members: int):
        here = last[last.reward == reward]
        return here[(here.k == k) & (here.eta == eta) & (here.members == members)]

    found = {LAZY: rows(rewards[0], 0.0, 0.1, team)}
    if TRACKING in rewards:
        found |= {
            RECIPE: rows(TRACKING, 0.5, 0.1, team),
            CHOSEN: chosen(table),
            TEAM: rows(TRACKING, 1.0, 1.0, team),
            SEED: rows(TRACKING, 1.0, 1.0, 1),
            "one seed, the rest of the recipe": rows(TRACKING, 0.5, 0.1, 1),
        }
    if PLAIN in rewards:
        found |= {
            PAPER_TEAM: rows(PLAIN, 1.0, 1.0, team),
            PAPER_SEED: rows(PLAIN, 1.0, 1.0, 1),
        }
    return found


def _cells(rows: Any, kind: str, column: str = "log_gain") -> pd.DataFrame:
    return rows[rows.tested == kind].pivot(index="experiment", columns="year", values=column)


def draw(table: Any) -> Figure:
    """Each strategy's gain over Equal CRP with its interval, in log points and in Sharpe ratio."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    compared = strategies(table)
    for axes, column, label in zip(
        panels, ("log_gain", "sharpe_gain"), ("log points a year", "Sharpe ratio"), strict=True
    ):
        for kind, colour, shift in (("own", "C0", -0.12), ("held-out", "C1", 0.12)):
            for place, rows in enumerate(compared.values()):
                e = over_experiments_and_years(_cells(rows, kind, column))
                ends = np.array([[e.value - e.low], [e.high - e.value]])
                axes.errorbar(
                    e.value,
                    place + shift,
                    xerr=ends,
                    fmt="o",
                    color=colour,
                    capsize=3,
                    label=kind if place == 0 else None,
                )
        axes.axvline(0, color="k", linewidth=0.8)
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(f"{label} over daily Equal CRP, net")
    panels[0].set_yticks(range(len(compared)), list(compared))
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure
