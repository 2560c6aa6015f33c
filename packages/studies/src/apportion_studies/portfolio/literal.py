"""The effect of five departures from the paper's Algorithm 1, and of each value that it leaves open.

Figures 2 to 5 depart from the algorithm in five ways. The network reads 10 (v / v_last - 1) instead of raw
ratios. An update charges the batch's own drifted allocation, with its gradient, instead of the remembered
w_{n-1}. Memory starts full of the states of equal shares and each batch overwrites its part, instead of
being filled by acting only. The score is computed before the update. Acting that reaches the end of an
episode continues with the next one in the same round. Each departure is reverted alone, and all five
together. That is still not the paper to the letter: the optimiser is Adam, and a plain gradient has
separate arms. Stopping at the end matters only with acting, so that arm acts too and is compared with the
arm that acts.

The paper does not give the number of acted periods (n_e) and their noise. We use 10 periods, so that the
300 updates of a task in an epoch cover its ten years once, and noise of 0.1 on the scores. The other open
values (window, batch, learning rate, cost, recency) are halved and doubled one at a time; the plain
gradient replaces Adam with learning rates of three orders.

All arms are P-MTL policies with the same experiments, tasks, first parameters and draws, tested on the
paper's year. Single-task policies of the same tasks are trained with all five departures reverted. Our
P-MTL policies here replicate those of Figure 4 with other training seeds; Figure 4 alone judges their gain
over STL and Equal CRP, with more training seeds and years.

Rows of a cell: tested (own tasks, held-out tasks, or own tasks in the training period), step, epoch, gain
(points a year over Equal CRP: 100 times log growth, net) and deviation (mean over days of the largest
distance of a share from an equal share).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from apportion.certify.statistics import Estimate, compare, mean_over
from apportion.composition import EqualShares
from apportion.domains.portfolio.market import Market, growth_and_sharpe, walk_policy
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.domains.settings import METHOD_NAMES
from apportion.learners.direct import BatchRollout, Direct, lookback
from apportion.learners.learner import Learner, Update
from apportion.memory import Batch, Replay
from apportion.policy import GaussianLogits, Policy
from apportion.problem import Problem
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.tasks import Task, single_tasks
from apportion.training import Chunk, Chunks
from apportion.trees import take
from apportion_studies.portfolio.experiments import (
    POINTS,
    SMALL,
    SURVIVORSHIP,
    Experiments,
    at_once,
    by_cell,
    each_policy,
)

_OURS, _LITERAL = "ours", "all five put back"
_RAW, _REMEMBERED, _ACTED, _AFTER, _STOPS = _DEPARTURES = (
    "raw ratios as the state",
    "allocations out of memory in the update",
    "memory filled by acting alone",
    "the score after the update",
    "acting that stops at the end",
)
_ARMS = (_OURS, *_DEPARTURES, _LITERAL)
_NOISE = 0.1
"""Standard deviation of the noise on the scores while acting."""
_NEAR = 0.02
"""Mean deviation below which a policy has not left equal shares, as in Figure 5."""
_TOLERANCE = 3.0
"""Change of the gain, in points a year, above which results depend on a value."""
_JIANG = "as in the code published by Jiang et al. (2017), which the paper follows"
_WHY = {
    "window": f"H; {_JIANG}",
    "batch": f"B; {_JIANG}",
    "learning_rate": f"of Adam; {_JIANG}",
    "cost": f"c; {_JIANG}",
    "recency": f"rate of the geometric distribution of n_b; {_JIANG}",
    "optimiser": f"Adam; {_JIANG}",
}
"""Settings that the paper leaves open, and the sources of our values."""
_PLAIN = "plain gradient"
_UNSCALED = optax.identity()
_RATES = (1, 100, 10_000)
"""Learning rates of the plain gradient, as multiples of Adam's."""


@dataclass(frozen=True)
class _Variant:
    """A way to train: the departures that are reverted, and the changed settings."""

    name: str
    back: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    setting: str = ""
    """The changed setting, if the paper leaves its value open."""

    @property
    def program(self) -> str:
        """Name of the program; runs that differ only in learning rate or cost share one."""
        if self.setting in ("learning_rate", "cost"):
            return _OURS
        return _PLAIN if self.setting == "optimiser" else self.name


