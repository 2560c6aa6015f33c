"""Figures 3 and 4: STL, MTL and P-MTL walked forward over years, and what transfers to other instruments.

Every policy learns from the days before a test year and is walked through that year, net of costs. A cell
is a method, a number of tasks, an experiment and a year. The same runs, read at other steps, give both
protocols: the paper's, where an epoch gives each task the same number of updates, so that a multi-task
policy gets T times those of a single-task one, and equal updates per policy. Runs of one (experiment,
year) share first parameters and draws, so that they differ by method alone.

A cell's rows: tested (own or held-out), step, task (-1 for the mean over all that are tested; own ones by
number: those that have a single-task policy, and at the last step all), gain (annualised percentage points
over Equal CRP, net), log_gain (log growth a year) and sharpe_gain.

Figure 3: the gain over Equal CRP on tasks of instruments never trained on. Claims: multi-task policies
beat Equal CRP there; more tasks transfer better. Figure 4: learning curves, and the fraction of tasks that
gain over STL; methods are compared on the same tasks. Claims: P-MTL learns faster and better than STL, 30
tasks beat 5, P-MTL beats MTL.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from apportion.composition import EqualShares
from apportion.domains.portfolio import market as markets
from apportion.domains.portfolio.backtest import lazy_rebalancing
from apportion.domains.portfolio.baselines import volatility_tilt
from apportion.domains.portfolio.market import Market, Walk, walk_policy
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.record import LAZY
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.domains.settings import METHOD_NAMES
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.statistics import over_rows_and_columns
from apportion.studies.engine import Cell, Plan, Progress, Rows
from apportion.studies.figures import forest, panels
from apportion.studies.portfolio.experiments import (
    SMALL,
    SURVIVORSHIP,
    Experiments,
    by_cell,
    each_policy,
    note,
)
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.tasks import Task, single_tasks
from apportion.training import Chunk, Chunks
from apportion.trees import copies, stack, take

TILT = "volatility-tilt"
_GAINS = ["gain", "log_gain", "sharpe_gain"]


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


SCALES = {
    "quick": GridSize(
        settings=PortfolioSettings.paper(steps=1800, **SMALL),
        experiments=3,
        years=(2017, 2018, 2019),
        counts=(3, 12),
        held_out=7,
        single_tasks=2,
        shown=4,
        checkpoints=6,
    ),
    "paper": GridSize(
        settings=PortfolioSettings.paper(),
        experiments=10,
        years=tuple(range(2013, 2020)),
        counts=(5, 30, 100),
        held_out=18,
        single_tasks=3,
        shown=10,
        checkpoints=12,
    ),
}


def fig3_4(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """The grid behind both figures: what learns nothing, then multi-task, then single-task methods."""
    prices = embedded_prices() if prices is None else prices
    size = SCALES[scale].within(prices)
    size = replace(size, settings=replace(size.settings, seed=seed))
    programs = [((LAZY,), 0), ((TILT,), 0)]
    programs += [(("mtl", "pmtl"), count) for count in size.counts] + [(("stl",), 1)]
    cells = []
    for methods, count in programs:
        program = f"{'-'.join(methods)}-{count}"
        for experiment, year, method in product(range(size.experiments), size.years, methods):
            values = {"method": method, "tasks": count, "experiment": experiment, "year": year}
            cells.append(Cell(f"{method}-{count}-{experiment}-{year}", values, program))
    own = {name: value for name, value in vars(size).items() if name != "settings"}
    about = {"data": prices.summary(), **vars(size.settings), "tasks": own.pop("counts"), **own}
    return Plan("fig3-4", tuple(cells), partial(_compute, prices, size), _conclude, about)


def _compute(prices: Prices, size: GridSize, cells: Sequence[Cell], progress: Progress) -> Rows:
    """The rows of cells of one program: all of them trained in one vmap, tested at every checkpoint."""
    s, method, count = size.settings, cells[0]["method"], cells[0]["tasks"]
    counts = {"held_out": size.held_out, "own": max(size.counts), "shown": size.shown}
    known = Experiments.of(prices, s, size.years, size.experiments, **counts)
    each = size.single_tasks if method == "stl" else 1
    runs = known.runs(cells, each)
    if method == "stl":
        places = known.runs(cells).experiment
        trained = single_tasks(take(known.own.first(size.single_tasks), places).flat)
        own = trained
    else:
        trained = take(known.own.first(count or size.shown), runs.experiment)
        own = trained.first(size.shown)
    tested = {"own": own, "held-out": take(known.held_out, runs.experiment)}

    def test(policies: Policy, follow: Callable[..., Walk] = walk_policy) -> dict[str, Any]:
        """Net log growth a year and Sharpe ratio, (runs, tasks) each, by kind of task."""
        where = (known.testing, runs.starts, runs.days)
        return {kind: _record(policies, *where, tasks, follow) for kind, tasks in tested.items()}

    equal, frames = test(EqualShares()), []

    def record(values: dict[str, Any], step: int) -> None:
        named = size.shown if step == s.steps else size.single_tasks
        frames.append(_rows(values, equal, len(cells), step, named))

    def on_chunk(chunk: Chunk) -> None:
        if chunk.step in steps:
            record(test(chunk.policy), chunk.step)
            what = f"{method}, {count} tasks: {len(cells)} cells, step {chunk.step}"
            progress(what, chunk.step / chunk.steps)

    if method == LAZY:
        record(test(copies(lazy_rebalancing(), len(cells))), s.steps)
    elif method == TILT:
        record(test(EqualShares(), _follow_tilt), s.steps)
    else:
        steps = size.tested_steps(method)
        every = int(np.gcd.reduce(steps))
        methods = [cell["method"] for cell in cells for _ in range(each)]
        # The first parameters and the draws of a pair come from its place among all.
        policy_keys, run_keys = (
            jax.random.split(jax.random.fold_in(jax.random.key(s.seed), i), known.pairs)[runs.pair]
            for i in range(2)
        )
        train_portfolio_runs(
            known.training,
            trained,
            s,
            policy_keys=policy_keys,
            run_keys=run_keys,
            selection=stack([replace(s, method=m).selection() for m in methods]),
            lengths=runs.lengths,
            chunks=Chunks(every, every, on_chunk),
        )
    yield from by_cell(cells, pd.concat(frames))


@eqx.filter_jit
def _record(
    policies: Policy,
    market: Market,
    starts: Int[Array, " runs"],
    days: Int[Array, " runs"],
    tasks: Task,
    follow: Callable[..., Walk],
) -> tuple[Float[Array, "runs tasks"], Float[Array, "runs tasks"]]:
    """Net log growth a year and Sharpe ratio of each run's policy on each of its tasks."""

    def one(policy: Policy, start, days, tasks: Task):
        here = eqx.tree_at(lambda m: m.first, market, start)
        log = jax.vmap(lambda task: follow(policy, here, task).log_return)(tasks)
        return markets.growth_and_sharpe(log, days)

    return each_policy(one, policies, starts, days, tasks, at_once=32)


