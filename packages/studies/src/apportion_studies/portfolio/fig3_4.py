"""Figures 3 and 4: STL, MTL and P-MTL walked forward over years, and what transfers to other instruments.

Every policy learns from the days before a test year and is walked through that year, net of costs. A cell
is a method, a number of tasks T, an experiment and a year. As the paper's caption has it, an epoch is 300
updates for each task: a multi-task policy has 300 T of them, and each of T single-task policies 300, so
that 12 epochs are 18,000 updates of a policy for 5 tasks, 108,000 for 30, and 3,600 of each single-task
policy. All are tested at each epoch. That is the comparison at equal epochs; the one at equal updates
reads every policy after 18,000, single-task ones trained on so long for the first 3 tasks. The paper's
year is 2019; 2013 to 2018 say whether it was a lucky one. Runs of one (experiment, year) share first
parameters and draws, so that they differ by method alone.

A cell's rows: tested (own tasks each by its number, or the mean of the held-out ones, task -1), epoch,
step (updates of a policy), gain (annualised percentage points over Equal CRP, net), log_gain (log growth a
year) and sharpe_gain.

Figure 3: the gain over Equal CRP on tasks of instruments never trained on. Claims: multi-task policies
beat Equal CRP there. Figure 4: learning curves by epoch, and for each fraction of tasks the gain over STL
that they reach at least; methods are compared on the same tasks. Claims: P-MTL learns faster and better
than STL, 30 tasks beat 5, from 30 % of tasks on P-MTL gains more over STL than MTL, and below 20 % it does
not help much, which is read here as by less than a point a year.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from apportion.certify.statistics import over_rows_and_columns
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
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import forest, panels
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.tasks import Task, single_tasks
from apportion.training import Chunk, Chunks
from apportion.trees import copies, take
from apportion_studies.portfolio.experiments import (
    SMALL,
    SURVIVORSHIP,
    Experiments,
    at_once,
    by_cell,
    each_policy,
    note,
)

_TILT = "volatility-tilt"
_MULTI = ("mtl", "pmtl")
_FROM, _UP_TO = 0.3, 0.2
"""The fractions of tasks from which on priorities should help, and up to which they should not."""
_LITTLE = 1.0
"""Points a year that count as not much."""
_GAINS = ["gain", "log_gain", "sharpe_gain"]


@dataclass(frozen=True)
class _GridSize:
    """How large the grid is; the settings' seed makes its experiments."""

    settings: PortfolioSettings
    experiments: int
    years: tuple[int, ...]
    counts: tuple[int, int]
    """Numbers of tasks T, few and many; of many there is a single-task policy each."""
    held_out: int
    long: int
    """Single-task policies, those of the first tasks, that have as many updates as one of few tasks."""
    shown: int
    """Tasks of held-out instruments a policy is tested on."""
    epoch: int
    """Updates for each task in an epoch."""
    epochs: int
    """Each with an evaluation; so many of few tasks should make a whole number of many tasks' epochs."""

    def within(self, prices: Prices) -> "_GridSize":
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

    def updates(self, method: str, count: int) -> int:
        """Updates of a policy in the part of its training between two tests."""
        shared = count if method != "stl" else 1 if count == max(self.counts) else min(self.counts)
        return self.epoch * shared


_SCALES = {
    "quick": _GridSize(
        settings=PortfolioSettings.paper(**SMALL),
        experiments=3,
        years=(2017, 2018, 2019),
        counts=(3, 12),
        held_out=7,
        long=2,
        shown=4,
        epoch=40,
        epochs=4,
    ),
    "paper": _GridSize(
        settings=PortfolioSettings.paper(),
        experiments=10,
        years=tuple(range(2013, 2020)),
        counts=(5, 30),
        held_out=18,
        long=3,
        shown=10,
        epoch=300,
        epochs=12,
    ),
}


