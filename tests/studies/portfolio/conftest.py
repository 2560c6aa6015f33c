"""A small market, and the computing of a plan's cells without a folder."""

from collections.abc import Callable, Sequence

import pandas as pd
import pytest

from apportion.domains.portfolio import SimulatedMarket
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.studies.engine import Cell, Plan, programs_of

Compute = Callable[..., dict[str, pd.DataFrame]]


@pytest.fixture(scope="session")
def prices():
    return SimulatedMarket.draw(universe=10, days=1090, seed=5).prices


@pytest.fixture(scope="session")
def tiny() -> PortfolioSettings:
    return PortfolioSettings.paper(
        tasks=4, task_size=3, window=6, batch=12, hidden=4, learning_rate=1e-2, steps=12
    )


@pytest.fixture(scope="session")
def compute() -> Compute:
    """The rows of some cells of a plan (default: all), by the cell's name."""

    def of(plan: Plan, cells: Sequence[Cell] | None = None) -> dict[str, pd.DataFrame]:
        return {
            cell.name: rows.assign(cell=cell.name)
            for batch in programs_of(plan.cells if cells is None else cells)
            for cell, rows in plan.compute(batch, lambda what, fraction: None)
        }

    return of
