"""Why many tasks should help, on real prices: the generalisation gap, and the spread over seeds.

Generalisation: the paper shares one network over instruments and tasks because data is scarce. STL, MTL
and a plain network with as many parameters, which reads all instruments of its one task at once, learn
from the days before a test year. We measure the gain over Equal CRP on one task, the same for all three,
in the training days and in the test year; the gap is the difference. A cell is a method, an experiment
with its own instruments, and a year.

Stability: the paper says that prioritised drawing stabilises learning. MTL and P-MTL learn the same tasks
from several seeds, with different instruments each year. We compare the interquartile ranges over seeds
of their gains in the test year. A cell is a method, a seed and a year.

Policies are tested at equal updates and with early stopping: the number of updates that was best on their
own tasks in the year before, for policies of the same method that learned from the days before that year.
The first figure chooses one number for all experiments, because STL and the plain network have one task in
each, and the best number on a single task is mostly noise. The second chooses one for each experiment.
Validation cells are used for this choice only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, PRNGKeyArray

from apportion.certify.statistics import Estimate, mean_over, over_rows_and_columns
from apportion.composition import EqualShares
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import untrained_policies
from apportion.domains.settings import METHOD_NAMES
from apportion.learners.direct import Direct
from apportion.memory import Replay
from apportion.policy import Policy
from apportion.recurrence import History, Recurrence
from apportion.simplex import Allocation, Bounds, Head, Mask
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.tasks import Task
from apportion.training import Chunk, Chunks, OnChunk, train
from apportion.trees import stack, take
from apportion_studies.portfolio.experiments import (
    POINTS,
    SMALL,
    SURVIVORSHIP,
    Experiments,
    by_cell,
    doubling,
    note,
    stopped,
    walk_each,
)

_METHODS = ("stl", "mtl", "plain")
_NAMES = METHOD_NAMES | {"plain": "a plain network"}


@dataclass(frozen=True)
class _Size:
    """Size of the study."""

    settings: PortfolioSettings
    """Tasks and updates of every policy; its seed determines experiments and training seeds."""
    experiments: int
    seeds: int
    years: tuple[int, ...]
    held_out: int
    plain: int
    """Hidden units of the plain network, for about as many parameters as the shared one."""
    mark: int
    """Updates before the first test; the number doubles for each later test."""
    validated: int = 3
    """Number of seeds of the second figure that early stopping is validated on."""

    @property
    def walked(self) -> tuple[int, ...]:
        """The validation year and the test years after it."""
        return self.years[0] - 1, *self.years


_SCALES = {
    "quick": _Size(
        PortfolioSettings.paper(tasks=12, steps=600, **SMALL),
        experiments=3, seeds=3, years=(2017, 2018, 2019), held_out=7, plain=12, mark=75,
    ),
    "paper": _Size(
        PortfolioSettings.paper(tasks=30),
        experiments=10, seeds=10, years=tuple(range(2013, 2020)), held_out=18, plain=14, mark=100,
    ),
}  # fmt: skip


class Plain(Policy):
    """A recurrent network that reads all entities of a task at once and scores each position.

    It is not equivariant: its output depends on the order of the entities. All tasks have one size.

    >>> def count(policy):
    ...     return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(policy, eqx.is_array)))
    >>> shared = untrained_policies(3, PortfolioSettings.paper(), jax.random.key(0)[None])
    >>> count(Plain(10, 3, 14, key=jax.random.key(0))), count(shared)
    (780, 751)
    """

    recurrence: Recurrence
    of_features: Float[Array, "hidden entities"]
    of_held: Float[Array, " entities"]
    head: Head

    def __init__(self, entities: int, channels: int, hidden: int, *, key: PRNGKeyArray):
        recurrence_key, score_key = jax.random.split(key)
        self.recurrence = Recurrence(entities * channels, hidden, key=recurrence_key)
        # As small as in the shared network, so that both start with equal shares.
        self.of_features = 0.01 * jax.random.normal(score_key, (hidden, entities))
        self.of_held = jnp.zeros(entities)
        self.head = Head()

    def encode(self, history: History, mask: Mask) -> Float[Array, " hidden"]:
        window = history.shape[1]
        return self.recurrence(jnp.swapaxes(history, 0, 1).reshape(1, window, -1))[0]

    def allocate(
        self, features: Any, held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        return self.head(features @ self.of_features + self.of_held * held, mask, bounds)


def mechanisms(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """Plan a program for each method of the first figure, and one program for the second figure."""
    prices = embedded_prices() if prices is None else prices
    size = _SCALES[scale]
    size = replace(size, settings=replace(size.settings, seed=seed))
    cells = []
    for method, own, year in product(_METHODS, range(size.experiments), size.walked):
        values = {"figure": "generalisation", "method": method, "year": year, "seed": own}
        values |= {"experiment": own, "validation": year not in size.years}
        name = f"generalisation-{method}-{own}-{year}"
        cells.append(Cell(name, values, f"generalisation-{method}"))
    for method, own, (place, year), before in product(
        ("mtl", "pmtl"), range(size.seeds), enumerate(size.years), (True, False)
    ):
        if before and own >= size.validated:
            continue
        # Each year has the instruments of a different experiment.
        values = {"figure": "stability", "method": method, "year": year - before, "seed": own}
        values |= {"experiment": place % size.experiments, "validation": before}
        name = f"stability-{method}-{own}-{year}" + "-before" * before
        cells.append(Cell(name, values, "stability"))
    own = {name: value for name, value in vars(size).items() if name != "settings"}
    about = {"data": prices.summary(), **vars(size.settings), **own}
    return Plan("mechanisms", tuple(cells), partial(_compute, prices, size), _conclude, about)


def _compute(prices: Prices, size: _Size, cells: Sequence[Cell], progress: OnProgress) -> Rows:
    """Gain of each cell's policy over Equal CRP, in points a year, after each number of updates.

    `tested` is "own" (all training tasks) or "held-out". The first figure has "own", "first" (the
    task that all methods share, in the test year) and "in-sample" (that task in the training days).
    """
    s = size.settings
    several = cells[0]["figure"] == "stability"
    counts = {"held_out": size.held_out, "own": s.tasks, "shown": 4}
    known = Experiments.of(prices, s, size.walked, size.experiments, **counts)
    runs, single = known.runs(cells), cells[0]["method"] in ("stl", "plain")
    own = take(known.own, runs.experiment)
    year = (known.testing, runs.starts, runs.days)
    before = (
        replace(known.testing, horizon=known.training.horizon),
        jnp.full_like(runs.starts, known.training.first),
        runs.lengths,
    )
    tests = {"own": (*year, own.first(1) if single else own)}
    if several:
        tests["held-out"] = (*year, take(known.held_out, runs.experiment))
    else:
        tests |= {"first": (*year, own.first(1)), "in-sample": (*before, own.first(1))}
    equal = {name: _growth(EqualShares(), *where) for name, where in tests.items()}
    frames, marks = [], doubling(size.mark, s.steps)

    def on_chunk(chunk: Chunk) -> None:
        if chunk.step in marks:
            for name, where in tests.items():
                gain = 100 * (_growth(chunk.policy, *where) - equal[name])
                frame = pd.DataFrame({"place": range(len(cells)), "tested": name, "gain": gain})
                frames.append(frame.assign(step=chunk.step))
        progress(f"{cells[0].program}: step {chunk.step}", chunk.step / chunk.steps)

    _train(known, own.first(1) if single else own, size, cells, on_chunk)
    yield from by_cell(cells, pd.concat(frames))


def _train(
    known: Experiments, tasks: Task, size: _Size, cells: Sequence[Cell], on_chunk: OnChunk
) -> None:
    """Train the cells' policies, each from the days before its year."""
    s, runs, channels = size.settings, known.runs(cells), known.training.prices.shape[-1]
    years = [size.walked.index(cell["year"]) for cell in cells]
    number = jnp.asarray([cell["seed"] for cell in cells]) * len(size.walked) + jnp.asarray(years)
    # Methods share first parameters and draws.
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(s.seed)))(number)
    if cells[0]["method"] == "plain":
        first = eqx.filter_vmap(lambda key: Plain(tasks.width, channels, size.plain, key=key))(keys)
    else:
        first = untrained_policies(channels, s, keys)
    market = known.training
    shared = jax.tree.map(lambda _: None, market)
    axes = eqx.tree_at(lambda m: m.length, shared, 0, is_leaf=lambda leaf: leaf is None)
    train(
        eqx.tree_at(lambda m: m.length, market, runs.lengths),
        tasks,
        first,
        Direct(s.batch, s.learning_rate),
        steps=s.steps,
        priority=stack([replace(s, method=_drawn(cell)).priority() for cell in cells]),
        scorer=s.scorer_function(),
        replay=Replay(
            length=market.horizon, warm_up=market.horizon, recency=s.recency, act_periods=0
        ),
        chunks=Chunks(size.mark, size.mark, on_chunk),
        problem_axes=axes,
        key=keys,
    )


