"""Choosing k, eta and the number of updates on validation years inside the training period.

For each validation year policies learn from the days before it alone; the Sharpe ratio decides
(choosing by return over-fits), and equal shares (k = 0) win wherever trust is not earned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

from apportion.composition import Ensemble, PartialTrading, ShrunkToEqual
from apportion.jobs.portfolio_training import choose_tasks, training_market
from apportion.jobs.walk_forward import Years, by_cell, train_cells
from apportion.policy import Policy
from apportion.problems.portfolio.costs import Costs
from apportion.problems.portfolio.market import Market
from apportion.problems.portfolio.price_table import Prices
from apportion.problems.portfolio.settings import PortfolioSettings
from apportion.problems.portfolio.walk import walk_policy
from apportion.tasks import Tasks

TRUSTS = (0.0, 0.25, 0.5, 1.0)
SPEEDS = (0.05, 0.1, 0.3, 1.0)
"""The k and eta that `choose` looks at."""


@eqx.filter_jit
def score_variants(
    members: Policy,
    market: Market,
    starts: Int[Array, " cells"],
    days: Int[Array, " cells"],
    tasks: Tasks,
    trusts: Float[Array, " variants"],
    speeds: Float[Array, " variants"],
) -> tuple[Float[Array, "cells variants tasks"], Float[Array, "cells variants tasks"]]:
    """Net log growth a year and Sharpe ratio of each cell's ensemble, for each (k, eta).

    Features are computed once for all variants: k and eta come after them.
    """
    arrays, rest = eqx.partition(members, eqx.is_array)

    def one(cell):
        arrays, start, days, tasks = cell
        here = eqx.tree_at(lambda m: m.first, market, start)
        team = Ensemble(eqx.combine(arrays, rest))

        def variant(task, k, eta):
            return walk_policy(PartialTrading(ShrunkToEqual(team, k), eta), here, task).log_return

        across = jax.vmap(jax.vmap(variant, in_axes=(None, 0, 0)), in_axes=(0, None, None))
        log = across(tasks, trusts, speeds).swapaxes(0, 1)
        real = jnp.arange(market.horizon) < days
        mean_log = jnp.where(real, log, 0.0).sum(-1) / days
        simple = jnp.where(real, jnp.expm1(log), 0.0)
        mean = simple.sum(-1) / days
        variance = jnp.where(real, (simple - mean[..., None]) ** 2, 0.0).sum(-1) / (days - 1)
        return mean_log * 252, mean / jnp.sqrt(variance) * 252**0.5

    return jax.lax.map(one, (arrays, starts, days, tasks), batch_size=16)


@dataclass(frozen=True)
class Choice:
    """What validation years inside the training period say: which k, eta and number of updates."""

    k: float
    eta: float
    steps: int
    table: pd.DataFrame
    """Sharpe ratio less Equal CRP's of every variant, mean over validation years and tasks."""

    def applied(self, settings: PortfolioSettings) -> PortfolioSettings:
        """The settings with the choice made."""
        return replace(settings, k=self.k, eta=self.eta, steps=self.steps)


def choose(
    prices: Prices,
    settings: PortfolioSettings | None = None,
    *,
    years: int = 3,
    checkpoints: int = 3,
    trusts: Sequence[float] = TRUSTS,
    speeds: Sequence[float] = SPEEDS,
    tasks: Tasks | None = None,
) -> Choice:
    """Choose k, eta and the checkpoint by the Sharpe ratio of the last `years` years of `prices`.

    For each of those years policies learn from the days before it alone. `tasks` are those the
    choice is judged on, such as tasks of validation instruments (default: the trained ones).
    A learned policy (k > 0) is chosen only if it beats equal shares at the same eta in a majority
    of those years.
    """
    settings = PortfolioSettings() if settings is None else settings
    calendar = prices.years()[-years:]
    spans = Years.of(prices, calendar, before=settings.window + settings.batch)
    past = training_market(prices.until(prices.dates[spans.firsts[-1]]), settings)
    *_, own = choose_tasks(len(prices.tickers), settings)
    judged = own[: min(len(own), 10)] if tasks is None else tasks
    judged = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (years, *leaf.shape)), judged)
    costs = Costs(settings.cost, exact=True)
    test = replace(Market.of(prices, window=settings.window, costs=costs), horizon=max(spans.days))
    pairs = [(k, eta) for k in trusts for eta in speeds]
    grid = [jnp.asarray(column, jnp.float32) for column in zip(*[*pairs, (0.0, 1.0)], strict=True)]
    rows: list[pd.DataFrame] = []

    def on_chunk(chunk):
        teams = by_cell(chunk.policy, settings.members)
        spot = (jnp.asarray(spans.firsts, jnp.int32), jnp.asarray(spans.days, jnp.int32))
        _, sharpe = score_variants(teams, test, *spot, judged, *grid)
        gains = np.asarray(sharpe[:, :-1] - sharpe[:, -1:]).mean(-1)
        for year, values in zip(calendar, gains, strict=True):
            frame = pd.DataFrame(pairs, columns=["k", "eta"])
            rows.append(frame.assign(steps=chunk.step, year=year, sharpe_gain=values))

    train_cells(
        past,
        jnp.asarray([first - settings.window for first in spans.firsts], jnp.int32),
        own,
        settings,
        chunk=max(settings.updates // checkpoints, 1),
        on_chunk=on_chunk,
        key=jax.random.key(settings.seed),
    )
    return pick(pd.concat(rows, ignore_index=True))


def pick(table: Any) -> Choice:
    """The best variant on average, or equal shares at their best eta where trust is not earned."""
    mean = table.groupby(["k", "eta", "steps"]).sharpe_gain.mean().reset_index()
    equal = mean[mean.k == 0].sort_values("sharpe_gain").iloc[-1]
    best = mean.sort_values("sharpe_gain").iloc[-1]

    def each_year(row) -> np.ndarray:
        same = (table.k == row.k) & (table.eta == row.eta) & (table.steps == row.steps)
        return table[same].sort_values("year").sharpe_gain.to_numpy()

    trusted = (each_year(best) > each_year(equal)).mean() > 0.5
    chosen = best if trusted else equal
    return Choice(float(chosen.k), float(chosen.eta), int(chosen.steps), mean)
