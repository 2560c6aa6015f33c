"""Figure 2: a task's score against the change of episode rewards, and against the gradient norm.

Single-task runs on tasks of the training instruments (50 of the 68), over all days before the last year.
Every 50 steps we record the highest score (deviation from equal shares of a minibatch), the change of the
reward of the whole episode, and the score and gradient norm of the first minibatch. All four change with
training time, so each correlation is also computed at equal training time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from scipy.interpolate import BSpline
from scipy.stats import rankdata

from apportion.certify.statistics import mean_over
from apportion.domains.portfolio import training
from apportion.domains.portfolio.market import Market, walk_policy
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.record import TRADING_DAYS
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.policy import Policy
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import panels
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion.tasks import Task, draw_tasks, single_tasks, split_entities
from apportion.training import Chunk, Chunks
from apportion.trees import stack
from apportion_studies.portfolio.experiments import SMALL, by_cell, each_policy

_EVERY = 50
_SCALES = {
    "quick": (6, PortfolioSettings.paper(method="stl", steps=2000, held_out=7, **SMALL)),
    "paper": (10, PortfolioSettings.paper(method="stl", held_out=18)),
}
"""Number of recorded runs, and their training settings."""


def fig2(*, scale: Scale = "quick", seed: int = 0, prices: Prices | None = None) -> Plan:
    """Plan a cell for each recorded run."""
    prices = embedded_prices() if prices is None else prices
    count, settings = _SCALES[scale]
    settings = replace(settings, seed=seed)
    if scale == "quick":
        # Eight years give the same result as all years in a third of the time.
        prices = prices.since(f"{prices.years()[-1] - 8}-01-01")
    cells = tuple(Cell(f"run-{run}", {"run": run}) for run in range(count))
    about = {"data": prices.summary(), "runs": count, **vars(settings)}
    return Plan("fig2", cells, partial(_compute, prices, settings, count), _conclude, about)


def _compute(
    prices: Prices, s: PortfolioSettings, count: int, cells: Sequence[Cell], progress: OnProgress
) -> Rows:
    """Yield a row for every 50 steps of a run: the columns of `_watched`, and `reward_change`."""
    market = training.training_market(prices.until(f"{prices.years()[-1]}-01-01"), s)
    runs = [cell["run"] for cell in cells]
    seen, _ = split_entities(len(prices.tickers), s.held_out, seed=s.seed)
    tasks = draw_tasks(seen, s.task_size, count, seed=s.seed)[runs]
    keys = jax.random.split(jax.random.key(s.seed), count)[np.asarray(runs)]
    policies = training.untrained_policies(prices.channels, s, keys)
    found = [policies]

    def on_chunk(chunk: Chunk) -> None:
        # Copy, because the next chunk overwrites these arrays.
        found.append(jax.tree.map(jnp.copy, chunk.policy))
        if chunk.step % (20 * _EVERY) == 0:
            progress(f"single-task runs: step {chunk.step}", chunk.step / chunk.steps)

    trained = train_portfolio_runs(
        market,
        single_tasks(tasks),
        s,
        policy_keys=keys,
        run_keys=keys,
        # Without smoothing, the recorded score is that of the minibatch.
        priority=replace(s, smoothing=0.0).priority(1.0),
        chunks=Chunks(_EVERY, on_chunk=on_chunk),
    )
    table = _watched(trained.metrics)
    # Walk after training, because hundreds of policies together take as long as one.
    rewards = np.asarray(_episode_rewards(stack(found), market, tasks))
    # Both are ordered by run, then by time.
    table["reward_change"] = np.diff(rewards, axis=0).T.ravel()
    yield from by_cell(cells, table.rename(columns={"run": "place"}))


def _watched(metrics: Any) -> pd.DataFrame:
    """For every 50 steps of a run, return the highest score of a minibatch, and the score and
    gradient norm of the first minibatch.

    A step records the score that its task was drawn with, so the score of its minibatch is in the next
    step of the run. The first recorded score is the initial priority.
    """
    rows = metrics.sort_values(["run", "step"])
    rows = rows.assign(score=rows.groupby("run").score.shift(-1))
    last = ((rows.step - rows.step.min()) // _EVERY + 1) * _EVERY
    found = {"score": ("score", "max"), "batch_score": ("score", "first")}
    found |= {"gradient_norm": ("gradient_norm", "first")}
    return rows.groupby(["run", last]).agg(**found).reset_index()


@eqx.filter_jit
def _episode_rewards(policies: Policy, market: Market, tasks: Task) -> Float[Array, "times runs"]:
    """Return the mean yearly reward of each run's policies on its task, over the training days."""

    def one(policy, task):
        return walk_policy(policy, market, task, chunk=512).log_return.mean() * TRADING_DAYS

    def at_one_time(policies):
        return eqx.filter_vmap(one)(policies, tasks)

    return each_policy(at_one_time, policies, at_once=40)


def _rank_correlation(x: np.ndarray, y: np.ndarray, given: np.ndarray | None = None) -> float:
    """Return Spearman's correlation; if `given`, first remove a smooth curve in it from the ranks.

    >>> _rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 8.0, 9.0]))
    1.0
    """
    a, b = (rankdata(v) for v in (x, y))
    if given is not None:
        design = _smooth_curves(rankdata(given))
        a, b = (v - design @ np.linalg.lstsq(design, v, rcond=None)[0] for v in (a, b))
    return round(float(np.corrcoef(a, b)[0, 1]), 12)


def _smooth_curves(time: np.ndarray, pieces: int = 8) -> np.ndarray:
    """Return a basis (times, curves) of the cubic splines in time with `pieces` equal pieces.

    Removing only a straight line would leave the curvature in training time, and two quantities with
    similar curvature would appear correlated.

    Examples
    --------
    >>> _smooth_curves(np.arange(50.0)).shape
    (50, 11)
    """
    inner = np.linspace(time.min(), time.max(), pieces + 1)
    knots = np.concatenate([np.repeat(inner[0], 3), inner, np.repeat(inner[-1], 3)])
    return BSpline.design_matrix(time, knots, 3).toarray()


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Return the figure from the recorded runs."""
    table = rows[["run", "step", "score", "reward_change", "batch_score", "gradient_norm"]]
    runs = [run for _, run in table.groupby("run")]
    verdicts = []
    for name, score, column in (
        (f"the highest score in {_EVERY} steps and |reward change|", "score", "reward_change"),
        ("a minibatch's score and gradient norm", "batch_score", "gradient_norm"),
    ):
        for given in (False, True):
            # A gradient norm is never negative, so `abs` does not change it.
            correlations = [
                _rank_correlation(run[score], run[column].abs(), run.step if given else None)
                for run in runs
            ]
            claim = f"{name} are correlated{' at equal training time' if given else ''}"
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
    change = "change of the episode's log growth a year"
    for axes, score, seen, column, label in (
        (left, "score", f"largest score in {_EVERY} steps", "reward_change", change),
        (right, "batch_score", "score of a minibatch", "gradient_norm", "its gradient's norm"),
    ):
        points = axes.scatter(table[score], table[column], c=table.step, s=5, cmap="viridis")
        axes.set(xlabel=seen, ylabel=label)
    right.set_yscale("log")
    figure.colorbar(points, ax=[left, right], label="step")
    return figure
