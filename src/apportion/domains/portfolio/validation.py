"""Choosing k, eta and the number of updates on validation years inside the training period.

For each validation year policies learn from the days before it alone; the Sharpe ratio decides
(choosing by return over-fits), and equal shares (k = 0) win wherever trust is not earned.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.composition import Ensemble, PartialTrading, ShrunkToEqual
from apportion.domains.portfolio.constrained import constrain, unconstrained
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.metrics import TRADING_DAYS
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.rules import Rules
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import (
    choose_tasks,
    tasks_among,
    train_policies,
    training_market,
    with_cash,
)
from apportion.domains.portfolio.walk import growth_and_sharpe, walk_policy
from apportion.domains.portfolio.walk_forward import Years
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.tasks import Task, count_tasks, draw_tasks
from apportion.training import Chunk, Chunks, OnChunk
from apportion.trees import grouped, stack

K_GRID = (0.0, 0.25, 0.5, 1.0)
ETA_GRID = (0.05, 0.1, 0.3, 1.0)
"""The k and eta that are looked at."""
CHECKPOINTS = 3
"""Numbers of updates that are looked at."""
HALF_A_YEAR = TRADING_DAYS // 2
"""Trading days a calendar year must have in the prices to be tested on: fewer say too little."""
_TESTED = 10
"""Tasks the choice is tested on, at most."""


@dataclass(frozen=True)
class Choice:
    """What validation years inside the training period say: which k, eta and number of updates."""

    k: float
    eta: float
    steps: int
    """Updates of each policy."""
    table: pd.DataFrame
    """Sharpe ratio less daily Equal CRP's of every variant, by year and in the mean, over tasks."""

    def applied(self, settings: PortfolioSettings) -> PortfolioSettings:
        """The settings with the choice made; updates are the policy's from then on."""
        return replace(settings, k=self.k, eta=self.eta, steps=self.steps, protocol="per-policy")

    def summary(self) -> str:
        """What was chosen, by what, and what equal shares would have had."""
        years = [column for column in self.table if str(column).isdigit()]
        over = years[0] if len(years) == 1 else f"{years[0]}-{years[-1]}"
        gain, lazy = self._gain(self.k, self.eta), self._gain(0.0, self.eta)
        if self.k == 0:
            return (
                f"k = 0, equal shares, and eta = {self.eta:g}: no learned policy had the better "
                f"Sharpe ratio in most of {over} (over daily Equal CRP {gain:+.4f}; the best "
                f"learned one {self.table[self.table.k > 0].sharpe_gain.max():+.4f})"
            )
        return (
            f"k = {self.k:g}, eta = {self.eta:g} and {self.steps:,} updates, by the Sharpe ratio "
            f"over {over} (over daily Equal CRP {gain:+.4f}; equal shares at the same eta "
            f"{lazy:+.4f})"
        )

    def to_frame(self) -> pd.DataFrame:
        """The table the choice was made from."""
        return self.table

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which `from_dict` makes the same choice again."""
        rows = self.table.to_dict("list")
        return {"k": self.k, "eta": self.eta, "steps": self.steps, "table": rows}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Choice":
        """The choice that `to_dict` wrote."""
        try:
            table = pd.DataFrame(values["table"])
            k, eta, steps = float(values["k"]), float(values["eta"]), int(values["steps"])
        except (KeyError, TypeError, ValueError, OverflowError):
            k = eta = steps = -1
            table = pd.DataFrame()
        named = {"k", "eta", "steps", "sharpe_gain"} <= set(table.columns)
        if not (0 <= k <= 1 and 0 <= eta <= 1 and steps >= 0 and named):
            raise InputError(
                "choice.json: is not what choosing wrote; remove it, and resuming chooses again"
            )
        return cls(k, eta, steps, table)

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
    rules: Rules | None = None,
) -> tuple[Float[Array, "cells variants tasks"], Float[Array, "cells variants tasks"]]:
    """Net log growth a year and Sharpe ratio of each cell's ensemble, for each (k, eta).

    Features are computed once for all variants: k and eta come after them, and the rules around both.
    """
    rules = Rules() if rules is None else rules
    arrays, rest = eqx.partition(unconstrained(members, rules), eqx.is_array)

    def one(cell):
        arrays, start, days, tasks = cell
        here = eqx.tree_at(lambda m: m.first, market, start)
        team = Ensemble(eqx.combine(arrays, rest))

        def variant(task, k, eta):
            policy = constrain(PartialTrading(ShrunkToEqual(team, k), eta), rules)
            return walk_policy(policy, here, task).log_return

        across = jax.vmap(jax.vmap(variant, in_axes=(None, 0, 0)), in_axes=(0, None, None))
        log = across(tasks, ks, etas).swapaxes(0, 1)
        return growth_and_sharpe(log, days)

    return jax.lax.map(one, (arrays, starts, days, tasks), batch_size=16)


def validation_years(prices: Prices, settings: PortfolioSettings, years: int) -> list[int]:
    """The last `years` calendar years that are long enough and have enough days before them.

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
        if last - first >= HALF_A_YEAR and first >= settings.window + settings.batch:
            fit.append(year)
    return fit[-years:] if years else []


def validation_tasks(universe: int, settings: PortfolioSettings, instruments: int) -> Task:
    """Tasks of so many of the instruments to train on, drawn by the seed, to test variants on."""
    seen, *_ = choose_tasks(universe, settings)
    if instruments < 2 or instruments > len(seen) - settings.task_size:
        raise InputError(
            f"validation_instruments {instruments}: {len(seen)} instruments are there to train on "
            f"and a task needs {settings.task_size}; choose 0, or 2 to "
            f"{len(seen) - settings.task_size}"
        )
    apart = np.random.default_rng([settings.seed, 1]).permutation(seen)[:instruments]
    size = min(settings.task_size, instruments)
    count = min(_TESTED, count_tasks(instruments, size))
    tasks = draw_tasks(np.sort(apart), size, count, seed=settings.seed)
    return with_cash(tasks, universe, settings)


