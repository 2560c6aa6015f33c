"""Training a charging policy from past sessions, and testing it beside every scheduler.

It is tested where nothing was fitted: at stations never trained on, and on the days after training.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from apportion.domains.charging.backtest import POLICY, ChargingBacktest, backtest
from apportion.domains.charging.days import Days
from apportion.domains.charging.example_day import busiest, cars, power
from apportion.domains.charging.facts import as_trained, check_facts
from apportion.domains.charging.peers import Schedule
from apportion.domains.charging.predictions import Predictor
from apportion.domains.charging.problem import CHANNELS
from apportion.domains.charging.sessions import fingerprint, read_sessions
from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.charging.training import Garages, choose_tasks, foresee, train_charging
from apportion.domains.training import averaged
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.runs.runner import Outcome, PreparedJob
from apportion.runs.signals import tested_after_training
from apportion.training import Chunks, OnChunk, Resume

_TESTED_CAPACITY = 0.15
_TESTED_TASKS = 8


def prepare(settings: ChargingSettings) -> PreparedJob:
    """Read and check the sessions, and split them."""
    frame = read_sessions(settings.sessions, timezone=settings.timezone)
    garages = Garages.of(frame, settings)
    choose_tasks(garages, settings)
    data = {
        "source": "embedded" if settings.sessions is None else str(settings.sessions),
        "sites": {name: days.summary() for name, days in garages.sites.items()},
        "until": {name: str(day) for name, day in garages.until.items()},
        "fingerprint": fingerprint(frame),
    }

    def train(on_chunk: OnChunk, resume: Resume) -> Outcome:
        done = train_charging(
            garages, settings, chunks=Chunks(settings.chunk, on_chunk=on_chunk), state=resume
        )
        policy = averaged(done.policy, settings.members)
        return tested_after_training(lambda: evaluate_policy(policy, garages, settings))

    return PreparedJob(data, train)


def about(garages: Garages, settings: ChargingSettings) -> dict[str, Any]:
    """What is saved with the policy, for `backtest` and `allocate`."""
    return {
        "job": "charging",
        "task_size": settings.task_size,
        "capacity": list(settings.capacity),
        "until": {name: str(day) for name, day in garages.until.items()},
        "trained_on": {
            name: [days.stations[place] for place in garages.seen[name]]
            for name, days in garages.sites.items()
        },
        "predictor": garages.predictor.to_dict(),
        "recall": garages.recall,
        "channels": CHANNELS,
    }


def evaluate_policy(policy: Policy, garages: Garages, settings: ChargingSettings) -> Outcome:
    """The policy beside every scheduler, on stations and on days it was not trained on."""
    tests = {
        name: backtest(
            policy,
            days,
            garages.predictor.medians,
            capacity=_TESTED_CAPACITY,
            task_size=min(settings.task_size, len(days.stations)),
            tasks=_TESTED_TASKS,
            seed=settings.seed,
        )
        for name, days in _test_days(garages).items()
    }
    notes = [f"{name}\n{test.summary()}" for name, test in tests.items()]
    if not notes:
        notes = ["trained on every station and day; test it with apportion backtest on others"]
    headline = {
        "title": "Charging",
        "subtitle": settings.method,
        "cards": [_card(name, test) for name, test in tests.items()],
        "words": [
            "Clairvoyant and optimum look ahead: nobody can know at the time what they know."
        ],
        "lead": "One policy for every garage, tested where nothing was fitted: at stations it never saw, "
        "and on later days. A point is one hundredth of all energy that the cars needed.",
    }
    results = {name: test.to_json() for name, test in tests.items()}
    tables = _tables(policy, garages, tests)
    return Outcome(policy, results, "\n\n".join(notes), about(garages, settings), headline, tables)


def _tables(
    policy: Policy, garages: Garages, tests: dict[str, ChargingBacktest]
) -> dict[str, pd.DataFrame]:
    """Every schedule's results, and the busiest day of the last test."""
    if not tests:
        return {}
    name, test = list(tests.items())[-1]
    days = _test_days(garages)[name]
    task, day = busiest(test)
    return {
        "schedules": schedules(tests),
        "power": power(policy, days, garages.predictor.medians, test, task, day),
        "cars": cars(days, test, task, day),
    }


