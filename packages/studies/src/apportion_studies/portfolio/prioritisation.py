"""When prioritisation helps: simulated markets with known truth, equal updates, held-out instruments.

Prioritisation: 32 tasks share one policy, and few, some or all of them are informative. The scores are the
paper's deviation from equal shares, the gradient norm and the realised gain. Each rule is compared with
uniform MTL on held-out instruments that carry signal. Deviation and gradient norm find tasks that move;
realised gain finds tasks that pay. A cell is a case, a rule and a seed of the market.

Conflict: the best policy for most tasks is wrong for the others. In 24 of 32 tasks the moves of a day
tend to reverse on the next day, in 8 they continue; the state does not show the kind of a task. Each rule
is compared with uniform drawing by the result of the worse camp and by the spread of the runs. Claims:
priorities serve the worst tasks better, and runs differ less. A cell is a rule and a seed of the market.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float

from apportion.certify.statistics import compare, mean_over
from apportion.composition import EqualShares
from apportion.domains.portfolio.market import Costs, Market, walk_tasks
from apportion.domains.portfolio.record import TRADING_DAYS
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.domains.portfolio.training import train_portfolio_runs
from apportion.domains.settings import ScorerName
from apportion.policy import Policy
from apportion.priority import Priority
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.tasks import Task, draw_tasks
from apportion.training import Chunks
from apportion.trees import stack
from apportion_studies.portfolio.experiments import POINTS, by_cell, seeds_of

_SCALES = {
    "quick": {"prioritisation": (3, 1000), "conflict": (3, 300)},
    "paper": {"prioritisation": (10, 1000), "conflict": (12, 1000)},
}
"""Number of simulated markets and of updates of a policy, by figure."""
_TASKS, _TRAINED, _HELD_OUT, _TRAIN_DAYS, _DAYS = 32, 30, 10, 400, 1150
_SETTINGS = PortfolioSettings.paper(
    tasks=_TASKS, task_size=5, window=8, batch=32, learning_rate=1e-3, cost=0.0005
)
_QUIET = 0.002
"""Daily volatility of quiet instruments; lively ones are as volatile as informative ones."""
_CASES = {
    "2 of 32, others quiet": (2, True),
    "8 of 32, others lively": (8, False),
    "32 of 32": (_TASKS, False),
}
"""Number of tasks, out of 32, that carry signal, and whether the others are quiet."""
_CAMPS = {"most": (24, -0.2), "others": (8, 0.2)}
"""Number of tasks of each camp, and the autocorrelation of its instruments' moves."""


@dataclass(frozen=True)
class _Rule:
    """Rule for drawing the next task."""

    name: str
    scorer: ScorerName
    alpha: float
    beta: float

    @property
    def paper(self) -> bool:
        """Whether this is the paper's rule, with any beta."""
        return self.scorer == "max-deviation" and self.alpha == 0.5


_UNIFORM = _Rule("uniform", "max-deviation", 0.0, 1.0)
_RULES = (
    _UNIFORM,
    _Rule("paper's score, alpha 0.5, beta 1", "max-deviation", 0.5, 1.0),
    _Rule("paper's score, alpha 1, beta 0", "max-deviation", 1.0, 0.0),
    _Rule("gradient norm, alpha 1, beta 0", "gradient-norm", 1.0, 0.0),
    _Rule("realised gain, alpha 1, beta 0", "realised-gain", 1.0, 0.0),
    _Rule("realised gain, alpha 1, beta 1", "realised-gain", 1.0, 1.0),
)
_BY_NAME = {rule.name: rule for rule in _RULES}


