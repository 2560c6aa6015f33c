"""Training of a charging policy on past sessions: data split, tasks, learner and tests.

The policy and the predictor are fitted to the training stations on the training days only. Tests
use the stations held out from training, and the days after training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import optax
import pandas as pd

from apportion.domains.training import averaged, train_members
from apportion.errors import InputError
from apportion.learners.direct import DirectEpisodes
from apportion.memory import Replay
from apportion.policy import Policy, Pooled
from apportion.runs.runner import JobResult, PreparedJob
from apportion.runs.signals import tested_after_training
from apportion.tasks import Task, count_tasks, draw_tasks, split_entities
from apportion.training import Chunks, OnChunk, Resume, TrainingResult
from apportion_charging.backtest import MEASURES, POLICY, ChargingBacktest, backtest_schedules
from apportion_charging.days import Days
from apportion_charging.forecasts import Predictor, add_forecasts
from apportion_charging.garage import make_physics
from apportion_charging.objectives import make_objective
from apportion_charging.problem import CHANNELS, Charging
from apportion_charging.sessions import fingerprint
from apportion_charging.settings import ChargingSettings
from apportion_charging.site import Site, describe_sites


@dataclass(frozen=True, eq=False)
class Garages:
    """The sites of a file, split for training and tests."""

    descriptions: dict[str, Site]
    sites: dict[str, Days]
    """Sessions at all stations on all days."""
    until: dict[str, np.datetime64]
    """Last training day of each site."""
    seen: dict[str, np.ndarray]
    """Indices of the training stations of each site."""
    unseen: dict[str, np.ndarray]
    training: list[Days]
    """The training stations on the training days."""
    predictor: Predictor
    recall: bool
    """Whether forecasts also use earlier days."""

    @classmethod
    def of(cls, frame: pd.DataFrame, settings: ChargingSettings) -> "Garages":
        """Split stations and days; the predictor is fitted to the training part only."""
        embedded = settings.sessions is None
        descriptions = describe_sites(
            frame, settings.site, embedded=embedded, timezone=settings.timezone
        )
        physics = make_physics(
            settings.period_minutes, ideal=settings.ideal, objective=settings.objective
        )
        sites = {
            name: Days.of(frame, name, site, physics=physics) for name, site in descriptions.items()
        }
        until, seen, unseen = {}, {}, {}
        for name, days in sites.items():
            if settings.until is None:
                until[name] = days.dates[(len(days) * 2) // 3 - 1 if len(days) > 2 else -1]
            else:
                until[name] = days.between(None, settings.until).dates[-1]
            stations = len(days.stations)
            seen[name], unseen[name] = split_entities(
                stations, round(settings.held_out * stations), seed=settings.seed
            )
            if len(seen[name]) < settings.task_size:
                raise InputError(
                    f'site "{name}": {len(seen[name])} of its {stations} stations are trained on, '
                    f"too few for tasks of {settings.task_size}; choose a smaller --task-size or "
                    "--held-out"
                )
        training = [days.between(None, until[name]).at(seen[name]) for name, days in sites.items()]
        predictor = Predictor.fit(*training)
        return cls(descriptions, sites, until, seen, unseen, training, predictor, settings.recall)

    def training_days(self) -> list[Days]:
        """Return the training stations on the training days, with forecasts."""
        return [add_forecasts(days, self.predictor, self.recall) for days in self.training]

    @cached_property
    def all_days(self) -> dict[str, Days]:
        """All stations and days, with forecasts; recall uses earlier sessions at all stations."""
        return {
            name: add_forecasts(days, self.predictor, self.recall)
            for name, days in self.sites.items()
        }

    def unseen_stations(self, site: str) -> Days:
        """Return the held-out stations on the training days, with forecasts."""
        return self.all_days[site].between(None, self.until[site]).at(self.unseen[site])

    def test_days(self) -> dict[str, Days]:
        """Return each site's tests by name: held-out stations, and all stations after training."""
        tests: dict[str, Days] = {}
        for site, days in self.sites.items():
            if len(self.unseen[site]) > 1:
                tests[f"{site}, stations never seen"] = self.unseen_stations(site)
            after = self.until[site] + np.timedelta64(1, "D")
            if after <= days.dates[-1]:
                later = self.all_days[site].between(after)
                tests[f"{site}, from {later.dates[0]}"] = later
        return tests


