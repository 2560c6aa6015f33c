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

Model-predictive control, which plans every period by a linear programme from the forecasts that the policy
sees, is too slow for all garages: it is held against the policy in the first few garages of each test, real
and mixed. Policies are also trained for what else an operator may want: even shares, promises (80 % of each
car's need), and energy that is worth more than it costs, at the sites' tariff; each is held against the
baseline of its own objective, and measured by all others.

A cell is a way to train, or the schedulers of a garage, site and year; a row is the kWh of a schedule on a
day or at a station. Points are of the need:
100 x (kWh drawn by one - by the other) / kWh needed. Intervals are by clusters of days, as the days of one
test share their weather and their week; the table also has those by days and stations together, which are
wider.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.certify.statistics import Estimate, clustered_ratio
from apportion.composition import Ensemble
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Policy, Pooled
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.tasks import single_tasks
from apportion.training import Chunk, Chunks, train
from apportion.trees import take
from apportion_charging import backtest, training
from apportion_charging.backtest import POLICY
from apportion_charging.days import Days
from apportion_charging.mpc import MPC, simulate_mpc
from apportion_charging.problem import CHANNELS, Charging
from apportion_charging.schedulers import CLAIRVOYANT, HINDSIGHT, OPTIMUM
from apportion_charging.sessions import fingerprint, read_sessions
from apportion_charging.settings import ChargingSettings
from apportion_charging.site import PHASES, Site, Station, Tariff, embedded_site
from apportion_charging.training import Garages

_TRAINING: dict[str, dict[str, Any]] = {
    "quick": {"tasks": 20, "steps": 40, "days": 8, "members": 1, "hidden": 16},
    "paper": {"tasks": 200, "steps": 2000, "days": 64, "members": 3, "hidden": 48},
}
_SCALES: dict[str, dict[str, Any]] = {
    "quick": {
        "garages": 3,
        "planned_garages": 1,
        "sized_garages": 1,
        "days_tested": 8,
        "single_tasks": 2,
    },
    "paper": {
        "garages": 24,
        "planned_garages": 3,
        "sized_garages": 6,
        "days_tested": None,
        "single_tasks": 12,
    },
}
"""Garages of ten stations, those of them with model-predictive control, and garages of other numbers; the
first days of each test, or all of them; policies that learn from one task each."""
_PPO_STEPS = {"quick": 10, "paper": 1000}
_SITE_NAMES = {"caltech": "Caltech", "jpl": "JPL"}
_TRAINED_UNTIL, _TESTED_FROM = "2019-12-31", "2021-01-01"
_CAPACITIES = (0.1, 0.15, 0.2)
_SIZES, _SIZED_CAPACITY = (5, 20, 50), 0.15
_RECALLED = "llf-recalled"
_MPC_FOR_COST, _PLANNED_COST = "mpc, for cost", "planned cost"
_QUIET = 0.3
"""Sessions a station on a working day, as the earlier study had it."""
_CABLES = ((16.0, 1), (16.0, 3), (32.0, 3))
"""Stations of the mixed garage, amperes and phases at 230 V: 3.7, 11 and 22 kW."""
_LEARNED = {
    "mtl": "MTL",
    "pmtl": "P-MTL",
    "stl": "STL",
    "ppo": "PPO",
    "only-caltech": "Caltech only",
    "only-jpl": "JPL only",
    "plain": "MTL without recall",
    "fair": "MTL for even shares",
    "promise": "MTL for promises",
    "cost": "MTL for cost",
    "mixed": "MTL, mixed garage",
    "ideal": "MTL, ideal garage",
}
"""Every way to train, and its name in the table."""
_OBJECTIVES = {
    "energy": "energy, % of the need",
    "fair": "even shares, % (Jain)",
    "promise": "promises kept, % of cars",
    "cost": "worth less cost, cents a kWh",
}
"""What each policy may be trained for, and measured by."""
_GARAGES = {"real": "mtl", "mixed": "mixed", "ideal": "ideal"}
"""The garages of the tests, and the cell of the policy there."""
_TESTS = {"2019": "2019, new stations", "2021": "2021"}
"""The two years, and the names of their tests."""
_SCHEDULED = "schedulers"
_TRAINED, _TESTED = 0.6, 0.95
"""How far a cell is once its policy is trained, and once it is tested."""

_TEST = ["garage", "site", "test", "capacity"]
"""What tells a test of ten stations from the others."""
_Name = tuple[str, str]
"""A schedule by the cell that computed it and its name there."""
_Kwh = dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]]
"""Of each cell, schedule and unit: what was drawn and needed, (places, policies). Units are days and
stations; other objectives than energy have their own worth of a day, and `planned` is a day in the garages
with model-predictive control."""