def select_variant(
    prices: Prices,
    settings: PortfolioSettings | None = None,
    *,
    years: int = 3,
    tasks: Task | None = None,
    every: int | None = None,
    on_chunk: OnChunk | None = None,
) -> Choice:
    """Choose k, eta and the checkpoint by the Sharpe ratio of the last `years` years of `prices`.

    A learned policy (k > 0) is chosen only if it beats equal shares, at the eta that suits them best, on
    average and in a majority of those years.

    Parameters
    ----------
    prices, settings
        Everything that may be known: nothing after its last row takes part. Settings as for
        `train_portfolio`; `members` policies are trained for each year.
    years
        How many years at most.
    tasks
        Those the choice is tested on, such as `validation_tasks`; their instruments are then kept
        from training here. By default the first of the trained ones.
    every, on_chunk
        Steps between two calls of `on_chunk`, for progress.
    """
    settings = PortfolioSettings() if settings is None else settings
    calendar = validation_years(prices, settings, years)
    if not calendar:
        raise InputError(no_validation_year(prices, settings))
    spans = Years.of(prices, calendar, before=settings.window + settings.batch)
    past = training_market(prices.until(prices.dates[spans.firsts[-1]]), settings)
    seen, _, own = choose_tasks(len(prices.tickers), settings)
    if tasks is not None:
        left = tasks_among(np.setdiff1d(seen, np.asarray(tasks.members)), settings)
        own = with_cash(left, len(prices.tickers), settings)
    tested = own[: min(len(own), _TESTED)] if tasks is None else tasks
    score = _scorer(prices, settings, spans, tested, list(product(K_GRID, ETA_GRID)))
    rows: list[pd.DataFrame] = []

    def visit(chunk: Chunk) -> None:
        if chunk.step * CHECKPOINTS // chunk.steps > len(rows):
            rows.append(score(chunk.policy).assign(steps=chunk.step))
        if on_chunk is not None:
            on_chunk(chunk)

    train_ensembles(
        past,
        spans.known(settings.window),
        own,
        settings,
        every=max(settings.updates // CHECKPOINTS, 1) if every is None else every,
        on_chunk=visit,
        key=jax.random.key(settings.seed),
    )
    return best_variant(pd.concat(rows, ignore_index=True))


def train_ensembles(
    market: Market,
    lengths: Int[Array, " ensembles"],
    tasks: Task,
    settings: PortfolioSettings,
    *,
    every: int,
    on_chunk: OnChunk,
    key: PRNGKeyArray,
) -> None:
    """Train `settings.members` policies for each of several stretches of the market's first days.

    `on_chunk` is called every so many steps and sees policies ordered by ensemble, then by member.
    """
    runs = lengths.shape[0] * settings.members
    policy_key, run_key = jax.random.split(key)
    train_policies(
        market,
        tasks,
        settings,
        policy_keys=jax.random.split(policy_key, runs),
        run_keys=jax.random.split(run_key, runs),
        lengths=jnp.repeat(lengths, settings.members),
        chunks=Chunks(every, math.gcd(every, settings.updates), on_chunk),
    )


def _scorer(
    prices: Prices,
    settings: PortfolioSettings,
    spans: Years,
    tasks: Task,
    pairs: list[tuple[float, float]],
) -> Callable[[Policy], pd.DataFrame]:
    """From stacked policies to the Sharpe ratio of every (k, eta) in each year over Equal CRP's."""
    costs = Costs.of(settings.cost, prices.tickers, exact=True, cash=settings.cash)
    rules = Rules.of(settings)
    market = Market.of(prices, window=settings.window, costs=costs, rules=rules)
    test = replace(market, horizon=max(spans.days))
    ks, etas = jnp.asarray([*pairs, (0.0, 1.0)], jnp.float32).T
    starts, days = jnp.asarray([spans.firsts, spans.days], jnp.int32)
    by_year = stack([tasks] * len(spans.years))

    def score(policies: Policy) -> pd.DataFrame:
        teams = grouped(policies, settings.members)
        _, sharpe = score_variants(teams, test, starts, days, by_year, ks, etas, rules)
        gains = np.asarray(sharpe[:, :-1] - sharpe[:, -1:]).mean(-1)
        frame = pd.DataFrame(pairs, columns=["k", "eta"])
        return pd.concat(
            [
                frame.assign(year=year, sharpe_gain=values)
                for year, values in zip(spans.years, gains, strict=True)
            ]
        )

    return score


def no_validation_year(prices: Prices, settings: PortfolioSettings) -> str:
    """Why nothing can be chosen from these prices."""
    return (
        f"the prices, {len(prices.dates)} days from {prices.dates[0]} to {prices.dates[-1]}, hold no "
        f"calendar year of {HALF_A_YEAR} days or more with {settings.window + settings.batch} days "
        "before it on which k, eta and the number of updates could be chosen"
    )


def best_variant(table: Any) -> Choice:
    """The best variant on average, or equal shares at their best eta where trust is not earned."""
    columns = ["k", "eta", "steps"]
    by_year = table.pivot_table(index=columns, columns="year", values="sharpe_gain")
    mean = by_year.mean(axis=1)
    # Equal shares learn nothing: all checkpoints are one, so the first is taken.
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
