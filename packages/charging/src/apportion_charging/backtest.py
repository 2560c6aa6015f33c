"""Compare a policy with every scheduler on the same days, stations and feeder.

Served is the share of all need that was drawn. Leads are paired, with intervals clustered by day,
because all tasks share a day's weather and holidays. A certificate bets on daily gains: the
difference between the shares of the day's need that both schedules met, over all garages drawn at
the site. Only days after training count.
"""

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.certify.certificate import CertificateVerdict, Gains
from apportion.certify.statistics import Estimate, clustered_ratio
from apportion.domains.tables import as_day
from apportion.errors import InputError, reading
from apportion.policy import Policy
from apportion.runs.files import read_bytes
from apportion.runs.policy_file import load_about, load_policy
from apportion.tasks import count_tasks, draw_tasks
from apportion_charging.days import Days
from apportion_charging.forecasts import Predictor, add_forecasts
from apportion_charging.garage import make_physics
from apportion_charging.mpc import MPC, simulate_mpc
from apportion_charging.problem import CHANNELS, PolicySchedule
from apportion_charging.schedulers import (
    HINDSIGHT,
    OPTIMUM,
    SCHEDULERS,
    Delivered,
    Schedule,
    best_energies,
    find_scheduler,
    simulate,
    walk_day,
)
from apportion_charging.sessions import count
from apportion_charging.settings import OBJECTIVES
from apportion_charging.site import Site, Tariff, describe_sites, find_site, saved_site

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "policy"
_SHORT_SHARE = 0.8
"""A car is left short if it receives less than this share of its need."""
GAIN_BOUND = 0.05
"""Default bound of a day's gain, as a share of its need; schedulers rarely differ by more."""
_FORMATS: Any = {
    "served": "{:.2%}".format,
    "left_short": "{:.1%}".format,
    "fairness": "{:.3f}".format,
    "kept": "{:.1%}".format,
    "cost_per_kwh": "{:.4f}".format,
    **dict.fromkeys(("ahead", "low", "high"), lambda share: f"{100 * share:+.2f}"),
}
"""The format of each column; a lead is a difference of shares, in points."""
MEASURES = {
    "energy": "Energy",
    "fair": "Fairness",
    "promise": "Promises kept",
    "cost": "Value of the energy less its cost, a kWh of need,",
}
"""Name of the measure of each objective."""


