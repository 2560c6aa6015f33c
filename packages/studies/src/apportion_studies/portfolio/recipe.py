"""The practical policy: does it beat Equal CRP net of costs, and does it beat lazy rebalancing?

It is an ensemble of 4 seeds, trained with a penalty on tracking error (reward r - 15 d^2), shrunk half-way
to equal shares (k = 0.5), and trades a tenth of the way each day (eta = 0.1). It is walked forward over
years, on own tasks and on tasks of held-out instruments, beside the same ensemble trained on the paper's
reward. `chosen` uses the k, eta and checkpoint with the best Sharpe ratio on own tasks in earlier test
years; a year never affects the choice made for it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.certify.statistics import Estimate, over_rows_and_columns
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.domains.portfolio.validation import ETA_GRID, K_GRID, best_variant, score_variants
from apportion.policy import Policy
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.training import Chunk, Chunks
from apportion.trees import grouped, repeat, take
from apportion_studies.portfolio.experiments import (
    POINTS,
    SMALL,
    SURVIVORSHIP,
    Experiments,
    by_cell,
    note,
)

_TRACKING, _PLAIN = "tracking", "paper"
_REWARDS = (_TRACKING, _PLAIN)
"""The reward with a penalty on tracking error, and the paper's reward without it."""
_VARIANTS = tuple(product(K_GRID, ETA_GRID))
_VALIDATION = 3
"""Number of earlier years that a choice needs; with fewer, lazy Equal CRP is chosen."""
_LAZY, _PRACTICAL, _CHOSEN = "lazy Equal CRP", "the practical policy", "chosen by validation"
_DAILY, _PAPER_DAILY = "the ensemble, daily", "the ensemble on the paper's reward, daily"


@dataclass(frozen=True)
class _RecipeSize:
    """Size of the study."""

    settings: PortfolioSettings
    experiments: int
    years: int
    """Number of test years, at the end of the data."""
    held_out: int
    shown: int
    checkpoints: int


_QUICK = PortfolioSettings(method="mtl", tasks=20, steps=210, **SMALL)
_SCALES = {
    "quick": _RecipeSize(_QUICK, 2, 6, 6, 4, 3),
    "paper": _RecipeSize(PortfolioSettings(tasks=100, method="mtl"), 10, 7, 18, 10, 3),
    "paper, few stocks": _RecipeSize(
        PortfolioSettings(tasks=100, task_size=5, method="mtl"), 4, 22, 6, 6, 3
    ),
}
"""Data of few stocks, such as the 20 embedded ones from 2001 to 2022, has its own paper scale."""