def _variants(s: PortfolioSettings) -> dict[str, _Variant]:
    """Return all variants by name, ours first."""
    found = [_Variant(_OURS), *(_Variant(one, (one,)) for one in _DEPARTURES[:-1])]
    found += [_Variant(_STOPS, (_ACTED, _STOPS)), _Variant(_LITERAL, _DEPARTURES)]
    for name, (word, factor) in product(list(_WHY)[:-1], (("halved", 0.5), ("doubled", 2.0))):
        value = type(getattr(s, name))(factor * getattr(s, name))
        found.append(_Variant(f"{name} {word}", changes={name: value}, setting=name))
    for factor in _RATES:
        value = factor * s.learning_rate
        name = f"{_PLAIN}, learning rate {value:g}"
        found.append(_Variant(name, changes={"learning_rate": value}, setting="optimiser"))
    return {one.name: one for one in found}


@dataclass(frozen=True)
class _LiteralSize:
    """Size of the study."""

    settings: PortfolioSettings
    experiments: int
    year: int
    held_out: int
    own: int
    """Number of own tasks that are tested; each single-task policy learns one of them."""
    shown: int
    """Tasks of held-out instruments that are tested."""
    epoch: int
    """Updates for each task in an epoch."""
    epochs: int
    acted: int
    """Acted periods (n_e) of the arms that act."""


_SCALES = {
    "quick": _LiteralSize(PortfolioSettings.paper(tasks=8, **SMALL), 3, 2019, 7, 3, 4, 30, 3, 10),
    "paper": _LiteralSize(PortfolioSettings.paper(), 10, 2019, 18, 5, 10, 300, 3, 10),
}