def prioritisation(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """Plan both figures, with a cell for each drawing rule and simulated market."""
    sizes = _SCALES[scale]
    markets = {figure: seeds_of(seed, number) for figure, (number, _) in sizes.items()}
    known = {
        figure: replace(_SETTINGS, seed=seed, steps=steps) for figure, (_, steps) in sizes.items()
    }
    cells = []
    # Rules with the same scorer share a program.
    for program in dict.fromkeys(rule.scorer for rule in _RULES):
        rules = [rule for rule in _RULES if rule.scorer == program]
        worlds = product(_CASES.items(), markets["prioritisation"])
        for ((case, (informative, quiet)), own), (place, rule) in product(worlds, enumerate(rules)):
            others = "quiet" if quiet else "lively"
            name = f"{program}-{place}-{informative}-{others}-{own}"
            values = {"figure": "prioritisation", "case": case, "rule": rule.name, "seed": own}
            cells.append(Cell(f"prioritisation-{name}", values, f"prioritisation-{program}"))
    for (place, rule), own in product(enumerate(_RULES), markets["conflict"]):
        values = {"figure": "conflict", "rule": rule.name, "seed": own}
        cells.append(Cell(f"conflict-{place}-{own}", values, f"conflict-{rule.scorer}"))
    about = {figure: {"seeds": len(markets[figure]), **vars(known[figure])} for figure in known}
    about["conflict"]["camps"] = {name: list(camp) for name, camp in _CAMPS.items()}
    compute = partial(_compute, markets, known)
    return Plan("prioritisation", tuple(cells), compute, _conclude, about)


class _World(NamedTuple):
    """A simulated market with training days, test days and tasks."""

    train: Market
    test: Market
    own: Task
    unseen: dict[str, Task]
    """Tasks of held-out instruments, by kind."""


def _informative_world(case: str, seed: int, settings: PortfolioSettings) -> _World:
    """Simulate 30 informative, 30 uninformative and 10 held-out informative instruments.

    Informative tasks have instruments of the first group, the other tasks of the second.
    """
    count, quiet = _CASES[case]
    informative = np.repeat([True, False, True], [_TRAINED, _TRAINED, _HELD_OUT])
    rng = np.random.default_rng(seed + 1000)
    volatility = rng.uniform(0.01, 0.02, len(informative))
    if quiet:
        volatility = np.where(informative, volatility, _QUIET)
    truth = SimulatedMarket.draw(
        universe=len(informative),
        days=_DAYS,
        seed=seed,
        informative=informative,
        volatility=volatility,
    )
    own = draw_tasks(np.arange(_TRAINED), 5, count, seed=seed)
    if count < _TASKS:
        rest = draw_tasks(np.arange(_TRAINED, 2 * _TRAINED), 5, _TASKS - count, seed=seed)
        own = own.joined(rest)
    unseen = draw_tasks(np.arange(2 * _TRAINED, 2 * _TRAINED + _HELD_OUT), 5, 8, seed=seed)
    return _World(*_split_days(truth, settings), own, {"informative": unseen})


def _conflicting_world(seed: int, settings: PortfolioSettings) -> _World:
    """Simulate instruments of both camps, with training tasks and held-out tasks of each camp."""
    each = _TRAINED + _HELD_OUT
    truth = SimulatedMarket.draw(
        universe=each * len(_CAMPS),
        days=_DAYS,
        seed=seed,
        autocorrelation=np.repeat([phi for _, phi in _CAMPS.values()], each),
    )
    drawn, unseen = [], {}
    for place, (camp, (count, _)) in enumerate(_CAMPS.items()):
        first = place * each
        drawn.append(draw_tasks(np.arange(first, first + _TRAINED), 5, count, seed=seed))
        unseen[camp] = draw_tasks(np.arange(first + _TRAINED, first + each), 5, 8, seed=seed)
    return _World(*_split_days(truth, settings), drawn[0].joined(drawn[1]), unseen)


def _split_days(truth: SimulatedMarket, settings: PortfolioSettings) -> tuple[Market, Market]:
    first = truth.prices.dates[_TRAIN_DAYS]
    costs = Costs(settings.cost)
    train = Market.of(truth.prices.until(first), window=settings.window, costs=costs)
    return train, Market.of(truth.prices, start=first, window=settings.window, costs=costs)


def _compute(
    markets: dict[str, range],
    known: dict[str, PortfolioSettings],
    cells: Sequence[Cell],
    progress: OnProgress,
) -> Rows:
    """Yield each cell's points a year over Equal CRP; cells of one program run in one `vmap`."""
    figure = cells[0]["figure"]
    if figure == "prioritisation":
        table = _by_case(cells, known[figure], markets[figure])
    else:
        table = _by_camp(cells, known[figure])
    progress(f"{cells[0].program}: {len(cells)} runs of {known[figure].steps} updates", 1.0)
    yield from by_cell(cells, table)


def _by_case(cells: Sequence[Cell], settings: PortfolioSettings, seeds: range) -> pd.DataFrame:
    own = [_BY_NAME[cell["rule"]] for cell in cells]
    rules = [rule for rule in _RULES if rule.scorer == own[0].scorer]
    places: list[tuple[str, int]] = list(product(_CASES, seeds))
    s = replace(settings, scorer=own[0].scorer)
    rule = np.asarray([rules.index(one) for one in own])
    world = np.asarray([places.index((cell["case"], cell["seed"])) for cell in cells])
    made = {int(n): _informative_world(*places[int(n)], s) for n in np.unique(world)}
    # All rules share the first parameters of a world; each rule has its own draws.
    policy_keys = jax.random.split(jax.random.key(s.seed), len(places))
    run_keys = jax.random.split(jax.random.key(s.seed + 1), len(places) * len(rules))
    growth = _train_and_test(
        [made[number] for number in world],
        s,
        policy_keys=policy_keys[world],
        run_keys=run_keys[world * len(rules) + rule],
        priority=_priority(own, s),
    )
    return pd.DataFrame({"place": np.arange(len(cells)), "growth": growth["informative"]})


def _by_camp(cells: Sequence[Cell], settings: PortfolioSettings) -> pd.DataFrame:
    rules = [_BY_NAME[cell["rule"]] for cell in cells]
    s = replace(settings, scorer=rules[0].scorer)
    made = {seed: _conflicting_world(seed, s) for seed in {cell["seed"] for cell in cells}}
    # All rules share the first parameters of a market; each rule has its own draws.
    seeds = np.asarray([cell["seed"] for cell in cells], np.uint32)
    keys = jax.vmap(jax.random.key)(seeds)
    growth = _train_and_test(
        [made[cell["seed"]] for cell in cells],
        s,
        policy_keys=keys,
        run_keys=jax.vmap(jax.random.fold_in)(keys, jnp.asarray([_RULES.index(r) for r in rules])),
        priority=_priority(rules, s),
    )
    frames = [
        pd.DataFrame({"place": np.arange(len(cells)), "camp": camp, "growth": growth[camp]})
        for camp in _CAMPS
    ]
    return pd.concat(frames)


def _priority(rules: Sequence[_Rule], settings: PortfolioSettings) -> Priority:
    """Priorities of runs with these rules."""
    alphas, betas = (
        jnp.asarray([getattr(rule, name) for rule in rules]) for name in ("alpha", "beta")
    )
    return Priority(alphas, betas, settings.smoothing, settings.priority().initial)


def _train_and_test(
    worlds: Sequence[_World], settings: PortfolioSettings, **runs: Any
) -> dict[str, np.ndarray]:
    """Train one policy per world and return its gains on the held-out tasks.

    `runs` is passed to `train_portfolio_runs`; gains are points a year over Equal CRP, by kind of task.
    """
    train, test = (stack([getattr(world, name) for world in worlds]) for name in ("train", "test"))
    policies = train_portfolio_runs(
        train,
        stack([world.own for world in worlds]),
        settings,
        market_axes=jax.tree.map(lambda _: 0, train),
        chunks=Chunks(settings.steps, settings.steps),
        **runs,
    ).policy
    found = {}
    for kind in worlds[0].unseen:
        tasks = stack([world.unseen[kind] for world in worlds])
        equal = _growth(EqualShares(), test, tasks)
        found[kind] = 100 * np.asarray(_growth(policies, test, tasks) - equal)
    return found


@eqx.filter_jit
def _growth(policies: Policy, markets: Market, tasks: Task) -> Float[Array, " runs"]:
    """Log growth a year of each run's policy in its market, mean over its tasks."""

    def one(policy, market, tasks):
        return walk_tasks(policy, market, tasks).log_return.mean() * TRADING_DAYS

    return eqx.filter_vmap(one)(policies, markets, tasks)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    own = dict(iter(rows.groupby("figure")))
    return [
        _conclude_prioritisation(own["prioritisation"]),
        _conclude_conflict(own["conflict"]),
    ]


def _conclude_prioritisation(rows: Any) -> FigureResult:
    """Compare each rule with uniform MTL in each case."""
    table = rows[["case", "rule", "seed", "growth"]].reset_index(drop=True)
    verdicts, shown = [], {}
    for (case, rule), own in _over_uniform(table).groupby(["case", "rule"], sort=False):
        gain, paper = mean_over(own.gap.to_numpy()), _BY_NAME[str(rule)].paper
        ours = float(own.growth.mean())
        levels = {str(rule): ours, _UNIFORM.name: ours - gain.value}
        claim = f"{rule} beats uniform MTL with {case} ({POINTS})"
        verdicts.append(Verdict.of(claim, gain, paper=paper, levels=levels))
        shown.setdefault(f"informative: {case}", {})[rule] = gain
    notes = (
        "Points a year on held-out instruments with signal, over uniform MTL at equal updates; "
        "intervals over seeds of a simulated market.",
    )
    title = "Where prioritisation pays: few, some or all of 32 tasks informative"
    draw = partial(forest, shown, f"{POINTS} over uniform MTL")
    return FigureResult("prioritisation", title, table, verdicts, draw, notes)


def _over_uniform(table: Any) -> pd.DataFrame:
    """Each rule's gap to uniform MTL in the same case and seed."""
    growth = table.set_index(["case", "seed"]).growth
    base = growth[(table.rule == _UNIFORM.name).to_numpy()]
    gap = growth.to_numpy() - base.loc[growth.index].to_numpy()
    return table.assign(gap=gap)[table.rule != _UNIFORM.name]


def _conclude_conflict(rows: Any) -> FigureResult:
    """Compare each rule with uniform drawing: the worse camp, and the spread of the runs."""
    table = rows[["rule", "camp", "seed", "growth"]].reset_index(drop=True)
    ordered = table.sort_values("seed")
    growths = {
        rule.name: {
            camp: select(ordered, rule=rule.name, camp=camp).growth.to_numpy() for camp in _CAMPS
        }
        for rule in _RULES
    }
    worst = {name: np.minimum(*own.values()) for name, own in growths.items()}
    differ = {name: np.abs(values - np.median(values)) for name, values in worst.items()}
    verdicts, usual = [], _UNIFORM.name
    for rule in _RULES[1:]:
        for claim, values, gain in (
            ("serves the camp that fares worse better than uniform drawing",
             worst, compare(worst[rule.name], worst[usual])),
            ("runs differ less from their median than with uniform drawing",
             differ, compare(differ[usual], differ[rule.name])),
        ):  # fmt: skip
            levels = {name: float(values[name].mean()) for name in (rule.name, usual)}
            claim = f"{rule.name}: {claim} ({POINTS})"
            verdicts.append(Verdict.of(claim, gain, paper=rule.paper, levels=levels))
    notes = (
        f"{name}: {own['most'].mean():+.1f} {POINTS} over Equal CRP "
        f"with most, {own['others'].mean():+.1f} with the others."
        for name, own in growths.items()
    )
    title = "Priorities if tasks conflict: the camp that fares worse"
    shown = {
        f"{camp}: {count} of 32 tasks": {
            name: mean_over(own[camp]) for name, own in growths.items()
        }
        for camp, (count, _) in _CAMPS.items()
    }
    shown["the camp that fares worse"] = {name: mean_over(own) for name, own in worst.items()}
    draw = partial(forest, shown, f"{POINTS} over Equal CRP")
    return FigureResult("conflict", title, table, verdicts, draw, notes)
