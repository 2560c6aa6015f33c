"""A policy beside every scheduler on the same days, stations and feeder, and how sure its lead is.

Served is the share of all need that was drawn. Leads are paired by day and station, with intervals by
clusters of days (what the weather or a holiday does to one day it does to all tasks), and, more
cautiously, of days and stations both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

from apportion.domains.charging.days import Days
from apportion.domains.charging.garage import Garage, Medians, Seen
from apportion.domains.charging.optimum import best_energies
from apportion.domains.charging.peers import PEERS, Schedule, over_days, simulate_days
from apportion.domains.charging.problem import observation
from apportion.domains.charging.sessions import RATE_KW
from apportion.policy import Policy
from apportion.statistics import Estimate, clustered_ratio
from apportion.tasks import count_tasks, draw_tasks

POLICY, CLAIRVOYANT, OPTIMUM = "policy", "clairvoyant", "optimum"
HINDSIGHT = (CLAIRVOYANT, OPTIMUM)
"""What no scheduler can know at the time."""
SHORT = 0.8
"""A car that left with less than this share of its need left short."""


class PolicySchedule(eqx.Module):
    """A policy as a scheduler: from what is seen to kW."""

    policy: Policy

    def __call__(self, seen: Seen) -> Float[Array, " entities"]:
        everyone = jnp.ones(seen.can_draw.shape[0], bool)
        return self.policy(observation(seen, everyone), everyone) * seen.capacity_kw


@dataclass(frozen=True, eq=False)
class ChargingBacktest:
    """What every schedule delivered, session by session."""

    site: str
    dates: np.ndarray
    members: np.ndarray
    """Stations of each task, (tasks, entities)."""
    stations: int
    """Stations that tasks were drawn from."""
    capacity: float
    """The feeder, as a share of its stations' full rate."""
    need_kwh: np.ndarray
    """(tasks, days, entities, sessions); 0 where there is no session."""
    drawn_kwh: Mapping[str, np.ndarray]
    """Of each schedule, in the same shape."""
    optimum_kwh: np.ndarray | None
    """The most that could be drawn together, (tasks, days)."""

    @cached_property
    def served(self) -> dict[str, float]:
        """The share of all need that each schedule met."""
        needed = float(self.need_kwh.sum())
        shares = {name: float(drawn.sum()) / needed for name, drawn in self.drawn_kwh.items()}
        if self.optimum_kwh is not None:
            shares[OPTIMUM] = float(self.optimum_kwh.sum()) / needed
        return shares

    def ahead(self, other: str, name: str = POLICY, *, both: bool = False) -> Estimate:
        """By how much one schedule served more than another, in shares of the need.

        By clusters of days, or with `both` of days and stations.
        """
        by_day = (self.by_day(name) - self.by_day(other), self.by_day())
        if not both:
            return clustered_ratio(by_day)
        by_station = (self.by_station(name) - self.by_station(other), self.by_station())
        return clustered_ratio(by_day, by_station)

    def short(self, name: str) -> float:
        """The share of cars that left with less than 80 % of what they needed."""
        there = self.need_kwh > 0
        return float((self.drawn_kwh[name] < SHORT * self.need_kwh)[there].mean())

    def fairness(self, name: str) -> float:
        """Jain's index of the cars' shares of their need, within a task's day; the mean over them."""
        there = self.need_kwh > 0
        shares = np.where(there, self.drawn_kwh[name] / np.where(there, self.need_kwh, 1.0), 0.0)
        count = there.sum((2, 3))
        squares = (shares**2).sum((2, 3)) * count
        index = shares.sum((2, 3)) ** 2 / np.where(squares > 0, squares, 1.0)
        return float(index[squares > 0].mean())

    def to_json(self) -> dict[str, Any]:
        """The contract of `apportion backtest --json`."""
        ahead = {name: self.ahead(name) for name in self.served if name != POLICY}
        return {
            "site": self.site,
            "start": str(self.dates[0]),
            "end": str(self.dates[-1]),
            "days": len(self.dates),
            "stations": int(self.members.shape[1]),
            "capacity": self.capacity,
            "served": self.served,
            "ahead": {
                name: {"estimate": e.value, "low": e.low, "high": e.high}
                for name, e in ahead.items()
            },
        }

    def to_frame(self) -> pd.DataFrame:
        """A row for each schedule."""
        rows = []
        for name, share in sorted(self.served.items(), key=lambda pair: -pair[1]):
            row: dict[str, Any] = {"schedule": name, "served": share}
            if name in self.drawn_kwh:
                row |= {"left_short": self.short(name), "fairness": self.fairness(name)}
            if name != POLICY:
                ahead = self.ahead(name)
                row |= {"ahead": ahead.value, "low": ahead.low, "high": ahead.high}
            rows.append(row)
        return pd.DataFrame(rows)

    def summary(self) -> str:
        """The schedules side by side."""
        lines = [
            f"{self.site}, {self.dates[0]} to {self.dates[-1]}: {len(self.dates)} days, "
            f"{len(self.members)} garages of {self.members.shape[1]} stations, feeder "
            f"{self.capacity:.0%} of their full rate",
            f"  {'':18}{'need met':>9}{'left short':>12}{'fairness':>10}   the policy's lead, points",
        ]
        for row in self.to_frame().to_dict("records"):
            lead = ""
            if row["schedule"] != POLICY:
                ends = f"[{100 * row['low']:+.2f}, {100 * row['high']:+.2f}]"
                lead = f"{100 * row['ahead']:+.2f} {ends}"
            short, fair = row.get("left_short"), row.get("fairness")
            known = f"{short:12.1%}{fair:10.3f}" if short == short else f"{'':22}"
            lines.append(f"  {row['schedule']:18}{row['served']:9.2%}{known}   {lead}")
        lines.append(
            "  clairvoyant and optimum look ahead: nobody can know at the time what they know"
        )
        return "\n".join(lines)

    def by_day(self, name: str | None = None) -> np.ndarray:
        """KWh of a schedule, or of the need, on each day."""
        if name == OPTIMUM:
            assert self.optimum_kwh is not None, "the optimum was not computed"
            return self.optimum_kwh.sum(0)
        return self._table(name).sum((0, 2, 3))

    def by_station(self, name: str | None = None) -> np.ndarray:
        """KWh of a schedule, or of the need, at each station, over all tasks it is in."""
        sums = np.zeros(self.stations)
        np.add.at(sums, self.members, self._table(name).sum((1, 3)))
        return sums

    def _table(self, name: str | None) -> np.ndarray:
        return self.need_kwh if name is None else self.drawn_kwh[name]


