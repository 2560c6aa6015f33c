"""Walk-forward experiments: held-out instruments, tasks and test years.

A policy learns from the days before a test year. It is then walked through that year, on its own tasks and
on tasks of held-out instruments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int, PyTree

from apportion.certify.statistics import over_rows_and_columns
from apportion.domains.portfolio.market import Costs, Market, growth_and_sharpe, walk_policy
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import training_market
from apportion.domains.portfolio.validation import Years
from apportion.policy import Policy
from apportion.studies.engine import Cell, Rows
from apportion.tasks import Task, draw_tasks, split_entities
from apportion.trees import stack

SMALL: dict[str, Any] = {"task_size": 5, "window": 8, "batch": 32, "hidden": 12}
SMALL |= {"learning_rate": 3e-3}
"""Settings of studies at quick scale."""
POINTS = "points a year"
"""Unit of every gain of the portfolio studies: 100 times the log growth a year, net of costs.

Policies maximise log growth, which adds up over years. Unlike a difference of two returns, a
difference of two log growths does not depend on how much the market itself grew.
"""
SURVIVORSHIP = (
    "The instruments are those that were large when the data was gathered (survivorship), and each "
    "year of a market is one draw: intervals are over experiments and years of this market only."
)


class _Runs(NamedTuple):
    """Experiment, training period and test year of each run."""

    experiment: np.ndarray
    pair: np.ndarray
    """Index of each run's (experiment, year) pair; experiments vary slowest."""
    lengths: Int[Array, " runs"]
    """Number of periods that each run may learn from."""
    starts: Int[Array, " runs"]
    """Row of the first day of each run's test year."""
    days: Int[Array, " runs"]
    """Number of days in each run's test year."""


@dataclass(frozen=True, eq=False)
class Experiments:
    """Experiments on one market and several test years; each holds out its own instruments."""

    own: Task
    """Each experiment's tasks to train on."""
    held_out: Task
    """Each experiment's tasks of held-out instruments."""
    years: Years
    training: Market
    testing: Market
    """The horizon is the longest test year; each run sets the first row."""

    @classmethod
    def of(
        cls,
        prices: Prices,
        settings: PortfolioSettings,
        years: Sequence[int],
        experiments: int,
        *,
        held_out: int,
        own: int,
        shown: int,
    ) -> "Experiments":
        """Train on all days before the last test year, and test with exact costs.

        Each experiment has `own` training tasks and `shown` tasks of its `held_out` instruments.
        """
        seeds = seeds_of(settings.seed, experiments)
        halves = [split_entities(len(prices.tickers), held_out, seed=seed) for seed in seeds]
        own_tasks, unseen_tasks = (
            stack(
                [
                    draw_tasks(both[half], settings.task_size, count, seed=seed)
                    for both, seed in zip(halves, seeds, strict=True)
                ]
            )
            for half, count in enumerate((own, shown))
        )
        spans = Years.of(prices, years, before=settings.window + settings.batch)
        known = prices.until(prices.dates[max(spans.firsts)])
        costs = Costs(settings.cost, exact=True)
        whole = Market.of(prices, window=settings.window, costs=costs)
        longest = replace(whole, horizon=max(spans.days))
        return cls(own_tasks, unseen_tasks, spans, training_market(known, settings), longest)

    @property
    def pairs(self) -> int:
        """Number of (experiment, year) pairs."""
        return len(self.own) * len(self.years.years)

    def runs(self, cells: Sequence[Cell], each: int = 1) -> _Runs:
        """Return experiment, period and test year of the runs of these cells, `each` runs per cell."""
        experiment = np.repeat([cell["experiment"] for cell in cells], each)
        year = np.repeat([self.years.years.index(cell["year"]) for cell in cells], each)
        return _Runs(
            experiment,
            experiment * len(self.years.years) + year,
            self.years.known(self.training.window)[year],
            jnp.asarray(self.years.firsts, jnp.int32)[year],
            jnp.asarray(self.years.days, jnp.int32)[year],
        )


def seeds_of(seed: int, count: int) -> range:
    """Return the seeds of a study's parts; studies with different seeds share none.

    >>> seeds_of(0, 3), seeds_of(1, 3)
    (range(0, 3), range(1000, 1003))
    """
    return range(1000 * seed, 1000 * seed + count)


