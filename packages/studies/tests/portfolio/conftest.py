"""A small market, plans of any size, and the rows or the training arguments of their cells."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pandas as pd
import pytest

from apportion.domains.portfolio import SimulatedMarket
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.studies.engine import Cell, Plan, _programs_of


@pytest.fixture(scope="session")
def prices():
    return SimulatedMarket.draw(universe=10, days=1090, seed=5).prices


@pytest.fixture(scope="session")
def tiny() -> PortfolioSettings:
    return PortfolioSettings.paper(
        tasks=4, task_size=3, window=6, batch=12, hidden=4, learning_rate=1e-2, steps=12
    )


@pytest.fixture(scope="session")
def sized() -> Callable[..., Plan]:
    """Make a study's plan with another size in place of its quick scale."""

    def of(module: Any, size: Any, **options: Any) -> Plan:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(module._SCALES, "quick", size)
            return getattr(module, module.__name__.rpartition(".")[2])(**options)

    return of


@pytest.fixture(scope="session")
def compute() -> Callable[..., dict[str, pd.DataFrame]]:
    """Compute the rows of some cells of a plan (default: all), by the cell's name."""

    def of(plan: Plan, cells: Sequence[Cell] | None = None) -> dict[str, pd.DataFrame]:
        return {
            cell.name: rows.assign(cell=cell.name)
            for program in _programs_of(plan, plan.cells if cells is None else cells)
            for cell, rows in plan.compute(program.cells, lambda what, fraction: None)
        }

    return of


@pytest.fixture(scope="session")
def given() -> Callable[..., dict[str, Any]]:
    """Return the arguments that a study passes to training for some cells, without training."""

    def of(module: Any, plan: Plan, cells: Sequence[Cell]) -> dict[str, Any]:
        seen: dict = {}

        def take_down(market, tasks, settings, **others):
            seen.update(market=market, tasks=tasks, settings=settings, **others)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, train_portfolio_runs.__name__, take_down)
            # Skip the gain of equal shares, which some studies compute first.
            for walks in ("walk_each", "_walks"):
                patch.setattr(module, walks, lambda *where: None, raising=False)
            with pytest.raises(KeyboardInterrupt):
                list(plan.compute(cells, lambda what, fraction: None))
        return seen

    return of


@pytest.fixture(scope="session")
def alone_is_given_the_same(given) -> Callable[..., None]:
    """Check that a cell alone is trained with the same arguments as in its whole program."""

    def check(module: Any, plan: Plan, name: str, names: Sequence[str], runs: int = 1) -> None:
        [cell] = [cell for cell in plan.cells if cell.name == name]
        program = [other for other in plan.cells if other.program == cell.program]
        several, alone = given(module, plan, program), given(module, plan, [cell])
        own = slice(runs * program.index(cell), runs * (program.index(cell) + 1))
        for part in names:
            for one, all_of_them in zip(
                *(jax.tree.leaves(seen[part]) for seen in (alone, several)), strict=True
            ):
                assert (one == all_of_them[own]).all(), part

    return check
