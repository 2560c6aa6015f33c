"""One policy for every garage: charging on real sessions, at stations and in a year it never saw.

Trained on 70 % of two sites' stations in 2019, tested on the others and on 2021, behind feeders of 10,
15 and 20 % of their stations' full rate: 12 tests. Stations are told whole amperes, 6 or more or none; cars
taper, meters are silent at times, nights and weekends count. Claims: one policy serves at least as much as
the best of all schedulers that cannot see the future, chosen for each test in hindsight; multi-task
learning serves more than single-task learning at equal updates, and a policy that recalls earlier days
more than a plain one; it serves a site and numbers of stations it was not trained on; PPO, which needs no
gradient of the garage, learns too. The same 12 tests in a mixed garage, where the same sessions are at
stations of 3.7, 11 and 22 kW and cars of three kinds, and in an ideal one: any power at any time on
working days alone, for comparison with what was published before.

A cell is a way to train; a row is the kWh of a schedule on a day or at a station. Points are of the need:
100 x (kWh drawn by one - by the other) / kWh needed. Intervals are by clusters of days, as the days of one
test share their weather and their week; the table also has those by days and stations together, which are
wider.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.composition import Ensemble
from apportion.domains.charging import backtest, training
from apportion.domains.charging.backtest import POLICY
from apportion.domains.charging.problem import CHANNELS, Charging
from apportion.domains.charging.schedulers import CLAIRVOYANT, HINDSIGHT, OPTIMUM, SCHEDULERS
from apportion.domains.charging.sessions import fingerprint, read_sessions
from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.charging.site import PHASES, Site, Station, embedded_site
from apportion.domains.charging.training import Garages
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Policy, Pooled
from apportion.statistics import Estimate, clustered_ratio
from apportion.studies.engine import Cell, Plan, Progress, Rows
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.tasks import single_tasks
from apportion.training import train_runs
from apportion.trees import take

TRAINING: dict[str, dict[str, Any]] = {
    "quick": {"tasks": 20, "steps": 40, "days": 8, "members": 1, "hidden": 16},
    "paper": {"tasks": 200, "steps": 2000, "days": 64, "members": 3, "hidden": 48},
}
SCALES: dict[str, dict[str, Any]] = {
    "quick": {"garages": 3, "sized_garages": 1, "days_tested": 8, "single_tasks": 2},
    "paper": {"garages": 24, "sized_garages": 6, "days_tested": None, "single_tasks": 12},
}
"""Garages of ten stations, and of other numbers; the first days of each test, or all of them; policies
that learn from one task each."""
PPO_STEPS = {"quick": 10, "paper": 1000}
SITE_NAMES = {"caltech": "Caltech", "jpl": "JPL"}
TRAINED_UNTIL, TESTED_FROM = "2019-12-31", "2021-01-01"
CAPACITIES = (0.1, 0.15, 0.2)
SIZES, _SIZED_CAPACITY = (5, 20, 50), 0.15
RECALLED = "llf-recalled"
QUIET = 0.3
"""Sessions a station on a working day, as the earlier study had it."""
CABLES = ((16.0, 1), (16.0, 3), (32.0, 3))
"""Stations of the mixed garage, amperes and phases at 230 V: 3.7, 11 and 22 kW."""
LEARNED = {
    "mtl": "MTL",
    "pmtl": "P-MTL",
    "stl": "STL",
    "ppo": "PPO",
    "only-caltech": "Caltech only",
    "only-jpl": "JPL only",
    "plain": "MTL without recall",
    "mixed": "MTL, mixed garage",
    "ideal": "MTL, ideal garage",
}
"""Every way to train, and its name in the table."""
GARAGES = {"real": ("mtl", "schedulers"), "mixed": ("mixed",) * 2, "ideal": ("ideal",) * 2}
"""The garages of the tests: the cell of the policy there, and that of the schedulers."""

_TEST = ["garage", "site", "test", "capacity"]
"""What tells a test of ten stations from the others."""
Name = tuple[str, str]
"""A schedule by the cell that computed it and its name there."""
Kwh = dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]]
"""Of each cell, schedule and unit: what was drawn and needed, (places, policies)."""


def charging(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """A cell for each way to train, and one for the schedulers that learn nothing."""
    settings = ChargingSettings(until=TRAINED_UNTIL, seed=seed, **TRAINING[scale])
    about = {
        "training": {n: v for n, v in asdict(settings).items() if n not in ("method", "sessions")},
        **SCALES[scale],
        "ppo_steps": PPO_STEPS[scale],
        "data": {"sessions": "embedded", "fingerprint": fingerprint(read_sessions())},
    }
    cells = tuple(Cell.alone(name, {"trained": name}) for name in ("schedulers", *LEARNED))
    return Plan("charging", cells, partial(_compute, settings, about), _conclude, about)


def mixed_sites(seed: int) -> dict[str, Site]:
    """The embedded sites with cables of three kinds, drawn for each station."""
    sites, rng = {}, np.random.default_rng(seed)
    for name in SITE_NAMES:
        drawn = rng.integers(len(CABLES), size=len(embedded_site(name).stations))
        stations = {}
        for place, (station, kind) in enumerate(
            zip(embedded_site(name).stations, drawn, strict=True)
        ):
            max_a, phases = CABLES[kind]
            wired = PHASES if phases == 3 else (PHASES[place % 3],)
            stations[station] = Station(max_a, wired)
        # Garages are drawn among the stations, each behind a feeder of its own.
        full = sum(one.max_a * len(one.phases) for one in stations.values()) * 0.23
        sites[name] = Site(stations, feeder_kw=full, timezone=embedded_site(name).timezone)
    return sites


def _garages(kind: str, settings: ChargingSettings) -> Garages:
    """The garages that a cell is tested in, and most are trained in."""
    if kind == "mixed":
        return Garages.of(read_sessions(), settings, mixed_sites(settings.seed), settings.seed)
    if kind == "ideal":
        settings = replace(settings, ideal=True, quiet_days=QUIET)
    return Garages.of(read_sessions(), replace(settings, recall=kind != "plain"))


def _compute(
    settings: ChargingSettings, about: dict[str, Any], cells: Sequence[Cell], progress: Progress
) -> Rows:
    for cell in cells:
        kind = cell["trained"]
        garages = _garages(kind, settings)
        policies = _train(kind, garages, settings, about, progress)
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
    if kind not in ("stl", "ppo"):
        own = replace(settings, method="pmtl" if kind == "pmtl" else "mtl")
        if kind.startswith("only-"):
            own = replace(own, site=(kind.removeprefix("only-"),))
            garages = Garages.of(read_sessions(), own)
        return [Ensemble(training.train_charging(garages, own).policy)]
    problem = Charging.of(garages.training_days(), settings.capacity)
    tasks = training.choose_stations(garages, settings)
    count = about["single_tasks"] if kind == "stl" else settings.members
    seeds = jax.random.split(jax.random.key(settings.seed), (count, 2))
    network = eqx.filter_vmap(lambda key: Pooled(CHANNELS, settings.hidden, key=key))
    if kind == "ppo":
        learner = PPO(rollouts=32, learning_rate=1e-3, gamma=0.99, epochs=2, minibatches=8)
        steps, trained_on = about["ppo_steps"], tasks
    else:
        learner, steps = training.direct_learner(settings), settings.steps
        # Evenly out of all, so that every site has its share.
        spread = [(2 * number + 1) * len(tasks) // (2 * count) for number in range(count)]
        trained_on = single_tasks(tasks[spread])
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


def _test(policy: Policy, kind: str, garages: Garages, about: dict[str, Any]) -> pd.DataFrame:
    """What a policy, or the schedulers, deliver in every test."""
    tables = []
    garage = kind if kind in GARAGES else "real"
    schedulers = kind == GARAGES[garage][1]
    few = about["days_tested"]
    sizes = () if garage != "real" else SIZES if few is None else SIZES[:1]
    for site in SITE_NAMES:
        new = garages.unseen_stations(site)
        later = garages.all_days[site].between(TESTED_FROM)
        tests = [
            *(("2019, new stations", new, 10, capacity) for capacity in CAPACITIES),
            *(("2021", later, 10, capacity) for capacity in CAPACITIES),
            *(("2021", later, size, _SIZED_CAPACITY) for size in sizes),
        ]
        for name, days, size, capacity in tests:
            last = None if few is None else str(days.dates[min(few, len(days)) - 1])
            result = backtest.backtest_schedules(
                policy,
                days.between(None, last),
                capacity=capacity,
                task_size=size,
                tasks=about["garages"] if size == 10 else about["sized_garages"],
                optimum=schedulers and size == 10,
                schedulers=SCHEDULERS if schedulers else {},
            )
            rows = _rows(
                result, [name for name in result.served if name != POLICY or kind != "schedulers"]
            )
            where = {"garage": garage, "site": site, "test": name}
            tables.append(rows.assign(**where, capacity=capacity, stations=size))
    return pd.concat(tables, ignore_index=True)


def _rows(result: backtest.ChargingBacktest, names: Sequence[str]) -> pd.DataFrame:
    """KWh by day and by station, and how the cars left, of each schedule; of the optimum, by day alone."""
    tables = []
    for name in names:
        days = {"unit": "day", "place": [str(day) for day in result.dates]}
        parts = [days | {"drawn_kwh": result.by_day(name), "need_kwh": result.by_day()}]
        if name != OPTIMUM:
            stations = {"unit": "station", "place": [str(one) for one in range(result.stations)]}
            kwh = {"drawn_kwh": result.by_station(name), "need_kwh": result.by_station()}
            left = {"left_short": [result.short(name)], "fairness": result.fairness(name)}
            parts += [stations | kwh, {"unit": "all", "place": ""} | left]
        tables += [pd.DataFrame(part).assign(schedule=name) for part in parts]
    return pd.concat(tables, ignore_index=True)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """The study from the rows of all cells."""
    table = _summarise(rows)
    title = "Charging: one policy for every garage, at stations and in a year it never saw"
    notes = [_note(garage, table) for garage in GARAGES]
    notes += [
        "The best scheduler is chosen for each test in hindsight, of all that cannot see the future; no "
        "single one is best in all.",
        "The policies of one cell are averaged over seeds: intervals are over days, and do not hold "
        "for other seeds and other splits of the stations.",
    ]
    found = (table, _verdicts(rows, table), lambda: _plot(table), tuple(notes))
    return [FigureResult("charging", title, *found)]


def _note(garage: str, table: pd.DataFrame) -> str:
    """How the policy stands in a garage's tests: leads, the gap to clairvoyance, cars left short."""
    own, closed, leads, short = LEARNED[GARAGES[garage][0]], [], [], []
    here = table[(table.stations == 10) & (table.garage == garage)]
    for key, test in here.groupby(_TEST, sort=False):
        named = test.set_index("schedule")
        best = _best_scheduler(table, *key)
        gap = max(named.served[CLAIRVOYANT] - named.served[best], 1e-12)
        leads.append(100 * (named.served[own] - named.served[best]))
        closed.append(leads[-1] / 100 / gap)
        short.append(100 * (named.left_short[own] - named.left_short["llf"]))
    ahead = sum(x >= 0 for x in leads)
    return (
        f"In the {garage} garage {own} is at least as good as the best scheduler in {ahead} of "
        f"{len(leads)} tests; its lead is {min(leads):.2f} to {max(leads):.2f} points, {min(closed):.0%} "
        f"to {max(closed):.0%} of the gap to the clairvoyant one. Of its cars {min(short):+.1f} to "
        f"{max(short):+.1f} points more than least laxity first's leave with less than 80 % of their need."
    )