def _drawn(cell: Cell) -> Any:
    """Return the method that draws a cell's tasks; the plain network draws like STL."""
    return "stl" if cell["method"] == "plain" else cell["method"]


def _growth(policies: Policy, *where: Any) -> np.ndarray:
    """Net log growth a year of each run's policy, mean over its tasks; arguments as for `walk_each`."""
    return np.asarray(walk_each(policies, *where)[0]).mean(-1)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    own = dict(iter(rows.groupby("figure")))
    return [_conclude_generalisation(own["generalisation"]), _conclude_stability(own["stability"])]


def _protocols(rows: Any, early: Any) -> dict[str, Any]:
    """Rows of the test years: after all updates, and with early stopping."""
    last = rows[(rows.step == rows.step.max()) & ~rows.validation]
    return {f"at equal updates ({rows.step.max():,})": last, "stopped early": early}


def _stopped_together(rows: Any) -> Any:
    """Stop early, with one number of updates for all experiments of a method and year."""
    found = stopped(rows.assign(own=rows.experiment, experiment=0), ["method"])
    return found.assign(experiment=found.own).drop(columns="own")


def _conclude_generalisation(rows: Any) -> FigureResult:
    """Compare the methods' gains in the training days and in the test year, and their gaps."""
    verdicts, notes, shown, tables = [], [], {}, []
    spans = {"in-sample": "in the days learned from", "first": "in the test year"}
    for protocol, own in _protocols(rows, _stopped_together(rows)).items():
        index = ["method", "experiment", "year", "step"]
        wide = own[own.tested != "own"].pivot(index=index, columns="tested", values="gain")
        table = wide.assign(gap=wide["in-sample"] - wide["first"]).reset_index()
        tables.append(table.assign(protocol=protocol))
        found = {
            (method, column): select(table, method=method).pivot(
                index="experiment", columns="year", values=column
            )
            for method, column in product(_METHODS, ("in-sample", "first", "gap"))
        }
        paper = protocol != "stopped early"
        for first, second in (("mtl", "stl"), ("stl", "plain")):
            loses = f"{_NAMES[first]} loses less than {_NAMES[second]} from the days learned from"
            gains = f"{_NAMES[first]} gains more than {_NAMES[second]} in the test year"
            for claim, column, sign in (
                (f"{loses} to the test year", "gap", -1),
                (gains, "first", 1),
            ):
                arms = {_NAMES[method]: found[method, column] for method in (first, second)}
                better, worse = arms.values()
                e = over_rows_and_columns(sign * (better - worse))
                levels = {name: float(np.mean(values)) for name, values in arms.items()}
                claim = f"{claim}, {protocol} ({POINTS})"
                verdicts.append(Verdict.of(claim, e, paper=paper, levels=levels))
        for (column, span), method in product(spans.items(), _METHODS):
            values = found[method, column]
            shown.setdefault(f"{span},\n{protocol}", {})[_NAMES[method]] = over_rows_and_columns(
                values
            )
            notes.append(note(f"{_NAMES[method]}, {span}, {protocol}", values))
        steps = table.groupby("method").step.median()
        chosen = ", ".join(f"{_NAMES[method]} {steps[method]:,.0f}" for method in _METHODS)
        notes.append(f"Median number of updates, {protocol}: {chosen}.")
    title = "Generalisation: gains in the days learned from and in the year after"
    draw = partial(forest, shown, f"{POINTS} over Equal CRP, net, on one task of each policy", 3.0)
    whole = pd.concat(tables, ignore_index=True)
    return FigureResult("generalisation", title, whole, verdicts, draw, [*notes, SURVIVORSHIP])


