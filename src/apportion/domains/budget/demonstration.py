"""Comparison of the three methods and equal shares on simulated advertising markets."""

import numpy as np
import pandas as pd

from apportion.domains.budget.problem import Budget
from apportion.domains.budget.settings import BudgetSettings
from apportion.domains.demonstration import budgets_note, compare_methods, levels_of
from apportion.domains.domain import Demonstration
from apportion.learners.direct import Direct
from apportion.memory import Replay
from apportion.policy import Recurrent
from apportion.runs.progress import Progress

_MARKETS = 8
"""Independent markets, one per repetition."""
_RULE = "equal shares"


def demonstrate_budget(seed: int, progress: Progress) -> Demonstration:
    """Train and test in several markets of 60 campaigns, with 20 held out in each."""
    settings = BudgetSettings(seed=seed)
    # Campaigns are independent, so one large market simulates all of them.
    universe = _MARKETS * settings.universe
    problem = Budget.simulate(universe, settings.periods, noise=settings.noise, seed=seed)
    rewards, shares, tested = compare_methods(
        problem,
        problem,
        np.split(np.arange(universe), _MARKETS),
        lambda key: Recurrent(channels=2, hidden=settings.hidden, key=key),
        Direct(settings.batch, settings.learning_rate),
        settings,
        task_size=settings.task_size,
        held_out=settings.held_out,
        tested=settings.tasks,
        rule=_RULE,
        replay=Replay(warm_up=problem.horizon, act_periods=1),
        progress=progress,
    )
    sold = rewards[_RULE].mean(1, keepdims=True)
    names = [f"campaign {number}" for number in tested[0, 0].entities]
    return Demonstration(
        "An advertising budget among campaigns",
        f"In each period a budget is divided among the {settings.task_size} campaigns of a task. Spending "
        "builds goodwill that decays, sales saturate, and the efficiency of a campaign is measured with "
        "noise. Which shares sell most?",
        "sales, % of the sales of equal shares in the same market",
        levels_of(
            {name: 100 * each.mean(1, keepdims=True) / sold for name, each in rewards.items()}
        ),
        pd.DataFrame(shares, columns=pd.Index(names)),
        (
            f"Simulated markets of {settings.universe} campaigns: {settings.tasks} training tasks from "
            f"{settings.universe - settings.held_out} of them, {settings.tasks} test tasks from the other "
            f"{settings.held_out}, on the same {problem.horizon} periods.",
            budgets_note(_MARKETS),
            f"The independent unit is a market with its campaigns, tasks and parameters: n = {_MARKETS}.",
        ),
    )
