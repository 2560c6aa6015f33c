"""Figure 5: one task's test year under a multi-task and a single-task policy, with allocations.

Shown is the task on which the multi-task policy gains most over the single-task one, as the paper
chose it; the table and the verdicts cover every task watched. Claim: the single-task policy keeps
nearly equal shares while the multi-task one has learned more complex allocations.
"""

from dataclasses import replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.composition import EqualShares
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import (
    algorithm_settings,
    choose_tasks,
    first_policies,
    learner,
    training_market,
)
from apportion.domains.portfolio.walk import Walk, walk_policy, walk_tasks
from apportion.policy import Policy
from apportion.priority import Priority
from apportion.statistics import bootstrap, compare
from apportion.studies.portfolio.grid import Progress
from apportion.studies.study import Study, Verdict
from apportion.tasks import Tasks
from apportion.training import train_runs

PAPER = (PortfolioSettings.paper(tasks=30, held_out=18), 30)
QUICK = (
    PortfolioSettings.paper(
        tasks=12,
        task_size=5,
        window=8,
        batch=32,
        hidden=12,
        learning_rate=3e-3,
        steps=1800,
        held_out=7,
    ),
    6,
)
"""Settings, and on how many tasks single-task policies are trained."""
METHODS = ("pmtl", "stl (paper's protocol)", "stl (equal updates)")