@eqx.filter_jit
def _simulate_all(
    days: Garage,
    schedules: tuple[Schedule, ...],
    capacity_kw: Float[Array, ""],
    medians: Medians,
    members: Int[Array, "tasks entities"],
) -> Float[Array, "schedules tasks days entities sessions"]:
    """The kWh of every session under each schedule: one program, and one to compile."""

    def under(number):
        def chosen(seen: Seen) -> Float[Array, " entities"]:
            # Functions, since a policy with traced parameters has no hash.
            branches = [lambda seen, schedule=schedule: schedule(seen) for schedule in schedules]
            return jax.lax.switch(number, branches, seen)

        def task(members):
            garage = days.each_station(lambda x: x[:, members])
            return simulate_days(garage, chosen, capacity_kw, medians)

        # One after another: tasks at once would not fit into the cache.
        return jax.lax.map(task, members)

    return jax.lax.map(under, jnp.arange(len(schedules)))


def backtest(
    policy: Policy,
    days: Days,
    medians: Medians,
    *,
    capacity: float,
    task_size: int,
    tasks: int = 24,
    optimum: bool = True,
    peers: Mapping[str, Schedule] | None = None,
    seed: int = 0,
) -> ChargingBacktest:
    """Run a policy and every peer over days that have predictions (`Predictor.apply`).

    Parameters
    ----------
    capacity
        The feeder, as a share of its stations' full rate.
    task_size, tasks
        Stations behind a feeder, and how many such garages are drawn.
    optimum
        Whether the linear programme of every garage and day is solved, which takes longest.
    """
    peers = PEERS if peers is None else peers
    places = np.arange(len(days.stations))
    count = min(tasks, count_tasks(len(places), task_size))
    members = np.asarray(draw_tasks(places, task_size, count, seed=seed).members)
    feeder = capacity * task_size * RATE_KW
    schedules = {POLICY: PolicySchedule(policy)} | dict(peers)

    def run(some: Sequence[Schedule]) -> np.ndarray:
        shared = jnp.float32(feeder), medians, jnp.asarray(members, jnp.int32)
        return over_days(
            lambda part: _simulate_all(part, tuple(some), *shared), days.garage(), task_size
        )

    # Policies alone, in one program for all of a shape: two equal ones then deliver equal energy.
    others = [name for name in schedules if not isinstance(schedules[name], PolicySchedule)]
    drawn = {name: run([schedules[name]])[0] for name in schedules if name not in others}
    if others:
        drawn |= dict(zip(others, run([schedules[name] for name in others]), strict=True))
    best = None
    if optimum:
        best = best_energies(days.arrival, days.departure, days.need_kwh, feeder, members)
    need = days.need_kwh[:, members].transpose(1, 0, 2, 3)
    return ChargingBacktest(
        days.site,
        days.dates,
        members,
        len(places),
        capacity,
        need,
        {name: drawn[name] for name in schedules},
        best,
    )
