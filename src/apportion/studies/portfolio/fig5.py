"""Figure 5: one task's test year under a multi-task and a single-task policy, with allocations.

Shown is the task on which the multi-task policy gains most over the single-task one, as the paper
chose it; the table and the verdicts cover every task watched. Claim: the single-task policy keeps
nearly equal shares while the multi-task one has learned more complex allocations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.composition import EqualShares
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import choose_tasks, train_policies, training_market
from apportion.domains.portfolio.walk import Walk, walk_policy, walk_tasks
from apportion.policy import Policy
from apportion.statistics import over_rows_and_columns
from apportion.studies.cells import Cell, Plan, Progress, Rows
from apportion.studies.registry import Scale
from apportion.studies.study import Study, Verdict
from apportion.tasks import Tasks, TaskSets, single_tasks
from apportion.training import Chunk, Chunks
from apportion.trees import copies, take


@dataclass(frozen=True)
class WatchedTasks:
    """How policies are trained, and how many tasks have a single-task policy of their own."""

    settings: PortfolioSettings
    watched: int


PAPER = WatchedTasks(PortfolioSettings.paper(tasks=30, held_out=18), 30)
QUICK = WatchedTasks(
    PortfolioSettings.paper(
        tasks=12,
        task_size=5,
        window=8,
        batch=32,
        hidden=12,
        learning_rate=3e-3,
        steps=1800,
        held_out=7,
    ),
    6,
)
METHODS = ("pmtl", "stl (paper's protocol)", "stl (equal updates)")


def plan(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """A cell for the multi-task policy, and one for each single-task policy."""
    prices = embedded_prices() if prices is None else prices
    size = PAPER if scale == "paper" else QUICK
    return sized_plan(prices, replace(size, settings=replace(size.settings, seed=seed)))


def sized_plan(prices: Prices, size: WatchedTasks) -> Plan:
    """The plan with any number of watched tasks."""
    watched = list(range(size.watched))
    cells = [Cell("multi-task", {"method": "pmtl", "tasks": watched}, "multi-task")]
    cells += [Cell(f"task-{t}", {"method": "stl", "tasks": [t]}, "single-task") for t in watched]
    settings = {"data": prices.summary(), "watched": size.watched, **vars(size.settings)}
    return Plan("fig5", tuple(cells), partial(compute, prices, size), conclude, settings)


def compute(prices: Prices, size: WatchedTasks, cells: Sequence[Cell], progress: Progress) -> Rows:
    """The last year of the data under each cell's policy: a row for each method, task and day."""
    settings = replace(size.settings, method=cells[0]["method"])
    year = f"{prices.years()[-1]}-01-01"
    costs = Costs.of(settings.cost, prices.tickers, exact=True)
    test = Market.of(prices, start=year, window=settings.window, costs=costs)
    *_, tasks = choose_tasks(len(prices.tickers), size.settings)
    epoch = settings.steps // len(tasks)
    whole = epoch * len(tasks)
    numbers = [t for cell in cells for t in cell["tasks"]]
    shown = tasks[numbers]
    single = settings.method == "stl"
    trained: Tasks | TaskSets = single_tasks(shown) if single else tasks
    stages = {METHODS[1]: epoch, METHODS[2]: whole} if single else {METHODS[0]: whole}
    walks: dict[str, Walk] = {}

    def on_chunk(chunk: Chunk) -> None:
        policies = chunk.policy if single else copies(take(chunk.policy, 0), len(shown))
        for method, step in stages.items():
            if chunk.step == step:
                walks[method] = _walk_each(policies, test, shown)
        progress(f"{cells[0].program}: step {chunk.step}", chunk.step / chunk.steps)

    keys = jax.random.split(jax.random.key(settings.seed), size.watched if single else 1)
    keys = keys[np.asarray(numbers)] if single else keys
    train_policies(
        training_market(prices.until(year), settings),
        trained,
        replace(settings, steps=whole),
        policy_keys=keys,
        run_keys=keys,
        chunks=Chunks(epoch, epoch, on_chunk),
    )
    rows: Any = _rows(prices, test, shown, numbers, walks)
    for cell in cells:
        yield cell, rows[rows.task.isin(cell["tasks"])].reset_index(drop=True)


@eqx.filter_jit
def _walk_each(policies: Policy, market: Market, tasks: Tasks) -> Walk:
    """Each task under its own policy."""
    arrays, rest = eqx.partition(policies, eqx.is_array)
    return jax.lax.map(
        lambda run: walk_policy(eqx.combine(run[0], rest), market, run[1]),
        (arrays, tasks.each),
        batch_size=8,
    )