def kwh_of(rows: Any) -> Kwh:
    """The rows of one test as arrays; a cell's policies come one after the other, places in order."""
    found: Kwh = {}
    some = rows[rows.unit != "all"]
    for key, group in some.groupby(["trained", "schedule", "unit"], sort=False):
        policies = group.policy.nunique()
        arrays = [group[name].to_numpy() for name in ("drawn_kwh", "need_kwh")]
        found[key] = tuple(x.reshape(policies, -1).T for x in arrays)
    return found


def lead(kwh: Kwh, first: Name, second: Name, *, both: bool = False) -> Estimate:
    """What one schedule serves more than another in one test, in points of the need.

    Where one side has several policies, their mean is meant, and the policies are a clustering of their
    own.
    """
    clusterings = []
    for unit in ("day", "station") if both else ("day",):
        (one, need), (other, _) = kwh[(*first, unit)], kwh[(*second, unit)]
        clusterings.append((100 * (one.mean(1) - other.mean(1)), need.mean(1)))
    (one, need), (other, _) = kwh[(*first, "day")], kwh[(*second, "day")]
    policies = max(one.shape[1], other.shape[1])
    if policies > 1:
        gains = (one.sum(0) - other.sum(0)) / policies
        sizes = np.broadcast_to(need.sum(0), gains.shape) / policies
        clusterings.append((100 * gains, sizes))
    return clustered_ratio(*clusterings)


