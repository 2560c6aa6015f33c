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
from jaxtyping import Array, Float, Int, PyTree
from matplotlib.axes import Axes
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
from apportion.studies.figures import panels
from apportion.studies.portfolio.experiments import SMALL, SURVIVORSHIP, Experiments, by_cell, note
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion.tasks import Task, single_tasks
from apportion.training import Chunk, Chunks
from apportion.trees import copies, stack, take

TILT = "volatility-tilt"
_GAINS = ["gain", "log_gain", "sharpe_gain"]
_COLOURS = {"stl": "0.5", "mtl": "C0", "pmtl": "C1"}

Tested = dict[str, tuple[Float[Array, "runs tasks"], Float[Array, "runs tasks"]]]
"""Net log growth a year and Sharpe ratio of each run on each of its tasks, by kind of task."""


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

    def test(policies: Policy, follow: Callable[..., Walk] = walk_policy) -> Tested:
        where = (known.testing, runs.starts, runs.days)
        return {kind: _record(policies, *where, tasks, follow) for kind, tasks in tested.items()}

    found: list[tuple[Tested, int, int]] = []

    def on_chunk(chunk: Chunk) -> None:
        if chunk.step in steps:
            named = size.shown if chunk.step == chunk.steps else size.single_tasks
            found.append((test(chunk.policy), chunk.step, named))
            what = f"{method}, {count} tasks: {len(cells)} cells, step {chunk.step}"
            progress(what, chunk.step / chunk.steps)

    if method == LAZY:
        found.append((test(copies(lazy_rebalancing(), len(cells))), s.steps, size.shown))
    elif method == TILT:
        found.append((test(EqualShares(), _follow_tilt), s.steps, size.shown))
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
    equal = test(EqualShares())
    frames = [_rows(values, equal, len(cells), *where) for values, *where in found]
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
    arrays, rest = eqx.partition(policies, eqx.is_array)

    def one(run: PyTree):
        arrays, start, days, tasks = run
        here = eqx.tree_at(lambda m: m.first, market, start)
        policy = eqx.combine(arrays, rest)
        log = jax.vmap(lambda task: follow(policy, here, task).log_return)(tasks)
        return markets.growth_and_sharpe(log, days)

    # A few runs at a time: their windows of prices would not fit together.
    return jax.lax.map(one, (arrays, starts, days, tasks), batch_size=32)


def _follow_tilt(_: Policy, market: Market, task: Task) -> Walk:
    """The volatility tilt of every backtest, which sees all days before each period."""
    closes = market.prices[:, task.members, 0]
    targets = volatility_tilt(closes[1:] / closes[:-1])
    days = market.first - 1 + jnp.arange(market.horizon)
    return markets.walk_targets(targets[days], market, task)