def _follow_tilt(_: Policy, market: Market, task: Task) -> Walk:
    """The volatility tilt of every backtest, which sees all days before each period."""
    closes = market.prices[:, task.members, 0]
    targets = volatility_tilt(closes[1:] / closes[:-1])
    days = market.first - 1 + jnp.arange(market.horizon)
    return markets.walk_targets(targets[days], market, task)


def _rows(
    values: dict[str, Any], equal: dict[str, Any], cells: int, step: int, named: int
) -> pd.DataFrame:
    """A checkpoint's gains over Equal CRP: the mean over tasks, and the first `named` own tasks each."""
    frames = []
    for kind in values:
        (growth, sharpe), (base, base_sharpe) = map(np.asarray, (values[kind], equal[kind]))
        gains = np.stack(
            [100 * (np.exp(growth) - np.exp(base)), growth - base, sharpe - base_sharpe]
        )
        # Single-task policies of a cell stand side by side as tasks.
        if len(growth) != cells:
            gains = gains.mean(-1).reshape(len(_GAINS), cells, -1)
        means = pd.DataFrame(gains.mean(-1).T, columns=_GAINS)
        frames.append(means.assign(place=range(cells), task=-1, tested=kind))
        if kind == "own":
            first = gains[..., :named].reshape(len(_GAINS), -1)
            cell, task = np.divmod(np.arange(first.shape[1]), first.shape[1] // cells)
            each = pd.DataFrame(first.T, columns=_GAINS)
            frames.append(each.assign(place=cell, task=task, tested=kind))
    rows: Any = pd.concat(frames).assign(step=step)
    return rows[["place", "tested", "step", "task", *_GAINS]]


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    own = rows[(rows.tested == "held-out") & (rows.task == -1)]
    title = "Figure 3: gain over Equal CRP on instruments never trained on"
    shown = {"STL": ("stl", 1), "lazy Equal CRP": (LAZY, 0), "volatility tilt": (TILT, 0)} | {
        f"{METHOD_NAMES[method]}, {count} tasks": (method, count)
        for count, method in product(task_counts(own)[0], ("mtl", "pmtl"))
    }
    years = sorted(own.year.unique())
    gains = {
        label: {
            name: over_rows_and_columns(gains_of(own, method=method, tasks=count)[some])
            for name, (method, count) in shown.items()
        }
        for label, some in ((f"{years[-1]}, as in the paper", years[-1:]), ("all years", years))
    }
    draw = partial(forest, gains, "points a year over Equal CRP, net")
    _, many = task_counts(own)
    mtl, pmtl = (gains_of(own, method=method, tasks=many) for method in ("mtl", "pmtl"))
    sharpe = gains_of(own, method="mtl", tasks=many, column="sharpe_gain")
    notes = (
        *_notes_on_what_learns_nothing(own),
        note(f"MTL with {many} tasks", mtl),
        note("its Sharpe ratio over Equal CRP's", sharpe, "a year"),
        note(f"P-MTL less MTL with {many} tasks", pmtl - mtl),
        SURVIVORSHIP,
    )
    fig3 = FigureResult("fig3", title, _summary(own), _transfer_verdicts(own), draw, notes)
    title = "Figure 4: learning curves and the fraction of tasks that gain over STL"
    verdicts, draw = _learning_verdicts(rows), partial(_plot_learning, rows)
    fig4 = FigureResult("fig4", title, _summary(rows), verdicts, draw, _learning_notes(rows))
    return [fig3, fig4]


def gains_of(
    table: pd.DataFrame, *, step: int | None = None, column: str = "gain", **where: Any
) -> Any:
    """The values of one method as experiments by years, at a step (default: its last)."""
    rows = select(table, task=-1, **where)
    step = rows.step.max() if step is None else step
    return rows[rows.step == step].pivot(index="experiment", columns="year", values=column)


def _summary(table: Any) -> pd.DataFrame:
    """A row for each method, number of tasks, kind of task and step: mean gains, the gain's interval."""
    found, by = [], ["method", "tasks", "tested", "step"]
    for key, own in table[table.task == -1].groupby(by):
        gains = gains_of(own)
        e = over_rows_and_columns(gains)
        found.append(
            dict(zip(by, key, strict=True))
            | {"experiments": gains.shape[0], "years": gains.shape[1]}
            | {"gain": e.value, "low": e.low, "high": e.high}
            | {name: float(own[name].mean()) for name in _GAINS[1:]}
        )
    return pd.DataFrame(found)


def task_counts(table: pd.DataFrame) -> tuple[list[int], int]:
    """The numbers of tasks of multi-task policies, and the one that is compared with single-task
    learning: the most, or the second of three.
    """
    counts = sorted(int(t) for t in table[table.method == "mtl"].tasks.unique())
    return counts, counts[-2] if len(counts) > 2 else counts[-1]


def _above_zero(claim: str, gap: Any, *, paper: bool) -> Verdict:
    """Whether a gap, experiments by years, is positive: it is where its whole interval is."""
    positive = int((gap.mean(axis=0) > 0).sum())
    full = f"{claim} ({positive} of {gap.shape[1]} years positive)"
    return Verdict.of(full, over_rows_and_columns(gap), paper=paper)


def _transfer_verdicts(table: pd.DataFrame) -> Iterator[Verdict]:
    (counts, many), last = task_counts(table), int(table.year.max())
    for method, count in product(("mtl", "pmtl"), counts):
        gains = gains_of(table, method=method, tasks=count)
        beats = f"{METHOD_NAMES[method]} with {count} tasks beats Equal CRP"
        yield _above_zero(f"{beats} in {last}", gains[[last]], paper=True)
        yield _above_zero(f"{beats} over all years", gains, paper=False)
    mtl = {count: gains_of(table, method="mtl", tasks=count) for count in counts}
    for few, more in pairwise(counts):
        claim = f"{more} tasks transfer better than {few} (MTL)"
        yield _above_zero(claim, mtl[more] - mtl[few], paper=False)
    claim = f"MTL with {many} tasks transfers better than STL at equal updates"
    yield _above_zero(claim, mtl[many] - gains_of(table, method="stl"), paper=False)


def _notes_on_what_learns_nothing(table: pd.DataFrame) -> tuple[str, str]:
    return (
        note("Lazy Equal CRP, which learns nothing", gains_of(table, method=LAZY)),
        note("A tilt to volatile instruments, which learns nothing", gains_of(table, method=TILT)),
    )


def _first_tasks(table: pd.DataFrame, count: int) -> pd.DataFrame:
    """The rows of means anew, over the first `count` own tasks alone, where these stand by themselves.

    Methods that were tested on more tasks are then compared on the same ones.
    """
    rows: Any = table[(table.tested == "own") & (table.task >= 0) & (table.task < count)]
    keys = ["method", "tasks", "experiment", "year", "tested", "step"]
    return rows.groupby(keys)[_GAINS].mean().reset_index().assign(task=-1)


def _tasks_of_single_policies(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the tasks that have a single-task policy, for every method and step."""
    single: Any = table[(table.method == "stl") & (table.task >= 0)]
    return _first_tasks(table, single.task.nunique())


def _learning_verdicts(table: pd.DataFrame) -> Iterator[Verdict]:
    (counts, many), steps = task_counts(table), int(table.step.max())
    same = _tasks_of_single_policies(table)

    def along(method: str, tasks: int) -> Any:
        """The mean over the checkpoints of multi-task policies: the higher, the sooner it has risen."""
        shown = sorted(select(same, method="mtl").step.unique())
        every = [gains_of(same, method=method, tasks=tasks, step=step) for step in shown]
        return sum(every[1:], start=every[0]) / len(every)

    for method in ("mtl", "pmtl"):
        claim = f"{METHOD_NAMES[method]} with {many} tasks beats STL at equal updates per policy"
        gap = gains_of(same, method=method, tasks=many) - gains_of(same, method="stl")
        yield _above_zero(claim, gap, paper=False)
    for t in counts:
        if steps // t in set(table[table.method == "stl"].step):
            single = gains_of(same, method="stl", step=steps // t)
            gap = gains_of(same, method="pmtl", tasks=t) - single
            protocol = f"the paper's protocol ({steps} updates against {steps // t})"
            yield _above_zero(f"P-MTL with {t} tasks beats STL under {protocol}", gap, paper=True)
    for few, more in pairwise(counts):
        for where, method, rows, words in (
            ("own", "pmtl", _first_tasks(table, few), "own tasks (P-MTL)"),
            ("held-out", "mtl", table, "held-out instruments (MTL)"),
        ):
            fewer, gains = (
                gains_of(rows, method=method, tasks=count, tested=where) for count in (few, more)
            )
            claim = f"{more} tasks beat {few} on {words}"
            yield _above_zero(claim, gains - fewer, paper=where == "own")
    for count in counts:
        mtl, pmtl = (
            gains_of(table, method=method, tasks=count, tested="own") for method in ("mtl", "pmtl")
        )
        yield _above_zero(f"P-MTL beats MTL with {count} tasks", pmtl - mtl, paper=True)
        yield _above_zero(f"P-MTL with {count} tasks beats Equal CRP", pmtl, paper=True)
    for other, tasks in (("mtl", many), ("stl", 1)):
        claim = (
            f"P-MTL with {many} tasks learns faster than {METHOD_NAMES[other]} (mean of all "
            "checkpoints, equal updates)"
        )
        yield _above_zero(claim, along("pmtl", many) - along(other, tasks), paper=True)


def _learning_notes(table: pd.DataFrame) -> Iterator[str]:
    own = select(table, tested="own")
    yield from _notes_on_what_learns_nothing(own)
    for count in task_counts(table)[0]:
        gains = gains_of(own, method="mtl", tasks=count)
        yield note(f"MTL with {count} tasks, own tasks", gains)
    yield note("STL, own tasks, at equal updates", gains_of(own, method="stl"))
    yield (
        "The paper's protocol gives a multi-task policy T times the updates of a single-task one; "
        "the comparison at equal updates removes that advantage."
    )
    yield SURVIVORSHIP


def _plot_learning(table: Any) -> Figure:
    """Learning curves by number of tasks, single-task ones under both protocols; then, for each
    fraction of tasks, the gain over STL that they reach at least.
    """
    counts, same = task_counts(table)[0], _tasks_of_single_policies(table)
    figure, (*curves, fractions) = panels(4 * (len(counts) + 1), 4, len(counts) + 1)
    last, task = same.step.max(), ["experiment", "year", "task"]
    ends = table[(table.step == last) & (table.task >= 0)].set_index(task)
    for axis, count in zip(curves, counts, strict=True):
        for method, tasks, stretch, style in (
            ("stl", 1, 1, "C0-"),
            ("stl", 1, count, "C0--"),
            ("mtl", count, 1, "C1-"),
            ("pmtl", count, 1, "C2-"),
        ):
            mean = select(same, method=method, tasks=tasks).groupby("step").gain.mean()
            mean = mean[mean.index * stretch <= last]
            label = METHOD_NAMES[method] + (", paper's protocol" if stretch > 1 else "")
            axis.plot(mean.index * stretch, mean, style, label=label)
        axis.locator_params(axis="x", nbins=4)
        axis.set(title=f"{count} tasks", xlabel="updates (dashed: of the multi-task policy)")
        for method in ("mtl", "pmtl"):
            own = select(ends, method=method, tasks=count).gain
            gap = (own - select(ends, method="stl").gain).dropna().sort_values(ascending=False)
            label = f"{METHOD_NAMES[method]} {count}"
            fractions.plot(gap, np.arange(1, len(gap) + 1) / len(gap), label=label, linewidth=1)
    curves[0].set_ylabel("points a year over Equal CRP")
    fractions.set(xlabel="points a year over STL, equal updates", ylabel="fraction of tasks")
    fractions.set_title("tasks that gain at least x over STL")
    for axis in (curves[0], fractions):
        axis.legend(fontsize=8)
    return figure
