"""Figures 3 and 4: STL, MTL and P-MTL walked forward over years, and transfer to other instruments.

Every policy learns from the days before a test year and is walked through that year, net of costs. A cell
is a method, a number of tasks T, an experiment, a year and a training seed. As in the paper's caption, an
epoch is 300 updates per task: 300 T updates of a multi-task policy, and 300 updates of each of T
single-task policies. The paper gives no number of epochs; our 3 epochs are 4,500 updates of a policy for 5
tasks, 27,000 for 30 tasks and 900 of each single-task policy. The paper's year is 2019; 2013 to 2018 show
whether it is an exception.
Runs with the same experiment, year and training seed share first parameters and draws, so they differ by
method only.

Figures 3 and 4 compare at equal epochs, the paper's protocol. The third figure adds two protocols. At
equal updates every policy is tested after 4,500 updates; single-task policies of the first 2 tasks are
trained that long. With early stopping, an arm uses the number of updates that was best on its own tasks in
the year before, measured with policies that learned from the days before that year. There is one number
per arm, experiment and year, chosen among 150, 300, 600, ... and the ends of epochs. The year before the
first test year is used for validation only.

Multi-task policies have 3 training seeds. Those of 30 tasks, which cost six times as much, have 3 in the
paper's year and the year before it, and 1 in earlier years: a mean over seven years averages the noise of
training over its years. Seeds are averaged before any comparison. A single-task arm is a mean over its
policies and has one seed.

Rows of a cell: tested (each own task by its number, or the mean of the held-out tasks as task -1), epoch,
step (updates of a policy), gain (points a year over Equal CRP: 100 times log growth, net), sharpe and
equal_sharpe (Sharpe ratios of the policy and of Equal CRP).

Figure 3: gain over Equal CRP on tasks of held-out instruments. Claim: multi-task policies beat Equal CRP.
Figure 4: learning curves by epoch, and the gain over STL that each fraction of tasks reaches at least.
Methods are compared on the same tasks. Claims: P-MTL learns faster and better than STL; 30 tasks beat 5;
from 30 % of tasks on, P-MTL gains more over STL than MTL; below 20 % it does not help much, which we read
as less than a point a year.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.certify.statistics import over_rows_and_columns
from apportion.composition import EqualShares
from apportion.domains.portfolio.backtest import lazy_rebalancing
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
from apportion.tasks import single_tasks
from apportion.training import Chunk, Chunks
from apportion.trees import copies, take
from apportion_studies.portfolio.experiments import (
    POINTS,
    SMALL,
    SURVIVORSHIP,
    Experiments,
    by_cell,
    doubling,
    note,
    share_of_years,
    stopped,
    walk_each,
)

_MULTI = ("mtl", "pmtl")
_FROM, _UP_TO = 0.3, 0.2
"""Fractions of tasks: priorities should help above the first, and not below the second."""
_LITTLE = 1.0
"""Points a year below which prioritising does not help much."""
_SINGLE_TOGETHER = 10
"""Largest number of experiments per program of single-task policies, limited by GPU memory."""
_VALUES = ["gain", "sharpe", "equal_sharpe"]
_EPOCHS, _UPDATES, _STOPPED = "equal epochs", "equal updates", "stopped early"
_TESTED = {"own": "own tasks", "held-out": "held-out instruments"}
_Arm = tuple[str, int]
"""A method and its number of tasks."""


@dataclass(frozen=True)
class _GridSize:
    """Size of the grid; the seed of the settings determines its experiments."""

    settings: PortfolioSettings
    experiments: int
    years: tuple[int, ...]
    counts: tuple[int, int]
    """Numbers of tasks T, few and many; each of the many tasks has a single-task policy."""
    held_out: int
    long: int
    """Number of tasks whose single-task policies get as many updates as a policy of few tasks."""
    shown: int
    """Tasks of held-out instruments a policy is tested on."""
    epoch: int
    """Updates for each task in an epoch."""
    epochs: int
    """Number of epochs, each with an evaluation."""
    mark: int
    """Updates before the first evaluation, a divisor of `epoch`; later numbers are its doubles."""
    replicates: tuple[int, int]
    """Number of training seeds of a multi-task policy; the second is for many tasks before the last
    two years."""

    def within(self, prices: Prices) -> "_GridSize":
        """Restrict the grid to the years of the data, and check the number of instruments."""
        s = self.settings
        least = s.window + s.batch
        years = tuple(
            year
            for year in self.years
            if prices.row(f"{year - 1}-01-01") >= least and {year - 1, year} <= {*prices.years()}
        )
        if not years:
            raise InputError(
                f"prices: {prices.dates[0]} to {prices.dates[-1]} leaves none of the test years "
                f"{self.years[0]} to {self.years[-1]} with a year and {least} days before; "
                "give prices that do"
            )
        universe = len(prices.tickers)
        if universe - self.held_out < s.task_size + 1 or self.held_out < s.task_size:
            raise InputError(
                f"prices: {universe} tickers are too few for {self.held_out} held-out ones and tasks "
                f"of {s.task_size}; give at least {self.held_out + s.task_size + 1}"
            )
        return replace(self, years=years)

    @property
    def walked(self) -> tuple[int, ...]:
        """The validation year and the test years after it."""
        return self.years[0] - 1, *self.years

    def updates(self, method: str, count: int) -> int:
        """Return a policy's updates per epoch; `long` single-task ones have those of few tasks."""
        shared = count if method != "stl" else 1 if count == max(self.counts) else min(self.counts)
        return self.epoch * shared

    def marks(self, method: str, count: int) -> set[int]:
        """Return after how many updates a policy is tested: doublings, equal updates and epochs."""
        every = self.updates(method, count)
        end, shared = self.epochs * every, self.epochs * self.epoch * min(self.counts)
        common = doubling(self.mark, end) | {min(shared, end)}
        return common | set(range(every, end + 1, every))

    def seeds(self, method: str, count: int, year: int) -> int:
        """Return the number of training seeds of a cell."""
        early = count == max(self.counts) and year < self.years[-1] - 1
        return self.replicates[early] if method in _MULTI else 1


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
        mark=20,
        replicates=(1, 1),
    ),
    "paper": _GridSize(
        settings=PortfolioSettings.paper(),
        experiments=20,
        years=tuple(range(2013, 2020)),
        counts=(5, 30),
        held_out=18,
        long=2,
        shown=10,
        epoch=300,
        epochs=3,
        mark=150,
        replicates=(3, 1),
    ),
}


