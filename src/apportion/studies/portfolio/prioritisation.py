"""Where prioritisation pays: in a market whose truth is known, with few, some or all tasks informative.

32 tasks share one policy. Scored are the paper's deviation from equal shares, the gradient norm and
the realised gain; each against uniform MTL, on held-out instruments that carry signal, at equal
updates. Deviation and gradient find what moves; realised gain finds what pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from apportion.composition import EqualShares
from apportion.domains.portfolio.market import Costs, Market, walk_tasks
from apportion.domains.portfolio.record import TRADING_DAYS
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.domains.settings import ScorerName
from apportion.policy import Policy
from apportion.priority import Priority
from apportion.statistics import mean_over
from apportion.studies.cells import Cell, Plan, Progress, Rows
from apportion.studies.portfolio.tables import by_cell
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes
from apportion.tasks import Tasks, TaskSets, draw_tasks
from apportion.training import Chunks
from apportion.trees import stack, take

TASKS, HELD_OUT, TRAIN_DAYS, DAYS = 32, 10, 400, 1150
QUIET = 0.002
"""Daily volatility of quiet instruments; lively ones have as much as informative ones."""
SETTINGS = PortfolioSettings.paper(
    tasks=TASKS, task_size=5, window=8, batch=32, learning_rate=1e-3, cost=0.0005, steps=1000
)


@dataclass(frozen=True)
class Case:
    """How many of the 32 tasks carry signal, and whether the others are as volatile."""

    informative: int
    quiet_others: bool

    @property
    def name(self) -> str:
        others = "" if self.informative == TASKS else (" quiet" if self.quiet_others else " lively")
        return f"{self.informative} of {TASKS}{', others' + others if others else ''}"


@dataclass(frozen=True)
class Rule:
    """How the next task is drawn."""

    name: str
    scorer: ScorerName
    alpha: float
    beta: float | None
    """None rises from 0 to 1 along the run."""

    @property
    def program(self) -> str:
        """Rules of one program are trained side by side."""
        return self.scorer if self.beta is not None else f"{self.scorer}-rising"


CASES = (Case(2, True), Case(8, False), Case(TASKS, False))
PAPERS_RULE = "paper's score, alpha 0.5"
UNIFORM = Rule("uniform", "max-deviation", 0.0, 1.0)
RULES = (
    UNIFORM,
    Rule("paper's score, alpha 0.5, beta 1", "max-deviation", 0.5, 1.0),
    Rule("paper's score, alpha 1, beta 0", "max-deviation", 1.0, 0.0),
    Rule("gradient norm, alpha 1, beta 0", "gradient-norm", 1.0, 0.0),
    Rule("realised gain, alpha 1, beta 0", "realised-gain", 1.0, 0.0),
    Rule("realised gain, alpha 1, beta 1", "realised-gain", 1.0, 1.0),
    Rule("realised gain, alpha 1, beta 0 to 1", "realised-gain", 1.0, None),
)


@dataclass(frozen=True)
class Trials:
    """Which rules are tried on which cases, on how many simulated markets each."""

    seeds: int
    settings: PortfolioSettings = SETTINGS
    cases: tuple[Case, ...] = CASES
    rules: tuple[Rule, ...] = RULES

    @property
    def worlds(self) -> list[tuple[Case, int]]:
        """Every case with every seed of a market."""
        seeds = range(self.settings.seed, self.settings.seed + self.seeds)
        return [(case, seed) for case in self.cases for seed in seeds]

    @property
    def programs(self) -> dict[str, list[Rule]]:
        """The rules of each program."""
        names = dict.fromkeys(rule.program for rule in self.rules)
        return {name: [rule for rule in self.rules if rule.program == name] for name in names}


def plan(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """A cell for each case, rule and seed of a simulated market."""
    seeds = 10 if scale == "paper" else 3
    return sized_plan(Trials(seeds, replace(SETTINGS, seed=seed)))


def sized_plan(trials: Trials) -> Plan:
    """The plan of any cases and rules."""
    cells = []
    for program, rules in trials.programs.items():
        for (case, seed), (place, rule) in product(trials.worlds, enumerate(rules)):
            others = "quiet" if case.quiet_others else "lively"
            name = f"{program}-{place}-{case.informative}-{others}-{seed}"
            values = {"case": case.name, "rule": rule.name, "seed": seed}
            cells.append(Cell(name, values, program))
    settings = {"seeds": trials.seeds, **vars(trials.settings)}
    return Plan("prioritisation", tuple(cells), partial(compute, trials), conclude, settings)


def compute(trials: Trials, cells: Sequence[Cell], progress: Progress) -> Rows:
    """Held-out log growth a year over Equal CRP of each cell: rules of one program are one vmap."""
    rules = trials.programs[cells[0].program]
    s = replace(trials.settings, scorer=rules[0].scorer)
    names, places = [rule.name for rule in rules], [(case.name, n) for case, n in trials.worlds]
    rule = np.asarray([names.index(cell["rule"]) for cell in cells])
    world = np.asarray([places.index((cell["case"], cell["seed"])) for cell in cells])
    used, run = np.unique(world, return_inverse=True)
    made = [make_world(case, seed, s) for case, seed in (trials.worlds[number] for number in used)]
    train, test, own, unseen = zip(*made, strict=True)
    seen, tested = stack(train), (stack(test), TaskSets.of(unseen))
    alphas = jnp.asarray([rules[number].alpha for number in rule])
    betas = (
        jnp.asarray([rules[i].beta for i in rule])
        if rules[0].beta is not None
        else (lambda step: jnp.minimum(step / s.steps, 1.0).astype(jnp.float32))
    )
    # A world's first parameters are the same for all rules, its draws are each rule's own.
    policy_keys = jax.random.split(jax.random.key(s.seed), len(places))
    run_keys = jax.random.split(jax.random.key(s.seed + 1), len(places) * len(rules))
    policies = train_in(
        take(seen, run),
        take(TaskSets.of(own), run),
        s,
        policy_keys=policy_keys[world],
        run_keys=run_keys[world * len(rules) + rule],
        selection=Priority(alphas, betas, s.smoothing, s.selection().initial),
    )
    equal = np.asarray(held_out_growth(EqualShares(), *tested))
    growth = np.asarray(held_out_growth(policies, *take(tested, run))) - equal[run]
    progress(f"{cells[0].program}: {len(cells)} runs of {s.steps} updates", 1.0)
    yield from by_cell(cells, pd.DataFrame({"place": np.arange(len(cells)), "growth": growth}))


def train_in(markets: Market, tasks: TaskSets, settings: PortfolioSettings, **runs: Any) -> Policy:
    """Policies that each learn in a market of its own; `runs` as for `train_policies`."""
    axes = jax.tree.map(lambda _: 0, markets)
    chunks = Chunks(settings.steps, settings.steps)
    return train_portfolio_runs(
        markets, tasks, settings, market_axes=axes, chunks=chunks, **runs
    ).policy


def make_world(
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
        own = with_signal.joined(rest)
    unseen = draw_tasks(np.arange(60, 60 + HELD_OUT), 5, 8, seed=seed)
    return *split_days(truth, settings), own, unseen


def split_days(truth: SimulatedMarket, settings: PortfolioSettings) -> tuple[Market, Market]:
    """The market of the first days, to learn from, and that of the later ones."""
    first = truth.prices.dates[TRAIN_DAYS]
    costs = Costs(settings.cost)
    train = Market.of(truth.prices.until(first), window=settings.window, costs=costs)
    return train, Market.of(truth.prices, start=first, window=settings.window, costs=costs)


@eqx.filter_jit
def held_out_growth(policies: Policy, markets: Market, tasks: TaskSets) -> Float[Array, " runs"]:
    """Log growth a year of each run's policy in its market, mean over its tasks."""

    def one(policy, market, tasks):
        return walk_tasks(policy, market, tasks).log_return.mean() * TRADING_DAYS

    return eqx.filter_vmap(one)(policies, markets, tasks.each)


