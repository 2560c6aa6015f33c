"""The main job in small: P-MTL, MTL and STL on 20 stocks, tested on later years and unseen stocks.

Every experiment holds other stocks out. All policies get equal updates on the days of 2008 to 2017 and
walk through 2018 to 2022, net of 25 bp; comparisons are paired by experiment and year.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.composition import EqualShares, PartialTrading, ShrunkToEqual
from apportion.domains.portfolio.backtest import backtest_strategies, lazy_rebalancing
from apportion.domains.portfolio.baselines.simple import BASELINES
from apportion.domains.portfolio.domain import data_of, next_table, tables
from apportion.domains.portfolio.market import Costs, Market, walk_tasks
from apportion.domains.portfolio.prices import Prices, embedded_prices
from apportion.domains.portfolio.record import LAZY, TRADING_DAYS, Backtest
from apportion.domains.portfolio.rules import Rules
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio_runs, training_market
from apportion.domains.settings import METHOD_NAMES, Method
from apportion.policy import Policy
from apportion.runs.job import Outcome
from apportion.runs.progress import Progress, TrainingStatus
from apportion.studies.portfolio.demo_settings import DemoSettings
from apportion.studies.portfolio.experiments import Splits
from apportion.studies.portfolio.findings import Gains, claims_of, headline_of, sentences
from apportion.tasks import TaskSets, single_tasks
from apportion.training import Chunk, Chunks, TrainingResult
from apportion.trees import repeat, stack, take

FIRST, TEST = "2008-01-01", "2018-01-01"
HELD_OUT = 8
SHOWN = 3
"""Tasks of each experiment that are tested; each has its single-task policy."""
K, ETA = 0.5, 0.1
_BASELINES = ("exponentiated-gradient", "momentum", "inverse-volatility", "volatility-tilt")


@dataclass(frozen=True)
class Demo:
    """What the demo found, on which data, with the metrics of training."""

    outcome: Outcome
    data: dict[str, Any]
    metrics: pd.DataFrame
    probabilities: pd.DataFrame


def run_demo(settings: DemoSettings, progress: Progress) -> Demo:
    """Train, test, and report what held."""
    prices = embedded_prices().since(FIRST)
    known = prices.until(TEST)
    small = {"task_size": 5, "window": 16, "batch": 64, "hidden": 12, "learning_rate": 1e-3}
    own = {"tasks": settings.tasks, "steps": settings.steps, "seed": settings.seed}
    s = PortfolioSettings.paper(**small, **own)
    counts = {"held_out": HELD_OUT, "own": max(s.tasks, SHOWN), "shown": SHOWN}
    splits = Splits.draw(len(prices.tickers), s, settings.experiments, **counts)
    progress.note(
        f"{len(prices.tickers)} stocks; {settings.experiments} experiments hold {HELD_OUT} of them "
        f"out; training on {known.dates[0]} to {known.dates[-1]}, testing until {prices.dates[-1]}"
    )
    several, seen = _train(known, s, splits, ("pmtl", "mtl"), progress)
    alone, _ = _train(known, s, splits, ("stl",), progress)
    policies = {
        method: take(several.policy, slice(place, None, 2))
        for place, method in enumerate(("pmtl", "mtl"))
    }
    policies |= {"careful": _careful(policies["pmtl"]), "stl": alone.policy}
    claims = claims_of(_gains(policies, splits, prices, s, progress))
    progress.stage("backtesting on held-out stocks")
    last = str(known.dates[-1])
    record = replace(_backtest(policies, splits, prices, s), trained_until=last)
    policy = take(policies["careful"], 0)
    about = {
        "job": "portfolio",
        "window": s.window,
        "channels": prices.channels,
        "cost": s.cost,
        "last": last,
        "trained_on": [prices.tickers[i] for i in splits.seen[0]],
    }
    return Demo(
        Outcome(
            policy,
            {"claims": claims, "backtest": record.to_json()},
            sentences(claims),
            about,
            headline_of(claims),
            tables(record) | {"next": next_table(policy, prices, s.window, Rules())},
        ),
        data_of(known, "embedded") | {"fingerprint": prices.fingerprint},
        pd.concat([_metrics(several, ("pmtl", "mtl")), _metrics(alone, ("stl",))]),
        pd.DataFrame(seen),
    )


def _train(
    known: Prices,
    s: PortfolioSettings,
    splits: Splits,
    methods: tuple[Method, ...],
    progress: Progress,
) -> tuple[TrainingResult, list[dict[str, float]]]:
    """All policies of these methods in one vmap: by experiment, then by method or single task."""
    single = methods == ("stl",)
    if single:
        tasks = single_tasks(splits.own.first(SHOWN).flat)
    else:
        tasks = repeat(splits.own.first(s.tasks), len(methods))
    experiments, runs = len(splits.seen), len(tasks)
    names = " and ".join(METHOD_NAMES[method] for method in methods)
    title = f"{names}: {runs} policies at once"
    progress.stage(f"{title}, compiling")
    seen: list[dict[str, float]] = []

    def on_chunk(chunk: Chunk) -> None:
        progress.training(TrainingStatus.of(chunk), title)
        first = take(chunk.algorithm.selection, 0)
        chances = np.asarray(first.probabilities(take(chunk.state.selection, 0)))
        row = {f"task {t}": float(p) for t, p in enumerate(chances)}
        seen.append({"step": float(chunk.step), **row})

    selections = [replace(s, method=methods[run % len(methods)]).selection() for run in range(runs)]
    # Methods of one experiment start from the same parameters and differ by method alone.
    starts = jax.random.split(jax.random.key(s.seed), experiments)
    training = train_portfolio_runs(
        training_market(known, s),
        tasks,
        s,
        policy_keys=jnp.repeat(starts, runs // experiments),
        run_keys=jax.random.split(jax.random.key(s.seed + 1), runs),
        selection=stack(selections),
        chunks=Chunks(100, math.gcd(s.steps, 5), on_chunk),
    )
    return training, seen


def _gains(
    policies: dict[str, Policy],
    splits: Splits,
    prices: Prices,
    s: PortfolioSettings,
    progress: Progress,
) -> Gains:
    """Log growth a year over Equal CRP in points, the mean over tasks."""
    costs = Costs(s.cost, exact=True)
    market = Market.of(prices, start=TEST, window=s.window, costs=costs)
    years = prices.dates[prices.row(TEST) :].astype("datetime64[Y]")
    experiments = len(splits.seen)

    def yearly(log_returns: jax.Array) -> np.ndarray:
        log = np.asarray(log_returns).reshape(experiments, -1, len(years)).mean(1)
        means = [log[:, years == year].mean(-1) for year in np.unique(years)]
        return 100 * TRADING_DAYS * np.stack(means, -1)

    gains: Gains = {}
    own = splits.own.first(SHOWN)
    for number, (kind, tasks) in enumerate({"own": own, "held-out": splits.held_out}.items()):
        progress.stage(f"testing on {kind} tasks", number / 2)
        equal = yearly(walk_tasks(EqualShares(), market, tasks.flat).log_return)
        lazy = walk_tasks(lazy_rebalancing(), market, tasks.flat).log_return
        gains[LAZY, kind] = yearly(lazy) - equal
        for name in ("pmtl", "mtl", "careful"):
            gains[name, kind] = yearly(_walk_each(policies[name], market, tasks)) - equal
        # A single-task policy has one task of its own, and every held-out one.
        alone = single_tasks(tasks.flat) if kind == "own" else repeat(tasks, SHOWN)
        gains["stl", kind] = yearly(_walk_each(policies["stl"], market, alone)) - equal
    return gains


@eqx.filter_jit
def _walk_each(policies: Policy, market: Market, tasks: TaskSets) -> jax.Array:
    """Net log returns of stacked policies, each on its own tasks, (runs, tasks, time)."""
    walk = eqx.filter_vmap(lambda policy, own: walk_tasks(policy, market, own).log_return)
    return walk(policies, tasks.each)


def _backtest(
    policies: dict[str, Policy], splits: Splits, prices: Prices, s: PortfolioSettings
) -> Backtest:
    """The first experiment's policies on the stocks it held out."""
    unseen = prices.select([prices.tickers[i] for i in splits.unseen[0]])
    return backtest_strategies(
        unseen,
        {
            "policy": take(policies["careful"], 0),
            "p-mtl": take(policies["pmtl"], 0),
            "mtl": take(policies["mtl"], 0),
            "stl": take(policies["stl"], 0),
            LAZY: lazy_rebalancing(),
        },
        baselines={name: BASELINES[name] for name in _BASELINES},
        hindsight={name: BASELINES[name] for name in ("buy-and-hold", "best-crp")},
        start=TEST,
        window=s.window,
        cost=s.cost,
    )


def _careful(policies: Policy) -> Policy:
    """Half of the way from equal shares to the policy, a tenth of that traded each day."""
    return eqx.filter_vmap(lambda policy: PartialTrading(ShrunkToEqual(policy, K), ETA))(policies)


def _metrics(training: TrainingResult, methods: tuple[str, ...]) -> pd.DataFrame:
    """The rows of training, each with its method."""
    table = training.metrics
    return table.assign(method=np.asarray(methods)[table["run"].to_numpy() % len(methods)])