def recipe(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """Plan a cell for each reward, experiment and year."""
    prices = embedded_prices() if prices is None else prices
    few = scale == "paper" and len(prices.tickers) <= 30
    size = _SCALES["paper, few stocks" if few else scale]
    size = replace(size, settings=replace(size.settings, seed=seed))
    years = prices.years()[-size.years :]
    cells = []
    for reward, experiment, year in product(_REWARDS, range(size.experiments), years):
        values = {"reward": reward, "experiment": experiment, "year": year}
        cells.append(Cell(f"{reward}-{experiment}-{year}", values, reward))
    own = {name: value for name, value in vars(size).items() if name != "settings"}
    settings = {"data": prices.summary(), **vars(size.settings), **own, "rewards": list(_REWARDS)}
    return Plan("recipe", tuple(cells), partial(_compute, prices, size), _conclude, settings)


def _compute(
    prices: Prices, size: _RecipeSize, cells: Sequence[Cell], progress: OnProgress
) -> Rows:
    """Yield a row of gains over daily Equal CRP for each kind of task, checkpoint, k and eta.

    `log_gain` is in points a year. k = 0 holds equal shares; with eta = 0.1 it is lazy Equal CRP.
    """
    reward, s = cells[0]["reward"], size.settings
    counts = {"held_out": size.held_out, "own": s.tasks, "shown": size.shown}
    s = s if reward == _TRACKING else replace(s, tracking_error_weight=0.0)
    years = prices.years()[-size.years :]
    known = Experiments.of(prices, s, years, size.experiments, **counts)
    runs = known.runs(cells)
    own = take(known.own, runs.experiment)
    tested = {"own": own.first(size.shown), "held-out": take(known.held_out, runs.experiment)}
    frames = []

    def on_chunk(chunk: Chunk) -> None:
        teams = grouped(chunk.policy, s.members)
        for kind, tasks in tested.items():
            frame = _gains(teams, known.testing, runs.starts, runs.days, tasks)
            frames.append(frame.assign(tested=kind, steps=chunk.step))
        what = f"{reward} reward: step {chunk.step} of {chunk.steps}"
        progress(what, chunk.step / chunk.steps)

    # Both rewards share first parameters and batches.
    policy_keys, run_keys = (
        jax.random.split(key, known.pairs * s.members).reshape(-1, s.members)[runs.pair].ravel()
        for key in jax.random.split(jax.random.key(s.seed))
    )
    every = s.steps // size.checkpoints
    train_portfolio_runs(
        known.training,
        repeat(own, s.members),
        s,
        policy_keys=policy_keys,
        run_keys=run_keys,
        lengths=jnp.repeat(runs.lengths, s.members),
        chunks=Chunks(every, math.gcd(every, s.steps), on_chunk),
    )
    yield from by_cell(cells, pd.concat(frames))


def _gains(teams: Policy, *where: Any) -> pd.DataFrame:
    """Return gains over daily Equal CRP by cell and variant, averaged over tasks."""
    grid = [jnp.asarray(column, jnp.float32) for column in zip(*_VARIANTS, strict=True)]
    equal = _VARIANTS.index((0.0, 1.0))
    growth, sharpe = score_variants(teams, *where, *grid)
    log_gain = 100 * np.asarray(growth - growth[:, equal][:, None]).mean(-1)
    sharpe_gain = np.asarray(sharpe - sharpe[:, equal][:, None]).mean(-1)
    cell, variant = (i.ravel() for i in np.indices(log_gain.shape))
    k, eta = np.asarray(_VARIANTS)[variant].T
    gains = {"log_gain": log_gain.ravel(), "sharpe_gain": sharpe_gain.ravel()}
    return pd.DataFrame({"place": cell, "k": k, "eta": eta, **gains})


def _chosen(table: Any) -> pd.DataFrame:
    """Return each test year's rows of the variant that was best on own tasks in earlier years."""
    team = table[table.reward == _TRACKING]
    own = team[team.tested == "own"]
    parts = []
    for year in sorted(team.year.unique()):
        before = own[own.year < year]
        if before.year.nunique() < _VALIDATION:
            k, eta, steps = 0.0, 0.1, int(team.steps.max())
        else:
            means = before.groupby(["k", "eta", "steps", "year"]).sharpe_gain.mean()
            choice = best_variant(means.reset_index())
            k, eta, steps = choice.k, choice.eta, choice.steps
        parts.append(select(team, year=year, k=k, eta=eta, steps=steps))
    return pd.concat(parts, ignore_index=True)


def _conclude(table: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Return the figure from the rows of all cells."""
    by_strategy = _strategies(table)
    notes, summary = [], []
    for kind, name in product(("own", "held-out"), (_DAILY, _PAPER_DAILY)):
        gains = _pivot(by_strategy[name], kind)
        notes.append(note(f"{name}, {kind} tasks, over Equal CRP", gains))
    variants = len(table[["reward", "k", "eta", "steps"]].drop_duplicates())
    notes += [
        f"{variants} variants of reward, k, eta and checkpoint were looked at.",
        "Lazy Equal CRP needs no learning: it moves a tenth of the way back to equal shares a day.",
        SURVIVORSHIP,
    ]
    shown: dict[str, dict[str, Estimate]] = {}
    units = {"log_gain": POINTS, "sharpe_gain": "Sharpe ratio"}
    for (name, rows), kind in product(by_strategy.items(), ("own", "held-out")):
        row = {"strategy": name, "tested": kind}
        for column, unit in units.items():
            e = over_rows_and_columns(_pivot(rows, kind, column))
            row |= {column: e.value, f"{column}_low": e.low, f"{column}_high": e.high}
            shown.setdefault(f"{unit}, {kind} tasks", {})[name] = e
        summary.append(row)
    title = "The practical policy: walk-forward over years, net of costs"
    verdicts = [v for kind in ("own", "held-out") for v in _verdicts(by_strategy, kind)]
    draw = partial(forest, shown, "over daily Equal CRP, net")
    return [FigureResult("recipe", title, pd.DataFrame(summary), verdicts, draw, notes)]


def _verdicts(by_strategy: dict[str, Any], kind: str) -> Iterator[Verdict]:
    """Compare each strategy with Equal CRP, and the practical policy with lazy Equal CRP."""
    for name in (_LAZY, _PRACTICAL, _CHOSEN):
        for column, unit in (("log_gain", POINTS), ("sharpe_gain", "Sharpe")):
            gains = over_rows_and_columns(_pivot(by_strategy[name], kind, column))
            claim = f"{name} beats Equal CRP on {kind} tasks ({unit})"
            yield Verdict.of(claim, gains, paper=False)
    gains = {name: _pivot(by_strategy[name], kind) for name in (_PRACTICAL, _LAZY)}
    gap = over_rows_and_columns(gains[_PRACTICAL] - gains[_LAZY])
    levels = {name: float(np.mean(one)) for name, one in gains.items()}
    claim = f"{_PRACTICAL} beats {_LAZY} on {kind} tasks ({POINTS})"
    yield Verdict.of(claim, gap, paper=False, levels=levels)


def _strategies(table: Any) -> dict[str, Any]:
    """Return the rows of each compared strategy."""
    last = table[table.steps == table.steps.max()]

    def rows(reward: str, k: float, eta: float):
        return select(last, reward=reward, k=k, eta=eta)

    return {
        _LAZY: rows(_TRACKING, 0.0, 0.1),
        _PRACTICAL: rows(_TRACKING, 0.5, 0.1),
        _CHOSEN: _chosen(table),
        _DAILY: rows(_TRACKING, 1.0, 1.0),
        _PAPER_DAILY: rows(_PLAIN, 1.0, 1.0),
    }


def _pivot(rows: Any, kind: str, column: str = "log_gain") -> Any:
    return rows[rows.tested == kind].pivot(index="experiment", columns="year", values=column)