@dataclass(frozen=True, eq=False)
class ChargingBacktest:
    """The energy that every schedule delivered to each session."""

    site: str
    dates: np.ndarray
    members: np.ndarray
    """Stations of each task, (tasks, entities)."""
    stations: int
    """Number of stations from which tasks were drawn."""
    capacity_kw: np.ndarray
    """Capacity of each task's feeder, (tasks)."""
    capacity: float
    """Mean capacity of the feeders, as a share of their stations' full rate."""
    need_kwh: np.ndarray
    """Need of each session on its first day, (tasks, days, entities, sessions), or 0."""
    drawn_kwh: Mapping[str, np.ndarray]
    """Energy drawn with each schedule, in the same shape."""
    optimum_kwh: np.ndarray | None
    """Largest total energy that could be drawn, (tasks, days)."""
    cost: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Cost of the energy of each schedule, (tasks, days); empty without prices."""
    worth_per_kwh: float = 0.0
    objective: str = "energy"
    """Objective of the policy's training, which also sets the unit of leads."""
    fingerprint: str | None = None
    """Fingerprint of the site, if it was tested as a whole."""

    @cached_property
    def served(self) -> dict[str, float]:
        """The share of all need that each schedule met."""
        needed = float(self.need_kwh.sum())
        shares = {name: float(drawn.sum()) / needed for name, drawn in self.drawn_kwh.items()}
        if self.optimum_kwh is not None:
            shares[OPTIMUM] = float(self.optimum_kwh.sum()) / needed
        return shares

    def ahead(self, other: str) -> Estimate:
        """Return the policy's lead over a schedule in its own objective, with clusters by day.

        The unit is a share of the need for energy, Jain's index for fairness, a share of the cars
        for promises, and money per kWh of need for cost.
        """
        (mine, unit), (others, _) = (self.daily(name, self.objective) for name in (POLICY, other))
        return clustered_ratio((mine - others, unit))

    @property
    def best_rule(self) -> str:
        """The best rule by the policy's objective, among those that use no hidden values."""
        rules = [name for name in self.drawn_kwh if name not in (POLICY, *HINDSIGHT)]
        return max(rules, key=lambda name: float(self.daily(name, self.objective)[0].sum()))

    def daily(self, name: str, objective: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the numerator and denominator of a schedule's measure on each day.

        They are kWh drawn and needed; Jain's index, summed over garages, and garages; cars with
        their promise kept and all cars; or the energy's value minus its cost, and kWh needed.
        """
        need = self.need_kwh
        if objective == "energy":
            return self.by_day(name), self.by_day()
        if objective == "fair":
            return self._jain(name).sum(0), (need > 0).any((2, 3)).sum(0)
        if objective == "promise":
            # A tolerance of a thousandth, because energies are sums in single precision.
            kept = (need > 0) & (self.drawn_kwh[name] >= 0.999 * _SHORT_SHARE * need)
            return kept.sum((0, 2, 3)), (need > 0).sum((0, 2, 3))
        return self.worth_per_kwh * self.by_day(name) - self.cost[name].sum(0), self.by_day()

    def cost_per_kwh(self, name: str) -> float:
        """Return the cost per drawn kWh, including charges for peaks."""
        return float(self.cost[name].sum() / self.drawn_kwh[name].sum())

    def short(self, name: str) -> float:
        """Return the share of cars that left with less than 80 % of their need."""
        there = self.need_kwh > 0
        return float((self.drawn_kwh[name] < _SHORT_SHARE * self.need_kwh)[there].mean())

    def fairness(self, name: str) -> float:
        """Return Jain's index of the cars' served shares, averaged over tasks and days."""
        index = self._jain(name)
        return float(index[index > 0].mean())

    def _jain(self, name: str) -> np.ndarray:
        """Return Jain's index of each task and day, (tasks, days); 0 if no car was served."""
        there = self.need_kwh > 0
        shares = np.where(there, self.drawn_kwh[name] / np.where(there, self.need_kwh, 1.0), 0.0)
        count = there.sum((2, 3))
        squares = (shares**2).sum((2, 3)) * count
        return shares.sum((2, 3)) ** 2 / np.where(squares > 0, squares, 1.0)

    def measures(self, name: str) -> dict[str, float]:
        """Return all measures of a schedule; `kept` is the share of promises kept."""
        kept, cars = self.daily(name, "promise")
        found = {
            "served": self.served[name],
            "left_short": self.short(name),
            "fairness": self.fairness(name),
            "kept": float(kept.sum() / cars.sum()),
        }
        return found | ({"cost_per_kwh": self.cost_per_kwh(name)} if self.cost else {})

    def to_json(self) -> dict[str, Any]:
        """Return what `apportion backtest --json` prints."""
        leads = {name: self.ahead(name) for name in self._compared()}
        return {
            "site": self.site,
            "start": str(self.dates[0]),
            "end": str(self.dates[-1]),
            "days": len(self.dates),
            "stations": int(self.members.shape[1]),
            "capacity": self.capacity,
            "capacity_kw": float(self.capacity_kw.mean()),
            "served": self.served,
            "ahead": {
                name: {"estimate": lead.value, "low": lead.low, "high": lead.high}
                for name, lead in leads.items()
            },
            "objective": self.objective,
            "measures": {name: self.measures(name) for name in self.drawn_kwh},
        }

    def _compared(self) -> list[str]:
        """Return the schedules to compare with the policy; the optimum only for energy."""
        names = self.served if self.objective == "energy" else self.drawn_kwh
        return [name for name in names if name != POLICY]

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each schedule."""
        rows = []
        for name, share in sorted(self.served.items(), key=lambda pair: -pair[1]):
            row: dict[str, Any] = {"schedule": name, "served": share}
            if name in self.drawn_kwh:
                row |= self.measures(name)
            if name in self._compared():
                ahead = self.ahead(name)
                row |= {"ahead": ahead.value, "low": ahead.low, "high": ahead.high}
            rows.append(row)
        # A fixed column order: the optimum has no measures by car, and the policy no lead.
        table = pd.DataFrame(rows, columns=["schedule", *_FORMATS])
        # Without prices there are no costs.
        return table if self.cost else table.drop(columns="cost_per_kwh")

    def summary(self) -> str:
        """Format the test and a table of all schedules."""
        table = self.to_frame().to_string(index=False, na_rep="", formatters=_FORMATS)
        return (
            f"{self.site}, {self.dates[0]} to {self.dates[-1]}: {len(self.dates)} days, "
            f"{len(self.members)} garages of {self.members.shape[1]} stations, feeder "
            f"{self.capacity:.0%} of their full rate, {self.capacity_kw.mean():.1f} kW\n{table}\n"
            f"ahead, from low to high: the policy's lead over each in points of {self.objective}, and "
            "its 95 % interval\n"
            "clairvoyant and optimum know the future"
        )

    def plot(self) -> "Figure":
        """Plot the share of the need that each schedule met, in ascending order."""
        from matplotlib.figure import Figure

        names = sorted(self.served, key=lambda name: self.served[name])
        figure = Figure(figsize=(7, 0.35 * len(names) + 1), layout="constrained")
        axes = figure.subplots()
        colours = ["C1" if name == POLICY else "C0" for name in names]
        axes.barh(names, [100 * self.served[name] for name in names], color=colours)
        axes.set_xlabel("share of the need met (%)")
        return figure

    def by_day(self, name: str | None = None) -> np.ndarray:
        """Return the kWh of a schedule, or of the need, on each day."""
        if name == OPTIMUM:
            assert self.optimum_kwh is not None, "the optimum was not computed"
            return self.optimum_kwh.sum(0)
        kwh = self.need_kwh if name is None else self.drawn_kwh[name]
        return kwh.sum((0, 2, 3))

    def by_station(self, name: str | None = None) -> np.ndarray:
        """Return the kWh of a schedule, or of the need, at each station, over all its tasks."""
        kwh, sums = self.need_kwh if name is None else self.drawn_kwh[name], np.zeros(self.stations)
        np.add.at(sums, self.members, kwh.sum((1, 3)))
        return sums


def _parse_feeders(capacity: str | float, full_kw: np.ndarray) -> np.ndarray:
    """Compute each feeder's capacity in kW from a share of its stations' full rate, or from kW.

    >>> full_kw = np.array([20.0])
    >>> _parse_feeders("0.5", full_kw).tolist(), _parse_feeders("7kW", full_kw).tolist()
    ([10.0], [7.0])
    """
    text = str(capacity).strip().lower()
    try:
        number = float(text.removesuffix("kw"))
    except ValueError:
        number = float("nan")
    if text.endswith("kw") and 0 < number < float("inf"):
        return np.full(len(full_kw), number)
    if not 0 < number <= 1:
        raise InputError(
            f"capacity {capacity}: give a share of the stations' full rate, above 0 and at most 1, or "
            "power such as 30kW"
        )
    return number * full_kw


def _draw_garages(stations: int, task_size: int, tasks: int, seed: int = 0) -> np.ndarray:
    """Draw distinct garages from the stations, (tasks, entities); fewer if there are fewer."""
    count = min(tasks, count_tasks(stations, task_size))
    return np.asarray(draw_tasks(stations, task_size, count, seed=seed).members)


def backtest_schedules(
    policy: Policy,
    days: Days,
    *,
    capacity: str | float,
    task_size: int,
    tasks: int = 24,
    optimum: bool = True,
    schedulers: Mapping[str, Schedule] = SCHEDULERS,
    mpc: bool = False,
    objective: str = "energy",
    seed: int = 0,
) -> ChargingBacktest:
    """Run a policy and every scheduler over days that have predictions (`add_forecasts`).

    Parameters
    ----------
    capacity
        Capacity of the feeder, as a share of its stations' full rate or in kW.
    task_size, tasks
        Number of stations in a garage, and number of garages to draw.
    optimum
        Whether to solve the linear programme of every garage and day, the slowest part.
    schedulers
        The schedulers to compare with.
    mpc
        Whether to add model-predictive control, which plans some tens of days a second.
    objective
        Objective of the policy's training.
    """
    garage, stations = days.garage, len(days.stations)
    members = _draw_garages(stations, task_size, tasks, seed)
    full = np.asarray(days.wiring.max_kw)[members].sum(1)
    feeder = _parse_feeders(capacity, full)
    drawn: dict[str, Delivered] = {}
    others: dict[str, Schedule] = {}
    own = PolicySchedule(policy, spare=not days.physics.fill)
    for name, schedule in {POLICY: own, **schedulers}.items():
        if isinstance(schedule, PolicySchedule):
            # One program per policy shape, so that two equal policies deliver equal energy.
            drawn[name] = simulate(days, [schedule], feeder, members)
        else:
            others[name] = schedule
    if others:
        found = simulate(days, list(others.values()), feeder, members)
        for place, name in enumerate(others):
            drawn[name] = Delivered(*(x[place : place + 1] for x in found))
    prices, by_cost = days.prices, objective == "cost"
    if mpc:
        drawn[MPC] = simulate_mpc(days, feeder, members, prices if by_cost else None)
    best = best_energies(days, feeder, members) if optimum else None
    need = np.where(garage.begins, garage.need_kwh, 0)[:, members].transpose(1, 0, 2, 3)
    share = float((feeder / full).mean())
    energy = {name: each.energy_kwh[0] for name, each in drawn.items()}
    cost = {}
    if prices is not None:
        cost = {name: costs(days, prices, each) for name, each in drawn.items()}
    return ChargingBacktest(
        *(days.site, days.dates, members, stations, feeder, share, need, energy, best),
        cost=cost,
        worth_per_kwh=0.0 if prices is None else prices.worth_per_kwh,
        objective=objective,
    )


def costs(days: Days, prices: Tariff, drawn: Delivered) -> np.ndarray:
    """Compute the cost of the energy that a single schedule drew, (tasks, days)."""
    hours = np.arange(days.physics.periods) * days.physics.period_hours + 1e-3
    clock = hours + np.asarray(days.garage.clock_hours).max(1, keepdims=True)
    return prices.cost(drawn.by_period_kwh[0], clock, days.physics.period_hours)


def check_facts(saved: Mapping[str, Any]) -> None:
    """Refuse a policy of another domain, and invalid facts.

    Examples
    --------
    >>> check_facts({"job": "charging", "task_size": 10, "until": {"north": "2019-12-31"}})
    """
    if saved.get("job") != "charging":
        raise InputError(
            f"the policy was trained for {saved.get('job', 'something else')!r}, not for charging; "
            "give the folder of a charging run"
        )
    until = saved.get("until", {})
    size, recall = saved.get("task_size", 1), saved.get("recall", False)
    channels = saved.get("channels", CHANNELS)
    objective = saved.get("objective", "energy")
    sound = {
        f"objective {objective!r}": objective in OBJECTIVES,
        "until": isinstance(until, Mapping) and all(isinstance(day, str) for day in until.values()),
        f"task_size {size!r}": type(size) is int and size >= 1,
        f"recall {recall!r}": type(recall) is bool,
        f"channels {channels!r}": channels == CHANNELS,
    }
    for what, fits in sound.items():
        if not fits:
            raise InputError(f"the policy's own facts are wrong ({what}); train it again")
    for day in until.values():
        as_day(day)


def backtest_saved(
    policy: Policy,
    saved: Mapping[str, Any],
    frame: pd.DataFrame,
    *,
    site: str | None = None,
    start: str | None = None,
    end: str | None = None,
    stations: int | None = None,
    capacity: str | float | None = None,
    tasks: int = 8,
    embedded: bool = False,
    timezone: str | None = None,
    schedulers: Mapping[str, Schedule] = SCHEDULERS,
    optimum: bool = True,
    mpc: bool = False,
    past_alone: bool = False,
) -> ChargingBacktest:
    """Backtest a saved policy and every scheduler on a file's sessions.

    Options are those of `ChargingBacktestOptions` and of `backtest_schedules`. The site need not be
    one of training. If it is, garages are drawn from the stations known in training, and other
    stations are omitted with a warning. With `past_alone`, the result of a day does not depend on
    sessions of later days; a request that needs these is refused.
    """
    check_facts(saved)
    if tasks < 1:
        raise InputError(f"tasks is {tasks}; at least one garage is needed")
    names = sorted(map(str, frame.site.unique()))
    if site is None and len(names) > 1:
        raise InputError(
            f"the file has {len(names)} sites; choose one with --site: {', '.join(names)}"
        )
    chosen = names[0] if site is None else site
    described = describe_sites(
        frame, (chosen,), embedded=embedded, timezone=timezone or saved.get("timezone")
    )
    [(name, description)] = described.items()
    whole = site is not None and site.endswith(".toml")
    if not whole and find_site(saved.get("sites", {}), name) is not None:
        description = saved_site(saved, name)
        frame = _at_known_stations(frame, name, description)
    elif past_alone and not whole and not embedded:
        raise InputError(
            f'site "{name}" was not trained on, and its stations would depend on later sessions; '
            "describe it in a TOML file and give that with --site"
        )
    objective = saved.get("objective", "energy")
    physics = make_physics(
        saved.get("period_minutes", 15), ideal=saved.get("ideal", False), objective=objective
    )
    everything = Days.of(frame, name, description, physics=physics)
    until = find_site(saved.get("until", {}), name)
    if until is not None and start is None:
        start = str(np.datetime64(until, "D") + np.timedelta64(1, "D"))
    elif until is not None and as_day(str(start)) <= as_day(until):
        warnings.warn(
            f"the policy was trained on days of {name} up to {until}; what it serves on them says nothing "
            "about days to come",
            stacklevel=2,
        )
    if past_alone:
        end = str(everything.over)
    tested = everything.between(start, end)
    size = saved.get("task_size", 1) if stations is None else stations
    is_described = whole and stations is None and capacity is None
    most = len(everything.stations)
    if whole and stations is None:
        # Test the whole garage behind its own feeder.
        size, tasks = most, 1
        capacity = f"{description.capacity_kw}kW" if capacity is None else capacity
    if not 1 <= size <= most:
        raise InputError(
            f'stations {size}: site "{everything.site}" has {most} to choose from; give '
            "--stations from 1 to that"
        )
    capacity = 0.15 if capacity is None else capacity
    _parse_feeders(capacity, np.ones(1))
    predictor = Predictor.from_dict(saved.get("predictor", {}))
    drawn = np.unique(_draw_garages(most, size, tasks))
    days = add_forecasts(
        everything, predictor, saved.get("recall", False), only=tested, stations=drawn
    )
    found = backtest_schedules(
        policy,
        days,
        capacity=capacity,
        task_size=size,
        tasks=tasks,
        schedulers=schedulers,
        optimum=optimum,
        mpc=mpc,
        objective=objective,
    )
    return replace(found, fingerprint=description.fingerprint if is_described else None)


def _at_known_stations(frame: pd.DataFrame, site: str, description: Site) -> pd.DataFrame:
    """Select the sessions at described stations; warn about the others."""
    here = frame.site == site
    other = here & ~frame.station.isin(list(description.stations))
    if not other.any():
        return frame
    names = sorted(frame.station[other].astype(str).unique())
    if other.sum() == here.sum():
        raise InputError(
            f'site "{site}": none of its stations, such as {names[0]}, was there in training; if it is '
            "another garage, call it something else"
        )
    warnings.warn(
        f"{site}: {count(int(other.sum()), 'session')} at stations that were not there in "
        f"training ({', '.join(names[:3])}{', ...' if names[3:] else ''}) are left out; describe the site "
        "in a TOML file to test it with them",
        stacklevel=3,
    )
    return frame.loc[~other]


def daily_gains(
    policy: Policy,
    saved: Mapping[str, Any],
    frame: pd.DataFrame,
    against: str | Schedule,
    *,
    bound: float = GAIN_BOUND,
    **chosen: Any,
) -> Gains:
    """Compute a policy's daily gains over a scheduler on the days after training.

    Parameters
    ----------
    saved
        The facts saved with the policy.
    against
        Name of a scheduler, folder of another charging run, or a scheduler as a function. Another
        run's policy receives this run's predictions, on days after the training of both.
    bound
        Bound at which a day's gain is clipped; choose it before looking at the data.
    chosen
        Site, stations, capacity and tasks, as in `backtest_saved`.
    """
    saved = dict(saved)
    name, schedule = against if isinstance(against, str) else "own", against
    if isinstance(schedule, str):
        schedule, until = _scheduler(schedule)
        own = saved.get("until", {})
        saved["until"] = {
            site.casefold(): max(find_site(own, site) or "", find_site(until, site) or "")
            for site in {*own, *until}
        }
    found = backtest_saved(
        policy,
        saved,
        frame,
        schedulers={name: schedule},
        optimum=False,
        past_alone=True,
        **chosen,
    )
    needed = _sums(found.need_kwh)
    more = _sums(found.drawn_kwh[POLICY]) - _sums(found.drawn_kwh[name])
    # A day without need has no gain.
    share = np.where(needed > 0, more / np.where(needed > 0, needed, 1.0), np.nan)
    return Gains.within(
        share,
        bound,
        periods=found.dates,
        baseline=name,
        period="day",
        unit="the day's need",
        site=found.fingerprint,
    )


def _sums(kwh: np.ndarray) -> np.ndarray:
    """Sum each day exactly, so that its sum does not depend on other days."""
    days = np.asarray(kwh, float).swapaxes(0, 1)
    return np.array([math.fsum(day.ravel().tolist()) for day in days])


def read_certificate(path: Path, site: Site) -> dict[str, Any]:
    """Read a certificate for this site; its `trust` is 0 if the verdict is harmful.

    Raises
    ------
    InputError
        If the file has no certificate, or one for another site or for garages drawn from stations.
    """
    with reading(path, "certify the policy for this site first"):
        saved = json.loads(read_bytes(path))
    found = saved if isinstance(saved, dict) else {}
    trust, verdict = found.get("trust"), found.get("verdict")
    if isinstance(trust, bool) or not isinstance(trust, int | float) or not 0 <= trust <= 1:
        trust = None
    if trust is None or verdict not in get_args(CertificateVerdict):
        raise InputError(f"{path}: no certificate; apportion certify writes one")
    if found.get("site") != site.fingerprint:
        raise InputError(
            f"{path}: it is not of this site, {site.describe()}; certify the policy with --site and its "
            "TOML file"
        )
    return found | {"trust": 0.0 if verdict == "harmful" else float(trust)}


def _scheduler(name: str) -> tuple[Schedule, dict[str, str]]:
    """Find a scheduler by name, or load a run's policy; also return its last training days."""
    # os.path returns False for a name that is too long; Path raises.
    if name in {*SCHEDULERS} - {*HINDSIGHT} or not os.path.isdir(name):
        return find_scheduler(
            name, " to certify against", ", or the folder of another charging run"
        ), {}
    about = load_about(name)
    check_facts(about)
    spare = about.get("objective") == "cost"
    return PolicySchedule(load_policy(name), spare), about.get("until", {})


def busiest_day(policy: Policy, days: Days, test: ChargingBacktest) -> pd.DataFrame:
    """Return the power in kW of each station on the day of largest need, a row for each period.

    Periods more than two before the first or after the last draw are omitted.
    """
    need = test.need_kwh.sum((2, 3))
    task, day = (int(place) for place in np.unravel_index(int(need.argmax()), need.shape))
    members, capacity, physics = test.members[task], float(test.capacity_kw[task]), days.physics
    garage = jax.tree.map(lambda x: x[day, members], days.garage)
    own = PolicySchedule(policy, spare=not physics.fill)
    _, kwh = walk_day(garage, days.wiring.at(members), own, jnp.float32(capacity), physics)
    drawn = np.asarray(kwh) / physics.period_hours
    minutes = np.arange(physics.periods) * round(60 * physics.period_hours)
    times = pd.Timestamp(days.dates[day]) + pd.to_timedelta(minutes, unit="min")
    names = pd.Index([days.stations[place] for place in members])
    power = pd.DataFrame(drawn, columns=names).assign(
        unused=np.maximum(capacity - drawn.sum(1), 0.0)
    )
    power.insert(0, "time", pd.DatetimeIndex(times).strftime("%Y-%m-%d %H:%M"))
    active = np.flatnonzero(drawn.sum(1) > 0)
    return power.iloc[max(active[0] - 2, 0) : active[-1] + 3] if len(active) else power
