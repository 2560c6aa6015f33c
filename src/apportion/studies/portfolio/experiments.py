"""Walk-forward experiments: which instruments each one holds out, its tasks, and the years that test it.

A policy learns from the days before a test year alone and is then walked through that year, on its own
tasks and on tasks of instruments it never saw.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from apportion.domains.portfolio.market import Costs, Market
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import training_market
from apportion.domains.portfolio.validation import Years
from apportion.studies.cells import Cell
from apportion.tasks import TaskSets, draw_tasks, split_entities

SMALL: dict[str, Any] = {"task_size": 5, "window": 8, "batch": 32, "hidden": 12}
SMALL |= {"learning_rate": 3e-3}
"""Settings of studies at quick scale."""
SURVIVORSHIP = (
    "The instruments are those that were large when the data was gathered (survivorship), and each "
    "year of a market is one draw: intervals are over experiments and years of this market only."
)


@dataclass(frozen=True, eq=False)
class Splits:
    """For each experiment the instruments it trains on and those it holds out, with tasks of both."""

    seen: list[np.ndarray]
    unseen: list[np.ndarray]
    own: TaskSets
    held_out: TaskSets

    @classmethod
    def draw(
        cls,
        universe: int,
        settings: PortfolioSettings,
        experiments: int,
        *,
        held_out: int,
        own: int,
        shown: int,
    ) -> "Splits":
        """Each experiment has `own` tasks to train on, and `shown` of held-out instruments.

        Examples
        --------
        >>> settings = PortfolioSettings(task_size=3)
        >>> splits = Splits.draw(10, settings, 2, held_out=4, own=5, shown=2)
        >>> len(splits.own[0]), len(splits.held_out[1]), len(splits.unseen[1])
        (5, 2, 4)
        """
        seeds = range(settings.seed, settings.seed + experiments)
        halves = [split_entities(universe, held_out, seed=seed) for seed in seeds]

        def tasks(half: int, count: int) -> TaskSets:
            pairs = zip(halves, seeds, strict=True)
            m = settings.task_size
            return TaskSets.of([draw_tasks(both[half], m, count, seed=own) for both, own in pairs])

        seen, unseen = ([both[half] for both in halves] for half in range(2))
        return cls(seen, unseen, tasks(0, own), tasks(1, shown))


class Runs(NamedTuple):
    """Where each run stands in its experiments."""

    experiment: np.ndarray
    pair: np.ndarray
    """Number of its (experiment, year) among all, experiments first."""
    lengths: Int[Array, " runs"]
    """Periods it may learn from."""
    starts: Int[Array, " runs"]
    """Row of the first day of its test year."""
    days: Int[Array, " runs"]
    """Days of its test year."""


@dataclass(frozen=True, eq=False)
class Experiments:
    """Experiments by test years on one market."""

    splits: Splits
    years: Years
    training: Market
    testing: Market
    """Its horizon is the longest test year; a run sets its first row."""

    @classmethod
    def of(
        cls, prices: Prices, settings: PortfolioSettings, years: Sequence[int], splits: Splits
    ) -> "Experiments":
        """Training on all days before the last test year, testing with exact costs."""
        spans = Years.of(prices, years, before=settings.window + settings.batch)
        known = prices.until(prices.dates[max(spans.firsts)])
        costs = Costs(settings.cost, exact=True)
        whole = Market.of(prices, window=settings.window, costs=costs)
        return cls(
            splits, spans, training_market(known, settings), replace(whole, horizon=max(spans.days))
        )

    @property
    def pairs(self) -> int:
        """Number of (experiment, year) pairs."""
        return len(self.splits.seen) * len(self.years.years)

    def runs(self, cells: Sequence[Cell], each: int = 1) -> Runs:
        """The places of cells with `each` runs, in their order."""
        experiment = np.repeat([cell["experiment"] for cell in cells], each)
        year = np.repeat([self.years.years.index(cell["year"]) for cell in cells], each)
        return Runs(
            experiment,
            experiment * len(self.years.years) + year,
            self.years.known(self.training.window)[year],
            jnp.asarray(self.years.firsts, jnp.int32)[year],
            jnp.asarray(self.years.days, jnp.int32)[year],
        )