def doubling(first: int, end: int) -> set[int]:
    """Return numbers of updates after which policies are tested: `first`, its doubles, and `end`.

    >>> sorted(doubling(100, 1000))
    [100, 200, 400, 800, 1000]
    """
    doubled = {first * 2**power for power in range(end.bit_length())}
    return {step for step in doubled if step < end} | {end}


def stopped(rows: Any, arm: Sequence[str]) -> Any:
    """Select rows by early stopping: the number of updates that was best in the year before.

    Parameters
    ----------
    rows
        Columns `experiment`, `year`, `tested`, `step` and `gain`, and those of `arm`; the first year is
        for validation alone.
    arm
        Columns that name an arm.

    Returns
    -------
    DataFrame
        Rows of all years but the first. Each arm, experiment and year has one number of updates:
        the one with the highest mean gain on own tasks in the year before, for policies of the same
        arm and experiment that learned from the days before that earlier year.
    """
    place = [*arm, "experiment", "year"]
    own = rows[rows.tested == "own"].groupby([*place, "step"]).gain.mean()
    best = own.unstack("step").idxmax(axis=1).rename("step").reset_index()
    return rows.merge(best.assign(year=best.year + 1), on=[*place, "step"])


def share_of_years(gap: Any) -> float:
    """Return the share of the years in the variance of the mean of a gap (experiments, years).

    >>> share_of_years(pd.DataFrame([[1.0, 5.0, 9.0], [1.0, 5.0, 9.0]]))
    1.0
    """
    table = np.asarray(gap, float)
    by_row, by_column = table.mean(1), table.mean(0)
    rest = ((table - by_row[:, None] - by_column + table.mean()) ** 2).sum()
    rest /= max((table.shape[0] - 1) * (table.shape[1] - 1), 1)
    # Components of variance; an estimate below 0 counts as 0.
    years = max(by_column.var(ddof=1) - rest / table.shape[0], 0.0)
    experiments = max(by_row.var(ddof=1) - rest / table.shape[1], 0.0)
    of_mean = years / table.shape[1], experiments / table.shape[0], rest / table.size
    return float(of_mean[0] / (sum(of_mean) or 1.0))


def each_policy(follow: Callable[..., Any], policies: Policy, *others: PyTree, at_once: int) -> Any:
    """Apply `follow` to each policy with its own slice of `others`.

    Only `at_once` run at a time, because the price windows of all policies do not fit in memory.
    """
    arrays, rest = eqx.partition(policies, eqx.is_array)

    def one(run: PyTree) -> Any:
        arrays, *own = run
        return follow(eqx.combine(arrays, rest), *own)

    return jax.lax.map(one, (arrays, *others), batch_size=at_once)


def at_once(tasks: Task) -> int:
    """Return how many policies with these tasks to walk together through a market. A thousand walks
    fit in memory and take hardly longer than one.

    >>> at_once(Task(jnp.broadcast_to(jnp.arange(10), (70, 30, 10)), jnp.ones((70, 30, 10), bool)))
    33
    """
    return max(1, 1000 // tasks.members.shape[1])


@eqx.filter_jit
def walk_each(
    policies: Policy,
    market: Market,
    starts: Int[Array, " runs"],
    days: Int[Array, " runs"],
    tasks: Task,
) -> tuple[Float[Array, "runs tasks"], Float[Array, "runs tasks"]]:
    """Net log growth a year and Sharpe ratio of each run's policy on each of its tasks."""

    def one(policy: Policy, start, days, tasks: Task):
        here = eqx.tree_at(lambda m: m.first, market, start)
        log = jax.vmap(lambda task: walk_policy(policy, here, task, chunk=512).log_return)(tasks)
        return growth_and_sharpe(log, days)

    return each_policy(one, policies, starts, days, tasks, at_once=at_once(tasks))


def by_cell(cells: Sequence[Cell], table: pd.DataFrame) -> Rows:
    """Split the table of a batch into the rows of each cell, with the values of the cell.

    `table` has a column `place`, the number of the cell in the batch.
    """
    for place, rows in table.groupby("place"):
        cell = cells[int(place)]  # pyright: ignore[reportArgumentType]
        own = rows.drop(columns="place").reset_index(drop=True)
        yield cell, pd.DataFrame(cell.values, index=own.index).join(own)


def note(name: str, values: Any, unit: str = POINTS) -> str:
    """Format a value (experiments by years) with its interval as a sentence."""
    e = over_rows_and_columns(values)
    return f"{name}: {e.value:+.2f} {unit} [{e.low:+.2f}, {e.high:+.2f}]"
