"""Comparison of the three methods and the best rule on the sessions of a garage."""

from dataclasses import replace

import numpy as np

from apportion.domains.demonstration import (
    SINGLE_TASKS,
    UPDATES,
    budgets_note,
    by_method,
    levels_of,
    train_methods,
)
from apportion.domains.domain import Demonstration
from apportion.memory import Replay
from apportion.policy import Pooled
from apportion.runs.progress import Progress
from apportion.trees import stack, take
from apportion_charging.backtest import backtest_schedules, busiest_day
from apportion_charging.forecasts import add_forecasts
from apportion_charging.problem import CHANNELS, Charging, PolicySchedule
from apportion_charging.schedulers import HINDSIGHT, SCHEDULERS
from apportion_charging.sessions import read_sessions
from apportion_charging.settings import ChargingSettings
from apportion_charging.training import Garages, choose_stations, direct_learner

_REPETITIONS = 4
_SITE, _TRAINED_UNTIL, _TESTED = "jpl", "2019-12-31", ("2021-04-01", "2021-08-31")
_CAPACITY = 0.15
"""Capacity of the feeder in the test, as a share of its stations' full rate."""
_RULES = {name: rule for name, rule in SCHEDULERS.items() if name not in HINDSIGHT}


def demonstrate_charging(seed: int, progress: Progress) -> Demonstration:
    """Train on a site's days of 2019, and test in 2021 at stations held out from training."""
    settings = ChargingSettings(
        site=(_SITE,),
        until=_TRAINED_UNTIL,
        tasks=40,
        days=4,
        hidden=16,
        recall=False,
        steps=UPDATES,
        seed=seed,
    )
    garages = Garages.of(read_sessions(), settings)
    numbers = range(seed, seed + _REPETITIONS)
    policies = train_methods(
        Charging.of(garages.training_days(), settings.capacity),
        stack([choose_stations(garages, replace(settings, seed=number)) for number in numbers]),
        lambda key: Pooled(CHANNELS, settings.hidden, key=key),
        direct_learner(settings),
        settings,
        replay=Replay(act_periods=0),
        progress=progress,
    )
    progress.stage("testing", 0.9)
    later = garages.sites[_SITE].between(*_TESTED).at(garages.unseen[_SITE])
    days = add_forecasts(later, garages.predictor)
    places = list(np.ndindex(_REPETITIONS, 2 + SINGLE_TASKS))
    schedules = {str(place): PolicySchedule(take(policies, place)) for place in places}
    first = take(policies, places[0])
    found = backtest_schedules(
        first,
        days,
        capacity=_CAPACITY,
        task_size=settings.task_size,
        tasks=4,
        optimum=False,
        schedulers={**_RULES, **schedules},
        seed=seed,
    )
    best = max(_RULES, key=lambda name: float(found.by_day(name).sum()))
    dates = found.dates.astype("datetime64[W]")
    weeks = [dates == week for week in np.unique(dates)]

    def served(name: str) -> np.ndarray:
        """Return the share of the need met in each week, in per cent."""
        drawn, need = found.by_day(name), found.by_day()
        return np.array([100 * drawn[week].sum() / need[week].sum() for week in weeks])

    by_policy = np.reshape([served(name) for name in schedules], (_REPETITIONS, -1, len(weeks)))
    power = busiest_day(first, days, found).set_index("time")
    power.index = power.index.str[-5:].rename(f"time on {power.index[0][:10]}")
    return Demonstration(
        "A garage's power among charging cars",
        f"{settings.task_size} charging stations are behind a feeder that gives {_CAPACITY:.0%} of their "
        "full rate. Every 15 minutes its power is shared among the cars that are plugged in. Which shares "
        f"meet most of what the cars need? Of {len(_RULES)} rules, {best} is best on these days, chosen "
        "with hindsight.",
        "share of the cars' need met (%)",
        levels_of({**by_method(by_policy), f"best rule ({best})": served(best)}),
        power.div(power.sum(axis=1), axis=0),
        (
            f"Sessions of the site {_SITE} (ACN-Data): {settings.tasks} training tasks of "
            f"{len(garages.seen[_SITE])} stations on days of 2019, test tasks of the other "
            f"{len(garages.unseen[_SITE])} stations on {len(days)} days of 2021.",
            budgets_note(_REPETITIONS),
            f"Independent units are {_REPETITIONS} repetitions (tasks, parameters) crossed with "
            f"{len(weeks)} weeks; n is the smaller number. The rule has no repetitions: its n "
            "counts weeks. The picture of shares is the day of most need.",
        ),
    )
