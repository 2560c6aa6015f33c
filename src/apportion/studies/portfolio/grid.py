"""The portfolio experiments behind Figures 3 and 4: experiments x years x methods, as large vmaps.

An experiment draws which instruments are held out and which tasks are trained on. For each test
year C a policy learns from every day before C and is then walked through C, on its own tasks and on
tasks of held-out instruments. The same runs, read at other steps, give both protocols: with T tasks
the paper's epoch gives a multi-task policy T times the updates of a single-task one.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

from apportion.composition import EqualShares, PartialTrading
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.market import SCALE, Market
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.training import algorithm_settings, first_policies, learner
from apportion.domains.portfolio.walk import growth_and_sharpe, walk_policy
from apportion.policy import History, Policy
from apportion.priority import Priority
from apportion.simplex import Allocation, Mask
from apportion.studies.portfolio.scale import Scale
from apportion.tasks import Tasks, draw_tasks, split_entities
from apportion.training import train_runs

Progress = Callable[[str, float], None]
"""Called with what was just done and the fraction of all work done so far."""
KEY = ("method", "tasks", "experiment", "year", "tested", "step", "task")
"""Columns that tell the rows of the table apart."""


def compute(
    prices: Prices,
    scale: Scale,
    *,
    progress: Progress | None = None,
    save: Callable[[pd.DataFrame], None] | None = None,
    only: Collection[int] = (),
) -> pd.DataFrame:
    """The table of the grid: a row for each method, experiment, year, step and kind of task.

    Columns: method (stl, mtl, pmtl, or one that learns nothing), tasks (T), experiment, year, tested
    (own or held-out), step, task (a number at the last step, -1 for the mean over tasks), gain
    (annualised percentage points over Equal CRP, net), log_gain (log growth a year), sharpe_gain.
    `save` is handed the table as it stands after each part: a run cut short leaves what it had.
    `only` names the numbers of tasks to train on, 1 for single-task learning (default: all).
    """
    grid = _Grid.of(prices, scale)
    rows: list[pd.DataFrame] = [_unlearned_rows(grid)]
    parts = [*((("mtl", "pmtl"), count) for count in scale.counts), (("stl",), 1)]
    parts = [(methods, count) for methods, count in parts if not only or count in only]
    for number, (methods, count) in enumerate(parts):

        def tell(what: str, fraction: float, number: int = number) -> None:
            if progress is not None:
                progress(what, (number + fraction) / len(parts))

        rows += _train(grid, methods, count, tell)
        if save is not None:
            save(pd.concat(rows, ignore_index=True))
    return pd.concat(rows, ignore_index=True)


@dataclass(frozen=True, eq=False)
class _Grid:
    """Markets, tasks and Equal CRP's record; cells are (experiment, year) pairs, experiment first."""

    scale: Scale
    training: Market
    lengths: Int[Array, " cells"]
    testing: Market
    starts: Int[Array, " cells"]
    days: Int[Array, " cells"]
    own: list[Tasks]
    held_out: Tasks
    """Stacked by experiment."""

    @classmethod
    def of(cls, prices: Prices, scale: Scale) -> "_Grid":
        s = scale.settings
        own, unseen = [], []
        for experiment in range(scale.experiments):
            seed = scale.seed + experiment
            seen, others = split_entities(len(prices.tickers), scale.held_out, seed=seed)
            own.append(draw_tasks(seen, s.task_size, max(scale.counts), seed=seed))
            unseen.append(draw_tasks(others, s.task_size, scale.shown, seed=seed))
        firsts = [prices.row(f"{year}-01-01") for year in scale.years]
        lasts = [prices.row(f"{year + 1}-01-01") - 1 for year in scale.years]
        costs = Costs(s.cost)
        before = Market.of(
            prices,
            end=prices.dates[max(firsts) - 1],
            window=s.window,
            costs=costs,
            tracking=s.tracking,
        )
        longest = max(last - first + 1 for first, last in zip(firsts, lasts, strict=True))
        whole = Market.of(prices, window=s.window, costs=costs.exactly())
        cells = scale.experiments
        return cls(
            scale,
            before,
            jnp.tile(jnp.asarray([first - s.window for first in firsts], jnp.int32), cells),
            replace(whole, horizon=longest),
            jnp.tile(jnp.asarray(firsts, jnp.int32), cells),
            jnp.tile(
                jnp.asarray([b - a + 1 for a, b in zip(firsts, lasts, strict=True)], jnp.int32),
                cells,
            ),
            own,
            _stack(unseen),
        )

    @property
    def years(self) -> int:
        return len(self.scale.years)

    def tasks(self, kind: str, number: int) -> Tasks:
        """Tasks of each cell, (cells, tasks, entities)."""
        stacked = _stack([tasks[:number] for tasks in self.own]) if kind == "own" else self.held_out
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, self.years, 0), stacked)