def charging(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """A cell for each way to train, and for the schedulers of each garage, site and year."""
    settings = ChargingSettings(until=_TRAINED_UNTIL, seed=seed, **_TRAINING[scale])
    about = {
        "training": {n: v for n, v in asdict(settings).items() if n not in ("method", "sessions")},
        **_SCALES[scale],
        "ppo_steps": _PPO_STEPS[scale],
        "tariff": {name: asdict(_tariff(name)) for name in _SITE_NAMES},
        "data": {"sessions": "embedded", "fingerprint": fingerprint(read_sessions())},
    }
    # What takes longest first: whoever is free then takes the schedulers.
    cells = [Cell.alone(name, {"trained": name}) for name in _LEARNED]
    for garage in _GARAGES:
        for site in _SITE_NAMES:
            for year in _TESTS:
                values = {"trained": _SCHEDULED, "garage": garage, "site": site, "year": year}
                cells.append(Cell.alone(f"{_SCHEDULED}-{garage}-{site}-{year}", values))
    computing = partial(_compute, settings, about)
    return Plan("charging", tuple(cells), computing, _conclude, about, keep=_read_later)


def _tariff(site: str) -> Tariff:
    prices = embedded_site(site).prices
    assert prices is not None, "the embedded sites have prices"
    return prices


def _mixed_sites(seed: int) -> dict[str, Site]:
    """The embedded sites with cables of three kinds, drawn for each station."""
    sites, rng = {}, np.random.default_rng(seed)
    for name in _SITE_NAMES:
        drawn = rng.integers(len(_CABLES), size=len(embedded_site(name).stations))
        stations = {}
        for place, (station, kind) in enumerate(
            zip(embedded_site(name).stations, drawn, strict=True)
        ):
            max_a, phases = _CABLES[kind]
            wired = PHASES if phases == 3 else (PHASES[place % 3],)
            stations[station] = Station(max_a, wired)
        # Garages are drawn among the stations, each behind a feeder of its own.
        full = sum(one.max_a * len(one.phases) for one in stations.values()) * 0.23
        sites[name] = Site(stations, feeder_kw=full, timezone=embedded_site(name).timezone)
    return sites


@cache
def _garages(kind: str, settings: ChargingSettings) -> Garages:
    """The garages that a cell is tested in, and most are trained in: those of `_GARAGES`, plain ones, or
    real ones where what nobody wishes for is not drawn (cost).
    """
    if kind == "mixed":
        return Garages.of(read_sessions(), settings, _mixed_sites(settings.seed), settings.seed)
    if kind == "ideal":
        ideal = replace(settings, recall=True, ideal=True, quiet_days=_QUIET)
        return Garages.of(read_sessions(), ideal)
    settings = replace(
        settings, recall=kind != "plain", objective="cost" if kind == "cost" else "energy"
    )
    return Garages.of(read_sessions(), settings)


def _compute(
    settings: ChargingSettings, about: dict[str, Any], cells: Sequence[Cell], progress: OnProgress
) -> Rows:
    for cell in cells:
        kind = cell["trained"]
        if kind == _SCHEDULED:
            yield cell, _schedule(cell, settings, about, progress).assign(trained=kind, policy=0)
            continue
        progress(f"{kind}: reading sessions", 0.0)
        own = kind if kind in ("mixed", "ideal", "plain", "cost") else "real"
        garages = _garages(own, settings)
        policies = _train(kind, garages, settings, about, progress)
        tests = _tests(kind, garages, about)
        tables = []
        for number, policy in enumerate(policies):
            for place, (where, days, test) in enumerate(tests):
                done = (number + place / len(tests)) / len(policies)
                said = f"{kind}: policy {number + 1} of {len(policies)}, {_named(where)}"
                progress(said, _TRAINED + (_TESTED - _TRAINED) * done)
                result = backtest.backtest_schedules(
                    policy, days, **test, schedulers={}, optimum=False
                )
                tables.append(_rows(result, about).assign(**where, policy=number))
        yield cell, pd.concat(tables, ignore_index=True).assign(trained=kind)


def _schedule(
    cell: Cell, settings: ChargingSettings, about: dict[str, Any], progress: OnProgress
) -> pd.DataFrame:
    """What the schedulers, model-predictive control and the optimum deliver at a site in a year."""
    garage, tables, planned = cell["garage"], [], []
    progress(f"{cell.name}: reading sessions", 0.0)
    garages = _garages(garage, settings)
    tests = _tests(_SCHEDULED, garages, about, garage, cell["site"], cell["year"])
    # Equal shares stand where a policy would; its rows are left out.
    nobody = Pooled(CHANNELS, 1, key=jax.random.key(0))
    for place, (where, days, test) in enumerate(tests):
        progress(f"{cell.name}: every scheduler, {_named(where)}", place / len(tests))
        result = backtest.backtest_schedules(nobody, days, **test, optimum=where["stations"] == 10)
        drawn = {name: kwh for name, kwh in result.drawn_kwh.items() if name != POLICY}
        cost = {name: money for name, money in result.cost.items() if name != POLICY}
        result = replace(result, drawn_kwh=drawn, cost=cost)
        tables.append(_rows(result, about).assign(**where))
        if garage != "ideal" and where["stations"] == 10:
            planned.append((where, days, result))
    if planned:
        progress(f"{cell.name}: {MPC}, all feeders", _TESTED)
        tables.append(_plan(planned, about["planned_garages"]))
    if garage == "real":
        progress(f"{cell.name}: {_MPC_FOR_COST}, all feeders", _TESTED)
        priced = _tests(
            _SCHEDULED, _garages("cost", settings), about, garage, cell["site"], cell["year"]
        )
        own = [(where, priced[0][1], found) for where, _, found in planned]
        tables.append(_plan(own, about["planned_garages"], _tariff(cell["site"])))
    return pd.concat(tables, ignore_index=True)


def _plan(
    planned: Sequence[tuple[Any, ...]], count: int, tariff: Tariff | None = None
) -> pd.DataFrame:
    """Model-predictive control in the first garages of these tests, of the same days and garages; for the
    least cost where there is a tariff.
    """
    name, units = (MPC, ("planned", "all")) if tariff is None else (_MPC_FOR_COST, (_PLANNED_COST,))
    _, days, result = planned[0]
    members = np.tile(result.members[:count], (len(planned), 1))
    feeders = np.concatenate([found.capacity_kw[:count] for _, _, found in planned])
    drawn = simulate_mpc(days, feeders, members, tariff)
    energies = np.split(drawn.energy_kwh[0], len(planned))
    money = [{}] * len(planned)
    if tariff is not None:
        money = np.split(backtest.costs(days, tariff, drawn), len(planned))
    tables = []
    for (where, _, found), kwh, cost in zip(planned, energies, money, strict=True):
        few = replace(
            _first_garages(found, count),
            drawn_kwh={name: kwh},
            cost={} if tariff is None else {name: cost},
        )
        rows = _rows(few, {"planned_garages": count})
        tables.append(rows[rows.unit.isin(units)].assign(**where))
    return pd.concat(tables, ignore_index=True)


def _first_garages(result: backtest.ChargingBacktest, count: int) -> backtest.ChargingBacktest:
    """The same of the first garages alone."""
    drawn = {name: kwh[:count] for name, kwh in result.drawn_kwh.items()}
    cost = {name: money[:count] for name, money in result.cost.items()}
    return replace(
        result,
        members=result.members[:count],
        capacity_kw=result.capacity_kw[:count],
        need_kwh=result.need_kwh[:count],
        drawn_kwh=drawn,
        cost=cost,
        optimum_kwh=None,
    )


def _train(
    kind: str,
    garages: Garages,
    settings: ChargingSettings,
    about: dict[str, Any],
    progress: OnProgress,
) -> list[Policy]:
    """The policies of a cell: one, averaged over its members, or one for each single task."""

    def on_chunk(chunk: Chunk) -> None:
        said = f"{kind}: update {chunk.step} of {chunk.steps}"
        progress(said, _TRAINED * chunk.step / chunk.steps)

    progress(f"{kind}: compiling", 0.0)
    chunks = Chunks(max(settings.steps // 20, 1), on_chunk=on_chunk)
    if kind not in ("stl", "ppo"):
        own = replace(settings, method="pmtl" if kind == "pmtl" else "mtl")
        if kind in _OBJECTIVES:
            own = replace(own, objective=kind)
        if kind.startswith("only-"):
            own = replace(own, site=(kind.removeprefix("only-"),))
            garages = Garages.of(read_sessions(), own)
        return [Ensemble(training.train_charging(garages, own, chunks=chunks).policy)]
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
    done = train(
        problem,
        trained_on,
        network(seeds[:, 0]),
        learner,
        steps=steps,
        priority=replace(settings, method="mtl").priority(),
        replay=Replay(act_periods=0),
        chunks=chunks,
        key=seeds[:, 1],
    )
    if kind == "ppo":
        return [Ensemble(done.policy)]
    return [take(done.policy, run) for run in range(count)]


def _tests(
    kind: str,
    garages: Garages,
    about: dict[str, Any],
    garage: str | None = None,
    only_site: str | None = None,
    only_year: str | None = None,
) -> list[tuple[dict[str, Any], Days, dict[str, Any]]]:
    """The tests of a cell: what each is, its days, and its feeders and garages."""
    garage = garage or (kind if kind in _GARAGES else "real")
    few = about["days_tested"]
    # Garages of other sizes are asked of one policy, beside the schedulers.
    sized = garage == "real" and kind in (_SCHEDULED, _GARAGES["real"])
    sizes = () if not sized else _SIZES if few is None else _SIZES[:1]
    found = []
    for site in _SITE_NAMES:
        for year, name in _TESTS.items():
            if only_site not in (None, site) or only_year not in (None, year):
                continue
            if year == "2019":
                days = garages.unseen_stations(site)
            else:
                days = garages.all_days[site].between(_TESTED_FROM)
            last = None if few is None else str(days.dates[min(few, len(days)) - 1])
            days = days.between(None, last)
            chosen = [(10, capacity, about["garages"]) for capacity in _CAPACITIES]
            if year == "2021":
                chosen += [(size, _SIZED_CAPACITY, about["sized_garages"]) for size in sizes]
            for size, capacity, tasks in chosen:
                where = {"garage": garage, "site": site, "test": name}
                where |= {"capacity": capacity, "stations": size}
                test = {"capacity": capacity, "task_size": size, "tasks": tasks}
                found.append((where, days, test))
    return found


def _named(where: dict[str, Any]) -> str:
    """A test in a few words."""
    site, test, capacity = _SITE_NAMES[where["site"]], where["test"], where["capacity"]
    return f"{site}, {test}, feeder {capacity:.0%}, {where['stations']} stations"


def _rows(result: backtest.ChargingBacktest, about: dict[str, Any]) -> pd.DataFrame:
    """What each schedule drew by day and by station, and how cars left; of the optimum, by day alone."""
    tables = []
    dates = [str(day) for day in result.dates]
    stations = [str(one) for one in range(result.stations)]
    few = _first_garages(result, about["planned_garages"])
    objectives = [name for name in _OBJECTIVES if name != "cost" or result.cost]
    for name in result.served:
        units = {"day": result.daily(name, "energy")}
        parts: list[dict[str, Any]] = []
        if name != OPTIMUM:
            units |= {other: result.daily(name, other) for other in objectives if other != "energy"}
            units["planned"] = few.daily(name, "energy")
            if result.cost:
                units[_PLANNED_COST] = few.daily(name, "cost")
            kwh = {"drawn_kwh": result.by_station(name), "need_kwh": result.by_station()}
            parts.append({"unit": "station", "place": stations} | kwh)
            parts.append({"unit": "all", "place": ""} | _measures(result, name))
        for unit, (one, whole) in units.items():
            parts.append({"unit": unit, "place": dates, "drawn_kwh": one, "need_kwh": whole})
        tables += [pd.DataFrame(part).assign(schedule=name) for part in parts]
    return pd.concat(tables, ignore_index=True)


def _read_later(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that a figure reads: other objectives' days, and those of the few planned garages, of the
    schedules that are compared there.
    """
    by_policy = rows.schedule == POLICY
    planned = by_policy & rows.trained.isin(_GARAGES.values()) | (rows.schedule == MPC)
    for_cost = by_policy & (rows.trained == "cost") | (rows.schedule == _MPC_FOR_COST)
    by_objective = by_policy & rows.trained.isin(["mtl", *_OBJECTIVES])
    by_objective |= rows.schedule.isin(["llf", "equal"])
    by_objective &= (rows.garage == "real") & (rows.stations == 10)
    kept = rows.unit.isin(["day", "station", "all"])
    kept |= (rows.unit == "planned") & planned
    kept |= (rows.unit == _PLANNED_COST) & for_cost
    kept |= rows.unit.isin([name for name in _OBJECTIVES if name != "energy"]) & by_objective
    return rows.loc[kept]


def _measures(result: backtest.ChargingBacktest, name: str) -> dict[str, Any]:
    """How the cars left, and what a kWh cost."""
    found = {"left_short": [result.short(name)], "fairness": result.fairness(name)}
    return found | ({"cost_per_kwh": result.cost_per_kwh(name)} if result.cost else {})


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """The study from the rows of all cells."""
    table = _summarise(rows)
    title = "Charging: one policy for every garage, at stations and in a year it never saw"
    notes = [_note(garage, table) for garage in _GARAGES]
    notes.append(_note_on_planning(table, settings["planned_garages"]))
    notes += [
        "The best scheduler is chosen for each test in hindsight, of all that cannot see the future but "
        f"{MPC}; no single one is best in all.",
        "The policies of one cell are averaged over seeds: intervals are over days, and do not hold "
        "for other seeds and other splits of the stations.",
    ]
    found = (table, _verdicts(rows, table), lambda: _plot(table), tuple(notes))
    return [FigureResult("garages", title, *found), _by_objective(rows)]


def _by_objective(rows: Any) -> FigureResult:
    """Each policy by what it was trained for, beside the baseline of that, and by all other objectives."""
    records, verdicts, leads = [], [], {said: {} for said in _OBJECTIVES.values()}
    llf, equal = (_SCHEDULED, "llf"), (_SCHEDULED, "equal")
    trained = {"energy": "mtl", **{name: name for name in _OBJECTIVES if name != "energy"}}
    for site, kwh in _whole_sites(rows):
        at = _SITE_NAMES[site]
        for one in [*((kind, POLICY) for kind in trained.values()), llf, equal]:
            name = _LEARNED[one[0]] if one[1] == POLICY else one[1]
            record: dict[str, Any] = {"site": site, "schedule": name}
            for objective, said in _OBJECTIVES.items():
                unit = "day" if objective == "energy" else objective
                worth, whole = kwh[(*one, unit)]
                record[said] = 100 * float(worth.sum() / whole.sum())
                if one != llf:
                    leads[said][f"{at}: {name}"] = _lead(kwh, one, llf, unit=unit)
            records.append(record)
        for claim, first, second, unit in (
            ("for even shares it shares more evenly than equal", "fair", equal, "fair"),
            ("for promises it keeps more of them than llf", "promise", llf, "promise"),
            ("for cost it nets more than llf", "cost", llf, "cost"),
            (
                f"for cost it nets more than {_MPC_FOR_COST}",
                "cost",
                (_SCHEDULED, _MPC_FOR_COST),
                _PLANNED_COST,
            ),
        ):
            ahead = _lead(kwh, (first, POLICY), second, unit=unit)
            verdicts.append(Verdict.of(f"Trained {claim} ({at})", ahead, paper=False))
    notes = [
        "All tests of ten stations in the real garage together. The tariff is that of the sites' utility, "
        "a weekday in summer: dear from 12 to 18 o'clock, with a charge for the day's highest power; that "
        "a kWh in a car is worth .40 is our assumption.",
        f"Model-predictive control that plans for cost ({_MPC_FOR_COST}) is computed in the first few "
        "garages of each test.",
    ]
    title = "What an operator wants served: each objective, and what it costs in the others"
    draw = partial(forest, leads, "lead over least laxity first", width=2.4)
    return FigureResult("objectives", title, pd.DataFrame(records), verdicts, draw, notes)


def _whole_sites(rows: Any) -> Iterator[tuple[str, _Kwh]]:
    """Each site's tests of ten stations in the real garage together: a day's tests at several feeders are
    one cluster, and 2019 and 2021 share no day.
    """
    of_ten = rows[(rows.stations == 10) & (rows.garage == "real")]
    keys = ["trained", "schedule", "unit", "policy", "place"]
    for site, test in of_ten.groupby("site", sort=False):
        sums = test.groupby(keys, sort=False)[["drawn_kwh", "need_kwh"]].sum()
        yield str(site), _kwh_of(sums.reset_index())


def _note(garage: str, table: pd.DataFrame) -> str:
    """How the policy stands in a garage's tests: leads, what a clairvoyant adds, cars left short."""
    own, leads, beyond, short = _LEARNED[_GARAGES[garage]], [], [], []
    here = table[(table.stations == 10) & (table.garage == garage)]
    for key, test in here.groupby(_TEST, sort=False):
        named = test.set_index("schedule")
        best = _best_scheduler(table, *key)
        leads.append(100 * (named.served[own] - named.served[best]))
        beyond.append(100 * (named.served[CLAIRVOYANT] - named.served[own]))
        short.append(100 * (named.left_short[own] - named.left_short["llf"]))
    ahead = sum(x >= 0 for x in leads)
    return (
        f"In the {garage} garage {own} is at least as good as the best scheduler in {ahead} of "
        f"{len(leads)} tests; its lead is {min(leads):.2f} to {max(leads):.2f} points, and the "
        f"clairvoyant scheduler serves {min(beyond):.2f} to {max(beyond):.2f} points more than it. Of its "
        f"cars {min(short):+.1f} to {max(short):+.1f} points more than least laxity first's leave with "
        "less than 80 % of their need."
    )


def _note_on_planning(table: pd.DataFrame, garages: int) -> str:
    """How the policies stand beside model-predictive control."""
    found = select(table, schedule=MPC)
    ahead, leads = int((found.mtl_ahead >= 0).sum()), found.mtl_ahead
    return (
        f"Model-predictive control ({MPC}) is computed in the first {garages} garages of each test, real "
        f"and mixed: there the policy is at least as good in {ahead} of {len(found)} tests, its lead "
        f"is {leads.min():.2f} to {leads.max():.2f} points."
    )


def _kwh_of(rows: Any) -> _Kwh:
    """The rows of one test as arrays; a cell's policies come one after the other, places in order."""
    found: _Kwh = {}
    some = rows[rows.unit != "all"]
    for key, group in some.groupby(["trained", "schedule", "unit"], sort=False):
        policies = group.policy.nunique()
        arrays = [group[name].to_numpy() for name in ("drawn_kwh", "need_kwh")]
        found[key] = tuple(x.reshape(policies, -1).T for x in arrays)
    return found


def _lead(
    kwh: _Kwh, first: _Name, second: _Name, *, unit: str = "day", both: bool = False
) -> Estimate:
    """What one schedule serves more than another in one test, in points of the need.

    The unit may be that of the planned garages, or a day by another objective, in points of that.

    Where one side has several policies, their mean is meant, and the policies are a clustering of their
    own.
    """
    clusterings = []
    for each in (unit, "station") if both else (unit,):
        (one, need), (other, _) = kwh[(*first, each)], kwh[(*second, each)]
        clusterings.append((100 * (one.mean(1) - other.mean(1)), need.mean(1)))
    (one, need), (other, _) = kwh[(*first, unit)], kwh[(*second, unit)]
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
        kwh, whole = _kwh_of(test), test[test.unit == "all"]
        mtl = (_GARAGES[key[0]], POLICY)
        for trained, schedule in dict.fromkeys(name[:2] for name in kwh):
            if schedule == _MPC_FOR_COST:
                continue
            unit = "planned" if schedule == MPC else "day"
            drawn, need = kwh[trained, schedule, unit]
            some = select(whole, trained=trained, schedule=schedule)
            row: dict[str, Any] = dict(zip(by, key, strict=True)) | {
                "schedule": _LEARNED[trained] if schedule == POLICY else schedule,
                "served": float(drawn.sum() / need.sum()),
                "left_short": some.left_short.mean(),
                "fairness": some.fairness.mean(),
                "cost_per_kwh": some.cost_per_kwh.mean(),
                "days": len(drawn),
            }
            if (trained, schedule) != mtl:
                ahead = _lead(kwh, mtl, (trained, schedule), unit=unit)
                row |= {"mtl_ahead": ahead.value, "low": ahead.low, "high": ahead.high}
                if schedule not in (OPTIMUM, MPC):
                    wide = _lead(kwh, mtl, (trained, schedule), both=True)
                    row |= {"low_with_stations": wide.low, "high_with_stations": wide.high}
            found.append(row)
    return pd.DataFrame(found)


def _best_scheduler(table: Any, garage: str, site: str, test: str, capacity: float) -> str:
    here = select(table, garage=garage, site=site, test=test, capacity=capacity, stations=10)
    schedulers = here[~here.schedule.isin([*HINDSIGHT, MPC, *_LEARNED.values()])]
    return str(schedulers.loc[schedulers.served.idxmax(), "schedule"])


def _verdicts(rows: Any, table: pd.DataFrame) -> Iterator[Verdict]:
    of_ten = rows[rows.stations == 10]
    for key, test in of_ten.groupby(_TEST, sort=False):
        garage, site, name, capacity = key
        where = f"{_SITE_NAMES[site]}, {name}, feeder {capacity:.0%}"
        if garage != "real":
            where = f"{garage} garage, {where}"
        best, kwh = _best_scheduler(table, *key), _kwh_of(test)
        others = {"real": ("llf", _RECALLED, MPC), "mixed": (MPC,), "ideal": ()}[garage]
        for other in dict.fromkeys((best, *others)):
            unit = "planned" if other == MPC else "day"
            ahead = _lead(kwh, (_GARAGES[garage], POLICY), (_SCHEDULED, other), unit=unit)
            named = f"{other}, the best scheduler there" if other == best else other
            yield Verdict.of(f"MTL serves more than {named} ({where})", ahead, paper=False)
    for site, kwh in _whole_sites(rows):
        other_site = next(f"only-{one}" for one in _SITE_NAMES if one != site)
        policy = {kind: (kind, POLICY) for kind in _LEARNED if kind not in _GARAGES}
        llf = (_SCHEDULED, "llf")
        for claim, one, other in (
            ("MTL serves more than STL at equal updates", policy["mtl"], policy["stl"]),
            ("P-MTL serves more than MTL", policy["pmtl"], policy["mtl"]),
            ("MTL serves more than without recalling earlier days", policy["mtl"], policy["plain"]),
            ("PPO serves more than llf", policy["ppo"], llf),
            ("Trained at the other site alone it serves more than llf", policy[other_site], llf),
        ):
            claim = f"{claim} ({_SITE_NAMES[site]})"
            yield Verdict.of(claim, _lead(kwh, one, other), paper=False)
    sized = rows[rows.stations != 10]
    for (site, stations), test in sized.groupby(["site", "stations"], sort=False):
        ahead = _lead(_kwh_of(test), ("mtl", POLICY), (_SCHEDULED, "llf"))
        claim = f"Trained on 10 stations it serves more than llf on {stations}"
        yield Verdict.of(f"{claim} ({_SITE_NAMES[site]}, 2021)", ahead, paper=False)


def _plot(table: Any) -> Figure:
    """MTL's lead over schedulers and over other ways to learn, in every test of ten stations."""
    shown = {}
    for name in ("llf", "llf-predicted", _RECALLED, MPC, CLAIRVOYANT, "STL", "P-MTL", "PPO"):
        shown[f"over {name}"] = {
            f"{_SITE_NAMES[row.site]}, {row.test}, feeder {row.capacity:.0%}": (
                Estimate(row.mtl_ahead, row.low, row.high, row.days)
            )
            for row in select(table, schedule=name, garage="real", stations=10).itertuples()
        }
    return forest(shown, "MTL's lead in energy, points of the need", width=1.8)
