"""Where prioritisation pays: in a market whose truth is known, with few, some or all tasks informative.

32 tasks share one policy. Scored are the paper's deviation from equal shares, the gradient norm and
the realised gain; each against uniform MTL, on held-out instruments that carry signal, at equal
updates. Deviation and gradient find what moves; realised gain finds what pays.
"""

from dataclasses import dataclass, replace
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
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.domains.portfolio.training import algorithm_settings, first_policies, learner
from apportion.domains.portfolio.walk import walk_policy
from apportion.policy import Policy
from apportion.priority import Priority
from apportion.statistics import bootstrap
from apportion.studies.portfolio.grid import Progress
from apportion.studies.study import Study, Verdict
from apportion.tasks import Tasks, draw_tasks
from apportion.training import train_runs

TASKS, HELD_OUT, TRAIN_DAYS, DAYS = 32, 10, 400, 1150
QUIET = 0.002
"""Daily volatility of quiet instruments; lively ones have as much as informative ones."""


@dataclass(frozen=True)
class Case:
    """How many of the 32 tasks carry signal, and whether the others are as volatile."""

    informative: int
    quiet_others: bool

    @property
    def name(self) -> str:
        others = "" if self.informative == TASKS else (" quiet" if self.quiet_others else " lively")
        return f"{self.informative} of {TASKS}{', others' + others if others else ''}"


CASES = (Case(2, True), Case(8, False), Case(TASKS, False))
Rules = dict[str, list[tuple[str, float, Any]]]
RULES: Rules = {
    "max-deviation": [
        ("uniform", 0.0, 1.0),
        ("paper's score, alpha 0.5, beta 1", 0.5, 1.0),
        ("paper's score, alpha 1, beta 0", 1.0, 0.0),
    ],
    "gradient-norm": [("gradient norm, alpha 1, beta 0", 1.0, 0.0)],
    "realised-gain": [
        ("realised gain, alpha 1, beta 0", 1.0, 0.0),
        ("realised gain, alpha 1, beta 1", 1.0, 1.0),
    ],
}
"""For each scorer, rules as (name, alpha, beta); rules of one scorer are trained side by side."""
ANNEALED = "realised gain, alpha 1, beta 0 to 1"


def run(
    *,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Train every rule on every case."""
    seeds = 10 if scale == "paper" else 3
    table = compute(SETTINGS, seeds=seeds, seed=seed, progress=progress)
    return from_table(table, {"seeds": seeds, "seed": seed, **vars(SETTINGS)})


SETTINGS = PortfolioSettings.paper(
    tasks=TASKS, task_size=5, window=8, batch=32, learning_rate=1e-3, cost=0.0005, steps=1000
)


def compute(
    settings: PortfolioSettings,
    *,
    seeds: int,
    seed: int = 0,
    cases: tuple[Case, ...] = CASES,
    rules: Rules | None = None,
    annealed: bool = True,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """A row for each case, rule and seed: held-out log growth a year over Equal CRP.

    All cases, rules of one scorer and seeds are one vmap.
    """
    rules = dict(RULES if rules is None else rules)
    cells = [(case, seed + i) for case in cases for i in range(seeds)]
    worlds = [_world(case, number, settings) for case, number in cells]
    train, test, own, unseen = (
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *column)
        for column in zip(*worlds, strict=True)
    )
    one = worlds[0][0]
    equal = _growth(_constant(EqualShares(), len(cells)), test, unseen)
    frames = []
    plans = list(rules.items())
    if annealed:
        plans.append(("realised-gain", [(ANNEALED, 1.0, _rising(settings.steps))]))
    for done, (scorer, variants) in enumerate(plans):
        names, alphas, betas = zip(*variants, strict=True)
        number = len(variants)

        def repeat(tree, number=number):
            return jax.tree.map(lambda leaf: jnp.repeat(leaf, number, 0), tree)

        runs = len(cells) * number
        keys = jax.random.split(jax.random.key(seed), len(cells))
        scored = replace(settings, scorer=scorer)
        beta = betas[0] if callable(betas[0]) else jnp.tile(jnp.asarray(betas), len(cells))
        axes = jax.tree.map(lambda _: 0, one)
        policies = train_runs(
            repeat(train),
            repeat(own),
            first_policies(settings, one, jnp.repeat(keys, number, 0)),
            learner(settings),
            steps=settings.steps,
            selection=Priority(jnp.tile(jnp.asarray(alphas), len(cells)), beta, 0.2, 0.8),
            chunk=settings.steps,
            record_every=settings.steps,
            problem_axes=axes,
            keys=jax.random.split(jax.random.key(seed + 1), runs),
            **algorithm_settings(scored, one),
        ).policy
        gains = np.asarray(_growth(policies, repeat(test), repeat(unseen))).reshape(-1, number)
        gains = gains - np.asarray(equal)[:, None]
        cell, rule = (i.ravel() for i in np.indices(gains.shape))
        frames.append(
            pd.DataFrame(
                {
                    "case": [cells[i][0].name for i in cell],
                    "rule": np.asarray(names)[rule],
                    "seed": [cells[i][1] for i in cell],
                    "growth": gains.ravel(),
                }
            )
        )
        if progress is not None:
            progress(f"{scorer}: {runs} runs of {settings.steps} updates", (done + 1) / len(plans))
    return pd.concat(frames, ignore_index=True)


def _rising(steps: int):
    """Beta from 0 to 1 along the run."""

    def beta(step):
        return jnp.minimum(step / steps, 1.0).astype(jnp.float32)

    return beta


def _world(
    case: Case, seed: int, settings: PortfolioSettings
) -> tuple[Market, Market, Tasks, Tasks]:
    """Training and test market, tasks to train on, and tasks of held-out informative instruments.

    Instruments: 30 informative, 30 not, 10 informative ones held out. Informative tasks are drawn
    from the first, the others from the second.
    """
    informative = np.repeat([True, False, True], [30, 30, HELD_OUT])
    rng = np.random.default_rng(seed + 1000)
    volatility = rng.uniform(0.01, 0.02, len(informative))
    if case.quiet_others:
        volatility = np.where(informative, volatility, QUIET)
    truth = SimulatedMarket.draw(
        universe=len(informative),
        days=DAYS,
        seed=seed,
        informative=informative,
        volatility=volatility,
    )
    with_signal = draw_tasks(np.arange(30), 5, case.informative, seed=seed)
    own = with_signal
    if case.informative < TASKS:
        rest = draw_tasks(np.arange(30, 60), 5, TASKS - case.informative, seed=seed)
        own = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), with_signal, rest)
    unseen = draw_tasks(np.arange(60, 60 + HELD_OUT), 5, 8, seed=seed)
    first = truth.prices.dates[TRAIN_DAYS]
    costs = Costs(settings.cost)
    train = Market.of(truth.prices.until(first), window=settings.window, costs=costs)
    test = Market.of(truth.prices, start=first, window=settings.window, costs=costs)
    return train, test, own, unseen


@eqx.filter_jit
def _growth(policies: Policy, markets: Market, tasks: Tasks) -> jax.Array:
    """Log growth a year of each run's policy in its market, mean over its tasks."""

    def one(policy, market, tasks):
        walks = jax.vmap(lambda task: walk_policy(policy, market, task).log_return)(tasks)
        return walks.mean() * 252

    return eqx.filter_vmap(one)(policies, markets, tasks)


def _constant(policy: Policy, runs: int) -> Policy:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (runs, *leaf.shape)), policy)


