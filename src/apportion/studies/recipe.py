"""A policy worth having: does it beat Equal CRP net of costs, and does it beat lazy rebalancing?

The recipe: an ensemble of 4 seeds trained with a penalty on tracking error, shrunk half-way to equal
shares (k = 0.5), trading a tenth of the way each day (eta = 0.1). Walk-forward over years, on own
tasks and on tasks of held-out instruments. `chosen` takes k, eta and the checkpoint that earlier test
years favour by Sharpe ratio, on own tasks; no year takes part in a choice made for it.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.jobs.portfolio_choice import SPEEDS, TRUSTS, pick, score_variants
from apportion.jobs.portfolio_training import training_market
from apportion.jobs.walk_forward import Years, by_cell, train_cells
from apportion.policy import Policy
from apportion.problems.portfolio.costs import Costs
from apportion.problems.portfolio.market import Market
from apportion.problems.portfolio.price_table import Prices
from apportion.problems.portfolio.prices import embedded_prices
from apportion.problems.portfolio.settings import PortfolioSettings
from apportion.studies.market_grid import Progress
from apportion.studies.market_scale import SURVIVORSHIP
from apportion.studies.market_table import over_experiments_and_years
from apportion.studies.study import Study, Verdict
from apportion.tasks import Tasks, draw_tasks, split_entities

VALIDATION = 3
"""Years that must have been seen before a choice is made; until then equal shares are chosen."""


@dataclass(frozen=True)
class Scale:
    """How large the study is."""

    settings: PortfolioSettings
    experiments: int
    years: int
    """Test years: the last so many of the data that have enough days before them."""
    held_out: int
    shown: int
    checkpoints: int


PAPER = Scale(PortfolioSettings(tasks=100, method="mtl"), 10, 7, 18, 10, 3)
SECOND = Scale(PortfolioSettings(tasks=100, task_size=5, method="mtl"), 4, 22, 6, 6, 3)
"""For the 20 embedded stocks, 2001 to 2022."""
QUICK = Scale(
    PortfolioSettings(
        method="mtl",
        tasks=20,
        task_size=5,
        steps=300,
        window=8,
        batch=32,
        hidden=12,
        learning_rate=3e-3,
    ),
    experiments=2,
    years=6,
    held_out=6,
    shown=4,
    checkpoints=3,
)


def run(
    *,
    prices: Prices | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Measure the recipe walk-forward; at paper scale the embedded stocks use their own size."""
    data = embedded_prices() if prices is None else prices
    size = QUICK if scale == "quick" else (PAPER if len(data.tickers) > 30 else SECOND)
    table = compute(data, size, seed=seed, progress=progress)
    used = {"data": data.summary(), "experiments": size.experiments, "seed": seed}
    return from_table(table, {**used, **vars(size.settings)})


