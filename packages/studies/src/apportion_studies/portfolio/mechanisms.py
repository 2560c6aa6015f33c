"""Why many tasks should help, on the market itself: the generalisation gap, and the spread over seeds.

Generalisation: the paper's reason for sharing one network over instruments and tasks is that data is
scarce. STL, MTL and a plain network of as many parameters, which reads all instruments of its one task
at once, learn with the same updates from the days before a test year. Measured is the gain over Equal CRP
on one task, the same for all three, in the days learned from and in the test year; the gap is what is lost
between them. A cell is a method, an experiment with instruments of its own, and a year.

Stability: prioritised drawing is said to stabilise learning. MTL and P-MTL learn the same tasks from
several seeds, each year with instruments of its own; the ratio of the variances over seeds of what they
gain in the test year says which spreads less. A cell is a method, a seed and a year.
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
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.certify.statistics import Estimate, mean_over, of_means, over_rows_and_columns
from apportion.composition import EqualShares
from apportion.domains.portfolio import market as markets
from apportion.domains.portfolio.market import Market, walk_policy
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
from apportion.training import Chunks, train
from apportion.trees import stack, take
from apportion_studies.portfolio.experiments import (
    SMALL,
    SURVIVORSHIP,
    Experiments,
    at_once,
    by_cell,
    each_policy,
    note,
)

_METHODS = ("stl", "mtl", "plain")
_NAMES = METHOD_NAMES | {"plain": "a plain network"}


@dataclass(frozen=True)
class _Size:
    """How large the study is."""

    settings: PortfolioSettings
    """The tasks and updates of every policy; their seed makes experiments and seeds."""
    experiments: int
    seeds: int
    years: tuple[int, ...]
    held_out: int
    plain: int
    """Units of the plain network, for about as many parameters."""


_SCALES = {
    "quick": _Size(
        PortfolioSettings.paper(tasks=12, steps=600, **SMALL),
        experiments=3, seeds=3, years=(2017, 2018, 2019), held_out=7, plain=12,
    ),
    "paper": _Size(
        PortfolioSettings.paper(tasks=30),
        experiments=10, seeds=10, years=tuple(range(2013, 2020)), held_out=18, plain=14,
    ),
}  # fmt: skip


class Plain(Policy):
    """One recurrent network that reads all entities of a task at once and has a score for each place.

    Who stands where matters to it: it is not equivariant, and serves tasks of one size alone.

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
        # As small as in the shared network: both begin with equal shares.
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
    """A program for each method of the first figure, one for both of the second."""
    prices = embedded_prices() if prices is None else prices
    size = _SCALES[scale]
    size = replace(size, settings=replace(size.settings, seed=seed))
    cells = []
    for method, own, year in product(_METHODS, range(size.experiments), size.years):
        values = {"figure": "generalisation", "method": method, "year": year, "seed": own}
        name = f"generalisation-{method}-{own}-{year}"
        cells.append(Cell(name, values | {"experiment": own}, f"generalisation-{method}"))
    for method, own, (place, year) in product(
        ("mtl", "pmtl"), range(size.seeds), enumerate(size.years)
    ):
        values = {"figure": "stability", "method": method, "year": year, "seed": own}
        # Each year has instruments of its own, those of an experiment.
        values |= {"experiment": place % size.experiments}
        cells.append(Cell(f"stability-{method}-{own}-{year}", values, "stability"))
    own = {name: value for name, value in vars(size).items() if name != "settings"}
    about = {"data": prices.summary(), **vars(size.settings), **own}
    return Plan("mechanisms", tuple(cells), partial(_compute, prices, size), _conclude, about)


def _compute(prices: Prices, size: _Size, cells: Sequence[Cell], progress: OnProgress) -> Rows:
    """What each cell's policy gains over Equal CRP, in log growth a year, points: in the days it learned
    from, in the test year on the same tasks, and there on held-out instruments.
    """
    s = size.settings
    shown = 1 if cells[0]["figure"] == "generalisation" else s.tasks
    counts = {"held_out": size.held_out, "own": s.tasks, "shown": 4}
    known = Experiments.of(prices, s, size.years, size.experiments, **counts)
    runs, methods = known.runs(cells), [cell["method"] for cell in cells]
    own = take(known.own, runs.experiment)
    policies = _train(known, own.first(1) if methods[0] in ("stl", "plain") else own, size, cells)
    held = take(known.held_out, runs.experiment)
    year = (known.testing, runs.starts, runs.days)
    before = (
        replace(known.testing, horizon=known.training.horizon),
        jnp.full_like(runs.starts, known.training.first),
        runs.lengths,
    )
    tests = {"out_of_sample": (*year, own.first(shown))}
    tests |= {"in_sample": (*before, own.first(1))} if shown == 1 else {"transfer": (*year, held)}
    table = pd.DataFrame({"place": range(len(cells))})
    for name, (market, first, days, tasks) in tests.items():
        growth, equal = (
            _growth(choice, market, first, days, tasks) for choice in (policies, EqualShares())
        )
        table[name] = 100 * np.asarray(growth - equal)
    progress(f"{cells[0].program}: {len(cells)} policies of {s.steps} updates", 1.0)
    yield from by_cell(cells, table)