def from_table(table: Any, settings: dict | None = None) -> Study:
    """The study from a computed table."""
    gaps = over_uniform(table)
    verdicts = []
    for (case, rule), rows in gaps.groupby(["case", "rule"], sort=False):
        estimate = bootstrap(rows.gap.to_numpy())
        verdicts.append(
            Verdict.of(
                f"{rule} beats uniform MTL with {case}",
                estimate,
                holds=estimate.above_zero,
                paper=rule.startswith("paper's score, alpha 0.5"),
            )
        )
    readings = (
        "Log growth a year on held-out instruments with signal, over uniform MTL at equal updates; "
        "intervals over seeds of a simulated market.",
    )
    return Study(
        "prioritisation",
        "Where prioritisation pays: few, some or all of 32 tasks informative",
        table,
        tuple(verdicts),
        lambda: draw(table),
        readings,
        settings or {},
    )


def over_uniform(table: Any) -> pd.DataFrame:
    """Each rule's gap to uniform MTL in the same case and seed."""
    base = table[table.rule == "uniform"].set_index(["case", "seed"]).growth
    others = table[table.rule != "uniform"]
    gap = (
        others.growth.to_numpy()
        - base.loc[list(zip(others.case, others.seed, strict=True))].to_numpy()
    )
    return others.assign(gap=gap)


def draw(table: Any) -> Figure:
    """One panel a case: the rules' gaps with intervals over seeds."""
    gaps = over_uniform(table)
    cases = list(dict.fromkeys(table.case))
    rules = list(dict.fromkeys(gaps.rule))
    figure = Figure(figsize=(4 * len(cases) + 3, 3.6), layout="constrained")
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    for axes, case in zip(panels, cases, strict=True):
        for place, rule in enumerate(rules):
            values = gaps[(gaps.case == case) & (gaps.rule == rule)].gap.to_numpy()
            e = bootstrap(values)
            axes.plot([e.low, e.high], [place, place], color="C0")
            axes.plot(e.value, place, "o", color="C0")
            axes.plot(values, np.full(len(values), place + 0.15), ".", color="0.6", markersize=4)
        axes.axvline(0, color="k", linewidth=0.8)
        axes.set_title(f"{case} informative" if "others" not in case else case, fontsize=10)
        axes.set_xlabel("log growth a year over uniform MTL")
    panels[0].set_yticks(range(len(rules)), rules)
    panels[0].invert_yaxis()
    return figure