@eqx.filter_jit
def _record(
    policies: Policy,
    market: Market,
    starts: Int[Array, " runs"],
    days: Int[Array, " runs"],
    tasks: Tasks,
) -> tuple[Float[Array, "runs tasks"], Float[Array, "runs tasks"]]:
    """Net log growth a year and Sharpe ratio of each run's policy on each of its tasks."""
    arrays, rest = eqx.partition(policies, eqx.is_array)

    def one(run):
        arrays, start, days, tasks = run
        here = eqx.tree_at(lambda m: m.first, market, start)
        policy = eqx.combine(arrays, rest)
        log = jax.vmap(lambda task: walk_policy(policy, here, task).log_return)(tasks)
        return growth_and_sharpe(log, days)

    # A few runs at a time: their windows of prices would not fit together.
    return jax.lax.map(one, (arrays, starts, days, tasks), batch_size=32)


class _Record:
    """Log growth a year and Sharpe ratio, (runs, tasks)."""

    def __init__(self, growth: np.ndarray, sharpe: np.ndarray):
        self.growth, self.sharpe = growth, sharpe

    def over(self, equal: "_Record") -> dict[str, np.ndarray]:
        return {
            "gain": 100 * (np.exp(self.growth) - np.exp(equal.growth)),
            "log_gain": self.growth - equal.growth,
            "sharpe_gain": self.sharpe - equal.sharpe,
        }


def _test(grid: _Grid, policies: Policy, tasks: Tasks, runs_per_cell: int) -> _Record:
    repeat = partial(jnp.repeat, repeats=runs_per_cell, axis=0)
    growth, sharpe = _record(policies, grid.testing, repeat(grid.starts), repeat(grid.days), tasks)
    return _Record(np.asarray(growth), np.asarray(sharpe))


def _constant(policy: Policy, runs: int) -> Policy:
    """One policy as a stack of equal ones."""
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (runs, *leaf.shape)) if eqx.is_array(leaf) else leaf,
        policy,
    )


def _train(grid: _Grid, methods: tuple[str, ...], count: int, tell: Progress) -> list[pd.DataFrame]:
    """Train all cells of these methods in one vmap, and test at every checkpoint."""
    scale, s = grid.scale, grid.scale.settings
    single = methods == ("stl",)
    per_cell = scale.single_tasks if single else len(methods)
    repeat = partial(jnp.repeat, repeats=per_cell, axis=0)
    own = grid.tasks("own", scale.single_tasks if single else count)
    if single:
        trained = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, leaf.shape[-1]), own)
        tested = {"own": trained, "held-out": jax.tree.map(repeat, grid.tasks("held-out", 0))}
    else:
        trained = jax.tree.map(repeat, own)
        shown = grid.tasks("own", min(count, scale.shown))
        tested = {
            "own": jax.tree.map(repeat, shown),
            "held-out": jax.tree.map(repeat, grid.tasks("held-out", 0)),
        }
    cells = len(grid.starts)
    runs = cells * per_cell
    alphas = jnp.tile(jnp.asarray([s.alpha if m == "pmtl" else 0.0 for m in methods]), runs)[:runs]
    equal = {
        kind: _test(grid, _constant(EqualShares(), runs), tasks, per_cell)
        for kind, tasks in tested.items()
    }
    rows: list[pd.DataFrame] = []
    wanted = evaluated_steps(scale, single)

    def on_chunk(chunk):
        if chunk.step not in wanted:
            return
        for kind, tasks in tested.items():
            record = _test(grid, chunk.policy, tasks, per_cell).over(equal[kind])
            last = chunk.step == chunk.steps
            rows.append(_rows(grid, methods, count, kind, chunk.step, record, single, last))
        what = f"{'/'.join(methods)} T={count}: {runs} runs, step {chunk.step} of {chunk.steps}"
        tell(what, chunk.step / chunk.steps)

    # Runs of one cell share their first parameters and their draws: they differ by method alone.
    first, draws = (
        jnp.repeat(
            jax.random.split(jax.random.fold_in(jax.random.key(scale.seed), i), cells), per_cell, 0
        )
        for i in range(2)
    )
    axes = eqx.tree_at(
        lambda m: m.length,
        jax.tree.map(lambda _: None, grid.training),
        0,
        is_leaf=lambda x: x is None,
    )
    market = eqx.tree_at(lambda m: m.length, grid.training, repeat(grid.lengths))
    train_runs(
        market,
        trained,
        first_policies(s, grid.training, first),
        learner(s),
        steps=s.steps,
        selection=Priority(alphas, s.beta, s.smoothing, 1 - 1 / s.task_size),
        chunk=int(np.gcd.reduce(wanted)),
        record_every=int(np.gcd.reduce(wanted)),
        on_chunk=on_chunk,
        problem_axes=axes,
        keys=draws,
        **algorithm_settings(s, grid.training),
    )
    return rows


