"""The main job in small: P-MTL, MTL and STL on 20 stocks, tested on later years and unseen stocks.

Every experiment holds other stocks out. All policies get equal updates on the days of 2008 to 2017 and
walk through 2018 to 2022, net of 25 bp; comparisons are paired by experiment and year.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.composition import EqualShares, PartialTrading, ShrunkToEqual
from apportion.domains.portfolio.backtest import Backtest, backtest
from apportion.domains.portfolio.baselines.simple import BASELINES
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.job import LAZY, tables
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
from apportion.runs.job import Outcome
from apportion.runs.progress import Progress, Standing
from apportion.studies.portfolio.demo_settings import DemoSettings
from apportion.studies.portfolio.findings import Gains, claims_of, headline_of, sentences
from apportion.tasks import Tasks, draw_tasks, split_entities
from apportion.training import Chunk, Training, train_runs

FIRST, TEST = "2008-01-01", "2018-01-01"
HELD_OUT = 8
SHOWN = 3
"""Tasks of each experiment that are tested; each has its single-task policy."""
ETA, TRUST = 0.1, 0.5
DAYS = 252
_BASELINES = ("exponentiated-gradient", "momentum", "inverse-volatility", "volatility-tilt")


@dataclass(frozen=True)
class Demo:
    """What the demo found, on which data, with the metrics of training."""

    outcome: Outcome
    data: dict[str, Any]
    metrics: pd.DataFrame
    probabilities: pd.DataFrame


def run_demo(settings: DemoSettings, progress: Progress) -> Demo:
    """Train, test, and say what held."""
    prices = embedded_prices().since(FIRST)
    known = prices.until(TEST)
    s = PortfolioSettings.paper(
        task_size=5,
        window=16,
        batch=64,
        hidden=12,
        learning_rate=1e-3,
        tasks=settings.tasks,
        steps=settings.steps,
        seed=settings.seed,
    )
    splits = _splits(len(prices.tickers), s, settings.experiments)
    progress.note(
        f"{len(prices.tickers)} stocks; {settings.experiments} experiments hold {HELD_OUT} of them "
        f"out; training on {known.dates[0]} to {known.dates[-1]}, testing until {prices.dates[-1]}"
    )
    several, seen = _train(known, s, splits, ("pmtl", "mtl"), progress)
    alone, _ = _train(known, s, splits, ("stl",), progress)
    policies = {"pmtl": _every(several.policy, 0, 2), "mtl": _every(several.policy, 1, 2)}
    policies |= {"careful": _careful(policies["pmtl"]), "stl": alone.policy}
    claims = claims_of(_gains(policies, splits, prices, s, progress))
    progress.stage("backtesting on held-out stocks")
    record = _backtest(policies, splits, prices, s)
    about = {
        "job": "portfolio",
        "window": s.window,
        "channels": prices.channels,
        "cost": s.cost,
        "last": str(known.dates[-1]),
        "trained_on": [prices.tickers[i] for i in splits.seen[0]],
    }
    return Demo(
        Outcome(
            _first(policies["careful"]),
            {"claims": claims, "backtest": record.to_json()},
            sentences(claims),
            about,
            headline_of(claims),
            tables(record),
        ),
        {"source": "embedded", "tickers": len(prices.tickers), "fingerprint": prices.fingerprint},
        pd.concat([_metrics(several, ("pmtl", "mtl")), _metrics(alone, ("stl",))]),
        pd.DataFrame(seen),
    )


@dataclass(frozen=True, eq=False)
class _Splits:
    """Stocks seen and unseen, and tasks of both, stacked by experiment."""

    seen: list[np.ndarray]
    unseen: list[np.ndarray]
    own: Tasks
    fresh: Tasks


def _splits(universe: int, s: PortfolioSettings, experiments: int) -> _Splits:
    seeds = [s.seed + number for number in range(experiments)]
    halves = [split_entities(universe, HELD_OUT, seed=seed) for seed in seeds]

    def tasks(half: int, count: int) -> Tasks:
        drawn = [
            draw_tasks(entities[half], s.task_size, count, seed=seed)
            for entities, seed in zip(halves, seeds, strict=True)
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)

    seen, unseen = [half[0] for half in halves], [half[1] for half in halves]
    return _Splits(seen, unseen, tasks(0, max(s.tasks, SHOWN)), tasks(1, SHOWN))


def _train(
    known: Prices,
    s: PortfolioSettings,
    splits: _Splits,
    methods: tuple[str, ...],
    progress: Progress,
) -> tuple[Training, list[dict[str, float]]]:
    """All policies of these methods in one vmap: by experiment, then by method or single task."""
    single = methods == ("stl",)
    each = SHOWN if single else len(methods)
    runs = len(splits.seen) * each
    if single:
        tasks = jax.tree.map(lambda a: a[:, :SHOWN].reshape(runs, 1, -1), splits.own)
    else:
        tasks = jax.tree.map(lambda a: jnp.repeat(a[:, : s.tasks], each, 0), splits.own)
    names = " and ".join(method.upper().replace("PMTL", "P-MTL") for method in methods)
    title = f"{names}: {runs} policies at once"
    progress.stage(f"{title}, compiling")
    seen: list[dict[str, float]] = []

    def on_chunk(chunk: Chunk) -> None:
        progress.training(Standing.of(chunk), title)
        state = jax.tree.map(lambda leaf: leaf[0], chunk.state.selection)
        chances = np.asarray(_first(chunk.algorithm.selection).probabilities(state))
        row = {f"task {t}": float(p) for t, p in enumerate(chances)}
        seen.append({"step": float(chunk.step), **row})

    market = training_market(known, s)
    alphas = [s.alpha if method == "pmtl" else 0.0 for method in methods]
    # Methods of one experiment start from the same parameters and differ by method alone.
    starts = jnp.repeat(jax.random.split(jax.random.key(s.seed), len(splits.seen)), each)
    training = train_runs(
        market,
        tasks,
        first_policies(s, market, starts),
        learner(s),
        steps=s.steps,
        selection=Priority(
            jnp.resize(jnp.asarray(alphas), (runs,)), s.beta, s.smoothing, 1 - 1 / s.task_size
        ),
        chunk=100,
        record_every=int(np.gcd(s.steps, 5)),
        on_chunk=on_chunk,
        keys=jax.random.split(jax.random.key(s.seed + 1), runs),
        **algorithm_settings(s, market),
    )
    return training, seen


def _gains(
    policies: dict[str, Policy],
    splits: _Splits,
    prices: Prices,
    s: PortfolioSettings,
    progress: Progress,
) -> Gains:
    """Log growth a year over Equal CRP in points, the mean over tasks."""
    market = Market.of(prices, start=TEST, window=s.window, costs=Costs(s.cost).exactly())
    years = prices.dates[prices.row(TEST) :].astype("datetime64[Y]")
    experiments = len(splits.seen)

    def yearly(log_returns: jax.Array) -> np.ndarray:
        log = np.asarray(log_returns).reshape(experiments, -1, len(years)).mean(1)
        means = [log[:, years == year].mean(-1) for year in np.unique(years)]
        return 100 * DAYS * np.stack(means, -1)

    gains: Gains = {}
    own = jax.tree.map(lambda a: a[:, :SHOWN], splits.own)
    for number, (kind, tasks) in enumerate({"own": own, "held-out": splits.fresh}.items()):
        progress.stage(f"testing on {kind} tasks", number / 2)
        equal = yearly(_walk_all(EqualShares(), market, tasks))
        gains[LAZY, kind] = yearly(_walk_all(_lazy(), market, tasks)) - equal
        for name in ("pmtl", "mtl", "careful"):
            gains[name, kind] = yearly(_walk_each(policies[name], market, tasks)) - equal
        # A single-task policy has one task of its own, and every held-out one.
        if kind == "own":
            tasks = jax.tree.map(lambda a: a.reshape(experiments * SHOWN, 1, -1), tasks)
        else:
            tasks = jax.tree.map(lambda a: jnp.repeat(a, SHOWN, 0), tasks)
        gains["stl", kind] = yearly(_walk_each(policies["stl"], market, tasks)) - equal
    return gains


@eqx.filter_jit
def _walk_each(policies: Policy, market: Market, tasks: Tasks) -> jax.Array:
    """Net log returns of stacked policies, each on its own tasks, (runs, tasks, time)."""
    return eqx.filter_vmap(lambda policy, own: _walk_all(policy, market, own))(policies, tasks)


@eqx.filter_jit
def _walk_all(policy: Policy, market: Market, tasks: Tasks) -> jax.Array:
    """Net log returns of one policy on tasks stacked in any way."""
    flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), tasks)
    return jax.vmap(lambda task: walk_policy(policy, market, task).log_return)(flat)


def _backtest(
    policies: dict[str, Policy], splits: _Splits, prices: Prices, s: PortfolioSettings
) -> Backtest:
    """The first experiment's policies on the stocks it held out."""
    unseen = prices.select([prices.tickers[i] for i in splits.unseen[0]])
    return backtest(
        unseen,
        {
            "policy": _first(policies["careful"]),
            "p-mtl": _first(policies["pmtl"]),
            "mtl": _first(policies["mtl"]),
            "stl": _first(policies["stl"]),
            LAZY: _lazy(),
        },
        baselines={name: BASELINES[name] for name in _BASELINES},
        hindsight={name: BASELINES[name] for name in ("buy-and-hold", "best-crp")},
        start=TEST,
        window=s.window,
        cost=s.cost,
    )


def _lazy() -> Policy:
    return PartialTrading(EqualShares(), ETA)


def _careful(policies: Policy) -> Policy:
    """Half of the way from equal shares to the policy, a tenth of that traded each day."""
    return eqx.filter_vmap(lambda policy: PartialTrading(ShrunkToEqual(policy, TRUST), ETA))(
        policies
    )


def _first(stacked: Any) -> Any:
    """The first of stacked things; numbers they share stay as they are."""
    return jax.tree.map(lambda a: a[0] if eqx.is_array(a) and a.ndim else a, stacked)


def _every(stacked: Policy, start: int, step: int) -> Policy:
    return jax.tree.map(lambda a: a[start::step] if eqx.is_array(a) else a, stacked)


def _metrics(training: Training, methods: tuple[str, ...]) -> pd.DataFrame:
    """The rows of training, each with its method."""
    table = training.metrics
    return table.assign(method=np.asarray(methods)[table["run"].to_numpy() % len(methods)])