def _rows(
    prices: Prices, test: Market, tasks: Tasks, numbers: list[int], walks: dict[str, Walk]
) -> pd.DataFrame:
    """Net log return over Equal CRP's, deviation from equal shares, and the share of each ticker."""
    first = int(test.first)
    dates = prices.dates[first : first + test.horizon].astype(str)
    columns = [f"share {ticker}" for ticker in prices.tickers]
    equal = walk_tasks(EqualShares(), test, tasks)
    frames = []
    for method, walk in walks.items():
        gaps = np.asarray(walk.log_return - equal.log_return)
        shares = np.asarray(walk.allocations)
        deviation = np.abs(shares - 1 / shares.shape[-1]).max(-1)
        for place, number in enumerate(numbers):
            frame = pd.DataFrame({"method": method, "task": number, "date": dates})
            frame = frame.assign(over_equal=gaps[place], deviation=deviation[place])
            every = np.full((len(dates), len(columns)), np.nan, shares.dtype)
            every[:, tasks[place].entities] = shares[place]
            frames.append(frame.join(pd.DataFrame(every, columns=columns)))
    return pd.concat(frames, ignore_index=True)


def conclude(rows: Any, settings: dict[str, Any]) -> Study:
    """The study from the walks."""
    table = mark_drawn(rows.drop(columns="cell", errors="ignore"))
    deviation, gain = (by_task_and_month(table, name) for name in ("deviation", "over_equal"))
    gain = {name: table.date.nunique() * values for name, values in gain.items()}
    notes = (
        "The task drawn is the one where the multi-task policy gains most over the single-task one: "
        "it shows what the policies do, not how often. Intervals are over tasks and months of "
        "one year, for one training of each policy.",
        *(f"{name}: {float(gain[name].mean()):+.4f} log growth over Equal CRP" for name in METHODS),
    )
    return Study(
        "fig5",
        "Figure 5: a test year under a multi-task and a single-task policy",
        table,
        tuple(verdict for name in METHODS[1:] for verdict in _verdicts(name, deviation, gain)),
        lambda: plot(table),
        notes,
        settings,
    )


def by_task_and_month(table: Any, column: str) -> dict[str, np.ndarray]:
    """A method's values of a column, tasks by months; the mean of such a table is that over all days.

    Tasks share their days, and the days of a month share a market.
    """
    month = table.date.str[:7].rename("month")
    sums = table[column].groupby([table.method, table.task, month]).sum().unstack("month")
    days = table.date.nunique() / sums.shape[1]
    return {name: sums.loc[name].to_numpy() / days for name in METHODS}


def _by_task(values: Any, table: Any) -> Any:
    return values.groupby([table.method, table.task])


def mark_drawn(rows: Any) -> pd.DataFrame:
    """The rows with the task to draw marked; shares are kept for that one."""
    total = _by_task(rows.over_equal, rows).sum().unstack("method")
    drawn = rows.task == (total["pmtl"] - total[METHODS[2]]).idxmax()
    is_share = rows.columns.str.startswith("share ")
    shares = rows.loc[:, is_share].where(drawn).dropna(axis=1, how="all")
    return rows.loc[:, ~is_share].assign(drawn=drawn).join(shares)


def _verdicts(
    name: str, deviation: dict[str, np.ndarray], gain: dict[str, np.ndarray]
) -> tuple[Verdict, ...]:
    """What is claimed of a single-task policy, from values of tasks by months."""
    flat = over_rows_and_columns(deviation[name])
    gap = over_rows_and_columns(deviation["pmtl"] - deviation[name])
    ahead = over_rows_and_columns(gain["pmtl"] - gain[name])
    return (
        Verdict.of(
            f"the policy of {name} keeps nearly equal shares (mean deviation below 0.02)",
            flat,
            below=0.02,
        ),
        Verdict.of(
            f"the multi-task policy strays further from equal shares than {name}",
            gap,
        ),
        Verdict.of(
            f"over all watched tasks the multi-task policy grows more than {name}",
            ahead,
            paper=False,
        ),
    )


def plot(table: Any) -> Figure:
    """Gain over Equal CRP, then the allocations of both policies."""
    rows = table[table.drawn]
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for name, colour in zip(METHODS, ("C1", "0.7", "0.4"), strict=True):
        one = rows[rows.method == name]
        gain = 100 * np.expm1(one.over_equal.cumsum())
        axes[0].plot(pd.to_datetime(one.date), gain, color=colour, label=name)
    axes[0].axhline(0, color="k", linewidth=0.8)
    axes[0].set_ylabel("% over Equal CRP, net")
    axes[0].legend(fontsize=8)
    shares = [c for c in rows.columns if c.startswith("share ")]
    for place, name in ((1, METHODS[0]), (2, METHODS[2])):
        one = rows[rows.method == name]
        labels = [c.removeprefix("share ") for c in shares]
        axes[place].stackplot(
            pd.to_datetime(one.date), one[shares].T.to_numpy(float), labels=labels
        )
        axes[place].set_title(f"allocations, {name}", fontsize=10)
        axes[place].set_ylim(0, 1)
    axes[2].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for each in axes:
        each.tick_params(axis="x", rotation=40)
    return figure