def choose_stations(garages: Garages, settings: ChargingSettings) -> Task:
    """Draw tasks from the training stations; all stations of a task belong to one site."""
    drawn, first = [], 0
    for number, name in enumerate(garages.sites):
        stations = len(garages.seen[name])
        wanted = max(settings.tasks // len(garages.sites), 1)
        count = min(wanted, count_tasks(stations, settings.task_size))
        places = np.arange(first, first + stations)
        drawn.append(
            draw_tasks(places, settings.task_size, count, seed=settings.seed + 1000 * number)
        )
        first += stations
    tasks = reduce(Task.joined, drawn)
    if settings.objective != "cost":
        return tasks
    # The last entity of every task is the unused power.
    return Task.of([[*members, first] for members in np.asarray(tasks.members).tolist()])


def direct_learner(settings: ChargingSettings) -> DirectEpisodes:
    """Create the direct-gradient learner over whole days, with a cosine decay of its step size."""
    cosine = optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, settings.steps))
    return DirectEpisodes(
        settings.days,
        settings.learning_rate,
        transform=optax.chain(optax.scale_by_adam(), cosine),
    )


def train_charging(
    garages: Garages,
    settings: ChargingSettings,
    *,
    chunks: Chunks | None = None,
    state: Resume | None = None,
) -> TrainingResult:
    """Train a policy with the direct gradient through whole days."""
    days = garages.training_days()
    problem = Charging.of(days, settings.capacity, make_objective(settings, days))

    return train_members(
        problem,
        choose_stations(garages, settings),
        lambda key: Pooled(CHANNELS, settings.hidden, key=key),
        direct_learner(settings),
        settings,
        replay=Replay(act_periods=0),
        chunks=chunks,
        state=state,
    )


def prepare_charging(
    settings: ChargingSettings, frame: pd.DataFrame, notes: Sequence[str] = ()
) -> PreparedJob:
    """Split the sessions and prepare the training; `notes` describe their file."""
    garages = Garages.of(frame, settings)
    choose_stations(garages, settings)
    data = {
        "source": "embedded" if settings.sessions is None else str(settings.sessions),
        "sites": {
            name: f"{days.summary()}; {garages.descriptions[name].describe()}"
            for name, days in garages.sites.items()
        },
        "until": {name: str(day) for name, day in garages.until.items()},
        "fingerprint": fingerprint(frame),
    }

    def train(on_chunk: OnChunk, resume: Resume) -> JobResult:
        done = train_charging(
            garages, settings, chunks=Chunks(settings.chunk, on_chunk=on_chunk), state=resume
        )
        policy = averaged(done.policy, settings.members)
        return tested_after_training(lambda: _judge_policy(policy, garages, settings))

    return PreparedJob(data, train, notes=[*notes, *data["sites"].values()])


def _collect_facts(garages: Garages, settings: ChargingSettings) -> dict[str, Any]:
    """Return the facts saved with the policy, for `backtest` and `allocate`."""
    return {
        "job": "charging",
        "task_size": settings.task_size,
        "capacity": list(settings.capacity),
        "until": {name: str(day) for name, day in garages.until.items()},
        "predictor": garages.predictor.to_dict(),
        "recall": garages.recall,
        "period_minutes": settings.period_minutes,
        "timezone": settings.timezone,
        "ideal": settings.ideal,
        "objective": settings.objective,
        "sites": {name: site.to_toml() for name, site in garages.descriptions.items()},
        "channels": CHANNELS,
    }


def _judge_policy(policy: Policy, garages: Garages, settings: ChargingSettings) -> JobResult:
    """Compare the policy with every scheduler on stations and days that it was not trained on."""
    tests = {
        name: backtest_schedules(
            policy,
            days,
            task_size=min(settings.task_size, len(days.stations)),
            seed=settings.seed,
            objective=settings.objective,
            mpc=settings.objective == "cost",
            capacity=0.15,
            tasks=8,
        )
        for name, days in garages.test_days().items()
    }
    notes = [f"{name}\n{test.summary()}" for name, test in tests.items()]
    if not notes:
        notes = ["trained on every station and day; test it with apportion backtest on others"]
    headline = {
        "title": "Charging",
        "subtitle": settings.method,
        "cards": [_card(name, test) for name, test in tests.items()],
        "lead": "One policy for every garage, tested where nothing was fitted: at stations it never saw, "
        "and on later days. A point is one hundredth of all energy that the cars needed. The best rule of "
        "each test is chosen with hindsight.",
    }
    each = [test.to_frame().assign(test=name) for name, test in tests.items()]
    tables = {"schedules": pd.concat(each, ignore_index=True)} if each else {}
    results = {name: test.to_json() for name, test in tests.items()}
    facts = _collect_facts(garages, settings)
    return JobResult(policy, results, "\n\n".join(notes), facts, headline, tables)


def _card(name: str, test: ChargingBacktest) -> dict[str, Any]:
    lead, measure = test.ahead(test.best_rule), MEASURES[test.objective]
    return {
        "label": f"{measure} over {test.best_rule}, the best rule: {name}",
        "value": f"{100 * lead.value:+.2f} points",
        "interval": f"[{100 * lead.low:+.2f}, {100 * lead.high:+.2f}]",
        "note": f"{test.served[POLICY]:.1%} of the need met, over {lead.n} days",
        "outcome": lead.outcome,
    }
