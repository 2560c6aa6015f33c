"""Figure 5: one task's test year under a multi-task and a single-task policy, with allocations.

An epoch is 300 updates per task, as in Figure 4: 9,000 of a multi-task policy with 30 tasks, 300 of a
single-task policy. Both are tested after 2 and after 12 epochs, and a single-task policy also after as
many updates as the multi-task policy has in 2 epochs. The figure shows the task with the largest gain of
the multi-task over the single-task policy after 12 epochs, which is the paper's choice. The table and the
verdicts cover all policies and tasks. Claims: the single-task policy keeps nearly equal shares, the
multi-task policy has learned more complex allocations, and it deviates from equal shares only if that
pays. Rows contain the shares of the drawn task only, because shares of all tasks would reveal the prices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.certify.statistics import over_rows_and_columns
from apportion.composition import EqualShares
from apportion.domains.portfolio import training
from apportion.domains.portfolio.market import Costs, Market, Walk, walk_policy, walk_tasks
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.policy import Policy
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import panels
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion.tasks import Task, single_tasks
from apportion.training import Chunk, Chunks
from apportion.trees import stack, take
from apportion_studies.portfolio.experiments import POINTS, SMALL, each_policy, seeds_of


@dataclass(frozen=True)
class _Size:
    """Size of the study, and training settings of its policies."""

    settings: PortfolioSettings
    policies: int
    """Number of multi-task policies, each with its own instruments, tasks and seed."""
    watched: int
    """Number of tasks of each multi-task policy that also have a single-task policy."""
    updates: int
    """Updates per task in an epoch."""
    epochs: tuple[int, int]
    """Numbers of epochs after which policies are tested, few and many."""

    def stages(self, method: str) -> dict[str, int]:
        """Return after how many updates a policy is tested, by name in the rows."""
        tasks = self.settings.tasks if method == "pmtl" else 1
        found = {
            f"{method}, {when}": tasks * self.updates * epochs
            for when, epochs in zip(_WHEN, self.epochs, strict=True)
        }
        if method == "stl":
            found[_EQUAL_UPDATES] = self.settings.tasks * self.updates * self.epochs[0]
        return found


_WHEN = _FEW, _MANY = ("few epochs", "many epochs")
_EQUAL_UPDATES = "stl, equal updates"
_PAIRS = {
    f"stl, {_FEW}": (f"pmtl, {_FEW}", f"stl, {_FEW}"),
    f"stl, {_MANY}": (f"pmtl, {_MANY}", f"stl, {_MANY}"),
    _EQUAL_UPDATES: (f"pmtl, {_FEW}", _EQUAL_UPDATES),
}
"""Comparisons: each single-task policy with the multi-task one of the same epochs or updates."""
_DRAWN = _PAIRS[f"stl, {_MANY}"]
_METHODS = (f"pmtl, {_FEW}", f"pmtl, {_MANY}", *_PAIRS)
_SCALES = {
    "quick": _Size(
        PortfolioSettings.paper(tasks=12, held_out=7, **SMALL),
        policies=3, watched=2, updates=50, epochs=(1, 3),
    ),
    "paper": _Size(
        PortfolioSettings.paper(tasks=30, held_out=18),
        policies=10, watched=3, updates=300, epochs=(2, 12),
    ),
}  # fmt: skip


def fig5(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """Plan a cell for each multi-task policy and for each single-task policy."""
    prices = embedded_prices() if prices is None else prices
    size = _SCALES[scale]
    size = replace(size, settings=replace(size.settings, seed=seed))
    policies, tasks = size.policies, list(range(size.watched))
    cells = [
        Cell(f"multi-task-{p}", {"method": "pmtl", "policy": p, "tasks": tasks}, "multi-task")
        for p in range(policies)
    ]
    cells += [
        Cell(f"task-{p}-{t}", {"method": "stl", "policy": p, "tasks": [t]}, "single-task")
        for p, t in product(range(policies), tasks)
    ]
    # `stages` replaces this number of updates.
    own = {name: value for name, value in vars(size.settings).items() if name != "steps"}
    about = {"data": prices.summary(), **own}
    about |= {name: value for name, value in vars(size).items() if name != "settings"}
    compute = partial(_compute, prices, size)
    return Plan("fig5", tuple(cells), compute, _conclude, about, keep=_mark_drawn)


def _compute(prices: Prices, size: _Size, cells: Sequence[Cell], progress: OnProgress) -> Rows:
    """Walk each policy through the last year; yield a row for each method, policy, task and day.

    A row has the net log return minus Equal CRP's, the deviation from equal shares, and all shares.
    """
    settings = size.settings
    seeds = [seeds_of(settings.seed, size.policies)[cell["policy"]] for cell in cells]
    year = f"{prices.years()[-1]}-01-01"
    costs = Costs(settings.cost, exact=True)
    test = Market.of(prices, start=year, window=settings.window, costs=costs)
    universe = len(prices.tickers)
    # All tasks of a multi-task policy; a single-task policy learns one of them.
    drawn = [training.draw_portfolio_tasks(universe, replace(settings, seed=own)) for own in seeds]
    tasks = stack([own for _, _, own in drawn])
    method = cells[0]["method"]
    single, stages = method == "stl", size.stages(method)
    epoch = size.updates * (1 if single else settings.tasks)
    settings = replace(settings, method=method, steps=max(stages.values()))
    watched = [(run, t) for run, cell in enumerate(cells) for t in cell["tasks"]]
    runs, numbers = (np.array(column) for column in zip(*watched, strict=True))
    shown = Task(tasks.members[runs, numbers], tasks.mask[runs, numbers])
    walks: dict[str, Walk] = {}

    def on_chunk(chunk: Chunk) -> None:
        for stage, step in stages.items():
            if chunk.step == step:
                walks[stage] = _walk_each(take(chunk.policy, runs), test, shown)
        progress(f"{cells[0].program}: step {chunk.step}", chunk.step / chunk.steps)

    # Keys of first parameters and draws; those of single-task policies differ by task.
    firsts = [jax.random.key(own) for own in seeds]
    if single:
        firsts = [
            jax.random.split(first, size.watched)[cell["tasks"][0]]
            for first, cell in zip(firsts, cells, strict=True)
        ]
    keys = stack(firsts)
    train_portfolio_runs(
        training.training_market(prices.until(year), settings),
        single_tasks(shown) if single else tasks,
        settings,
        policy_keys=keys,
        run_keys=keys,
        chunks=Chunks(epoch, epoch, on_chunk),
    )
    dates = prices.dates[int(test.first) :][: test.horizon].astype(str)
    equal = walk_tasks(EqualShares(), test, shown)
    frames: list[list[pd.DataFrame]] = [[] for _ in cells]
    for (stage, walk), place in product(walks.items(), range(len(shown))):
        shares = np.asarray(walk.allocations[place])
        every = np.full((len(dates), universe), np.nan, shares.dtype)
        every[:, shown[place].entities] = shares
        frame = pd.DataFrame({"method": stage, "date": dates}).assign(
            over_equal=np.asarray(walk.log_return - equal.log_return)[place],
            deviation=np.abs(shares - 1 / shares.shape[-1]).max(-1),
        )
        frame = frame.join(pd.DataFrame(every, columns=[f"share {one}" for one in prices.tickers]))
        run = runs[place]
        frames[run].append(frame.assign(policy=cells[run]["policy"], task=numbers[place]))
    for cell, own in zip(cells, frames, strict=True):
        yield cell, pd.concat(own, ignore_index=True)


@eqx.filter_jit
def _walk_each(policies: Policy, market: Market, tasks: Task) -> Walk:
    """Walk each task with its own policy."""
    return each_policy(
        lambda policy, task: walk_policy(policy, market, task), policies, tasks, at_once=8
    )


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Return the figure from the rows of all walks."""
    table = rows.drop(columns="cell", errors="ignore")
    deviation, gain = (_by_policy_and_month(table, name) for name in ("deviation", "over_equal"))
    gain = {name: 100 * table.date.nunique() * values for name, values in gain.items()}
    notes = (
        "The plot shows the task with the largest gain of the multi-task over the single-task policy: an "
        "example, not a typical task. Intervals are over policies, each with its own "
        "instruments and tasks, and months of one year.",
        f"An epoch is {settings['updates']} updates a task; few epochs are {settings['epochs'][0]}, many "
        f"{settings['epochs'][1]}.",
        *(
            f"{name}: {float(gain[name].mean()):+.2f} {POINTS} over Equal CRP, mean deviation from equal "
            f"shares {float(deviation[name].mean()):.4f}"
            for name in _METHODS
        ),
    )
    # For each method, policy and task: growth over Equal CRP and mean deviation in the year.
    kept = {"over_equal": "sum", "deviation": "mean", "drawn": "first"}
    years = table.groupby(["method", "policy", "task"], sort=False).agg(kept).reset_index()
    found = (years, _verdicts(table, deviation, gain), lambda: _plot(table), notes)
    title = "Figure 5: a test year under a multi-task and a single-task policy"
    return [FigureResult("fig5", title, *found)]


