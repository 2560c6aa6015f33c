"""Walk-forward: for each year a policy that learned from the days before it alone, all in one vmap.

Runs differ in how many periods of the same market their episodes have. The drifted shares at a
year's end are what the next year's policy starts from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from apportion.composition import EqualShares, PartialTrading
from apportion.domains.portfolio.backtest import EQUAL, Backtest, account
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.price_table import Prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import (
    algorithm_settings,
    choose_tasks,
    compose,
    first_policies,
    learner,
    selection,
    training_market,
)
from apportion.domains.portfolio.walk import walk_policy
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.tasks import Tasks
from apportion.training import OnChunk, train_runs

LAZY = "lazy-equal-crp"


def train_cells(
    market: Market,
    lengths: Int[Array, " cells"],
    tasks: Tasks,
    settings: PortfolioSettings,
    *,
    chunk: int,
    on_chunk: OnChunk,
    key: PRNGKeyArray,
) -> None:
    """Train `settings.members` policies for each cell, a cell being a stretch of the market's days.

    `lengths` says how many of the market's periods a cell may learn from; `tasks` are one set for
    all cells, or stacked by cell. `on_chunk` sees policies stacked as cells x members.
    """
    members = settings.members
    runs = lengths.shape[0] * members
    of_problem = eqx.tree_at(
        lambda m: m.length, jax.tree.map(lambda _: None, market), 0, is_leaf=lambda x: x is None
    )
    policy_key, run_key = jax.random.split(key)
    own = tasks.members.ndim == 3
    train_runs(
        eqx.tree_at(lambda m: m.length, market, jnp.repeat(lengths, members)),
        jax.tree.map(lambda leaf: jnp.repeat(leaf, members, 0), tasks) if own else tasks,
        first_policies(settings, market, jax.random.split(policy_key, runs)),
        learner(settings),
        steps=settings.updates,
        selection=selection(settings),
        chunk=chunk,
        record_every=math.gcd(chunk, settings.updates),
        on_chunk=on_chunk,
        problem_axes=of_problem,
        keys=jax.random.split(run_key, runs),
        **algorithm_settings(settings, market),
    )


def by_cell(policies: Policy, members: int) -> Policy:
    """Stacked runs as cells x members."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(-1, members, *leaf.shape[1:]) if eqx.is_array(leaf) else leaf,
        policies,
    )


def member_of(policies: Policy, place: int) -> Policy:
    """One of a stack."""
    return jax.tree.map(lambda leaf: leaf[place] if eqx.is_array(leaf) else leaf, policies)


@dataclass(frozen=True)
class Years:
    """Test years as rows of a table of prices."""

    years: tuple[int, ...]
    firsts: tuple[int, ...]
    days: tuple[int, ...]

    @classmethod
    def of(cls, prices: Prices, years: Sequence[int], *, before: int) -> "Years":
        """Refuses years that are not there or have fewer than `before` days of history."""
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


def walk_forward(
    prices: Prices, settings: PortfolioSettings | None = None, *, years: Sequence[int]
) -> Backtest:
    """Retrain before each of consecutive years and walk it, carrying the drifted shares over.

    Trains on tasks of all instruments and trades all of them, beside Equal CRP and lazy Equal CRP.
    """
    settings = PortfolioSettings() if settings is None else settings
    spans = Years.of(prices, years, before=settings.window + settings.batch)
    past = training_market(prices.until(prices.dates[spans.firsts[-1]]), settings)
    *_, tasks = choose_tasks(len(prices.tickers), settings)
    last: list[Policy] = []
    train_cells(
        past,
        jnp.asarray([first - settings.window for first in spans.firsts], jnp.int32),
        tasks,
        settings,
        chunk=settings.updates,
        on_chunk=lambda chunk: last.append(by_cell(chunk.policy, settings.members)),
        key=jax.random.key(settings.seed),
    )
    teams = [compose(member_of(last[0], place), settings) for place in range(len(years))]
    lazy = PartialTrading(EqualShares(), 0.1)
    costs = Costs(settings.cost, exact=True)
    whole = replace(Market.of(prices, window=settings.window, costs=costs), horizon=max(spans.days))
    everyone = Tasks.of([range(len(prices.tickers))])[0]
    start, periods = spans.firsts[0], sum(spans.days)
    relatives = prices.relatives()[start : start + periods]
    allocations = {
        name: _carry(policies, whole, spans, everyone, prices.relatives())
        for name, policies in {
            "policy": teams,
            LAZY: [lazy] * len(years),
            EQUAL: [EqualShares()] * len(years),
        }.items()
    }
    accounts = {name: account(a, relatives, settings.cost) for name, a in allocations.items()}
    return Backtest(
        prices.dates[start : start + periods],
        prices.tickers,
        settings.cost,
        {name: growth - 1 for name, (growth, _, _) in accounts.items()},
        {name: growth * keep - 1 for name, (growth, keep, _) in accounts.items()},
        {name: turnover for name, (_, _, turnover) in accounts.items()},
        allocations,
    )


def _carry(
    policies: list[Policy], market: Market, spans: Years, task: Tasks, relatives: np.ndarray
) -> np.ndarray:
    """Allocations over all years; each starts from what the year before drifted to."""
    held = np.full(task.width, 1 / task.width, np.float32)
    parts = []
    for policy, first, days in zip(policies, spans.firsts, spans.days, strict=True):
        here = eqx.tree_at(lambda m: m.first, market, jnp.asarray(first, jnp.int32))
        walk = _walk(policy, here, task, jnp.asarray(held))
        parts.append(np.asarray(walk.allocations)[:days])
        grown = parts[-1][-1] * relatives[first + days - 1]
        held = (grown / grown.sum()).astype(np.float32)
    return np.concatenate(parts)


_walk = eqx.filter_jit(
    lambda policy, market, task, held: walk_policy(policy, market, task, held=held)
)
