"""The experiments behind Figures 3 and 4, as cells: a method, a number of tasks, an experiment, a year.

The same runs, read at other steps, give both protocols: with T tasks the paper's epoch gives a
multi-task policy T times the updates of a single-task one. Runs of one (experiment, year) share first
parameters and draws, so that they differ by method alone. A cell's rows: tested (own or held-out), step,
task (-1 for the mean over all that are tested; own ones by number: those that have a single-task policy,
and at the last step all), gain (annualised percentage points over Equal CRP, net), log_gain (log growth
a year) and sharpe_gain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int, PyTree

from apportion.composition import EqualShares
from apportion.domains.portfolio.backtest import lazy_rebalancing
from apportion.domains.portfolio.baselines.simple import volatility_tilt
from apportion.domains.portfolio.market import (
    Market,
    Walk,
    growth_and_sharpe,
    walk_policy,
    walk_targets,
)
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.record import LAZY
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.studies.cells import Cell, Plan, Progress, Rows
from apportion.studies.portfolio.experiments import SMALL, Experiments, Runs, Splits
from apportion.studies.portfolio.tables import by_cell
from apportion.studies.registry import Scale
from apportion.studies.study import Study
from apportion.tasks import Task, TaskSets, single_tasks
from apportion.training import Chunk, Chunks
from apportion.trees import copies, stack, take

TILT = "volatility-tilt"
COLUMNS = ["method", "tasks", "experiment", "year", "tested", "step", "task"]
COLUMNS += ["gain", "log_gain", "sharpe_gain"]


@dataclass(frozen=True)
class GridSize:
    """How large the grid is; the settings' seed makes its experiments."""

    settings: PortfolioSettings
    experiments: int
    years: tuple[int, ...]
    counts: tuple[int, ...]
    """Numbers of tasks T."""
    held_out: int
    single_tasks: int
    """Single-task policies of each experiment and year: those of its first tasks."""
    shown: int
    """Tasks a policy is tested on, of its own and of held-out instruments."""
    checkpoints: int
    """Evaluations along a run."""

    def within(self, prices: Prices) -> "GridSize":
        """The grid cut to what the data has: its years, and enough instruments held out."""
        s = self.settings
        least = s.window + s.batch
        years = tuple(
            year
            for year in self.years
            if prices.row(f"{year}-01-01") >= least and year in prices.years()
        )
        if not years:
            raise InputError(
                f"prices: {prices.dates[0]} to {prices.dates[-1]} leaves none of the test years "
                f"{self.years[0]} to {self.years[-1]} with {least} days before it; give prices that do"
            )
        universe = len(prices.tickers)
        if universe - self.held_out < s.task_size + 1 or self.held_out < s.task_size:
            raise InputError(
                f"prices: {universe} tickers are too few for {self.held_out} held-out ones and tasks "
                f"of {s.task_size}; give at least {self.held_out + s.task_size + 1}"
            )
        return replace(self, years=years)

    def tested_steps(self, method: str) -> list[int]:
        """Steps at which policies are tested; single-task ones also where the paper's protocol has them."""
        every = self.settings.steps // self.checkpoints
        steps = {every * (i + 1) for i in range(self.checkpoints)}
        if method == "stl":
            for count in self.counts:
                steps |= {max(step // count, 1) for step in steps if step % count == 0}
        return sorted(steps)

    def describe(self, prices: Prices) -> dict[str, Any]:
        """What is needed to run the grid again."""
        own = {name: value for name, value in vars(self).items() if name != "settings"}
        return {"data": prices.summary(), **vars(self.settings), "tasks": own.pop("counts"), **own}


PAPER = GridSize(
    settings=PortfolioSettings.paper(),
    experiments=10,
    years=tuple(range(2013, 2020)),
    counts=(5, 30, 100),
    held_out=18,
    single_tasks=3,
    shown=10,
    checkpoints=12,
)
QUICK = GridSize(
    settings=PortfolioSettings.paper(steps=1800, **SMALL),
    experiments=3,
    years=(2017, 2018, 2019),
    counts=(3, 12),
    held_out=7,
    single_tasks=2,
    shown=4,
    checkpoints=6,
)


def grid_plan(
    study: str,
    conclude: Callable[[pd.DataFrame, dict[str, Any]], Study],
    *,
    scale: Scale,
    seed: int,
    prices: Prices | None,
) -> Plan:
    """The plan of a study of the grid; studies of the same grid share their cells."""
    prices = embedded_prices() if prices is None else prices
    size = PAPER if scale == "paper" else QUICK
    size = replace(size, settings=replace(size.settings, seed=seed)).within(prices)
    return sized_plan(study, conclude, prices, size)


def sized_plan(
    study: str,
    conclude: Callable[[pd.DataFrame, dict[str, Any]], Study],
    prices: Prices,
    size: GridSize,
) -> Plan:
    """The plan of a grid of any size: what learns nothing, then multi-task, then single-task methods."""
    programs = [((LAZY,), 0), ((TILT,), 0)]
    programs += [(("mtl", "pmtl"), count) for count in size.counts] + [(("stl",), 1)]
    cells = []
    for methods, count in programs:
        program = f"{'-'.join(methods)}-{count}"
        for experiment, year, method in product(range(size.experiments), size.years, methods):
            values = {"method": method, "tasks": count, "experiment": experiment, "year": year}
            cells.append(Cell(f"{method}-{count}-{experiment}-{year}", values, program))
    compute_grid = partial(compute, prices, size)
    return Plan(study, tuple(cells), compute_grid, conclude, size.describe(prices), family="grid")


def compute(prices: Prices, size: GridSize, cells: Sequence[Cell], progress: Progress) -> Rows:
    """The rows of cells of one program: all of them trained in one vmap, tested at every checkpoint."""
    method, count = cells[0]["method"], cells[0]["tasks"]
    batch = _Batch.of(prices, size, cells)
    frames = []
    if method in (LAZY, TILT):
        lazy = copies(lazy_rebalancing(), len(cells))
        gains = batch.gains(lazy) if method == LAZY else batch.gains(EqualShares(), _follow_tilt)
        frames.append(_rows(gains, len(cells), size.settings.steps, size.shown))
    else:

        def on_chunk(chunk: Chunk) -> None:
            if chunk.step in steps:
                named = size.shown if chunk.step == chunk.steps else size.single_tasks
                frames.append(_rows(batch.gains(chunk.policy), len(cells), chunk.step, named))
                done = f"step {chunk.step} of {chunk.steps}"
                progress(
                    f"{method}, {count} tasks: {len(cells)} cells, {done}", chunk.step / chunk.steps
                )

        steps = size.tested_steps(method)
        every = int(np.gcd.reduce(steps))
        batch.train(cells, Chunks(every, every, on_chunk))
    yield from by_cell(cells, pd.concat(frames))


@dataclass(frozen=True, eq=False)
class _Batch:
    """The runs of some cells of one program: what they learn from, and what they are tested on."""

    settings: PortfolioSettings
    experiments: Experiments
    runs: Runs
    trained: TaskSets
    tested: dict[str, TaskSets]

    @classmethod
    def of(cls, prices: Prices, size: GridSize, cells: Sequence[Cell]) -> "_Batch":
        s, method, count = size.settings, cells[0]["method"], cells[0]["tasks"]
        counts = {"held_out": size.held_out, "own": max(size.counts), "shown": size.shown}
        splits = Splits.draw(len(prices.tickers), s, size.experiments, **counts)
        experiments = Experiments.of(prices, s, size.years, splits)
        runs = experiments.runs(cells, each=size.single_tasks if method == "stl" else 1)
        if method == "stl":
            places = experiments.runs(cells).experiment
            trained = single_tasks(take(splits.own.first(size.single_tasks), places).flat)
            own = trained
        else:
            trained = take(splits.own.first(count or size.shown), runs.experiment)
            own = trained.first(size.shown)
        held_out = take(splits.held_out, runs.experiment)
        return cls(s, experiments, runs, trained, {"own": own, "held-out": held_out})

    def train(self, cells: Sequence[Cell], chunks: Chunks) -> None:
        """Train all runs; the first parameters and the draws of a pair come from its place among all."""
        each = len(self.runs.pair) // len(cells)
        methods = [cell["method"] for cell in cells for _ in range(each)]
        seed = jax.random.key(self.settings.seed)
        policy_keys, run_keys = (
            jax.random.split(jax.random.fold_in(seed, i), self.experiments.pairs)[self.runs.pair]
            for i in range(2)
        )
        train_portfolio_runs(
            self.experiments.training,
            self.trained,
            self.settings,
            policy_keys=policy_keys,
            run_keys=run_keys,
            selection=stack([replace(self.settings, method=m).selection() for m in methods]),
            lengths=self.runs.lengths,
            chunks=chunks,
        )

    def gains(
        self, policies: Policy, follow: Callable[..., Walk] = walk_policy
    ) -> dict[str, dict[str, np.ndarray]]:
        """Each kind of task to gains over Equal CRP, runs by tasks."""
        found = {}
        for kind in self.tested:
            growth, sharpe = self._test(kind, policies, follow)
            equal, equal_sharpe = self._equal[kind]
            found[kind] = {
                "gain": 100 * (np.exp(growth) - np.exp(equal)),
                "log_gain": growth - equal,
                "sharpe_gain": sharpe - equal_sharpe,
            }
        return found

    @cached_property
    def _equal(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {kind: self._test(kind, EqualShares(), walk_policy) for kind in self.tested}

    def _test(
        self, kind: str, policies: Policy, follow: Callable[..., Walk]
    ) -> tuple[np.ndarray, np.ndarray]:
        where = (self.experiments.testing, self.runs.starts, self.runs.days, self.tested[kind])
        growth, sharpe = _record(policies, *where, follow)
        return np.asarray(growth), np.asarray(sharpe)


@eqx.filter_jit
def _record(
    policies: Policy,
    market: Market,
    starts: Int[Array, " runs"],
    days: Int[Array, " runs"],
    tasks: TaskSets,
    follow: Callable[..., Walk],
) -> tuple[Float[Array, "runs tasks"], Float[Array, "runs tasks"]]:
    """Net log growth a year and Sharpe ratio of each run's policy on each of its tasks."""
    arrays, rest = eqx.partition(policies, eqx.is_array)

    def one(run: PyTree):
        arrays, start, days, tasks = run
        here = eqx.tree_at(lambda m: m.first, market, start)
        policy = eqx.combine(arrays, rest)
        log = jax.vmap(lambda task: follow(policy, here, task).log_return)(tasks.each)
        return growth_and_sharpe(log, days)

    # A few runs at a time: their windows of prices would not fit together.
    return jax.lax.map(one, (arrays, starts, days, tasks.each), batch_size=32)


def _follow_tilt(_: Policy, market: Market, task: Task) -> Walk:
    """The volatility tilt of every backtest, which sees all days before each period."""
    closes = market.prices[:, task.members, 0]
    targets = volatility_tilt(closes[1:] / closes[:-1])
    return walk_targets(targets[market.first - 1 + jnp.arange(market.horizon)], market, task)


def _rows(
    gains: dict[str, dict[str, np.ndarray]], cells: int, step: int, named: int
) -> pd.DataFrame:
    """A checkpoint's rows: the mean over tasks, and the first `named` own tasks each by itself."""
    frames = []
    for kind, values in gains.items():
        # Single-task policies of a cell stand side by side as tasks.
        by_task = {
            name: v if len(v) == cells else v.mean(-1).reshape(cells, -1)
            for name, v in values.items()
        }
        means = {name: v.mean(-1) for name, v in by_task.items()}
        place = {"place": np.arange(cells), "tested": kind, "step": step}
        frames.append(pd.DataFrame({**place, "task": -1, **means}))
        if kind == "own":
            first = {name: v[:, :named] for name, v in by_task.items()}
            cell, task = (i.ravel() for i in np.indices(first["gain"].shape))
            each = {name: v.ravel() for name, v in first.items()}
            frames.append(pd.DataFrame({**place, "place": cell, "task": task, **each}))
    return pd.concat(frames)