def run(
    *,
    prices: Prices | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Train, and walk the last year of the data."""
    prices = embedded_prices() if prices is None else prices
    settings, watched = PAPER if scale == "paper" else QUICK
    table = compute(prices, replace(settings, seed=seed), watched=watched, progress=progress)
    return from_table(table, {"data": prices.summary(), **vars(settings), "seed": seed})


def compute(
    prices: Prices,
    settings: PortfolioSettings,
    *,
    watched: int,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """A row for each method, task and day: net log return over Equal CRP's, deviation, shares.

    Shares are given for the one task that is drawn; the first row of a task is its summary's place.
    """
    tell = progress or (lambda what, fraction: None)
    year = f"{prices.years()[-1]}-01-01"
    past = prices.until(year)
    market = training_market(past, settings)
    costs = Costs(settings.cost, exact=True)
    test = Market.of(prices, start=year, window=settings.window, costs=costs)
    *_, tasks = choose_tasks(len(prices.tickers), settings)
    shown = tasks[:watched]
    equal = walk_tasks(EqualShares(), test, shown)
    key = jax.random.key(settings.seed)
    epoch = settings.steps // len(tasks)
    whole = epoch * len(tasks)

    def train(tasks: Tasks, runs: int, alpha: float) -> list[Policy]:
        """The policies after one paper's share of a task's updates, and after all of them."""
        kept: list[Policy] = []

        def on_chunk(now):
            if now.step in (epoch, whole):
                kept.append(jax.tree.map(jnp.copy, eqx.filter(now.policy, eqx.is_array)))

        skeleton = first_policies(settings, market, jax.random.split(key, runs))
        train_runs(
            market,
            tasks,
            skeleton,
            learner(settings),
            steps=whole,
            selection=Priority(
                alpha, settings.beta, settings.smoothing, 1 - 1 / settings.task_size
            ),
            chunk=epoch,
            record_every=epoch,
            on_chunk=on_chunk,
            keys=jax.random.split(key, runs),
            **algorithm_settings(settings, market),
        )
        rest = eqx.filter(skeleton, eqx.is_array, inverse=True)
        return [eqx.combine(arrays, rest) for arrays in kept]

    tell("multi-task policy", 0.0)
    many = train(tasks, 1, settings.alpha)[-1]
    walks = {"pmtl": _walk_all(many, test, shown, shared=True)}
    tell("single-task policies", 0.4)
    alone = train(jax.tree.map(lambda leaf: leaf[:, None], shown), len(shown), 0.0)
    for name, policies in zip(METHODS[1:], (alone[0], alone[-1]), strict=True):
        walks[name] = _walk_all(policies, test, shown, shared=False)
    return _table(prices, test, shown, walks, equal)


@eqx.filter_jit
def _walk_all(policies: Policy, market: Market, tasks: Tasks, *, shared: bool) -> Walk:
    """Each task under its own policy, or all under one."""
    arrays, rest = eqx.partition(policies, eqx.is_array)
    if shared:
        arrays = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[0], (len(tasks), *leaf.shape[1:])), arrays
        )
    return jax.lax.map(
        lambda run: walk_policy(eqx.combine(run[0], rest), market, run[1]),
        (arrays, tasks),
        batch_size=8,
    )


def _table(
    prices: Prices, test: Market, tasks: Tasks, walks: dict[str, Walk], equal: Walk
) -> pd.DataFrame:
    first = int(test.first)
    dates = prices.dates[first : first + test.horizon]
    gaps = {name: np.asarray(walk.log_return - equal.log_return) for name, walk in walks.items()}
    best = int(np.argmax(gaps["pmtl"].sum(-1) - gaps[METHODS[2]].sum(-1)))
    frames = []
    for name, walk in walks.items():
        shares = np.asarray(walk.allocations)
        deviation = np.abs(shares - 1 / shares.shape[-1]).max(-1)
        for task in range(len(tasks)):
            frame = {
                "method": name,
                "task": task,
                "date": dates.astype(str),
                "over_equal": gaps[name][task],
                "deviation": deviation[task],
                "drawn": task == best,
            }
            if task == best:
                names = tasks[task].names(prices.tickers)
                frame |= {f"share {ticker}": shares[task, :, i] for i, ticker in enumerate(names)}
            frames.append(pd.DataFrame(frame))
    return pd.concat(frames, ignore_index=True)


def from_table(table: Any, settings: dict | None = None) -> Study:
    """The study from the walks."""
    deviation = table.groupby(["method", "task"]).deviation.mean().unstack("method")
    gain = table.groupby(["method", "task"]).over_equal.sum().unstack("method")
    verdicts = []
    for name in METHODS[1:]:
        flat = bootstrap(deviation[name].to_numpy())
        verdicts.append(
            Verdict.of(
                f"the policy of {name} keeps nearly equal shares (mean deviation below 0.02)",
                flat,
                holds=flat.high < 0.02,
            )
        )
        gap = compare(deviation["pmtl"].to_numpy(), deviation[name].to_numpy())
        verdicts.append(
            Verdict.of(
                f"the multi-task policy strays further from equal shares than {name}",
                gap,
                holds=gap.above_zero,
            )
        )
        ahead = compare(gain["pmtl"].to_numpy(), gain[name].to_numpy())
        verdicts.append(
            Verdict.of(
                f"over all watched tasks the multi-task policy grows more than {name}",
                ahead,
                holds=ahead.above_zero,
                paper=False,
            )
        )
    readings = (
        "The task drawn is the one where the multi-task policy gains most over the single-task one: "
        "it shows what the policies do, not how often. Intervals are over tasks of one year, which "
        "share instruments and days.",
        *(f"{name}: {gain[name].mean():+.4f} log growth over Equal CRP" for name in METHODS),
    )
    return Study(
        "fig5",
        "Figure 5: a test year under a multi-task and a single-task policy",
        table,
        tuple(verdicts),
        lambda: draw(table),
        readings,
        settings or {},
    )


def draw(table: Any) -> Figure:
    """Gain over Equal CRP, then the allocations of both policies."""
    rows = table[table.drawn]
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for name, colour in zip(METHODS, ("C1", "0.7", "0.4"), strict=True):
        one = rows[rows.method == name]
        gain = 100 * np.expm1(one.over_equal.cumsum())
        axes[0].plot(pd.to_datetime(one.date), gain, color=colour, label=name)
    axes[0].axhline(0, color="k", linewidth=0.8)
    axes[0].set_ylabel("% over Equal CRP, net")
    axes[0].legend(fontsize=8)
    shares = [c for c in rows.columns if c.startswith("share ")]
    for place, name in ((1, METHODS[0]), (2, METHODS[2])):
        one = rows[rows.method == name]
        labels = [c.removeprefix("share ") for c in shares]
        axes[place].stackplot(
            pd.to_datetime(one.date), one[shares].T.to_numpy(float), labels=labels
        )
        axes[place].set_title(f"allocations, {name}", fontsize=10)
        axes[place].set_ylim(0, 1)
    axes[2].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for each in axes:
        each.tick_params(axis="x", rotation=40)
    return figure