def _train(known: Experiments, tasks: Task, size: _Size, cells: Sequence[Cell]) -> Policy:
    """The cells' policies, each from the days before its year."""
    s, runs, channels = size.settings, known.runs(cells), known.training.prices.shape[-1]
    years = [size.years.index(cell["year"]) for cell in cells]
    number = jnp.asarray([cell["seed"] for cell in cells]) * len(size.years) + jnp.asarray(years)
    # Methods share first parameters and draws.
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(s.seed)))(number)
    if cells[0]["method"] == "plain":
        first = eqx.filter_vmap(lambda key: Plain(tasks.width, channels, size.plain, key=key))(keys)
    else:
        first = untrained_policies(channels, s, keys)
    market = known.training
    shared = jax.tree.map(lambda _: None, market)
    axes = eqx.tree_at(lambda m: m.length, shared, 0, is_leaf=lambda leaf: leaf is None)
    return train(
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
        chunks=Chunks(s.steps, s.steps),
        problem_axes=axes,
        key=keys,
    ).policy


def _drawn(cell: Cell) -> Any:
    """How a cell's tasks are drawn: one alone, evenly or by priority."""
    return "stl" if cell["method"] == "plain" else cell["method"]


@eqx.filter_jit
def _growth(
    policies: Policy,
    market: Market,
    starts: Int[Array, " runs"],
    days: Int[Array, " runs"],
    tasks: Task,
) -> Float[Array, " runs"]:
    """Net log growth a year of each run's policy, mean over its tasks."""

    def one(policy, start, days, tasks):
        here = eqx.tree_at(lambda m: m.first, market, start)
        log = jax.vmap(lambda task: walk_policy(policy, here, task, chunk=512).log_return)(tasks)
        return markets.growth_and_sharpe(log, days)[0].mean()

    return each_policy(one, policies, starts, days, tasks, at_once=at_once(tasks))


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    own = dict(iter(rows.groupby("figure")))
    return [_conclude_generalisation(own["generalisation"]), _conclude_stability(own["stability"])]


def _conclude_generalisation(rows: Any) -> FigureResult:
    """What each method loses from the days it learned from to the test year."""
    table = rows[["method", "experiment", "year", "in_sample", "out_of_sample"]]
    table = table.assign(gap=table.in_sample - table.out_of_sample).reset_index(drop=True)

    def values(method: str, column: str) -> Any:
        own = select(table, method=method)
        return own.pivot(index="experiment", columns="year", values=column)

    verdicts = []
    for first, second in (("mtl", "stl"), ("stl", "plain")):
        better, worse = _NAMES[first], _NAMES[second]
        claim = f"{better} loses less than {worse} from the days learned from to the test year"
        gap = values(second, "gap") - values(first, "gap")
        verdicts.append(Verdict.of(f"{claim} (points)", over_rows_and_columns(gap)))
        claim = f"{better} gains more than {worse} in the test year (points)"
        gain = values(first, "out_of_sample") - values(second, "out_of_sample")
        verdicts.append(Verdict.of(claim, over_rows_and_columns(gain)))
    spans = {"in the days learned from": "in_sample", "in the test year": "out_of_sample"}
    shown = {
        span: {_NAMES[m]: over_rows_and_columns(values(m, column)) for m in _METHODS}
        for span, column in spans.items()
    }
    notes = [
        note(f"{_NAMES[method]}, {span}", values(method, column))
        for method, (span, column) in product(_METHODS, spans.items())
    ]
    notes.append(
        "Equal updates; log growth a year over Equal CRP, net, on one task of each policy."
    )
    title = "Generalisation: gains in the days learned from and in the year after"
    draw = partial(forest, shown, "points a year over Equal CRP, net")
    return FigureResult("generalisation", title, table, verdicts, draw, [*notes, SURVIVORSHIP])


def _variance_ratio(first: np.ndarray, second: np.ndarray) -> Estimate:
    """The log of the ratio of two variances over the same units, three at least, by the jackknife: units
    are paired.
    """

    def log_ratio(means):
        first, square, second, other = np.moveaxis(means, -1, 0)
        return np.log((square - first**2) / (other - second**2))

    # Moments about the mean: those about 0 would lose digits.
    pair = [own - own.mean() for own in (first, second)]
    return of_means(np.stack([m for own in pair for m in (own, own**2)], -1), log_ratio)


def _ratio(log: float) -> float:
    """What a logarithm is of; of few seeds its interval may be wider than numbers are."""
    return math.exp(min(log, 700.0))


def _conclude_stability(rows: Any) -> FigureResult:
    """The ratio of variances over seeds, year by year: its log is averaged over years."""
    spans = {"own tasks": "out_of_sample", "held-out instruments": "transfer"}
    verdicts, shown, found = [], {}, []
    for where, column in spans.items():
        gains = rows.pivot(index=["year", "seed"], columns="method", values=column)
        by_year = {
            str(year): _variance_ratio(own["pmtl"].to_numpy(), own["mtl"].to_numpy())
            for year, own in gains.groupby("year")
        }
        over_years = mean_over(np.array([one.value for one in by_year.values()]))
        claim = f"P-MTL's gains in the test year spread less over seeds than MTL's on {where}"
        verdict = Verdict.of(f"{claim} (ratio of variances)", over_years, below=0.0)
        verdicts.append(verdict.scaled(_ratio))
        shown[where] = by_year | {"all years": over_years}
        found += [
            {"tested": where, "year": year, "ratio": _ratio(one.value)}
            | {"low": _ratio(one.low), "high": _ratio(one.high), "seeds": one.n}
            for year, one in by_year.items()
        ]
    notes = (
        f"Variances over {rows.seed.nunique()} seeds that share tasks and days; each year has instruments "
        "of its own. A year's interval is over seeds, that of all years over years.",
    )
    table = pd.DataFrame(found)
    title = "Stability: the variance over seeds of P-MTL's gains over that of MTL's"
    draw = partial(forest, shown, "log ratio of variances")
    return FigureResult("stability", title, table, verdicts, draw, notes)
