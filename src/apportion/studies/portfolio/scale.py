"""How large the portfolio experiments of Figures 3 and 4 are: the paper's size, and a quick one."""

from dataclasses import dataclass, replace
from typing import Any

from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.errors import InputError

SURVIVORSHIP = (
    "The instruments are those that were large when the data was gathered (survivorship), and each "
    "year of a market is one draw: intervals are over experiments and years of this market only."
)


@dataclass(frozen=True)
class Scale:
    """How large the grid is."""

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
    seed: int = 0

    def seeded(self, seed: int) -> "Scale":
        """The same grid with other experiments."""
        return replace(self, seed=seed)

    def within(self, prices: Prices) -> "Scale":
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


PAPER = Scale(
    settings=PortfolioSettings.paper(),
    experiments=10,
    years=tuple(range(2013, 2020)),
    counts=(5, 30, 100),
    held_out=18,
    single_tasks=3,
    shown=10,
    checkpoints=12,
)
QUICK = Scale(
    settings=PortfolioSettings.paper(
        task_size=5, window=8, batch=32, hidden=12, learning_rate=3e-3, steps=1800
    ),
    experiments=3,
    years=(2017, 2018, 2019),
    counts=(3, 12),
    held_out=7,
    single_tasks=2,
    shown=4,
    checkpoints=6,
)


def describe(prices: Prices, scale: Scale) -> dict[str, Any]:
    """What is needed to run the grid again."""
    return {
        "data": prices.summary(),
        "experiments": scale.experiments,
        "years": list(scale.years),
        "tasks": list(scale.counts),
        "held_out_instruments": scale.held_out,
        "single_task_policies_per_experiment": scale.single_tasks,
        "tested_tasks": scale.shown,
        "seed": scale.seed,
        **vars(scale.settings),
    }