def compute(
    prices: Prices, scale: Scale, *, seed: int = 0, progress: Progress | None = None
) -> pd.DataFrame:
    """A row for each experiment, year, tested, members, step, k and eta: log_gain and sharpe_gain.

    Gains are over daily Equal CRP; log_gain in log percentage points a year. k = 0 learns nothing:
    with eta = 0.1 it is lazy Equal CRP.
    """
    s = scale.settings
    spans = Years.of(prices, prices.years()[-scale.years :], before=s.window + s.batch)
    own, unseen = [], []
    for experiment in range(scale.experiments):
        seen, others = split_entities(len(prices.tickers), scale.held_out, seed=seed + experiment)
        own.append(draw_tasks(seen, s.task_size, s.tasks, seed=seed + experiment))
        unseen.append(draw_tasks(others, s.task_size, scale.shown, seed=seed + experiment))
    count = len(spans.years)

    def cells(tasks: list[Tasks]) -> Tasks:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tasks)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, count, 0), stacked)

    tile = (scale.experiments,)
    starts, days = (jnp.tile(jnp.asarray(x, jnp.int32), tile) for x in (spans.firsts, spans.days))
    past = training_market(prices.until(prices.dates[spans.firsts[-1]]), s)
    test = replace(
        Market.of(prices, window=s.window, costs=Costs(s.cost, exact=True)), horizon=max(spans.days)
    )
    pairs = [(k, eta) for k in TRUSTS for eta in SPEEDS]
    equal = pairs.index((0.0, 1.0))
    grid = [jnp.asarray(column, jnp.float32) for column in zip(*pairs, strict=True)]
    tested = {"own": cells([tasks[: scale.shown] for tasks in own]), "held-out": cells(unseen)}
    frames = []

    def on_chunk(chunk):
        teams = by_cell(chunk.policy, s.members)
        for members in (s.members, 1):
            team = _first(teams, members)
            for kind, tasks in tested.items():
                growth, sharpe = score_variants(team, test, starts, days, tasks, *grid)
                gains = {
                    "log_gain": 100 * np.asarray(growth - growth[:, equal][:, None]).mean(-1),
                    "sharpe_gain": np.asarray(sharpe - sharpe[:, equal][:, None]).mean(-1),
                }
                cell, pair = (i.ravel() for i in np.indices(gains["log_gain"].shape))
                frames.append(
                    pd.DataFrame(
                        {
                            "experiment": cell // count,
                            "year": np.asarray(spans.years)[cell % count],
                            "tested": kind,
                            "members": members,
                            "steps": chunk.step,
                            "k": np.asarray(pairs)[pair, 0],
                            "eta": np.asarray(pairs)[pair, 1],
                            **{name: v.ravel() for name, v in gains.items()},
                        }
                    )
                )
        if progress is not None:
            progress(f"recipe: step {chunk.step} of {chunk.steps}", chunk.step / chunk.steps)

    train_cells(
        past,
        starts - s.window,
        cells(own),
        s,
        chunk=s.updates // scale.checkpoints,
        on_chunk=on_chunk,
        key=jax.random.key(seed),
    )
    return pd.concat(frames, ignore_index=True)


def _first(teams: Policy, members: int) -> Policy:
    """The first so many members of every cell's team."""
    return jax.tree.map(lambda leaf: leaf[:, :members] if eqx.is_array(leaf) else leaf, teams)


def chosen(table: Any) -> pd.DataFrame:
    """For each test year the rows of the variant that earlier test years favour on own tasks."""
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
    """The study from a computed table."""
    verdicts: list[Verdict] = []
    readings = []
    by_strategy = strategies(table)
    for kind in ("own", "held-out"):
        frames = {name: _cells(rows, kind) for name, rows in by_strategy.items()}
        for name in ("lazy Equal CRP", "the recipe", "chosen by validation"):
            for column, unit in (("log_gain", "log points a year"), ("sharpe_gain", "Sharpe")):
                estimate = over_experiments_and_years(_cells(by_strategy[name], kind, column))
                claim = f"{name} beats Equal CRP on {kind} tasks ({unit})"
                verdicts.append(Verdict.of(claim, estimate, holds=estimate.above_zero, paper=False))
        ahead = over_experiments_and_years(frames["the recipe"] - frames["lazy Equal CRP"])
        verdicts.append(
            Verdict.of(
                f"the recipe beats lazy Equal CRP on {kind} tasks (log points a year)",
                ahead,
                holds=ahead.above_zero,
                paper=False,
            )
        )
        team = over_experiments_and_years(frames["ensemble, daily"] - frames["one seed, daily"])
        verdicts.append(
            Verdict.of(
                f"the ensemble beats a single seed on {kind} tasks (log points a year)",
                team,
                holds=team.above_zero,
                paper=False,
            )
        )
    variants = len(table[["k", "eta", "steps", "members"]].drop_duplicates())
    readings += [
        f"{variants} variants of k, eta, checkpoint and ensemble were looked at.",
        "Lazy Equal CRP needs no learning: it moves a tenth of the way back to equal shares a day.",
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
    """The rows of each strategy that is compared."""
    steps, team = table.steps.max(), table.members.max()
    last = table[table.steps == steps]

    def pick_rows(k: float, eta: float, members: int):
        return last[(last.k == k) & (last.eta == eta) & (last.members == members)]

    return {
        "lazy Equal CRP": pick_rows(0.0, 0.1, team),
        "the recipe": pick_rows(0.5, 0.1, team),
        "chosen by validation": chosen(table),
        "ensemble, daily": pick_rows(1.0, 1.0, team),
        "one seed, daily": pick_rows(1.0, 1.0, 1),
        "one seed, the rest of the recipe": pick_rows(0.5, 0.1, 1),
    }


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
        axes.set_xlabel(f"{label} over daily Equal CRP, net")
    panels[0].set_yticks(range(len(compared)), list(compared))
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure
