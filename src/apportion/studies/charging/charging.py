"""One policy for every garage: charging on real sessions, at stations and in a year it never saw.

Trained on 70 % of two sites' stations in 2019, tested on the others and on 2021, behind feeders of 10,
15 and 20 % of their stations' full rate: 12 tests. Claims: it serves more than every scheduler that
garages use, multi-task learning more than single-task learning at equal updates, and a policy that
recalls earlier days more than a plain one; it serves a site and numbers of stations it was not trained
on; PPO, which needs no gradient of the garage, learns too.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import pandas as pd

from apportion.composition import Ensemble
from apportion.domains.charging.backtest import (
    OPTIMUM,
    POLICY,
    ChargingBacktest,
    backtest_schedules,
)
from apportion.domains.charging.problem import CHANNELS, Charging
from apportion.domains.charging.schedulers import SCHEDULERS
from apportion.domains.charging.sessions import fingerprint, read_sessions
from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.charging.training import (
    Garages,
    choose_stations,
    direct_learner,
    train_charging,
)
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Policy, Pooled
from apportion.studies.cells import Cell, Plan, Progress, Rows
from apportion.studies.charging.findings import conclude
from apportion.studies.registry import Scale
from apportion.tasks import Tasks, single_tasks
from apportion.training import train_runs
from apportion.trees import take

SITES = ("caltech", "jpl")
TRAINED_UNTIL, TESTED_FROM = "2019-12-31", "2021-01-01"
CAPACITIES = (0.1, 0.15, 0.2)
SIZES = (5, 20, 50)
_SIZED_CAPACITY = 0.15
_QUICK_DAYS = 15


def plan(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """A cell for each way to train, and one for the schedulers that learn nothing."""
    few = scale == "quick"
    settings = ChargingSettings(
        until=TRAINED_UNTIL,
        tasks=20 if few else 200,
        steps=40 if few else 4000,
        days=8 if few else 64,
        members=1 if few else 3,
        hidden=16 if few else 48,
        seed=seed,
    )
    about = {
        "training": {
            name: value
            for name, value in asdict(settings).items()
            if name not in ("method", "sessions")
        },
        "garages": 3 if few else 24,
        "sized_garages": 1 if few else 6,
        "single_tasks": 2 if few else 12,
        "ppo_steps": 10 if few else 1000,
        "days_tested": _QUICK_DAYS if few else None,
        "data": {"sessions": "embedded", "fingerprint": fingerprint(read_sessions())},
    }
    names = [
        "schedulers",
        "mtl",
        "pmtl",
        "stl",
        "ppo",
        *(f"only-{site}" for site in SITES),
        "plain",
    ]
    cells = tuple(Cell.alone(name, {"trained": name}) for name in names)
    return Plan("charging", cells, partial(_compute, settings, about), conclude, about)


def _compute(
    settings: ChargingSettings, about: dict[str, Any], cells: Sequence[Cell], progress: Progress
) -> Rows:
    for cell in cells:
        kind = cell["trained"]
        own = replace(settings, recall=kind != "plain")
        garages = Garages.of(read_sessions(), own)
        policies = _train(kind, garages, own, about, progress)
        tables = []
        for number, policy in enumerate(policies):
            tables.append(_test(policy, kind, garages, about).assign(policy=number))
            progress(f"{kind}: tested {number + 1} of {len(policies)}", 0.9)
        yield cell, pd.concat(tables, ignore_index=True).assign(trained=kind)


def _train(
    kind: str,
    garages: Garages,
    settings: ChargingSettings,
    about: dict[str, Any],
    progress: Progress,
) -> list[Policy]:
    """The policies of a cell: one, averaged over its members, or one for each single task."""
    progress(f"{kind}: training", 0.0)
    if kind == "schedulers":
        # Equal shares stand where a policy would; its row is left out.
        return [Pooled(CHANNELS, 1, key=jax.random.key(0))]
    if kind.startswith("only-"):
        alone = replace(settings, method="mtl", site=(kind.removeprefix("only-"),))
        trained = train_charging(Garages.of(read_sessions(), alone), alone)
        return [Ensemble(trained.policy)]
    if kind in ("mtl", "pmtl", "plain"):
        method = "pmtl" if kind == "pmtl" else "mtl"
        return [Ensemble(train_charging(garages, replace(settings, method=method)).policy)]
    problem = Charging.of(garages.training_days(), garages.predictor.medians, settings.capacity)
    tasks = choose_stations(garages, settings)
    count = about["single_tasks"] if kind == "stl" else settings.members
    seeds = jax.random.split(jax.random.key(settings.seed), (count, 2))
    network = eqx.filter_vmap(lambda key: Pooled(CHANNELS, settings.hidden, key=key))
    if kind == "ppo":
        learner = PPO(rollouts=32, learning_rate=1e-3, gamma=0.99, epochs=2, minibatches=8)
        steps, trained_on = about["ppo_steps"], tasks
    else:
        learner, steps = direct_learner(settings), settings.steps
        trained_on = single_tasks(_spread(tasks, count))
    done = train_runs(
        problem,
        trained_on,
        network(seeds[:, 0]),
        learner,
        steps=steps,
        selection=replace(settings, method="mtl").selection(),
        replay=Replay(act_periods=0),
        keys=seeds[:, 1],
    )
    if kind == "ppo":
        return [Ensemble(done.policy)]
    return [take(done.policy, run) for run in range(count)]


def _spread(tasks: Tasks, count: int) -> Tasks:
    """So many tasks out of all, evenly, so that every site has its share."""
    return tasks[[(2 * number + 1) * len(tasks) // (2 * count) for number in range(count)]]


def _test(policy: Policy, kind: str, garages: Garages, about: dict[str, Any]) -> pd.DataFrame:
    """What a policy, or the schedulers, deliver in every test."""
    tables = []
    schedulers = kind == "schedulers"
    few = about["days_tested"]
    sizes = SIZES if few is None else SIZES[:1]
    for site in SITES:
        new = garages.unseen_stations(site)
        later = garages.all_days[site].between(TESTED_FROM)
        tests = [
            *(("2019, new stations", new, 10, capacity) for capacity in CAPACITIES),
            *(("2021", later, 10, capacity) for capacity in CAPACITIES),
            *(("2021", later, size, _SIZED_CAPACITY) for size in sizes),
        ]
        for name, days, size, capacity in tests:
            last = None if few is None else str(days.dates[min(few, len(days)) - 1])
            result = backtest_schedules(
                policy,
                days.between(None, last),
                garages.predictor.medians,
                capacity=capacity,
                task_size=size,
                tasks=about["garages"] if size == 10 else about["sized_garages"],
                optimum=schedulers and size == 10,
                schedulers=SCHEDULERS if schedulers else {},
            )
            rows = _rows(result, schedulers)
            tables.append(rows.assign(site=site, test=name, capacity=capacity, stations=size))
    return pd.concat(tables, ignore_index=True)


def _rows(result: ChargingBacktest, schedulers: bool) -> pd.DataFrame:
    """KWh by day and by station, and how the cars left, of each schedule."""
    names = [name for name in result.served if (name == POLICY) != schedulers]
    dates = [str(day) for day in result.dates]
    places = [str(place) for place in range(result.stations)]
    tables = []
    for name in names:
        one = name != OPTIMUM
        by_day = {"unit": "day", "place": dates, "drawn_kwh": result.by_day(name)}
        tables.append(pd.DataFrame(by_day | {"need_kwh": result.by_day()}).assign(schedule=name))
        if one:
            by_station = {"unit": "station", "place": places, "drawn_kwh": result.by_station(name)}
            by_station |= {"need_kwh": result.by_station()}
            tables.append(pd.DataFrame(by_station).assign(schedule=name))
            left = {"left_short": result.short(name), "fairness": result.fairness(name)}
            row = {"unit": "all", "place": "", "schedule": name} | left
            tables.append(pd.DataFrame([row]))
    return pd.concat(tables, ignore_index=True)