def schedules(tests: dict[str, ChargingBacktest]) -> pd.DataFrame:
    """Every test's schedules under one another, best first."""
    return pd.concat(
        [test.to_frame().assign(test=name) for name, test in tests.items()], ignore_index=True
    )


def _test_days(garages: Garages) -> dict[str, Days]:
    tests: dict[str, Days] = {}
    for site in garages.sites:
        if len(garages.unseen[site]) > 1:
            tests[f"{site}, stations never seen"] = garages.unseen_stations(site)
        later = garages.later_days(site)
        if later is not None:
            tests[f"{site}, from {later.dates[0]}"] = later
    return tests


def _card(name: str, test: ChargingBacktest) -> dict[str, Any]:
    lead = test.ahead("llf")
    return {
        "label": f"Energy over least laxity first: {name}",
        "value": f"{100 * lead.value:+.2f} points",
        "interval": f"[{100 * lead.low:+.2f}, {100 * lead.high:+.2f}]",
        "note": f"{test.served[POLICY]:.1%} of the need met, over {lead.n} days",
        "outcome": lead.outcome,
    }


def backtest_policy(
    policy: Policy,
    saved: dict[str, Any],
    frame: pd.DataFrame,
    *,
    site: str | None = None,
    start: str | None = None,
    end: str | None = None,
    stations: int | None = None,
    capacity: float = _TESTED_CAPACITY,
    tasks: int = _TESTED_TASKS,
    unseen: bool = False,
    peers: Mapping[str, Schedule] | None = None,
    optimum: bool = True,
) -> ChargingBacktest:
    """A trained policy beside every scheduler on a file of sessions.

    Parameters
    ----------
    saved
        What was saved with the policy.
    site
        Which site of the file; it need not be one that was trained on.
    start, end
        First and last day; by default all after training at that site, or all where it is another.
    stations, capacity, tasks
        Stations behind a feeder, its capacity as a share of their full rate, and how many are drawn.
    unseen
        Only stations that were not trained on.
    peers, optimum
        As in `backtest`: other schedulers than all of them, and whether the optimum is solved.
    """
    check_facts(saved)
    if not 0 < capacity <= 1:
        raise InputError(f"capacity {capacity:g}: give a share of the full rate, 0 < capacity <= 1")
    if tasks < 1:
        raise InputError(f"tasks is {tasks}; at least one garage is needed")
    everything = Days.of(frame, _only_site(frame) if site is None else site)
    days = _days_to_test(saved, everything, start, end, unseen)
    size = saved.get("task_size", 1) if stations is None else stations
    if not 1 <= size <= len(days.stations):
        raise InputError(
            f'stations {size}: site "{days.site}" has {len(days.stations)} to choose from; give '
            "--stations from 1 to that"
        )
    predictor = Predictor.from_dict(saved.get("predictor", {}))
    known = foresee(everything, predictor, saved.get("recall", False))
    return backtest(
        as_trained(policy, saved),
        _days_to_test(saved, known, start, end, unseen),
        predictor.medians,
        capacity=capacity,
        task_size=size,
        tasks=tasks,
        peers=peers,
        optimum=optimum,
    )


def _days_to_test(
    saved: dict[str, Any],
    days: Days,
    start: str | None,
    end: str | None,
    unseen: bool,
) -> Days:
    until = saved.get("until", {}).get(days.site)
    if start is None and until is not None and not unseen:
        start = str(np.datetime64(until, "D") + np.timedelta64(1, "D"))
    days = days.between(start, end)
    if unseen:
        known = set(saved.get("trained_on", {}).get(days.site, ()))
        days = days.at([i for i, name in enumerate(days.stations) if name not in known])
    return days


def _only_site(frame: pd.DataFrame) -> str:
    names = sorted(map(str, frame.site.unique()))
    if len(names) > 1:
        raise InputError(
            f"the file has {len(names)} sites; choose one with --site: {', '.join(names)}"
        )
    return names[0]