def fig3_4(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """Plan the grid behind all figures, with the longest programs first."""
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
    for method, count in [*programs, (LAZY, 0)]:
        # Arms without early stopping need no validation year.
        years = size.walked if count in size.counts else size.years
        for experiment, year in product(range(size.experiments), years):
            values = {"method": method, "tasks": count, "experiment": experiment, "year": year}
            arm = program = f"{method}-{count}"
            if count == many and method == "stl" and experiment >= _SINGLE_TOGETHER:
                program += f"-{experiment // _SINGLE_TOGETHER}"
            for replicate in range(size.seeds(method, count, year)):
                name = f"{arm}-{experiment}-{year}-{replicate}"
                cells.append(Cell(name, values | {"replicate": replicate}, program))
    own = {name: value for name, value in vars(size).items() if name != "settings"}
    about = {"data": prices.summary(), **vars(size.settings), "tasks": own.pop("counts"), **own}
    # The epochs and the cells replace these two settings.
    del about["steps"], about["method"]
    return Plan("fig3-4", tuple(cells), partial(_compute, prices, size), _conclude, about)


def _compute(prices: Prices, size: _GridSize, cells: Sequence[Cell], progress: OnProgress) -> Rows:
    """Train the cells of one program in one `vmap`, and yield the rows of all their evaluations."""
    s, method, count = size.settings, cells[0]["method"], cells[0]["tasks"]
    counts = {"held_out": size.held_out, "own": max(size.counts), "shown": size.shown}
    known = Experiments.of(prices, s, size.walked, size.experiments, **counts)
    each = count if method == "stl" else 1
    runs = known.runs(cells, each)
    own = take(known.own.first(count or max(size.counts)), known.runs(cells).experiment)
    if method == "stl":
        own = single_tasks(own.flat)
    tested = {"own": own, "held-out": take(known.held_out, runs.experiment)}

    def test(policies: Policy) -> dict[str, Any]:
        """Net log growth a year and Sharpe ratio, (runs, tasks) each, by kind of task."""
        where = (known.testing, runs.starts, runs.days)
        return {kind: walk_each(policies, *where, tasks) for kind, tasks in tested.items()}

    equal, frames = test(EqualShares()), []

    def record(values: dict[str, Any], step: int) -> None:
        frames.append(_rows(values, equal, len(cells)).assign(step=step))

    def on_chunk(chunk: Chunk) -> None:
        if chunk.step in marks:
            record(test(chunk.policy), chunk.step)
        what = f"{method}, {count} tasks: {len(cells)} cells, step {chunk.step}"
        progress(what, chunk.step / chunk.steps)

    if method == LAZY:
        record(test(copies(lazy_rebalancing(), len(cells))), 0)
    else:
        marks = size.marks(method, count)
        s = replace(s, method=method, steps=max(marks))
        # First parameters and draws depend on the seed and the index of the pair.
        replicate = np.repeat([cell["replicate"] for cell in cells], each)
        policy_keys, run_keys = (
            jax.random.split(
                jax.random.fold_in(jax.random.key(s.seed), i), (max(size.replicates), known.pairs)
            )[replicate, runs.pair]
            for i in range(2)
        )
        train_portfolio_runs(
            known.training,
            own,
            s,
            policy_keys=policy_keys,
            run_keys=run_keys,
            lengths=runs.lengths,
            chunks=Chunks(size.mark, size.mark, on_chunk),
        )
    an_epoch = size.epoch * (1 if method == "stl" else max(count, 1))
    table = pd.concat(frames)
    yield from by_cell(cells, table.assign(epoch=table.step / an_epoch))


def _rows(values: dict[str, Any], equal: dict[str, Any], cells: int) -> pd.DataFrame:
    """Return gains over Equal CRP for each own task and for the mean of the held-out tasks."""
    frames = []
    for kind in values:
        (growth, sharpe), (base, base_sharpe) = map(np.asarray, (values[kind], equal[kind]))
        found = np.stack(
            [100 * (growth - base), sharpe, np.broadcast_to(base_sharpe, sharpe.shape)]
        )
        # Each single-task policy of a cell has one of its tasks.
        found = found.reshape(len(_VALUES), cells, -1)
        if kind == "held-out":
            found = found.mean(-1, keepdims=True)
        cell, task = (index.ravel() for index in np.indices(found.shape[1:]))
        frame = pd.DataFrame(found.reshape(len(_VALUES), -1).T, columns=_VALUES, dtype=np.float32)
        task = task if kind == "own" else -1
        frames.append(frame.assign(place=cell, tested=kind, task=task))
    return pd.concat(frames)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    rows = rows.assign(sharpe_gain=rows.sharpe - rows.equal_sharpe)
    known = _Arms.of(rows)
    protocols = known.protocols(rows)
    kinds = {kind: select(protocols[_EPOCHS], tested=kind) for kind in _TESTED}
    gains = {
        label: {
            name: over_rows_and_columns(_gap(kinds["held-out"], arm).values[some])
            for name, arm in known.shown.items()
        }
        for label, some in (
            (f"{known.years[-1]}, as in the paper", known.years[-1:]),
            (f"{known.years[0]} to {known.years[-1]}", known.years),
        )
    }
    draw = partial(forest, gains, f"{POINTS} over Equal CRP, net, after {known.epochs} epochs")
    fig3 = FigureResult(
        "fig3",
        "Figure 3: gain over Equal CRP on instruments never trained on",
        _summary(select(rows, tested="held-out"), known),
        _transfer_verdicts(kinds["held-out"], known),
        draw,
        [*_notes(kinds["held-out"], known), SURVIVORSHIP],
    )
    own = select(rows[rows.year.isin(known.years)], tested="own")
    fig4 = FigureResult(
        "fig4",
        "Figure 4: learning curves by epoch, and the fraction of tasks that gain over STL",
        _summary(select(rows, tested="own"), known),
        _learning_verdicts(own, kinds["own"], known),
        partial(_plot_learning, own, kinds["own"], known),
        [*_notes(kinds["own"], known), SURVIVORSHIP],
    )
    return [fig3, fig4, _conclude_protocols(protocols, known)]


@dataclass(frozen=True)
class _Gap:
    """Difference of two arms on their common tasks, or the gain of one arm over Equal CRP."""

    values: Any
    """Experiments by years, means over training seeds and tasks."""
    arms: dict[str, Any]
    """The values of each arm."""


def _gap(rows: Any, first: _Arm, second: _Arm | None = None, column: str = "gain") -> _Gap:
    """Return the first arm minus the second, or minus Equal CRP."""
    found = [select(rows, method=arm[0], tasks=arm[1]) for arm in (first, second) if arm]
    tasks = set.intersection(*(set(one.task) for one in found))
    values = []
    for one in found:
        one = one[one.task.isin(tasks)]
        seeds = one.groupby(["experiment", "year", "replicate"])[column].mean()
        values.append(seeds.groupby(["experiment", "year"]).mean().unstack("year"))
    if second is None:
        return _Gap(values[0], {})
    arms = dict(zip((_name(first), _name(second)), values, strict=True))
    return _Gap(values[0] - values[1], arms)


def _name(arm: _Arm) -> str:
    method, count = arm
    return "STL" if method == "stl" else f"{METHOD_NAMES[method]} with {count} tasks"


@dataclass(frozen=True)
class _Arms:
    """The arms in a table, and their numbers of updates."""

    few: int
    many: int
    long: int
    """Number of single-task policies with as many updates as a policy of few tasks."""
    years: list[int]
    """Test years."""
    ends: dict[_Arm, int]
    """Final number of updates of a policy."""
    epochs: int

    @classmethod
    def of(cls, rows: Any) -> "_Arms":
        few, many = sorted(int(count) for count in select(rows, method="mtl").tasks.unique())
        ends = rows.groupby(["method", "tasks"]).step.max().to_dict()
        [long] = [count for method, count in ends if method == "stl" and count != many]
        epochs = int(select(rows, method="stl", tasks=many).epoch.max())
        return cls(few, many, long, sorted(rows.year.unique())[1:], ends, epochs)

    @property
    def single(self) -> _Arm:
        return "stl", self.many

    @property
    def multi(self) -> list[_Arm]:
        return [(method, count) for count in (self.few, self.many) for method in _MULTI]

    @property
    def shown(self) -> dict[str, _Arm]:
        """Arms by name, and lazy Equal CRP, which does not learn."""
        arms = {_name(arm): arm for arm in (self.single, *self.multi)}
        return arms | {"lazy Equal CRP": (LAZY, 0)}

    @property
    def equal(self) -> int:
        """Updates of every policy under the protocol of equal updates."""
        return self.ends["mtl", self.few]

    def protocols(self, rows: Any) -> dict[str, Any]:
        """Return the rows of test years by protocol; arms have the same names in every protocol."""
        tested = rows[rows.year.isin(self.years)]
        short = rows[(rows.method != "stl") | (rows.tasks == self.many)]
        last = short.groupby(["method", "tasks"]).step.transform("max")
        return {
            _EPOCHS: short[(short.step == last) & short.year.isin(self.years)],
            _UPDATES: tested[tested.step == self.equal].assign(
                tasks=lambda own: own.tasks.where(own.method != "stl", self.many)
            ),
            _STOPPED: stopped(short[short.step > 0], ["method", "tasks"]),
        }

    def at_equal_epochs(self, first: _Arm, second: _Arm) -> str:
        """Describe the paper's protocol and the updates of both arms, for a claim."""
        return f"at equal epochs ({self.ends[first]:,} updates against {self.ends[second]:,})"


def _summary(table: Any, known: _Arms) -> pd.DataFrame:
    """A row for each method, number of tasks and number of updates: means, and the gain's interval."""
    found, by = [], ["method", "tasks", "tested", "epoch", "step"]
    for key, own in table[table.year.isin(known.years)].groupby(by):
        gap = _gap(own, (key[0], key[1]))
        e = over_rows_and_columns(gap.values)
        found.append(
            dict(zip(by, key, strict=True))
            | {"gain": e.value, "low": e.low, "high": e.high}
            | {name: float(own[name].mean()) for name in ("sharpe", "sharpe_gain")}
        )
    return pd.DataFrame(found)


def _by_years(claim: str, gap: _Gap, *, paper: bool, **bounds: float) -> Iterator[Verdict]:
    """Test if a gap is positive or within bounds, in the last year (the paper's) and over all."""
    first, last = gap.values.columns[0], gap.values.columns[-1]
    for words, years, whose in (
        (f"in {last}", [last], paper),
        (f"over {first} to {last}", gap.values.columns, False),
    ):
        found = over_rows_and_columns(gap.values[years])
        levels = {name: float(np.mean(one[years])) for name, one in gap.arms.items()}
        full = f"{claim}, {words} ({POINTS})"
        yield Verdict.of(full, found, paper=whose, levels=levels, **bounds)


def _sharpe_verdicts(rows: Any, known: _Arms) -> Iterator[Verdict]:
    """Test if trained policies have a higher Sharpe ratio than Equal CRP over all years."""
    [kind] = rows.tested.unique()
    for arm in known.multi:
        found = over_rows_and_columns(_gap(rows, arm, column="sharpe_gain").values)
        columns = {_name(arm): "sharpe", "Equal CRP": "equal_sharpe"}
        means = {name: _gap(rows, arm, column=one).values for name, one in columns.items()}
        levels = {name: float(np.mean(values)) for name, values in means.items()}
        claim = f"{_name(arm)} has a higher Sharpe ratio than Equal CRP on {_TESTED[kind]}"
        claim += f" after {known.ends[arm]:,} updates, over {known.years[0]} to {known.years[-1]}"
        yield Verdict.of(claim, found, paper=False, levels=levels)


def _notes(rows: Any, known: _Arms) -> Iterator[str]:
    """Gain of each arm over Equal CRP."""
    for name, arm in known.shown.items():
        after = f", {known.ends[arm]:,} updates" if known.ends[arm] else ", which learns nothing"
        yield note(f"{name}{after}", _gap(rows, arm).values)


def _transfer_verdicts(rows: Any, known: _Arms) -> Iterator[Verdict]:
    for arm in known.multi:
        claim = f"{_name(arm)} beats Equal CRP after {known.ends[arm]:,} updates"
        yield from _by_years(claim, _gap(rows, arm), paper=True)
    few, many = ("mtl", known.few), ("mtl", known.many)
    for other, claim in (
        (few, f"{known.many} tasks transfer better than {known.few} (MTL)"),
        (known.single, f"{_name(many)} transfers better than STL"),
    ):
        claim = f"{claim} {known.at_equal_epochs(many, other)}"
        yield from _by_years(claim, _gap(rows, many, other), paper=False)
    yield from _sharpe_verdicts(rows, known)


def _learning_verdicts(own: Any, rows: Any, known: _Arms) -> Iterator[Verdict]:
    """Claims about own tasks: over all epochs (`own`), and after training (`rows`)."""
    along = _along(own)
    for arm in known.multi:
        paper, name = arm[0] == "pmtl", _name(arm)
        claim = f"{name} beats STL {known.at_equal_epochs(arm, known.single)}"
        yield from _by_years(claim, _gap(rows, arm, known.single), paper=paper)
        if paper:
            claim = f"{name} learns faster than STL at equal epochs (mean of all {known.epochs})"
            yield from _by_years(claim, _gap(along, arm, known.single), paper=True)
            yield from _by_years(f"{name} beats Equal CRP", _gap(rows, arm), paper=True)
    few, many = ("pmtl", known.few), ("pmtl", known.many)
    claim = f"{known.many} tasks beat {known.few} (P-MTL) {known.at_equal_epochs(many, few)}"
    yield from _by_years(claim, _gap(rows, many, few), paper=True)
    for count in (known.few, known.many):
        pair = ("pmtl", count), ("mtl", count)
        yield from _by_years(f"P-MTL beats MTL with {count} tasks", _gap(rows, *pair), paper=True)
        claim = f"P-MTL with {count} tasks learns faster than MTL (mean of all epochs)"
        yield from _by_years(claim, _gap(along, *pair), paper=True)
    ends = {method: _over_single(rows, (method, known.many), known) for method in _MULTI}
    gap = ends["pmtl"] - ends["mtl"]
    for claim, some, bounds in (
        (f"from {_FROM:.0%} of {known.many} tasks on P-MTL gains more over STL than MTL",
         gap.columns >= _FROM, {}),
        (f"up to {_UP_TO:.0%} of {known.many} tasks prioritising helps by less than {_LITTLE:g}",
         gap.columns <= _UP_TO, {"below": _LITTLE}),
    ):  # fmt: skip
        claim = f"{claim} (mean over these fractions, equal epochs)"
        values = gap.loc[:, some].mean(axis=1).unstack("year")
        yield from _by_years(claim, _Gap(values, {}), paper=True, **bounds)
    yield from _sharpe_verdicts(rows, known)


def _along(own: Any) -> Any:
    """Mean over all epochs, which is higher if a curve rises earlier."""
    by = ["method", "tasks", "experiment", "year", "replicate", "task"]
    return own[own.epoch % 1 == 0].groupby(by, as_index=False).gain.mean()


def _over_single(rows: Any, arm: _Arm, known: _Arms) -> Any:
    """Gain of tasks over their single-task policies after training, at equal epochs.

    A row for each experiment and year; a column for each fraction of the tasks, with the gain that this
    fraction reaches at least.
    """
    both = [
        select(rows, method=one[0], tasks=one[1])
        .groupby(["experiment", "year", "task"])
        .gain.mean()
        for one in (arm, known.single)
    ]
    gaps = (both[0] - both[1]).dropna().unstack("task")
    # Round, so that the comparison with 0.3 is exact.
    fractions = np.round(np.arange(1, arm[1] + 1) / arm[1], 9)
    return pd.DataFrame(-np.sort(-gaps.to_numpy(), axis=1), gaps.index, fractions)


def _conclude_protocols(protocols: dict[str, Any], known: _Arms) -> FigureResult:
    """Compare the arms with Equal CRP and with one another, under three protocols."""
    few, many = ("pmtl", known.few), ("pmtl", known.many)
    pairs: list[tuple[_Arm, _Arm | None]] = [(arm, None) for arm in (known.single, *known.multi)]
    pairs += [(arm, known.single) for arm in known.multi]
    pairs += [(many, few), (("mtl", known.many), ("mtl", known.few))]
    pairs += [(("pmtl", count), ("mtl", count)) for count in (known.few, known.many)]
    words = {_UPDATES: f"at equal updates ({known.equal:,} each)", _STOPPED: _STOPPED}
    asked = {_UPDATES: [known.single], _STOPPED: [known.single, None]}
    found, verdicts, shown = [], [], {}
    for (protocol, rows), kind in product(protocols.items(), _TESTED):
        own = select(rows, tested=kind)
        for first, second in pairs:
            gap, sharpe = (_gap(own, first, second, column) for column in ("gain", "sharpe_gain"))
            e, against = over_rows_and_columns(gap.values), _name(second) if second else "Equal CRP"
            step = select(own, method=first[0], tasks=first[1]).step.median()
            row = {"protocol": protocol, "tested": kind, "arm": _name(first), "against": against}
            row |= {"median updates": int(step), "value": e.value, "low": e.low, "high": e.high}
            level = _gap(own, first, column="sharpe").values
            row |= {"sharpe": np.mean(level), "sharpe gain": np.mean(sharpe.values)}
            row |= {"years positive": int((gap.values.mean() > 0).sum())}
            found.append(row | {"share of years": share_of_years(gap.values)})
            if protocol in words and second in asked[protocol]:
                claim = f"{_name(first)} beats {against} on {_TESTED[kind]} {words[protocol]}"
                *_, verdict = _by_years(claim, gap, paper=False)
                verdicts.append(verdict)
            if second is None:
                shown.setdefault(protocol, {})[f"{_name(first)}, {kind}"] = e
    of_years = pd.DataFrame(found).query("tested == 'own' and against == 'STL'")
    of_years = of_years[of_years.arm == _name(many)].set_index("protocol")["share of years"]
    shares = ", ".join(f"{share:.0%} {protocol}" for protocol, share in of_years.items())
    shares = f"{_name(many)} less STL, own tasks, {shares}"
    notes = (
        "Equal epochs, the paper's protocol, give a multi-task policy T times the updates of a "
        "single-task one; equal updates remove that advantage, and train the single-task one beyond its "
        "best. Stopped early, each arm has the updates that were best in the year before.",
        "The share of years is the part of the variance of a mean over experiments and years that is due "
        f"to the years alone, which no training seed or experiment reduces: {shares}.",
        SURVIVORSHIP,
    )
    title = "Three protocols side by side: equal epochs, equal updates, stopped early"
    draw = partial(forest, shown, f"{POINTS} over Equal CRP, net")
    return FigureResult("protocols", title, pd.DataFrame(found), verdicts, draw, notes)


def _plot_learning(own: Any, rows: Any, known: _Arms) -> Figure:
    """Plot learning curves by number of tasks, and the fraction of tasks above each gain over STL.
    As in the paper's caption, a curve is the mean over the last year's experiments, with the
    interquartile range. Dashed curves are means over all years.
    """
    figure, (*curves, fractions) = panels(13, 4, 3)
    last = known.years[-1]
    for axis, count in zip(curves, (known.few, known.many), strict=True):
        arms = (known.single, ("mtl", count), ("pmtl", count))
        for arm, colour in zip(arms, ("C0", "C1", "C2"), strict=True):
            here = select(
                own[(own.task < count) & (own.epoch % 1 == 0)], method=arm[0], tasks=arm[1]
            )
            means = here.groupby(["epoch", "experiment", "year"]).gain.mean()
            curve = means.xs(last, level="year").unstack("experiment")
            axis.plot(curve.index, curve.mean(axis=1), colour, label=METHOD_NAMES[arm[0]])
            low, high = curve.quantile(0.25, axis=1), curve.quantile(0.75, axis=1)
            axis.fill_between(curve.index, low, high, color=colour, alpha=0.2, linewidth=0)
            axis.plot(curve.index, means.groupby("epoch").mean(), colour + "--", linewidth=1)
        axis.set(title=f"{count} tasks, {last} (dashed: all years)", xlabel="epochs")
        for method in _MULTI:
            gaps = (
                _over_single(rows, (method, count), known).xs(last, level="year").to_numpy().ravel()
            )
            share = np.arange(1, len(gaps) + 1) / len(gaps)
            label = f"{METHOD_NAMES[method]} {count}"
            fractions.plot(-np.sort(-gaps), share, label=label, linewidth=1)
    curves[0].set_ylabel(f"{POINTS} over Equal CRP")
    fractions.set(xlabel=f"{POINTS} over STL, equal epochs", ylabel="fraction of tasks")
    fractions.set_title(f"tasks that gain at least x over STL, {last}")
    for axis in (curves[0], fractions):
        axis.legend(fontsize=8)
    return figure