def _rows(values: Tested, equal: Tested, cells: int, step: int, named: int) -> pd.DataFrame:
    """A checkpoint's gains over Equal CRP: the mean over tasks, and the first `named` own tasks each."""
    frames = []
    for kind in values:
        (growth, sharpe), (base, base_sharpe) = (
            [np.asarray(one) for one in of[kind]] for of in (values, equal)
        )
        gains = (100 * (np.exp(growth) - np.exp(base)), growth - base, sharpe - base_sharpe)
        # Single-task policies of a cell stand side by side as tasks.
        by_task = {
            name: v if len(v) == cells else v.mean(-1).reshape(cells, -1)
            for name, v in zip(_GAINS, gains, strict=True)
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


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    own = rows[(rows.tested == "held-out") & (rows.task == -1)]
    title = "Figure 3: gain over Equal CRP on instruments never trained on"
    verdicts, draw = _transfer_verdicts(own), partial(_plot_transfer, own)
    fig3 = FigureResult("fig3", title, _summary(own), verdicts, draw, _transfer_notes(own))
    title = "Figure 4: learning curves and the fraction of tasks that gain over STL"
    verdicts, draw = _learning_verdicts(rows), partial(_plot_learning, rows)
    fig4 = FigureResult("fig4", title, _summary(rows), verdicts, draw, _learning_notes(rows))
    return [fig3, fig4]


def by_experiment_and_year(
    table: pd.DataFrame,
    method: str,
    tasks: int | None,
    tested: str,
    *,
    step: int | None = None,
    column: str = "gain",
) -> pd.DataFrame:
    """One method's values as experiments by years, at a step (default: its last)."""
    rows: Any = table[(table.method == method) & (table.tested == tested) & (table.task == -1)]
    if tasks is not None:
        rows = rows[rows.tasks == tasks]
    step = rows.step.max() if step is None else step
    return rows[rows.step == step].pivot(index="experiment", columns="year", values=column)


def _summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each method, number of tasks, kind of task and step: mean gains, the gain's interval."""
    rows: Any = table[table.task == -1]
    found = []
    for key, own in rows.groupby(["method", "tasks", "tested", "step"]):
        method, tasks, tested, step = key
        gains = by_experiment_and_year(own, method, tasks, tested, step=step)
        e = over_rows_and_columns(gains.to_numpy())
        found.append(
            {"method": method, "tasks": tasks, "tested": tested, "step": step}
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


def _above_zero(claim: str, gap: pd.DataFrame, *, paper: bool) -> Verdict:
    """Whether a gap, experiments by years, is positive: it is where its whole interval is."""
    positive = int((gap.mean(axis=0) > 0).sum())
    full = f"{claim} ({positive} of {gap.shape[1]} years positive)"
    return Verdict.of(full, over_rows_and_columns(gap.to_numpy()), paper=paper)


def _transferred(
    table: pd.DataFrame, method: str, tasks: int | None = None, column: str = "gain"
) -> Any:
    return by_experiment_and_year(table, method, tasks, "held-out", column=column)


def _transfer_verdicts(table: pd.DataFrame) -> Iterator[Verdict]:
    (counts, many), last = task_counts(table), int(table.year.max())
    for method, count in product(("mtl", "pmtl"), counts):
        gains = _transferred(table, method, count)
        beats = f"{METHOD_NAMES[method]} with {count} tasks beats Equal CRP"
        yield _above_zero(f"{beats} in {last}", gains[[last]], paper=True)
        yield _above_zero(f"{beats} over all years", gains, paper=False)
    for few, more in pairwise(counts):
        gap = _transferred(table, "mtl", more) - _transferred(table, "mtl", few)
        yield _above_zero(f"{more} tasks transfer better than {few} (MTL)", gap, paper=False)
    gap = _transferred(table, "mtl", many) - _transferred(table, "stl")
    claim = f"MTL with {many} tasks transfers better than STL at equal updates"
    yield _above_zero(claim, gap, paper=False)


def _transfer_notes(table: pd.DataFrame) -> tuple[str, ...]:
    _, many = task_counts(table)
    mtl, sharpe = (_transferred(table, "mtl", many, name) for name in ("gain", "sharpe_gain"))
    return (
        note("Lazy Equal CRP, which learns nothing", _transferred(table, LAZY)),
        note("A tilt to volatile instruments, which learns nothing", _transferred(table, TILT)),
        note(f"MTL with {many} tasks", mtl),
        note("its Sharpe ratio over Equal CRP's", sharpe, "a year"),
        note(f"P-MTL less MTL with {many} tasks", _transferred(table, "pmtl", many) - mtl),
        SURVIVORSHIP,
    )


def _plot_transfer(table: Any) -> Figure:
    """Bars like the paper's (mean and standard deviation over experiments), and years beside them."""
    bars = [("stl", None, "STL", _COLOURS["stl"])]
    bars += [
        (method, count, f"{METHOD_NAMES[method]} {count}", _COLOURS[method])
        for count in task_counts(table)[0]
        for method in ("mtl", "pmtl")
    ]
    bars.append((LAZY, None, "lazy CRP", "C2"))
    figure, (left, right) = panels(11, 4.2, frame=True)
    last = int(table.year.max())
    for place, (method, tasks, _, colour) in enumerate(bars):
        gains = _transferred(table, method, tasks)
        left.bar(place, gains[last].mean(), yerr=gains[last].std(), color=colour, capsize=3)
        e = over_rows_and_columns(gains.to_numpy())
        ends = np.array([[e.value - e.low], [e.high - e.value]])
        right.bar(place, e.value, yerr=ends, color=colour, capsize=3)
        right.scatter(np.full(gains.shape[1], place), gains.mean(axis=0), s=9, color="k", zorder=3)
    for axes, title in ((left, f"{last}, as in the paper"), (right, "mean over all test years")):
        axes.axhline(0, color="k", linewidth=0.8)
        axes.set_xticks(range(len(bars)), [name for _, _, name, _ in bars], rotation=40, ha="right")
        axes.set_title(title)
    left.set_ylabel("points a year over Equal CRP, net")
    left.set_xlabel("bars: standard deviation over experiments")
    right.set_xlabel("bars: 95 % interval over experiments and years; dots: years")
    return figure


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

    def own(method: str, tasks: int | None = None, step: int | None = None) -> pd.DataFrame:
        return by_experiment_and_year(same, method, tasks, "own", step=step)

    def along(method: str, tasks: int) -> pd.DataFrame:
        """The mean over the checkpoints of multi-task policies: the higher, the sooner it has risen."""
        shown = sorted(same[same.method == "mtl"].step.unique())
        every = [own(method, tasks, int(step)) for step in shown]
        return sum(every[1:], start=every[0]) / len(every)

    for method in ("mtl", "pmtl"):
        claim = f"{METHOD_NAMES[method]} with {many} tasks beats STL at equal updates per policy"
        yield _above_zero(claim, own(method, many) - own("stl"), paper=False)
    for t in counts:
        if steps // t in set(table[table.method == "stl"].step):
            gap = own("pmtl", t) - own("stl", step=steps // t)
            protocol = f"the paper's protocol ({steps} updates against {steps // t})"
            yield _above_zero(f"P-MTL with {t} tasks beats STL under {protocol}", gap, paper=True)
    for few, more in pairwise(counts):
        both = _first_tasks(table, few)
        last = [by_experiment_and_year(both, "pmtl", count, "own") for count in (more, few)]
        claim = f"{more} tasks beat {few} on own tasks (P-MTL)"
        yield _above_zero(claim, last[0] - last[1], paper=True)
        gap = _transferred(table, "mtl", more) - _transferred(table, "mtl", few)
        claim = f"{more} tasks beat {few} on held-out instruments (MTL)"
        yield _above_zero(claim, gap, paper=False)
    for count in counts:
        mtl, pmtl = (by_experiment_and_year(table, m, count, "own") for m in ("mtl", "pmtl"))
        yield _above_zero(f"P-MTL beats MTL with {count} tasks", pmtl - mtl, paper=True)
        yield _above_zero(f"P-MTL with {count} tasks beats Equal CRP", pmtl, paper=True)
    for other, tasks in (("mtl", many), ("stl", 1)):
        claim = (
            f"P-MTL with {many} tasks learns faster than {METHOD_NAMES[other]} (mean of all "
            "checkpoints, equal updates)"
        )
        yield _above_zero(claim, along("pmtl", many) - along(other, tasks), paper=True)


def _learning_notes(table: pd.DataFrame) -> tuple[str, ...]:
    def own(method: str, tasks: int | None = None) -> pd.DataFrame:
        return by_experiment_and_year(table, method, tasks, "own")

    return (
        note("Lazy Equal CRP, which learns nothing", own(LAZY)),
        note("A tilt to volatile instruments, which learns nothing", own(TILT)),
        *(note(f"MTL with {t} tasks, own tasks", own("mtl", t)) for t in task_counts(table)[0]),
        note("STL, own tasks, at equal updates", own("stl")),
        "The paper's protocol gives a multi-task policy T times the updates of a single-task one; "
        "the comparison at equal updates removes that advantage.",
        SURVIVORSHIP,
    )


def _plot_learning(table: Any) -> Figure:
    """Top: the paper's protocol; bottom: equal updates; right: the fraction-of-tasks curves."""
    (counts, many), same = task_counts(table), _tasks_of_single_policies(table)
    figure = Figure(figsize=(4 * (len(counts) + 1), 7), layout="constrained")
    grid = figure.subplots(2, len(counts) + 1, sharey=False)
    for column, count in enumerate(counts):
        for row, protocol in enumerate(("the paper's protocol", "equal updates")):
            axes = grid[row, column]
            for method, colour in _COLOURS.items():
                # Mean and quartiles over experiments and years, each step at so many times its number.
                stretch = count if row == 0 and method == "stl" else 1
                tasks = 1 if method == "stl" else count
                rows: Any = same[(same.method == method) & (same.tasks == tasks)]
                gains = rows[rows.step * stretch <= same.step.max()].groupby("step").gain
                mean, x = gains.mean(), stretch * np.asarray(list(gains.groups), float)
                axes.plot(x, mean, color=colour, label=METHOD_NAMES[method])
                quartiles = (gains.quantile(0.25), gains.quantile(0.75))
                axes.fill_between(x, *quartiles, color=colour, alpha=0.2)
            axes.axhline(0, color="k", linewidth=0.8)
            axes.set_title(f"{count} tasks, {protocol}", fontsize=10)
            axes.set_xlabel("updates of the multi-task policy" if row == 0 else "updates")
            axes.locator_params(axis="x", nbins=4)
        grid[0, column].sharey(grid[1, column])
    for row in range(2):
        grid[row, 0].set_ylabel("points a year over Equal CRP")
    grid[0, 0].legend(fontsize=8)
    _plot_fractions(grid[0, -1], table, counts)
    # Every test year by itself: one good year is not a pattern.
    years = grid[1, -1]
    for method, tasks in (("stl", None), ("mtl", many), ("pmtl", many)):
        gains = by_experiment_and_year(same, method, tasks, "own").mean(axis=0)
        years.plot(gains.index, gains, "o-", color=_COLOURS[method], markersize=4)
    years.axhline(0, color="k", linewidth=0.8)
    years.set_title(f"by test year ({many} tasks, equal updates)", fontsize=10)
    years.set_xticks([int(year) for year in sorted(same.year.unique())])
    years.tick_params(axis="x", rotation=45)
    return figure


def _plot_fractions(axes: Axes, table: Any, counts: list[int]) -> None:
    """For each fraction of tasks, the gain over STL that they reach at least (equal updates)."""
    pair = ["experiment", "year", "task"]
    last = table[(table.step == table.step.max()) & (table.task >= 0)]
    single = last[last.method == "stl"].set_index(pair)["gain"]
    for count, line in zip(counts, ("--", "-", ":"), strict=False):
        for method in ("mtl", "pmtl"):
            rows = last[(last.method == method) & (last.tasks == count)]
            gap = (rows.set_index(pair)["gain"] - single).dropna().sort_values(ascending=False)
            fraction = np.arange(1, len(gap) + 1) / max(len(gap), 1)
            label = f"{METHOD_NAMES[method]} {count}"
            axes.plot(gap, fraction, line, color=_COLOURS[method], label=label, linewidth=1)
    axes.axvline(0, color="k", linewidth=0.8)
    axes.set_title("tasks that gain at least x over STL", fontsize=10)
    axes.set(xlabel="points a year over STL, equal updates", ylabel="fraction of tasks")
    axes.legend(fontsize=7)