def _spread(values: Any) -> float:
    """Interquartile range, which is robust to one diverging seed."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low)


def _conclude_stability(rows: Any) -> FigureResult:
    """Compare interquartile ranges over seeds in each year; average their log ratio over years."""
    tested = {"own": "own tasks", "held-out": "held-out instruments"}
    verdicts, shown, found = [], {}, []
    protocols = _protocols(rows, stopped(rows, ["method"]))
    for (protocol, read), (kind, where) in product(protocols.items(), tested.items()):
        own = select(read, tested=kind)
        spreads = own.groupby(["year", "method"]).gain.apply(_spread).unstack("method")
        logs = np.log(spreads["pmtl"] / spreads["mtl"])
        over_years = mean_over(logs.to_numpy())
        claim = f"P-MTL's gains in the test year spread less over seeds than MTL's on {where}"
        claim = f"{claim}, {protocol} (ratio of interquartile ranges)"
        paper = protocol != "stopped early"
        # The ratio of these geometric means is the estimate.
        means = np.exp(np.log(spreads).mean())
        levels = {METHOD_NAMES[method]: float(means[method]) for method in ("pmtl", "mtl")}
        verdict = Verdict.of(claim, over_years, below=0.0, paper=paper, levels=levels)
        verdicts.append(verdict.scaled(math.exp))
        by_year = {
            str(year): Estimate(one, one, one, own.seed.nunique()) for year, one in logs.items()
        }
        shown[f"{where},\n{protocol}"] = by_year | {"all years": over_years}
        found += [
            {"protocol": protocol, "tested": where, "year": year, "ratio": math.exp(log)}
            | {METHOD_NAMES[method]: spreads.loc[year, method] for method in ("mtl", "pmtl")}
            for year, log in logs.items()
        ]
    notes = (
        f"Interquartile ranges over {rows.seed.nunique()} seeds that share tasks and days, in {POINTS}; "
        "each year has instruments of its own. The interval is over years.",
    )
    title = "Stability: the spread over seeds of P-MTL's gains over that of MTL's"
    draw = partial(forest, shown, "log ratio of interquartile ranges", 3.0)
    return FigureResult("stability", title, pd.DataFrame(found), verdicts, draw, notes)
