"""Selection of trust k, trade fraction eta and the number of updates on validation years.

For each validation year, policies are trained on the days before it and compared by the Sharpe ratio
(selection by return overfits). Equal shares (k = 0) are selected unless a learned policy beats them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

from apportion.domains.portfolio.market import Costs, Market, growth_and_sharpe, walk_policy
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.record import TRADING_DAYS
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import (
    combine_members,
    draw_portfolio_tasks,
    train_portfolio_runs,
    training_market,
)
from apportion.errors import InputError, reading
from apportion.policy import Policy
from apportion.tasks import Task
from apportion.training import Chunk, Chunks, OnChunk
from apportion.trees import grouped, stack

K_GRID = (0.0, 0.25, 0.5, 1.0)
ETA_GRID = (0.05, 0.1, 0.3, 1.0)
"""Candidate values of k and eta."""
_CHECKPOINTS = 3
"""Number of candidate values for the number of updates."""
_LEAST_DAYS = TRADING_DAYS // 2
"""Smallest number of trading days in a validation year."""
_TESTED = 10
"""Largest number of tasks to validate on."""


@dataclass(frozen=True)
class Years:
    """Walk-forward years as rows of a price table; each is tested with policies trained before it."""

    years: tuple[int, ...]
    firsts: tuple[int, ...]
    days: tuple[int, ...]

    @classmethod
    def of(cls, prices: Prices, years: Sequence[int], *, before: int) -> "Years":
        """Build from calendar years; raise InputError if a year has fewer than `before` days before it."""
        firsts = [prices.row(f"{year}-01-01") for year in years]
        days = [
            prices.row(f"{year + 1}-01-01") - first
            for year, first in zip(years, firsts, strict=True)
        ]
        for year, first, length in zip(years, firsts, days, strict=True):
            if length < 2 or first < before:
                raise InputError(
                    f"walk-forward year {year}: {first} days before it and {length} in it; "
                    f"{before} before it are needed, so choose other years or give more prices"
                )
        return cls(tuple(years), tuple(firsts), tuple(days))

    def known(self, window: int) -> Int[Array, " years"]:
        """Return the number of training periods before each year, without the first window."""
        return jnp.asarray([first - window for first in self.firsts], jnp.int32)


@dataclass(frozen=True)
class Choice:
    """Selected k, eta and number of updates."""

    k: float
    eta: float
    steps: int
    """Updates of each policy."""
    table: pd.DataFrame
    """Sharpe ratio of each variant minus that of daily Equal CRP, by year and overall."""

    def applied(self, settings: PortfolioSettings) -> PortfolioSettings:
        """Return the settings with the selected values."""
        return replace(settings, trust=self.k, trade_fraction=self.eta, steps=self.steps)

    def summary(self) -> str:
        """Describe the choice, with the gains of the selected variant and of equal shares."""
        years = [column for column in self.table if str(column).isdigit()]
        over = years[0] if len(years) == 1 else f"{years[0]}-{years[-1]}"
        gain, lazy = self._gain(self.k, self.eta), self._gain(0.0, self.eta)
        return (
            f"trust {self.k:g} (0 is equal shares), trade fraction {self.eta:g} and {self.steps:,} updates "
            f"by the Sharpe ratio over {over} (over daily Equal CRP {gain:+.4f}; equal shares at the same "
            f"fraction {lazy:+.4f})"
        )

    def to_frame(self) -> pd.DataFrame:
        """Return the table of all variants, with the names of the settings as columns."""
        return self.table.rename(columns={"k": "trust", "eta": "trade_fraction"})

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serialisable values for `from_dict`."""
        rows = self.table.to_dict("list")
        return {"k": self.k, "eta": self.eta, "steps": self.steps, "table": rows}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Choice":
        """Restore a choice from `to_dict`; raise InputError if the values are invalid."""
        with reading("choice.json", "remove it, and resuming the run repeats the selection"):
            k, eta, steps = (values[name] for name in ("k", "eta", "steps"))
            return cls(float(k), float(eta), int(steps), pd.DataFrame(values["table"]))

    def _gain(self, k: float, eta: float) -> float:
        same = (self.table.k == k) & (self.table.eta == eta) & (self.table.steps == self.steps)
        return float(self.table[same].sharpe_gain.iloc[0])


@eqx.filter_jit
def score_variants(
    members: Policy,
    market: Market,
    starts: Int[Array, " cells"],
    days: Int[Array, " cells"],
    tasks: Task,
    ks: Float[Array, " variants"],
    etas: Float[Array, " variants"],
    max_turnover: float = 2.0,
) -> tuple[Float[Array, "cells variants tasks"], Float[Array, "cells variants tasks"]]:
    """Compute annual net log growth and Sharpe ratio of each cell's ensemble, for each (k, eta).

    Features are computed once for all variants, because they do not depend on k and eta.
    """
    arrays, rest = eqx.partition(members, eqx.is_array)

    def one(cell):
        arrays, start, days, tasks = cell
        here = eqx.tree_at(lambda m: m.first, market, start)
        members = eqx.combine(arrays, rest)

        def variant(task, k, eta):
            policy = combine_members(members, k, eta, max_turnover)
            return walk_policy(policy, here, task).log_return

        across = jax.vmap(jax.vmap(variant, in_axes=(None, 0, 0)), in_axes=(0, None, None))
        log = across(tasks, ks, etas).swapaxes(0, 1)
        return growth_and_sharpe(log, days)

    return jax.lax.map(one, (arrays, starts, days, tasks), batch_size=16)