def _summarise(rows: Any) -> pd.DataFrame:
    """A row for each test and schedule: what it served, how cars left, and MTL's lead over it."""
    found, by = [], [*_TEST, "stations"]
    for key, test in rows.groupby(by, sort=False):
        kwh, whole = kwh_of(test), test[test.unit == "all"]
        mtl = (GARAGES[key[0]][0], POLICY)
        for trained, schedule, _ in [name for name in kwh if name[2] == "day"]:
            drawn, need = kwh[trained, schedule, "day"]
            some = select(whole, trained=trained, schedule=schedule)
            row: dict[str, Any] = dict(zip(by, key, strict=True)) | {
                "schedule": LEARNED[trained] if schedule == POLICY else schedule,
                "served": float(drawn.sum() / need.sum()),
                "left_short": some.left_short.mean(),
                "fairness": some.fairness.mean(),
                "days": len(drawn),
            }
            if (trained, schedule) != mtl:
                ahead = lead(kwh, mtl, (trained, schedule))
                row |= {"mtl_ahead": ahead.value, "low": ahead.low, "high": ahead.high}
                if schedule != OPTIMUM:
                    wide = lead(kwh, mtl, (trained, schedule), both=True)
                    row |= {"low_with_stations": wide.low, "high_with_stations": wide.high}
            found.append(row)
    return pd.DataFrame(found)


