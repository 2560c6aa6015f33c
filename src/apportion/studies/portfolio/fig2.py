"""Figure 2: a task's score against the change of episode rewards, and against the gradient norm.

Single-task runs are watched every 50 steps: the highest score (deviation from equal shares, as the
update left it) and gradient norm seen in them, and how much the reward of the whole episode changed.
All three move with training time, so each correlation is also given at equal training time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.interpolate import BSpline
from scipy.stats import rankdata

from apportion.domains.portfolio import training
from apportion.domains.portfolio.market import Market, walk_policy
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.record import TRADING_DAYS
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.policy import Policy
from apportion.statistics import mean_over
from apportion.studies.engine import Cell, Plan, Progress, Rows
from apportion.studies.figures import panels
from apportion.studies.portfolio.experiments import SMALL, by_cell, each_policy
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion.tasks import Task, draw_tasks, single_tasks
from apportion.training import Chunk, Chunks

EVERY = 50
SCALES = {
    "quick": (6, PortfolioSettings.paper(method="stl", steps=2000, **SMALL)),
    "paper": (10, PortfolioSettings.paper(method="stl")),
}
"""Watched runs, and how they are trained."""


def fig2(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """A cell for each watched run."""
    prices = embedded_prices() if prices is None else prices
    count, settings = SCALES[scale]
    settings = replace(settings, seed=seed)
    if scale == "quick":
        # The last eight years show the same as all of them in a third of the time.
        prices = prices.since(f"{prices.years()[-1] - 7}-01-01")
    cells = tuple(Cell(f"run-{run}", {"run": run}) for run in range(count))
    about = {"data": prices.summary(), "runs": count, **vars(settings)}
    return Plan("fig2", cells, partial(_compute, prices, settings, count), _conclude, about)


def _compute(
    prices: Prices, s: PortfolioSettings, count: int, cells: Sequence[Cell], progress: Progress
) -> Rows:
    """A row for every 50 steps of every run: step, score, reward_change, gradient_norm."""
    market = training.training_market(prices, s)
    runs = [cell["run"] for cell in cells]
    tasks = draw_tasks(len(prices.tickers), s.task_size, count, seed=s.seed)[runs]
    keys = jax.random.split(jax.random.key(s.seed), count)[np.asarray(runs)]
    policies = training.untrained_policies(prices.channels, s, keys)
    rewards = [np.asarray(_episode_rewards(policies, market, tasks))]

    def on_chunk(chunk: Chunk) -> None:
        rewards.append(np.asarray(_episode_rewards(chunk.policy, market, tasks)))
        if chunk.step % (20 * EVERY) == 0:
            progress(f"single-task runs: step {chunk.step}", chunk.step / chunk.steps)

    trained = train_portfolio_runs(
        market,
        single_tasks(tasks),
        s,
        policy_keys=keys,
        run_keys=keys,
        # Without smoothing the recorded score is the batch's own.
        selection=replace(s, smoothing=0.0).selection(1.0),
        chunks=Chunks(EVERY, on_chunk=on_chunk),
    )
    table = highest(trained.metrics)
    # Both go by run, then by time.
    table["reward_change"] = np.diff(rewards, axis=0).T.ravel()
    yield from by_cell(cells, table.rename(columns={"run": "place"}))


def highest(metrics: Any) -> pd.DataFrame:
    """The highest score and gradient norm of every run (column `run`) in every 50 steps.

    A step records the score that its task was drawn with. The next step of a run shows the score that
    the update left; the first shows the priority that every task begins with, which no update made.
    """
    rows = metrics.sort_values(["run", "step"])
    rows = rows.assign(score=rows.groupby("run").score.shift(-1))
    last = ((rows.step - rows.step.min()) // EVERY + 1) * EVERY
    return rows.groupby(["run", last])[["score", "gradient_norm"]].max().reset_index()


@eqx.filter_jit
def _episode_rewards(policies: Policy, market: Market, tasks: Task) -> jax.Array:
    """Mean reward over the whole training episode, each policy on its own task, a year's worth."""

    def one(policy, task):
        return walk_policy(policy, market, task, chunk=512).log_return.mean() * TRADING_DAYS

    return each_policy(one, policies, tasks, at_once=10)


def rank_correlation(x: np.ndarray, y: np.ndarray, given: np.ndarray | None = None) -> float:
    """Spearman's correlation; with `given`, of what a smooth curve in it leaves of the ranks.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 8.0, 9.0]))
    1.0
    """
    a, b = (rankdata(v) for v in (x, y))
    if given is not None:
        design = smooth_curves(rankdata(given))
        a, b = (v - design @ np.linalg.lstsq(design, v, rcond=None)[0] for v in (a, b))
    return round(float(np.corrcoef(a, b)[0, 1]), 12)


def smooth_curves(time: np.ndarray, pieces: int = 8) -> np.ndarray:
    """A basis of the cubic splines in time of so many pieces of equal length (times, curves).

    A straight line would leave the bend that most things have in training time, and two things that
    bend alike would be called correlated.

    Examples
    --------
    >>> smooth_curves(np.arange(50.0)).shape
    (50, 11)
    """
    inner = np.linspace(time.min(), time.max(), pieces + 1)
    knots = np.concatenate([np.repeat(inner[0], 3), inner, np.repeat(inner[-1], 3)])
    return BSpline.design_matrix(time, knots, 3).toarray()


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """The study from the watched runs."""
    table = rows[["run", "step", "score", "reward_change", "gradient_norm"]]
    runs = [run for _, run in table.groupby("run")]
    verdicts = []
    for name, column in (("|reward change|", "reward_change"), ("gradient norm", "gradient_norm")):
        for given in (False, True):
            # A gradient's norm is its own absolute value.
            correlations = [
                rank_correlation(run.score, run[column].abs(), run.step if given else None)
                for run in runs
            ]
            claim = f"score and {name} are correlated{' at equal training time' if given else ''}"
            verdicts.append(Verdict.of(claim, mean_over(np.array(correlations)), paper=not given))
    notes = (
        "Spearman's correlation within each run, mean and interval over runs. What is left at equal "
        "training time (ranks less a smooth curve in time) is what a score says about a task beyond "
        "how long it was trained.",
    )
    title = "Figure 2: scores against reward changes and gradient norms"
    return [FigureResult("fig2", title, table, verdicts, lambda: _plot(table), notes)]


def _plot(table: Any) -> Figure:
    """Two scatter plots, coloured by training time."""
    figure, (left, right) = panels(10, 4.2, frame=True)
    for axes, column, label in (
        (left, "reward_change", "change of the episode's log growth a year"),
        (right, "gradient_norm", "largest gradient norm"),
    ):
        points = axes.scatter(table.score, table[column], c=table.step, s=5, cmap="viridis")
        axes.set(xlabel=f"largest score in {EVERY} steps", ylabel=label)
    right.set_yscale("log")
    figure.colorbar(points, ax=[left, right], label="step")
    return figure
