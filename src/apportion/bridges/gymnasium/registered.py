"""The environments that `gymnasium.make` and `make_vec` know by name, made of embedded data."""

from functools import cache
from typing import Any

import gymnasium

from apportion.bridges.gymnasium.environment import ProblemEnv
from apportion.bridges.gymnasium.vector import ProblemVectorEnv
from apportion.domains.budget.problem import Budget
from apportion.domains.charging.days import Days
from apportion.domains.charging.predictions import Predictor
from apportion.domains.charging.problem import Charging
from apportion.domains.charging.sessions import read_sessions
from apportion.problem import Problem
from apportion.tasks import draw_tasks


@cache
def _budget() -> Problem:
    return Budget.simulate(universe=60, periods=80, seed=0)


@cache
def _charging() -> Problem:
    """The stations of one site in the year before the pandemic."""
    days = Days.of(read_sessions(), "jpl").between("2019-01-01", "2019-12-31")
    predictor = Predictor.fit(days)
    return Charging.of([predictor.apply(days)], predictor.medians)


_PROBLEMS = {"Budget": _budget, "Charging": _charging}


def make(
    name: str, *, entities: int = 5, tasks: int = 64, seed: int = 0, **options: Any
) -> ProblemEnv:
    """An environment over `tasks` subsets of so many entities, drawn by the seed."""
    problem = _PROBLEMS[name]()
    return ProblemEnv(problem, draw_tasks(problem.universe, entities, tasks, seed=seed), **options)


def make_vector(
    num_envs: int,
    name: str,
    *,
    entities: int = 5,
    tasks: int = 64,
    seed: int = 0,
    **options: Any,
) -> ProblemVectorEnv:
    """So many of them side by side."""
    problem = _PROBLEMS[name]()
    subsets = draw_tasks(problem.universe, entities, tasks, seed=seed)
    return ProblemVectorEnv(num_envs, problem, subsets, **options)


def register_all() -> None:
    """Make the ids known; a second time changes nothing."""
    for name in _PROBLEMS:
        if (number := f"apportion/{name}-v0") not in gymnasium.registry:
            gymnasium.register(
                number,
                entry_point=f"{__name__}:make",
                vector_entry_point=f"{__name__}:make_vector",
                kwargs={"name": name},
            )