def evaluated_steps(scale: Scale, single: bool) -> list[int]:
    """Steps at which policies are tested; single-task ones also where the paper's protocol has them."""
    every = scale.settings.steps // scale.checkpoints
    steps = {every * (i + 1) for i in range(scale.checkpoints)}
    if single:
        for count in scale.counts:
            steps |= {max(step // count, 1) for step in steps if step % count == 0}
    return sorted(steps)


def _rows(
    grid: _Grid,
    methods: tuple[str, ...],
    count: int,
    kind: str,
    step: int,
    record: dict[str, np.ndarray],
    single: bool,
    last: bool,
) -> pd.DataFrame:
    """A checkpoint's rows: the mean over tasks, and at the last step each task by itself."""
    cells = len(grid.starts)
    shaped = {}
    for name, values in record.items():
        # (cells, methods, tasks); single-task policies stand side by side as tasks.
        values = values.reshape(cells, -1, values.shape[-1])
        if single:
            values = values.mean(-1)[:, None, :]
        shaped[name] = values
    tables = [{name: v.mean(-1, keepdims=True) for name, v in shaped.items()}]
    if last and kind == "own":
        tables.append(shaped)
    frames = []
    for table in tables:
        number = table["gain"].shape[-1]
        cell, method, task = (i.ravel() for i in np.indices((cells, len(methods), number)))
        frames.append(
            pd.DataFrame(
                {
                    "method": np.asarray(methods)[method],
                    "tasks": count,
                    "experiment": cell // grid.years,
                    "year": np.asarray(grid.scale.years)[cell % grid.years],
                    "tested": kind,
                    "step": step,
                    "task": task if number > 1 else -1,
                    **{name: v.ravel() for name, v in table.items()},
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


class VolatilityTilt(Policy):
    """Shares in proportion to the volatility seen in the window: what a policy that has learned
    nothing but to favour what moves would do.
    """

    def encode(self, history: History, mask: Mask) -> Float[Array, " entities"]:
        closes = 1 + history[..., 0] / SCALE
        return jnp.diff(jnp.log(closes), axis=-1).std(-1) + 1e-6

    def allocate(
        self, features: Float[Array, " entities"], held: Allocation, mask: Mask
    ) -> Allocation:
        shares = jnp.where(mask, features, 0.0)
        return shares / shares.sum()


def _unlearned_rows(grid: _Grid) -> pd.DataFrame:
    """What learns nothing: lazy Equal CRP, each day a tenth of the way back, and a volatility tilt."""
    cells, step = len(grid.starts), grid.scale.settings.steps
    frames = []
    for kind in ("own", "held-out"):
        tasks = grid.tasks(kind, grid.scale.shown)
        equal = _test(grid, _constant(EqualShares(), cells), tasks, 1)
        for name, policy in (
            ("lazy-equal-crp", PartialTrading(EqualShares(), 0.1)),
            ("volatility-tilt", VolatilityTilt()),
        ):
            record = _test(grid, _constant(policy, cells), tasks, 1).over(equal)
            frames.append(_rows(grid, (name,), 0, kind, step, record, False, False))
    return pd.concat(frames, ignore_index=True)


def _stack(tasks: list[Tasks]) -> Tasks:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *tasks)