def fig3_4(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """The grid behind both figures, the longest programs first."""
    prices = embedded_prices() if prices is None else prices
    size = _SCALES[scale].within(prices)
    size = replace(size, settings=replace(size.settings, seed=seed))
    few, many = size.counts
    programs = [
        *product(_MULTI, (many,)),
        ("stl", many),
        *product(_MULTI, (few,)),
        ("stl", size.long),
    ]
    cells = []
    for method, count in [*programs, (LAZY, 0), (_TILT, 0)]:
        for experiment, year in product(range(size.experiments), size.years):
            values = {"method": method, "tasks": count, "experiment": experiment, "year": year}
            program = f"{method}-{count}"
            cells.append(Cell(f"{program}-{experiment}-{year}", values, program))
    own = {name: value for name, value in vars(size).items() if name != "settings"}
    about = {"data": prices.summary(), **vars(size.settings), "tasks": own.pop("counts"), **own}
    # What these two would say, epochs and cells do.
    del about["steps"], about["method"]
    return Plan("fig3-4", tuple(cells), partial(_compute, prices, size), _conclude, about)


def _compute(prices: Prices, size: _GridSize, cells: Sequence[Cell], progress: OnProgress) -> Rows:
    """The rows of cells of one program: all of them trained in one vmap, tested at every epoch."""
    s, method, count = size.settings, cells[0]["method"], cells[0]["tasks"]
    counts = {"held_out": size.held_out, "own": max(size.counts), "shown": size.shown}
    known = Experiments.of(prices, s, size.years, size.experiments, **counts)
    each = count if method == "stl" else 1
    runs = known.runs(cells, each)
    own = take(known.own.first(count or max(size.counts)), known.runs(cells).experiment)
    if method == "stl":
        own = single_tasks(own.flat)
    tested = {"own": own, "held-out": take(known.held_out, runs.experiment)}

    def test(policies: Policy, follow: Callable[..., Walk] = walk_policy) -> dict[str, Any]:
        """Net log growth a year and Sharpe ratio, (runs, tasks) each, by kind of task."""
        where = (known.testing, runs.starts, runs.days)
        return {kind: _record(policies, *where, tasks, follow) for kind, tasks in tested.items()}

    equal, frames = test(EqualShares()), []

    def record(values: dict[str, Any], step: int) -> None:
        frames.append(_rows(values, equal, len(cells)).assign(step=step))

    def on_chunk(chunk: Chunk) -> None:
        record(test(chunk.policy), chunk.step)
        what = f"{method}, {count} tasks: {len(cells)} cells, step {chunk.step}"
        progress(what, chunk.step / chunk.steps)

    every = 1
    if method == LAZY:
        record(test(copies(lazy_rebalancing(), len(cells))), 0)
    elif method == _TILT:
        record(test(EqualShares(), _follow_tilt), 0)
    else:
        every = size.updates(method, count)
        s = replace(s, method=method, steps=size.epochs * every)
        # The first parameters and the draws of a pair come from its place among all.
        policy_keys, run_keys = (
            jax.random.split(jax.random.fold_in(jax.random.key(s.seed), i), known.pairs)[runs.pair]
            for i in range(2)
        )
        train_portfolio_runs(
            known.training,
            own,
            s,
            policy_keys=policy_keys,
            run_keys=run_keys,
            lengths=runs.lengths,
            chunks=Chunks(every, every, on_chunk),
        )
    an_epoch = size.epoch * (1 if method == "stl" else max(count, 1))
    table = pd.concat(frames)
    yield from by_cell(cells, table.assign(epoch=table.step // an_epoch))


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

    return each_policy(one, policies, starts, days, tasks, at_once=at_once(tasks))


def _follow_tilt(_: Policy, market: Market, task: Task) -> Walk:
    """The volatility tilt of every backtest, which sees all days before each period."""
    closes = market.prices[:, task.members, 0]
    targets = volatility_tilt(closes[1:] / closes[:-1])
    days = market.first - 1 + jnp.arange(market.horizon)
    return markets.walk_targets(targets[days], market, task)


def _rows(values: dict[str, Any], equal: dict[str, Any], cells: int) -> pd.DataFrame:
    """The gains over Equal CRP at one time: own tasks each, held-out ones in the mean."""
    frames = []
    for kind in values:
        (growth, sharpe), (base, base_sharpe) = map(np.asarray, (values[kind], equal[kind]))
        gains = np.stack(
            [100 * (np.exp(growth) - np.exp(base)), growth - base, sharpe - base_sharpe]
        )
        # Single-task policies of a cell stand side by side as tasks.
        gains = gains.reshape(len(_GAINS), cells, -1)
        if kind == "held-out":
            gains = gains.mean(-1, keepdims=True)
        cell, task = (index.ravel() for index in np.indices(gains.shape[1:]))
        frame = pd.DataFrame(gains.reshape(len(_GAINS), -1).T, columns=_GAINS)
        task = task if kind == "own" else -1
        frames.append(frame.assign(place=cell, tested=kind, task=task))
    return pd.concat(frames)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    held_out, own = (select(rows, tested=kind) for kind in ("held-out", "own"))
    (few, many), years = _task_counts(rows), sorted(rows.year.unique())
    last = int(select(rows, method="stl", tasks=many).epoch.max())
    shown = {"STL": ("stl", many), "lazy Equal CRP": (LAZY, 0), "volatility tilt": (_TILT, 0)} | {
        f"{METHOD_NAMES[method]}, {count} tasks": (method, count)
        for count, method in product((few, many), _MULTI)
    }
    gains = {
        label: {
            name: over_rows_and_columns(_gains_of(held_out, method=method, tasks=count)[some])
            for name, (method, count) in shown.items()
        }
        for label, some in (
            (f"{years[-1]}, as in the paper", years[-1:]),
            (f"{years[0]} to {years[-1]}", years),
        )
    }
    draw = partial(forest, gains, f"points a year over Equal CRP, net, after {last} epochs")
    mtl, pmtl = (_gains_of(held_out, method=method, tasks=many) for method in _MULTI)
    sharpe = _gains_of(held_out, method="mtl", tasks=many, column="sharpe_gain")
    notes = (
        *_notes_on_what_learns_nothing(held_out),
        note(f"MTL with {many} tasks", mtl),
        note("its Sharpe ratio over Equal CRP's", sharpe, "a year"),
        note(f"P-MTL less MTL with {many} tasks", pmtl - mtl),
        SURVIVORSHIP,
    )
    title = "Figure 3: gain over Equal CRP on instruments never trained on"
    verdicts = _transfer_verdicts(held_out)
    fig3 = FigureResult("fig3", title, _summary(held_out), verdicts, draw, notes)
    title = "Figure 4: learning curves by epoch, and the fraction of tasks that gain over STL"
    draw = partial(_plot_learning, own)
    fig4 = FigureResult(
        "fig4", title, _summary(own), _learning_verdicts(own), draw, _learning_notes(own)
    )
    return [fig3, fig4]


def _gains_of(
    table: Any,
    *,
    step: int | None = None,
    first: int | None = None,
    column: str = "gain",
    **where: Any,
) -> Any:
    """The values of one method as experiments by years, at a step (default: its last).

    They are means over the tasks there are, or over the first so many of them.
    """
    rows = select(table, **where)
    rows = rows if first is None else rows[rows.task < first]
    step = rows.step.max() if step is None else step
    return rows[rows.step == step].groupby(["experiment", "year"])[column].mean().unstack("year")


def _summary(table: Any) -> pd.DataFrame:
    """A row for each method, number of tasks and epoch: mean gains, the gain's interval."""
    found, by = [], ["method", "tasks", "tested", "epoch", "step"]
    for key, own in table.groupby(by):
        gains = _gains_of(own)
        e = over_rows_and_columns(gains)
        found.append(
            dict(zip(by, key, strict=True))
            | {"experiments": gains.shape[0], "years": gains.shape[1]}
            | {"gain": e.value, "low": e.low, "high": e.high}
            | {name: float(own[name].mean()) for name in _GAINS[1:]}
        )
    return pd.DataFrame(found)


def _task_counts(table: Any) -> tuple[int, int]:
    """The numbers of tasks of multi-task policies, few and many."""
    few, many = sorted(int(t) for t in select(table, method="mtl").tasks.unique())
    return few, many


def _trained_for(table: Any) -> tuple[dict[tuple[str, int], int], int]:
    """Updates of a policy in the end, by method and number of tasks; and how many single-task policies go
    on to as many as one of few tasks has.
    """
    ends = table.groupby(["method", "tasks"]).step.max().to_dict()
    [long] = [
        count for method, count in ends if method == "stl" and count != _task_counts(table)[1]
    ]
    return ends, long


def _at_equal_epochs(updates: int, others: int) -> str:
    """The paper's protocol in words."""
    return f"at equal epochs ({updates:,} updates against {others:,})"


def _at_equal_updates(updates: int) -> str:
    """The other protocol in words."""
    return f"at equal updates ({updates:,} each)"


def _by_years(claim: str, gap: Any, *, paper: bool, **bounds: float) -> Iterator[Verdict]:
    """Whether a gap, experiments by years, is positive, or within bounds: in the last year, the paper's,
    then over all.
    """
    first, last = gap.columns[0], gap.columns[-1]
    own = over_rows_and_columns(gap[[last]])
    yield Verdict.of(f"{claim}, in {last}", own, paper=paper, **bounds)
    claim = f"{claim}, over {first} to {last}"
    if not bounds:
        positive = int((gap.mean(axis=0) > 0).sum())
        claim = f"{claim} ({positive} of {gap.shape[1]} years positive)"
    yield Verdict.of(claim, over_rows_and_columns(gap), paper=False, **bounds)


def _transfer_verdicts(table: Any) -> Iterator[Verdict]:
    (few, many), (ends, long) = _task_counts(table), _trained_for(table)
    for method, count in product(_MULTI, (few, many)):
        gains = _gains_of(table, method=method, tasks=count)
        name = f"{METHOD_NAMES[method]} with {count} tasks"
        claim = f"{name} beats Equal CRP after {ends[method, count]:,} updates"
        yield from _by_years(claim, gains, paper=True)
    most, equal = ends["mtl", many], ends["mtl", few]
    for step, than_few, than_single in (
        (most, _at_equal_epochs(most, equal), _at_equal_epochs(most, ends["stl", many])),
        (equal, _at_equal_updates(equal), _at_equal_updates(equal)),
    ):
        mtl = _gains_of(table, method="mtl", tasks=many, step=step)
        claim = f"{many} tasks transfer better than {few} {than_few} (MTL)"
        gap = mtl - _gains_of(table, method="mtl", tasks=few)
        yield from _by_years(claim, gap, paper=False)
        claim = f"MTL with {many} tasks transfers better than STL {than_single}"
        gap = mtl - _gains_of(table, method="stl", tasks=many if step == most else long)
        yield from _by_years(claim, gap, paper=False)


def _notes_on_what_learns_nothing(table: Any) -> tuple[str, str]:
    return (
        note("Lazy Equal CRP, which learns nothing", _gains_of(table, method=LAZY)),
        note(
            "A tilt to volatile instruments, which learns nothing", _gains_of(table, method=_TILT)
        ),
    )


def _learning_verdicts(table: Any) -> Iterator[Verdict]:
    (few, many), (ends, long) = _task_counts(table), _trained_for(table)
    equal = ends["pmtl", few]
    for count, method in product((few, many), _MULTI):
        own, paper = {"method": method, "tasks": count}, method == "pmtl"
        name = f"{METHOD_NAMES[method]} with {count} tasks"
        ours = _curve(table, count, **own)
        single = _curve(table, count, method="stl", tasks=many)
        claim = f"{name} beats STL {_at_equal_epochs(ends[method, count], ends['stl', many])}"
        yield from _by_years(claim, ours[-1] - single[-1], paper=paper)
        if paper:
            claim = f"{name} learns faster than STL at equal epochs (mean of all {len(ours)})"
            yield from _by_years(claim, _mean(ours) - _mean(single), paper=True)
        ours = _gains_of(table, step=equal, first=long, **own)
        claim = f"{name} beats STL {_at_equal_updates(equal)}"
        yield from _by_years(claim, ours - _gains_of(table, method="stl", tasks=long), paper=False)
    # The same tasks for both: those of the policies with few.
    fewer = _gains_of(table, method="pmtl", tasks=few)
    for step, words in (
        (ends["pmtl", many], _at_equal_epochs(ends["pmtl", many], equal)),
        (equal, _at_equal_updates(equal)),
    ):
        more = _gains_of(table, method="pmtl", tasks=many, step=step, first=few)
        claim = f"{many} tasks beat {few} {words} (P-MTL)"
        yield from _by_years(claim, more - fewer, paper=step != equal)
    for count in (few, many):
        mtl, pmtl = (_curve(table, count, method=method, tasks=count) for method in _MULTI)
        yield from _by_years(f"P-MTL beats MTL with {count} tasks", pmtl[-1] - mtl[-1], paper=True)
        claim = f"P-MTL with {count} tasks learns faster than MTL (mean of all epochs)"
        yield from _by_years(claim, _mean(pmtl) - _mean(mtl), paper=True)
        yield from _by_years(f"P-MTL with {count} tasks beats Equal CRP", pmtl[-1], paper=True)
    ends = {method: _over_single(table, method, many) for method in _MULTI}
    gap = ends["pmtl"] - ends["mtl"]
    claim = f"from {_FROM:.0%} of {many} tasks on P-MTL gains more over STL than MTL"
    upper = gap.loc[:, gap.columns >= _FROM].mean(axis=1).unstack("year")
    yield from _by_years(f"{claim} (mean over these fractions, equal epochs)", upper, paper=True)
    claim = f"up to {_UP_TO:.0%} of {many} tasks prioritising helps by less than {_LITTLE:g} point a year"
    lower = gap.loc[:, gap.columns <= _UP_TO].mean(axis=1).unstack("year")
    claim = f"{claim} (mean over these fractions, equal epochs)"
    yield from _by_years(claim, lower, paper=True, below=_LITTLE)


def _curve(table: Any, first: int, **where: Any) -> list[Any]:
    """The gains on the first tasks after each epoch, experiments by years each."""
    steps = sorted(select(table, **where).step.unique())
    return [_gains_of(table, step=step, first=first, **where) for step in steps]


def _mean(curve: Sequence[Any]) -> Any:
    """The mean along a curve: the higher, the sooner it has risen."""
    return sum(curve[1:], start=curve[0]) / len(curve)


def _over_single(table: Any, method: str, count: int) -> Any:
    """What so many tasks gain over their single-task policies at the end, equal epochs.

    A row for each experiment and year; a column for each fraction of the tasks: the gain that so many of
    them reach at least.
    """
    single = select(table, method="stl", tasks=_task_counts(table)[1])
    key = ["experiment", "year", "task"]
    both = [
        one[one.step == one.step.max()].set_index(key).gain
        for one in (select(table, method=method, tasks=count), single)
    ]
    gaps = (both[0] - both[1]).dropna().unstack("task")
    # Rounded, so that 0.3 is 0.3.
    fractions = np.round(np.arange(1, count + 1) / count, 9)
    return pd.DataFrame(-np.sort(-gaps.to_numpy(), axis=1), gaps.index, fractions)


def _learning_notes(table: Any) -> Iterator[str]:
    yield from _notes_on_what_learns_nothing(table)
    (few, many), (ends, long) = _task_counts(table), _trained_for(table)
    for count in (few, many):
        gains = _gains_of(table, method="mtl", tasks=count)
        yield note(f"MTL with {count} tasks, {ends['mtl', count]:,} updates", gains)
    for count in (many, long):
        gains = _gains_of(table, method="stl", tasks=count)
        yield note(f"STL, {ends['stl', count]:,} updates, first {count} tasks", gains)
    yield (
        "Equal epochs, the paper's protocol, give a multi-task policy T times the updates of a "
        "single-task one; equal updates remove that advantage."
    )
    yield SURVIVORSHIP


def _plot_learning(table: Any) -> Figure:
    """Learning curves by number of tasks, as captioned: the mean over experiments of the last year with
    their interquartile range, and dashed the mean of all years; then, for each fraction of tasks, the
    gain over STL that they reach at least.
    """
    few, many = _task_counts(table)
    figure, (*curves, fractions) = panels(13, 4, 3)
    last = int(table.year.max())
    for axis, count in zip(curves, (few, many), strict=True):
        for method, tasks, colour in (
            ("stl", many, "C0"),
            ("mtl", count, "C1"),
            ("pmtl", count, "C2"),
        ):
            curve = _curve(table, count, method=method, tasks=tasks)
            epochs = np.arange(1, len(curve) + 1)
            own = np.stack([gains[last] for gains in curve], axis=1)
            axis.plot(epochs, own.mean(0), colour, label=METHOD_NAMES[method])
            low, high = np.quantile(own, [0.25, 0.75], axis=0)
            axis.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)
            axis.plot(epochs, [np.mean(gains) for gains in curve], colour + "--", linewidth=1)
        axis.set(title=f"{count} tasks, {last} (dashed: all years)", xlabel="epochs")
        for method in _MULTI:
            gaps = _over_single(table, method, count).xs(last, level="year").to_numpy().ravel()
            share = np.arange(1, len(gaps) + 1) / len(gaps)
            label = f"{METHOD_NAMES[method]} {count}"
            fractions.plot(-np.sort(-gaps), share, label=label, linewidth=1)
    curves[0].set_ylabel("points a year over Equal CRP")
    fractions.set(xlabel="points a year over STL, equal epochs", ylabel="fraction of tasks")
    fractions.set_title(f"tasks that gain at least x over STL, {last}")
    for axis in (curves[0], fractions):
        axis.legend(fontsize=8)
    return figure