def over_equal(policies: Policy, markets: Market, tasks: TaskSets) -> np.ndarray:
    """The same over Equal CRP."""
    equal = held_out_growth(EqualShares(), markets, tasks)
    return np.asarray(held_out_growth(policies, markets, tasks) - equal)


@concludes("prioritisation", "Where prioritisation pays: few, some or all of 32 tasks informative")
def conclude(rows: Any, settings: dict[str, Any]) -> Conclusion:
    """The study from its rows."""
    table = rows[["case", "rule", "seed", "growth"]]
    verdicts = []
    for (case, rule), gaps in over_uniform(table).groupby(["case", "rule"], sort=False):
        claim, paper = f"{rule} beats uniform MTL with {case}", rule.startswith(PAPERS_RULE)
        verdicts.append(Verdict.of(claim, mean_over(gaps.gap.to_numpy()), paper=paper))
    notes = (
        "Log growth a year on held-out instruments with signal, over uniform MTL at equal updates; "
        "intervals over seeds of a simulated market.",
    )
    return table, verdicts, lambda: plot(table), notes


def over_uniform(table: Any) -> pd.DataFrame:
    """Each rule's gap to uniform MTL in the same case and seed."""
    base = table[table.rule == UNIFORM.name].set_index(["case", "seed"]).growth
    others = table[table.rule != UNIFORM.name]
    gap = (
        others.growth.to_numpy()
        - base.loc[list(zip(others.case, others.seed, strict=True))].to_numpy()
    )
    return others.assign(gap=gap)


def plot(table: Any) -> Figure:
    """One panel a case: the rules' gaps with intervals over seeds."""
    gaps = over_uniform(table)
    cases = list(dict.fromkeys(table.case))
    rules = list(dict.fromkeys(gaps.rule))
    figure = Figure(figsize=(4 * len(cases) + 3, 3.6), layout="constrained")
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    for axes, case in zip(panels, cases, strict=True):
        for place, rule in enumerate(rules):
            values = gaps[(gaps.case == case) & (gaps.rule == rule)].gap.to_numpy()
            e = mean_over(values)
            axes.plot([e.low, e.high], [place, place], color="C0")
            axes.plot(e.value, place, "o", color="C0")
            axes.plot(values, np.full(len(values), place + 0.15), ".", color="0.6", markersize=4)
        axes.axvline(0, color="k", linewidth=0.8)
        axes.set_title(f"{case} informative" if "others" not in case else case, fontsize=10)
        axes.set_xlabel("log growth a year over uniform MTL")
    panels[0].set_yticks(range(len(rules)), rules)
    panels[0].invert_yaxis()
    return figure