def literal(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """Plan a cell for each variant, method and experiment; the slowest, arms that act, first."""
    prices = embedded_prices() if prices is None else prices
    size = _SCALES[scale]
    size = replace(size, settings=replace(size.settings, seed=seed))
    known = _variants(size.settings)
    arms = [(one, "pmtl") for one in sorted(known.values(), key=lambda v: _ACTED not in v.back)]
    arms.append((known[_LITERAL], "stl"))
    cells = []
    for (variant, method), experiment in product(arms, range(size.experiments)):
        values = {"variant": variant.name, "setting": variant.setting, "method": method}
        values |= {"experiment": experiment, "year": size.year}
        name = variant.name.replace(",", "").replace(":", "").replace(" ", "-")
        program = f"{method}, {variant.program}"
        cells.append(Cell(f"{method}-{name}-{experiment}", values, program))
    own = {name: value for name, value in vars(size).items() if name != "settings"}
    about = {"data": prices.summary(), **vars(size.settings), **own, "noise": _NOISE}
    # The epochs and the cells replace these two settings.
    del about["steps"], about["method"]
    return Plan("literal", tuple(cells), partial(_compute, prices, size), _conclude, about)


def _remembered(
    problem: Problem, task: Task, policy: Policy, batch: Batch, key: PRNGKeyArray
) -> BatchRollout:
    """Apply `lookback`, but compute every reward in the remembered state: no gradient reaches an
    allocation through the drift and cost of the next period.
    """
    rolled = lookback(problem, task, policy, batch, key)
    keys = jax.random.split(key, batch.rows.shape[0])

    def step(state, allocation, key):
        return problem.step(task, state, allocation, key=key).reward

    rewards = jax.vmap(step)(batch.states, rolled.allocations, keys)
    return replace(rolled, rewards=rewards)


class _AsPrinted(Learner):
    """`Direct` with options for the score and the use of memory that Algorithm 1 prints."""

    periods: int = eqx.field(static=True)
    direct: Direct
    scored_after: bool = eqx.field(static=True)
    """Whether scorers read the allocations of the updated policy."""
    rewrites: bool = eqx.field(static=True)
    """Whether the states of the batch overwrite those in memory."""

    def start(self, policy: Policy) -> PyTree[Array]:
        return self.direct.start(policy)

    def update(
        self,
        problem: Problem,
        task: Task,
        batch: Batch | None,
        policy: Policy,
        state: PyTree[Array],
        weight: Float[Array, ""],
        *,
        key: PRNGKeyArray,
    ) -> Update:
        update = self.direct.update(problem, task, batch, policy, state, weight, key=key)
        evidence = update.evidence
        if self.scored_after:
            assert batch is not None, "a learner with periods > 0 is always handed a batch"
            after = self.direct.objective(problem, task, update.policy, batch, key)
            evidence = replace(evidence, allocations=after.allocations)
        states = update.new_states if self.rewrites else None
        return Update(update.policy, update.state, evidence, states)


def _compute(
    prices: Prices, size: _LiteralSize, cells: Sequence[Cell], progress: OnProgress
) -> Rows:
    """Train the cells of one program in one `vmap`, and yield their rows."""
    method, known_variants = cells[0]["method"], _variants(size.settings)
    own_variants = [known_variants[cell["variant"]] for cell in cells]
    back, each = own_variants[0].back, size.own if method == "stl" else 1
    by_run = [
        replace(size.settings, method=method, **one.changes)
        for one in own_variants
        for _ in range(each)
    ]
    every = size.epoch * (1 if method == "stl" else size.settings.tasks)
    # All other settings are the same in every run.
    s = replace(by_run[0], steps=every * size.epochs)
    rates, costs = (
        jnp.asarray([getattr(one, name) for one in by_run]) for name in ("learning_rate", "cost")
    )
    counts = {"held_out": size.held_out, "own": s.tasks, "shown": size.shown}
    known = Experiments.of(prices, s, [size.year], size.experiments, **counts)
    runs = known.runs(cells, each)
    tasks = take(known.own, known.runs(cells).experiment)
    tasks = single_tasks(tasks.first(size.own).flat) if method == "stl" else tasks
    training, testing = known.training, known.testing
    if _RAW in back:
        training, testing = (replace(one, centre=0.0, scale=1.0) for one in (training, testing))
    in_year = (testing, runs.starts[0], costs)
    tested = {
        "own": (*in_year, tasks.first(size.own)),
        "held-out": (*in_year, take(known.held_out, runs.experiment)),
        "in-sample": (training, training.first, costs, tasks.first(size.own)),
    }
    equal = {kind: _walks(EqualShares(), *where) for kind, where in tested.items()}
    frames = []

    def on_chunk(chunk: Chunk) -> None:
        for kind, where in tested.items():
            growth, deviation = _walks(chunk.policy, *where)
            base = equal[kind][0]
            found = np.stack([100 * (growth - base), deviation])
            # Each single-task policy of a cell has one of its tasks.
            means = found.reshape(2, len(cells), -1).mean(-1)
            frame = pd.DataFrame(means.T, columns=["gain", "deviation"])
            frame = frame.assign(place=range(len(cells)), tested=kind, step=chunk.step)
            frames.append(frame.assign(epoch=chunk.step / every))
        progress(f"{cells[0].program}: step {chunk.step}", chunk.step / chunk.steps)

    policy_keys, run_keys = (
        jax.random.split(jax.random.fold_in(jax.random.key(s.seed), i), known.pairs)[runs.pair]
        for i in range(2)
    )
    shared: Any = jax.tree.map(lambda _: None, training)
    train_portfolio_runs(
        eqx.tree_at(lambda m: m.costs.rate, training, costs),
        tasks,
        s,
        policy_keys=policy_keys,
        run_keys=run_keys,
        market_axes=eqx.tree_at(lambda m: m.costs.rate, shared, 0, is_leaf=lambda x: x is None),
        learner=_learner_of(own_variants[0], s, rates),
        replay=_replay_of(back, training.horizon, s.recency, size.acted),
        explore=GaussianLogits(_NOISE) if _ACTED in back else None,
        chunks=Chunks(every, every, on_chunk),
    )
    yield from by_cell(cells, pd.concat(frames))


def _learner_of(variant: _Variant, s: PortfolioSettings, rates: Float[Array, " runs"]) -> Learner:
    """Return the learner of a variant."""
    options: dict[str, Any] = {"transform": _UNSCALED} if variant.setting == "optimiser" else {}
    objective = _remembered if _REMEMBERED in variant.back else lookback
    return _AsPrinted(
        s.batch,
        Direct(s.batch, rates, objective=objective, **options),
        scored_after=_AFTER in variant.back,
        rewrites=_ACTED not in variant.back,
    )


def _replay_of(back: Sequence[str], horizon: int, recency: float, acted: int) -> Replay:
    """Return a memory of the whole period, full from the start or filled by acting from day one."""
    acts = _ACTED in back
    return Replay(
        length=horizon,
        warm_up=0 if acts else horizon,
        recency=recency,
        act_periods=acted if acts else 0,
        stops=_STOPS in back,
    )


@eqx.filter_jit
def _walks(
    policies: Policy,
    market: Market,
    start: Int[Array, ""],
    costs: Float[Array, " runs"],
    tasks: Task,
) -> tuple[Float[Array, "runs tasks"], Float[Array, "runs tasks"]]:
    """Net log growth a year, and mean deviation from equal shares, of each run's policy on its tasks."""

    def one(policy: Policy, cost, tasks: Task):
        here = eqx.tree_at(lambda m: (m.first, m.costs.rate), market, (start, cost))
        walk = jax.vmap(lambda task: walk_policy(policy, here, task, chunk=512))(tasks)
        gaps = jnp.abs(walk.allocations - 1 / tasks.width).max(-1).mean(-1)
        days = jnp.asarray(market.horizon, jnp.int32)
        return growth_and_sharpe(walk.log_return, days)[0], gaps

    return each_policy(one, policies, costs, tasks, at_once=at_once(tasks))


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    last, year = rows[rows.epoch == rows.epoch.max()], int(rows.year.max())
    values: Callable[..., np.ndarray] = partial(_values_of, last)
    notes = [
        f"{METHOD_NAMES[method]}, {name}: {values(name, method=method).mean():+.2f} {POINTS} over Equal "
        f"CRP in {year}, in sample {values(name, 'gain', 'in-sample', method).mean():+.2f}, deviation from "
        f"equal shares {values(name, 'deviation', method=method).mean():.4f}"
        for method, names in (("pmtl", _ARMS), ("stl", (_LITERAL,)))
        for name in names
    ]
    drawn = {
        label: {name: mean_over(values(name, column, tested)) for name in _ARMS}
        for label, column, tested in (
            ("deviation from equal shares", "deviation", "own"),
            (f"{POINTS}, in sample", "gain", "in-sample"),
            (f"{POINTS}, {year}", "gain", "own"),
        )
    }
    departures = FigureResult(
        "literal",
        "Five departures from Algorithm 1 put back, one at a time and together",
        _summary(last[last.setting == ""]),
        _departure_verdicts(values, year),
        partial(forest, drawn, "after all updates", 3.0),
        (*notes, SURVIVORSHIP),
    )
    moves = _moves(last)
    shown = {
        f"{kind} tasks, {year}": {name: moved[kind, "gain"] for name, _, moved in moves}
        for kind in ("own", "held-out")
    }
    omitted = FigureResult(
        "omitted",
        "Values that the paper leaves open, halved and doubled",
        _omitted_table(moves, settings),
        _omitted_verdicts(moves, year),
        partial(forest, shown, f"{POINTS}, change from ours"),
        (
            f"P-MTL with {settings['tasks']} tasks after {rows.step.max():,} updates, each change "
            "against ours with the same experiments, tasks, first parameters and draws.",
            SURVIVORSHIP,
        ),
    )
    return [departures, omitted]


def _values_of(
    table: Any, variant: str, column: str = "gain", tested: str = "own", method: str = "pmtl"
) -> np.ndarray:
    """Return a column's values, ordered by experiment."""
    rows = select(table, variant=variant, tested=tested, method=method)
    return rows.sort_values("experiment")[column].to_numpy()


def _summary(last: Any) -> pd.DataFrame:
    """A row for each variant, method and kind of task: the gain's interval, and means of the rest."""
    by, found = ["variant", "method", "tested"], []
    for key, own in last.groupby(by, sort=False):
        e = mean_over(own.gain.to_numpy())
        row = dict(zip(by, key, strict=True)) | {"gain": e.value, "low": e.low, "high": e.high}
        found.append(row | {"deviation": own.deviation.mean()})
    return pd.DataFrame(found)


def _departure_verdicts(values: Callable[..., np.ndarray], year: int) -> Iterator[Verdict]:
    """Deviation of each arm, effect of each departure, and the paper's claims for its own method."""
    stays = f"has not left equal shares (mean deviation below {_NEAR:g})"
    for name in _ARMS:
        found = mean_over(values(name, "deviation"))
        yield Verdict.of(f"{name}: P-MTL {stays}", found, below=_NEAR, paper=False)
    for name in _ARMS[1:]:
        base = _ACTED if name == _STOPS else _OURS
        for claim, tested in (
            (f"grows less in sample than {base}", "in-sample"),
            (f"gains less than {base} on own tasks in {year}", "own"),
        ):
            arms = {one: values(one, tested=tested) for one in (base, name)}
            levels = {one: float(own.mean()) for one, own in arms.items()}
            gap, claim = compare(*arms.values()), f"{name}: {claim} ({POINTS})"
            yield Verdict.of(claim, gap, paper=False, levels=levels)
    arms = {"P-MTL": values(_LITERAL), "STL": values(_LITERAL, method="stl")}
    levels = {one: float(own.mean()) for one, own in arms.items()}
    claim = f"{_LITERAL}: P-MTL beats STL at equal epochs on own tasks in {year} ({POINTS})"
    yield Verdict.of(claim, compare(*arms.values()), levels=levels)
    claim = f"{_LITERAL}: P-MTL beats Equal CRP on held-out instruments in {year} ({POINTS})"
    yield Verdict.of(claim, mean_over(values(_LITERAL, tested="held-out")))
    found = mean_over(values(_LITERAL, "deviation", method="stl"))
    yield Verdict.of(f"{_LITERAL}: STL {stays}", found, below=_NEAR)


_Moves = list[tuple[str, str, dict[tuple[str, str], Estimate]]]
"""Variants, the setting that each changes, and its effects by kind of task and column."""


def _moves(last: Any) -> _Moves:
    values = partial(_values_of, last)
    asked = [("own", "gain"), ("held-out", "gain"), ("in-sample", "gain"), ("own", "deviation")]
    names = last[last.setting != ""].drop_duplicates("variant")[["variant", "setting"]]
    return [
        (
            name,
            setting,
            {
                (kind, column): compare(values(name, column, kind), values(_OURS, column, kind))
                for kind, column in asked
            },
        )
        for name, setting in names.itertuples(index=False)
    ]


def _omitted_table(moves: _Moves, settings: dict[str, Any]) -> pd.DataFrame:
    """Return a row for each change: our value, its source, the effects on gain and deviation."""
    rows = []
    for name, setting, moved in moves:
        row = {"changed": name, "ours": str(settings.get(setting, "adam")), "why": _WHY[setting]}
        for (kind, column), e in moved.items():
            head = f"{kind} {column}"
            row |= {head: e.value, f"{head} low": e.low, f"{head} high": e.high}
        rows.append(row)
    return pd.DataFrame(rows)


def _omitted_verdicts(moves: _Moves, year: int) -> Iterator[Verdict]:
    """Test if results depend on each open value, and if Adam is needed."""
    for setting in list(_WHY)[:-1]:
        both = [moved["own", "gain"] for _, one, moved in moves if one == setting]
        claim = f"{setting} halved or doubled moves the gain on own tasks in {year} by less than "
        claim += f"{_TOLERANCE:g} {POINTS}"
        yield Verdict.of_all(claim, both, above=-_TOLERANCE, below=_TOLERANCE, paper=False)
    plain = [moved["in-sample", "gain"] for _, one, moved in moves if one == "optimiser"]
    claim = (
        f"a plain gradient grows less in sample than Adam, with any of {len(plain)} learning rates"
    )
    claim += f" ({POINTS})"
    yield Verdict.of_all(claim, plain, above=-np.inf, below=0.0, paper=False)
