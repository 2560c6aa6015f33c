"""Figure 2: a task's score against the change of episode rewards, and against the gradient norm.

Single-task runs are watched every 50 steps: the highest score (deviation from equal shares) and
gradient norm seen in them, and how much the reward of the whole episode changed. All three move with
training time, so each correlation is also given at equal training time.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import rankdata

from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import (
    algorithm_settings,
    first_policies,
    learner,
    training_market,
)
from apportion.domains.portfolio.walk import walk_policy
from apportion.policy import Policy
from apportion.priority import Priority
from apportion.statistics import bootstrap
from apportion.studies.portfolio.grid import Progress
from apportion.studies.study import Study, Verdict
from apportion.tasks import Tasks, draw_tasks
from apportion.training import train_runs

EVERY = 50
PAPER = (PortfolioSettings.paper(), 10)
QUICK = (
    PortfolioSettings.paper(
        task_size=5, window=8, batch=32, hidden=12, learning_rate=3e-3, steps=2000
    ),
    6,
)
"""Settings, and how many single-task runs are watched."""


def run(
    *,
    prices: Prices | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Watch single-task runs and correlate."""
    prices = embedded_prices() if prices is None else prices
    settings, runs = PAPER if scale == "paper" else QUICK
    if scale == "quick":
        # The last eight years show the same as all of them in a third of the time.
        prices = prices.since(f"{prices.years()[-1] - 7}-01-01")
    table = compute(prices, settings, runs=runs, seed=seed, progress=progress)
    used = {"data": prices.summary(), "runs": runs, "seed": seed, **vars(settings)}
    return from_table(table, used)


def compute(
    prices: Prices,
    settings: PortfolioSettings,
    *,
    runs: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """A row for every 50 steps of every run: run, step, score, reward_change, gradient_norm."""
    market = training_market(prices, settings)
    tasks = draw_tasks(len(prices.tickers), settings.task_size, runs, seed=seed)
    own = jax.tree.map(lambda leaf: leaf[:, None], tasks)
    keys = jax.random.split(jax.random.key(seed), runs)
    policies = first_policies(settings, market, keys)
    rewards = [np.asarray(_episode_rewards(policies, market, tasks))]
    tables = []

    def on_chunk(chunk):
        rewards.append(np.asarray(_episode_rewards(chunk.policy, market, tasks)))
        seen = chunk.metrics.groupby("run")[["score", "gradient_norm"]].max()
        change = rewards[-1] - rewards[-2]
        tables.append(seen.reset_index().assign(step=chunk.step, reward_change=change))
        if progress is not None and chunk.step % (20 * EVERY) == 0:
            progress(f"single-task runs: step {chunk.step}", chunk.step / chunk.steps)

    train_runs(
        market,
        own,
        policies,
        learner(settings),
        steps=settings.steps,
        # Without smoothing the recorded score is the batch's own.
        selection=Priority(0.0, smoothing=0.0),
        chunk=EVERY,
        on_chunk=on_chunk,
        keys=keys,
        **algorithm_settings(settings, market),
    )
    columns = ["run", "step", "score", "reward_change", "gradient_norm"]
    return pd.DataFrame(pd.concat(tables, ignore_index=True)[columns])


@eqx.filter_jit
def _episode_rewards(policies: Policy, market: Market, tasks: Tasks) -> jax.Array:
    """Mean reward over the whole training episode, each policy on its own task, a year's worth."""
    arrays, rest = eqx.partition(policies, eqx.is_array)

    def one(run):
        arrays, task = run
        walk = walk_policy(eqx.combine(arrays, rest), market, task, chunk=512)
        return walk.log_return.mean() * 252

    return jax.lax.map(one, (arrays, tasks), batch_size=10)


def rank_correlation(x: np.ndarray, y: np.ndarray, given: np.ndarray | None = None) -> float:
    """Spearman's correlation; with `given`, of what is left of the ranks after regressing on its.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 8.0, 9.0]))
    1.0
    """
    a, b = (rankdata(v) for v in (x, y))
    if given is not None:
        design = np.stack([np.ones(len(x)), rankdata(given)], -1)
        a, b = (v - design @ np.linalg.lstsq(design, v, rcond=None)[0] for v in (a, b))
    return round(float(np.corrcoef(a, b)[0, 1]), 12)


def from_table(table: Any, settings: dict | None = None) -> Study:
    """The study from the watched runs."""
    pairs = {
        "score and |reward change|": lambda r: (r.score, r.reward_change.abs()),
        "score and gradient norm": lambda r: (r.score, r.gradient_norm),
    }
    verdicts = []
    for name, pick in pairs.items():
        for given in (False, True):
            values = []
            for _, rows in table.groupby("run"):
                x, y = (v.to_numpy() for v in pick(rows))
                values.append(rank_correlation(x, y, rows.step.to_numpy() if given else None))
            estimate = bootstrap(np.array(values))
            claim = f"{name} are correlated{' at equal training time' if given else ''}"
            verdicts.append(Verdict.of(claim, estimate, holds=estimate.above_zero, paper=not given))
    readings = (
        "Spearman's correlation within each run, mean and interval over runs. What is left at equal "
        "training time is what a score says about a task beyond how long it was trained.",
    )
    return Study(
        "fig2",
        "Figure 2: scores against reward changes and gradient norms",
        table,
        tuple(verdicts),
        lambda: draw(table),
        readings,
        settings or {},
    )


def draw(table: Any) -> Figure:
    """Two scatter plots, coloured by training time."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, column, label in (
        (left, "reward_change", "change of the episode's log growth a year"),
        (right, "gradient_norm", "largest gradient norm"),
    ):
        points = axes.scatter(table.score, table[column], c=table.step, s=5, cmap="viridis")
        axes.set_xlabel(f"largest score in {EVERY} steps")
        axes.set_ylabel(label)
    right.set_yscale("log")
    figure.colorbar(points, ax=[left, right], label="step")
    return figure