def validation_years(prices: Prices, settings: PortfolioSettings, years: int) -> list[int]:
    """Return the last `years` calendar years with enough days in them and before them.

    Examples
    --------
    >>> from apportion.domains.portfolio import SimulatedMarket
    >>> prices = SimulatedMarket.draw(universe=4, days=700).prices
    >>> validation_years(prices, PortfolioSettings(), 3)
    [2001]
    """
    fit = []
    for year in prices.years():
        first, last = prices.row(f"{year}-01-01"), prices.row(f"{year + 1}-01-01")
        if last - first >= _LEAST_DAYS and first >= settings.window + settings.batch:
            fit.append(year)
    return fit[-years:] if years else []


def select_variant(
    prices: Prices,
    settings: PortfolioSettings | None = None,
    *,
    years: int = 3,
    every: int | None = None,
    on_chunk: OnChunk | None = None,
) -> Choice:
    """Select k, eta and the number of updates by the Sharpe ratio of the last `years` years of `prices`.

    A learned policy (k > 0) is selected only if it beats equal shares with their best eta on average and
    in a majority of the years.

    Parameters
    ----------
    prices, settings
        As in `train_portfolio`; `members` policies are trained for each year.
    years
        Largest number of validation years.
    every, on_chunk
        Updates between two calls of `on_chunk`, for progress.
    """
    settings = PortfolioSettings() if settings is None else settings
    calendar = validation_years(prices, settings, years)
    if not calendar:
        raise InputError(no_validation_year(prices, settings))
    spans = Years.of(prices, calendar, before=settings.window + settings.batch)
    past = training_market(prices.until(prices.dates[spans.firsts[-1]]), settings)
    *_, tasks = draw_portfolio_tasks(len(prices.tickers), settings)
    pairs = list(product(K_GRID, ETA_GRID))
    costs = Costs(settings.cost, exact=True, cash=settings.cash)
    market = Market.of(prices, window=settings.window, costs=costs, head=settings.head())
    market = replace(market, horizon=max(spans.days))
    starts, days = jnp.asarray([spans.firsts, spans.days], jnp.int32)
    by_year = stack([tasks[: min(len(tasks), _TESTED)]] * len(calendar))
    # The last variant is daily Equal CRP.
    ks, etas = jnp.asarray([*pairs, (0.0, 1.0)], jnp.float32).T
    rows: list[pd.DataFrame] = []

    def visit(chunk: Chunk) -> None:
        if chunk.step * _CHECKPOINTS // chunk.steps > len(rows):
            teams = grouped(chunk.policy, settings.members)
            _, sharpe = score_variants(
                teams, market, starts, days, by_year, ks, etas, settings.max_turnover
            )
            gains = np.asarray(sharpe[:, :-1] - sharpe[:, -1:]).mean(-1)
            scored = pd.DataFrame(pairs * len(calendar), columns=["k", "eta"])
            years = np.repeat(calendar, len(pairs))
            rows.append(scored.assign(year=years, sharpe_gain=gains.ravel(), steps=chunk.step))
        if on_chunk is not None:
            on_chunk(chunk)

    every = max(settings.steps // _CHECKPOINTS, 1) if every is None else every
    runs = len(calendar) * settings.members
    policy_key, run_key = jax.random.split(jax.random.key(settings.seed))
    # Policies are ordered by year, then by member.
    train_portfolio_runs(
        past,
        tasks,
        settings,
        policy_keys=jax.random.split(policy_key, runs),
        run_keys=jax.random.split(run_key, runs),
        lengths=jnp.repeat(spans.known(settings.window), settings.members),
        chunks=Chunks(every, math.gcd(every, settings.steps), visit),
    )
    return best_variant(pd.concat(rows, ignore_index=True))


def no_validation_year(prices: Prices, settings: PortfolioSettings) -> str:
    """Explain why these prices have no validation year."""
    return (
        f"the prices, {len(prices.dates)} days from {prices.dates[0]} to {prices.dates[-1]}, have no "
        f"calendar year of {_LEAST_DAYS} days or more with {settings.window + settings.batch} days "
        "before it to select trust, trade fraction and the number of updates on"
    )


def best_variant(table: Any) -> Choice:
    """Return the best variant on average, or equal shares with their best eta if it does not beat them."""
    columns = ["k", "eta", "steps"]
    by_year = table.pivot_table(index=columns, columns="year", values="sharpe_gain")
    mean = by_year.mean(axis=1)
    # Equal shares do not depend on training, so the first checkpoint represents all.
    first = mean.index.get_level_values("steps").min()
    untrained = mean.index.get_level_values("k") == 0
    equal = mean[untrained & (mean.index.get_level_values("steps") == first)].idxmax()
    chosen = equal
    if not untrained.all():
        best = mean[~untrained].idxmax()
        most_years = (by_year.loc[best] > by_year.loc[equal]).mean() > 0.5
        chosen = best if mean[best] > mean[equal] and most_years else equal
    wide = by_year.rename(columns=str).assign(sharpe_gain=mean).reset_index()
    wide.columns.name = None
    return Choice(float(chosen[0]), float(chosen[1]), int(chosen[2]), wide)
