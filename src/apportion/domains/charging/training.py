"""Training a charging policy: which stations and days, which tasks, how.

Everything that is fitted, the policy, the predictor and the medians, sees the training stations on the
training days alone.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import optax
import pandas as pd

from apportion.domains.charging.days import Days, split_stations
from apportion.domains.charging.predictions import Predictor
from apportion.domains.charging.problem import CHANNELS, Charging
from apportion.domains.charging.recollection import memories
from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.training import train_members
from apportion.errors import InputError
from apportion.learners.direct import DirectEpisodes
from apportion.memory import Replay
from apportion.policy import Pooled
from apportion.tasks import Task, count_tasks, draw_tasks
from apportion.training import Chunks, Resume, TrainingResult


@dataclass(frozen=True, eq=False)
class Garages:
    """The sites of a file: what is trained on, and what is kept for tests."""

    sites: dict[str, Days]
    """All working days and stations."""
    until: dict[str, np.datetime64]
    """The last day that each site was trained on."""
    seen: dict[str, np.ndarray]
    """Stations trained on, by their places."""
    unseen: dict[str, np.ndarray]
    predictor: Predictor
    recall: bool
    """Whether days have predictions that recall earlier ones, too."""

    @classmethod
    def of(cls, frame: pd.DataFrame, settings: ChargingSettings) -> "Garages":
        """Split stations and days; nothing after `until` and no held-out station is looked at."""
        names = settings.site or tuple(sorted(map(str, frame.site.unique())))
        sites = {name: Days.of(frame, name) for name in names}
        until, seen, unseen = {}, {}, {}
        for name, days in sites.items():
            until[name] = _last_training_day(days, settings.until)
            seen[name], unseen[name] = split_stations(
                len(days.stations), settings.held_out, seed=settings.seed
            )
            if len(seen[name]) < settings.task_size:
                raise InputError(
                    f'site "{name}": {len(seen[name])} of its {len(days.stations)} stations are '
                    f"trained on, too few for tasks of {settings.task_size}; choose a smaller "
                    "--task-size or --held-out"
                )
        training = [days.between(None, until[name]).at(seen[name]) for name, days in sites.items()]
        return cls(sites, until, seen, unseen, Predictor.fit(*training), settings.recall)

    def training_days(self) -> list[Days]:
        """The training stations on the training days, with predictions."""
        return [
            self._foreseen(days.between(None, self.until[name]).at(self.seen[name]))
            for name, days in self.sites.items()
        ]

    @cached_property
    def all_days(self) -> dict[str, Days]:
        """All stations and days, with predictions; of the days before, all stations are recalled."""
        return {name: self._foreseen(days) for name, days in self.sites.items()}

    def later_days(self, site: str) -> Days | None:
        """All stations on the days after training, with predictions; None where there are none."""
        after = self.until[site] + np.timedelta64(1, "D")
        return None if after > self.sites[site].dates[-1] else self.all_days[site].between(after)

    def unseen_stations(self, site: str) -> Days:
        """The held-out stations on the training days, with predictions."""
        return self.all_days[site].between(None, self.until[site]).at(self.unseen[site])

    def _foreseen(self, days: Days) -> Days:
        return foresee(days, self.predictor, self.recall)


def foresee(days: Days, predictor: Predictor, recall: bool) -> Days:
    """Days of one site with predictions and, where wanted, with what the days before each tell."""
    known = predictor.apply(days)
    for memory in memories(known, predictor) if recall else ():
        known = memory.recall(known)
    return known


def _last_training_day(days: Days, until: str | None) -> np.datetime64:
    if until is None:
        return days.dates[(len(days) * 2) // 3 - 1 if len(days) > 2 else -1]
    return days.between(None, until).dates[-1]


def choose_tasks(garages: Garages, settings: ChargingSettings) -> Task:
    """Tasks of the training stations, each of one site, the sites in turn."""
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
    together = drawn[0]
    for others in drawn[1:]:
        together = together.joined(others)
    return together


def direct_learner(settings: ChargingSettings) -> DirectEpisodes:
    """The direct gradient through whole days, its steps falling to 0 along a cosine."""
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
    """Train by the direct gradient through whole days."""
    problem = Charging.of(garages.training_days(), garages.predictor.medians, settings.capacity)
    return train_members(
        problem,
        choose_tasks(garages, settings),
        lambda key: Pooled(CHANNELS, settings.hidden, key=key),
        direct_learner(settings),
        settings,
        replay=Replay(act_periods=0),
        chunks=chunks,
        state=state,
    )
