"""Walk-forward: for each year a policy that learned from the days before it alone, all in one vmap.

Runs differ in how many periods of the same market their episodes have. The drifted shares at a
year's end are what the next year's policy starts from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from apportion.composition import EqualShares
from apportion.domains.portfolio.backtest import accounted, lazy_rebalancing
from apportion.domains.portfolio.cash import WithoutCash, everyone, relatives_of
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.record import EQUAL, LAZY, Backtest
from apportion.domains.portfolio.rules import Rules
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import (
    choose_tasks,
    compose,
    train_ensembles,
    training_market,
)
from apportion.domains.portfolio.walk import walk_policy
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.tasks import Task
from apportion.trees import grouped, take


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

    def known(self, window: int) -> Int[Array, " years"]:
        """Periods before each year, the first window left out: those that may be learned from."""
        return jnp.asarray([first - window for first in self.firsts], jnp.int32)


def walk_forward(
    prices: Prices, settings: PortfolioSettings | None = None, *, years: Sequence[int]
) -> Backtest:
    """Retrain before each of consecutive years and walk it, carrying the drifted shares over.

    Trains on tasks of all instruments and trades all of them, beside Equal CRP and lazy Equal CRP,
    which keep to no rules.
    """
    settings = PortfolioSettings() if settings is None else settings
    spans = Years.of(prices, years, before=settings.window + settings.batch)
    past = training_market(prices.until(prices.dates[spans.firsts[-1]]), settings)
    *_, tasks = choose_tasks(len(prices.tickers), settings)
    last: list[Policy] = []
    train_ensembles(
        past,
        spans.known(settings.window),
        tasks,
        settings,
        every=settings.updates,
        on_chunk=lambda chunk: last.append(grouped(chunk.policy, settings.members)),
        key=jax.random.key(settings.seed),
    )
    teams = [compose(take(last[0], place), settings) for place in range(len(years))]
    costs = Costs.of(settings.cost, prices.tickers, exact=True, cash=settings.cash)
    rules = Rules.of(settings)
    whole = replace(Market.of(prices, window=settings.window, costs=costs), horizon=max(spans.days))
    free = WithoutCash if rules.cash else lambda policy: policy
    ruled = whole.ruled(prices, rules)
    task = everyone(len(prices.tickers), cash=rules.cash)
    relatives = relatives_of(prices, cash=rules.cash)
    allocations = {
        name: _carry(policies, market, spans, task, relatives)
        for name, policies, market in (
            ("policy", teams, ruled),
            (LAZY, [free(lazy_rebalancing())] * len(years), whole),
            (EQUAL, [free(EqualShares())] * len(years), whole),
        )
    }
    return accounted(prices, spans.firsts[0], allocations, settings.cost, {"policy": rules})


def _carry(
    policies: Sequence[Policy], market: Market, spans: Years, task: Task, relatives: np.ndarray
) -> np.ndarray:
    """Allocations over all years; each starts from what the year before drifted to."""
    held = None
    parts = []
    for policy, first, days in zip(policies, spans.firsts, spans.days, strict=True):
        here = eqx.tree_at(lambda m: m.first, market, jnp.asarray(first, jnp.int32))
        walk = _walk(policy, here, task, held)
        parts.append(np.asarray(walk.allocations)[:days])
        grown = parts[-1][-1] * relatives[first + days - 1]
        held = jnp.asarray(grown / grown.sum(), jnp.float32)
    return np.concatenate(parts)


_walk = eqx.filter_jit(
    lambda policy, market, task, held: walk_policy(policy, market, task, held=held)
)