def _by_policy_and_month(table: Any, column: str) -> dict[str, np.ndarray]:
    """Return a column by policy and month, scaled so that its mean is the mean over all days.

    Policies and months are the units: a policy's tasks share instruments, a month's days a market.
    """
    month = table.date.str[:7].rename("month")
    keys = [table.method, table.policy, month]
    sums = table[column].groupby(keys).sum().unstack("month")
    tasks = table.task.groupby([table.method, table.policy]).nunique().max()
    days = table.date.nunique() / sums.shape[1]
    return {name: sums.loc[name].to_numpy() / (days * tasks) for name in _METHODS}


def _mark_drawn(rows: Any) -> pd.DataFrame:
    """Mark the task to draw, and keep shares of that task only."""
    total = rows.groupby(["method", "policy", "task"]).over_equal.sum().unstack("method")
    multi, single = _DRAWN
    policy, task = (total[multi] - total[single]).idxmax()
    drawn = (rows.policy == policy) & (rows.task == task)
    is_share = rows.columns.str.startswith("share ")
    shares = rows.loc[:, is_share].where(drawn).dropna(axis=1, how="all")
    return rows.loc[:, ~is_share].assign(drawn=drawn).join(shares)


def _verdicts(
    table: Any, deviation: dict[str, np.ndarray], gain: dict[str, np.ndarray]
) -> Iterator[Verdict]:
    """Yield claims about each single-task policy, from values by policy and month.

    The last claims are that a policy gains more on days on which it deviates more than on average.
    """
    for name, (multi, single) in _PAIRS.items():
        paper = name != _EQUAL_UPDATES
        claim = f"the policy of {name}, keeps nearly equal shares (mean deviation below 0.02)"
        yield Verdict.of(claim, over_rows_and_columns(deviation[single]), below=0.02, paper=paper)
        claim = f"the multi-task policy strays further from equal shares than {name}"
        further = over_rows_and_columns(deviation[multi] - deviation[single])
        arms = {multi: deviation[multi], single: deviation[single]}
        levels = {arm: float(values.mean()) for arm, values in arms.items()}
        yield Verdict.of(claim, further, paper=paper, levels=levels)
        claim = f"over all watched tasks the multi-task policy grows more than {name} ({POINTS})"
        ahead = over_rows_and_columns(gain[multi] - gain[single])
        levels = {arm: float(gain[arm].mean()) for arm in arms}
        yield Verdict.of(claim, ahead, paper=False, levels=levels)
    days = table.groupby(["method", "policy", "task"])
    further = table.deviation - days.deviation.transform("mean")
    for name in (*_METHODS[:2], _EQUAL_UPDATES):
        spread = float(further[table.method == name].std())
        together = table.assign(together=further * table.over_equal / (spread or 1.0))
        moved = 100 * table.date.nunique() * _by_policy_and_month(together, "together")[name]
        claim = f"{name}: strays from equal shares if it pays"
        claim += f" ({POINTS} with one more deviation of straying)"
        yield Verdict.of(claim, over_rows_and_columns(moved), paper=name != _EQUAL_UPDATES)


def _plot(table: Any) -> Figure:
    """Plot the gain over Equal CRP, and the allocations of both policies."""
    rows = table[table.drawn]
    figure, axes = panels(14, 4.2, 3, frame=True)
    for name, colour in zip((*_DRAWN, _EQUAL_UPDATES), ("C1", "C0", "0.7"), strict=True):
        one = rows[rows.method == name]
        gain = 100 * one.over_equal.cumsum()
        axes[0].plot(pd.to_datetime(one.date), gain, color=colour, label=name)
    axes[0].axhline(0, color="k", linewidth=0.8)
    axes[0].set_ylabel("points of log growth over Equal CRP, net")
    axes[0].legend(fontsize=8)
    shares = [c for c in rows.columns if c.startswith("share ")]
    labels = [c.removeprefix("share ") for c in shares]
    for axis, name in zip(axes[1:], _DRAWN, strict=True):
        one = rows[rows.method == name]
        axis.stackplot(pd.to_datetime(one.date), one[shares].T.to_numpy(float), labels=labels)
        axis.set_title(f"allocations, {name}", fontsize=10)
        axis.set_ylim(0, 1)
    axes[2].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for axis in axes:
        axis.tick_params(axis="x", rotation=40)
    return figure