def _best_scheduler(table: Any, garage: str, site: str, test: str, capacity: float) -> str:
    here = select(table, garage=garage, site=site, test=test, capacity=capacity, stations=10)
    schedulers = here[~here.schedule.isin([*HINDSIGHT, *LEARNED.values()])]
    return str(schedulers.loc[schedulers.served.idxmax(), "schedule"])


def _verdicts(rows: Any, table: pd.DataFrame) -> Iterator[Verdict]:
    of_ten = rows[rows.stations == 10]
    for key, test in of_ten.groupby(_TEST, sort=False):
        garage, site, name, capacity = key
        where = f"{SITE_NAMES[site]}, {name}, feeder {capacity:.0%}"
        if garage != "real":
            where = f"{garage} garage, {where}"
        policy, schedulers = GARAGES[garage]
        best, kwh = _best_scheduler(table, *key), kwh_of(test)
        for other in dict.fromkeys((best, "llf", RECALLED) if garage == "real" else (best,)):
            ahead = lead(kwh, (policy, POLICY), (schedulers, other))
            named = f"{other}, the best scheduler there" if other == best else other
            yield Verdict.of(f"MTL serves more than {named} ({where})", ahead, paper=False)
    of_ten = of_ten[of_ten.garage == "real"]
    for site, test in of_ten.groupby("site", sort=False):
        # A day's tests at several feeders are one cluster; 2019 and 2021 share no day.
        keys = ["trained", "schedule", "unit", "policy", "place"]
        sums = test.groupby(keys, sort=False)[["drawn_kwh", "need_kwh"]].sum()
        kwh = kwh_of(sums.reset_index())
        other_site = next(f"only-{one}" for one in SITE_NAMES if one != site)
        policy = {kind: (kind, POLICY) for kind in LEARNED if kind not in GARAGES}
        llf = ("schedulers", "llf")
        for claim, one, other in (
            ("MTL serves more than STL at equal updates", policy["mtl"], policy["stl"]),
            ("P-MTL serves more than MTL", policy["pmtl"], policy["mtl"]),
            ("MTL serves more than without recalling earlier days", policy["mtl"], policy["plain"]),
            ("PPO serves more than llf", policy["ppo"], llf),
            ("Trained at the other site alone it serves more than llf", policy[other_site], llf),
        ):
            claim = f"{claim} ({SITE_NAMES[site]})"
            yield Verdict.of(claim, lead(kwh, one, other), paper=False)
    sized = rows[rows.stations != 10]
    for (site, stations), test in sized.groupby(["site", "stations"], sort=False):
        ahead = lead(kwh_of(test), ("mtl", POLICY), ("schedulers", "llf"))
        claim = f"Trained on 10 stations it serves more than llf on {stations}"
        yield Verdict.of(f"{claim} ({SITE_NAMES[site]}, 2021)", ahead, paper=False)


def _plot(table: Any) -> Figure:
    """MTL's lead over schedulers and over other ways to learn, in every test."""
    shown = {}
    for name in ("llf", "llf-predicted", RECALLED, CLAIRVOYANT, "STL", "P-MTL", "PPO"):
        shown[f"over {name}"] = {
            f"{SITE_NAMES[row.site]}, {row.test}, {row.stations} stations, feeder {row.capacity:.0%}": (
                Estimate(row.mtl_ahead, row.low, row.high, row.days)
            )
            for row in select(table, schedule=name, garage="real").itertuples()
        }
    return forest(shown, "MTL's lead in energy, points of the need", width=1.8)
