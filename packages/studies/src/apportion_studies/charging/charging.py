"""One policy for every garage: charging on real sessions, at new stations and in a later year.

Training uses 70 % of the stations of two sites in 2019. Tests use the other stations and 2021, behind
feeders of 10, 15 and 20 % of the stations' full rate: 12 tests. Offers are whole amperes, 6 or more or
none; cars taper, meters are silent at times, nights and weekends count.

Everything is repeated for five splits of the stations, each with its own tasks, test garages and networks.
Multi-task, prioritised and single-task learning and a network without recall have five networks per split.
They are compared network with network, and as averages of three. A single-task policy learns from one
garage of ten stations, a different one for every network, and is tested at its own site; at the other site
it measures transfer. PPO, which needs no gradient of the garage, is trained too. Policies have 500
updates; those for energy worth less its cost learn more slowly and have 1,000.

Each objective (energy, even shares, promises of 80 % of each car's need, energy worth less its cost) has
its own policies. They are compared with the best of eight rules for that objective, chosen for each test
with hindsight: no choice in advance does better. Energy and cost are also compared with model-predictive
control, which solves a linear programme in every period with the same forecasts as the policy, in all
garages of ten stations behind feeders of 15 %.

A cell is a way to train or the schedulers of a site and year, in one split; a row is the kWh of a
schedule on a day or at a station. Points are of the need: 100 x (kWh drawn by one - by the other) / kWh
needed. Intervals are clustered by days and by splits. Each split draws its own stations, garages and
seeds, so that the spread of splits is theirs. Stations are no clusters of their own: behind one feeder
they are not independent, since what one of them gains others lose.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float
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
from apportion.training import Chunk, Chunks, train
from apportion.trees import stack, take
from apportion_charging import backtest, training
from apportion_charging.backtest import POLICY
from apportion_charging.days import Days
from apportion_charging.garage import Garage, GarageState, Physics, Stations
from apportion_charging.mpc import MPC
from apportion_charging.objectives import make_objective
from apportion_charging.problem import CHANNELS, Charging, PolicySchedule
from apportion_charging.schedulers import (
    CLAIRVOYANT,
    HINDSIGHT,
    SCHEDULERS,
    gather,
    make_lanes,
    move_to_first_days,
    pad_days,
    start_day,
    walk_rows,
)
from apportion_charging.sessions import fingerprint, read_sessions
from apportion_charging.settings import ChargingSettings
from apportion_charging.site import Tariff, embedded_site
from apportion_charging.training import Garages

_TRAINING: dict[str, dict[str, Any]] = {
    "quick": {"tasks": 20, "steps": 40, "days": 8, "members": 1, "hidden": 16},
    "paper": {"tasks": 200, "steps": 500, "days": 64, "members": 3, "hidden": 48},
}
_SCALES: dict[str, dict[str, Any]] = {
    "quick": {"splits": 2, "seeds": 2, "garages": 2, "sized_garages": 1, "days_tested": 8},
    "paper": {"splits": 5, "seeds": 5, "garages": 3, "sized_garages": 2, "days_tested": None},
}
"""Splits of the stations; networks per split for methods in `_REPLICATED`; garages per split, with
ten stations and other sizes; number of first days of each test, or None for all."""
_OTHER_STEPS = {"quick": {"ppo": 10}, "paper": {"ppo": 500, "cost": 1000}}
"""Updates of methods that learn at another pace than the rest."""
_NEXT_SPLIT = 10_000
"""Difference between the seeds of two splits."""
_SITE_NAMES = {"caltech": "Caltech", "jpl": "JPL"}
_TRAINED_UNTIL, _TESTED_FROM = "2019-12-31", "2021-01-01"
_CAPACITIES = (0.1, 0.15, 0.2)
_USUAL_CAPACITY = 0.15
"""The only feeder for model-predictive control, which is slow, and for garages of other sizes."""
_SIZES = (5, 20, 50)
_MPC_FOR_COST = "mpc, for cost"
_PROMISED = 0.8
"""Promised share of a car's need."""
_LEARNED = {
    "mtl": "MTL",
    "pmtl": "P-MTL",
    "stl": "STL",
    "ppo": "PPO",
    "plain": "MTL without recall",
    "fair": "MTL for even shares",
    "promise": "MTL for promises",
    "cost": "MTL for cost",
}
"""Training methods, and their names in the table."""
_REPLICATED = ("mtl", "pmtl", "stl", "plain")
"""Training methods that are also compared as single networks."""
_MOVED = "stl-moved"
_SHOWN = _LEARNED | {_MOVED: "STL, trained at the other site"}
_OBJECTIVES = {
    "energy": "energy, % of the need",
    "fair": "even shares, % (Jain)",
    "promise": "promises kept, % of cars",
    "cost": "worth less cost, cents a kWh",
}
"""Training objectives, and their columns in the table."""
_UNITS = {"energy": "day", "fair": "fair", "promise": "promise", "cost": "cost"}
"""Unit of the daily rows of each objective."""
_STATIONS = {"day": "station", "promise": "promised"}
"""Unit of the rows by station, for the daily units that add up over stations."""
_TESTS = {"2019": "2019, new stations", "2021": "2021"}
"""Test years, and the names of their tests."""
_SCHEDULED = "schedulers"
_RULES = [name for name in SCHEDULERS if name not in HINDSIGHT]
_BEST, _NETWORK = "best", "network"
"""Schedules: the best rule of a test, and the mean over the single networks of a split."""
_TRAINED = 0.6
"""Progress of a cell at the end of training, as a fraction."""

_TEST = ["site", "test", "capacity", "stations"]
"""Columns that identify a test."""
_Name = tuple[str, str]
"""A schedule: its training method (or `_SCHEDULED`), and its name."""
_Kwh = dict[tuple[str, str, str], pd.DataFrame]
"""`drawn_kwh` and `need_kwh` by split and place (day or station), for each method, schedule and
unit. For objectives other than energy, these columns are their value and its denominator."""


def charging(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """Plan a cell per split for each training method, and for the schedulers of a site and year."""
    settings = ChargingSettings(until=_TRAINED_UNTIL, seed=seed, **_TRAINING[scale])
    about = {
        "training": {n: v for n, v in asdict(settings).items() if n not in ("method", "sessions")},
        **_SCALES[scale],
        "other_steps": _OTHER_STEPS[scale],
        "tariff": {name: asdict(_tariff(name)) for name in _SITE_NAMES},
        "data": {"sessions": "embedded", "fingerprint": fingerprint(read_sessions())},
    }
    # The longest cells come first, so that idle processes take the schedulers.
    splits, cells = range(about["splits"]), []
    for kind in _LEARNED:
        for split in splits:
            cells.append(Cell(f"{kind}-{split}", {"trained": kind, "split": split}, kind))
    for site, year, split in product(_SITE_NAMES, _TESTS, splits):
        values = {"trained": _SCHEDULED, "split": split, "site": site, "year": year}
        # Reading the sessions of a split takes long, so both years of a site share a program.
        name, program = f"{_SCHEDULED}-{site}-{year}-{split}", f"{_SCHEDULED}-{site}-{split}"
        cells.append(Cell(name, values, program, on_processor=True))
    computing = partial(_compute, settings, about)
    return Plan("charging", tuple(cells), computing, _conclude, about, keep=_read_later)


def _tariff(site: str) -> Tariff:
    prices = embedded_site(site).prices
    assert prices is not None, "the embedded sites have prices"
    return prices


_read = cache(read_sessions)


@cache
def _garages(kind: str, settings: ChargingSettings) -> Garages:
    """Return the garages for a cell's tests and for the training of most cells. Garages of "plain"
    have no recall of earlier days; in those of "cost", cars may leave offered power undrawn.
    """
    objective = "cost" if kind == "cost" else "energy"
    return Garages.of(_read(), replace(settings, recall=kind != "plain", objective=objective))


def _of_split(settings: ChargingSettings, split: int) -> ChargingSettings:
    return replace(settings, seed=settings.seed + _NEXT_SPLIT * split)


def _compute(
    settings: ChargingSettings, about: dict[str, Any], cells: Sequence[Cell], progress: OnProgress
) -> Rows:
    kind = cells[0]["trained"]
    if kind == _SCHEDULED:
        for cell in cells:
            rows = _schedule(cell, _of_split(settings, cell["split"]), about, progress)
            yield cell, rows.assign(trained=kind, split=cell["split"])
        return
    splits = [cell["split"] for cell in cells]
    trained = _train(kind, settings, about, splits, progress)
    for number, (cell, networks) in enumerate(zip(cells, trained, strict=True)):
        done = _TRAINED + (1 - _TRAINED) * number / len(cells)
        progress(f"{kind}: testing split {cell['split']}", done)
        rows = _try(kind, networks, _of_split(settings, cell["split"]), about)
        yield cell, rows.assign(split=cell["split"])


def _train(
    kind: str,
    settings: ChargingSettings,
    about: dict[str, Any],
    splits: Sequence[int],
    progress: OnProgress,
) -> list[dict[str, Policy]]:
    """Train all networks of a kind in one `vmap`; return those of each split, stacked, by site."""
    count = about["seeds"] if kind in _REPLICATED else settings.members
    problems, tasks, keys = [], [], []
    for split in splits:
        progress(f"{kind}: reading sessions of split {split}", 0.0)
        own = _of_split(settings, split)
        if kind in _OBJECTIVES:
            own = replace(own, objective=kind)
        garages = _garages(_garage_of(kind), _of_split(settings, split))
        days = garages.training_days()
        problem = Charging.of(days, own.capacity, make_objective(own, days))
        chosen = training.choose_stations(garages, own)
        # One garage per single-task network; the first half of the networks is at the first site.
        single = [chosen[[n + site * len(chosen) // 2]] for site in range(2) for n in range(count)]
        some = single if kind == "stl" else [chosen] * count
        problems += [problem] * len(some)
        tasks += some
        keys += [jax.random.fold_in(jax.random.key(own.seed), n) for n in range(len(some))]

    def on_chunk(chunk: Chunk) -> None:
        said = f"{kind}: update {chunk.step} of {chunk.steps}"
        progress(said, _TRAINED * chunk.step / chunk.steps)

    progress(f"{kind}: compiling", 0.0)
    learner, steps = training.direct_learner(settings), settings.steps
    if kind == "ppo":
        learner = PPO(rollouts=32, learning_rate=1e-3, gamma=0.99, epochs=2, minibatches=8)
    steps = about["other_steps"].get(kind, steps)
    both = jax.vmap(jax.random.split)(jnp.stack(keys))
    done = train(
        stack(problems),
        stack(tasks),
        eqx.filter_vmap(lambda key: Pooled(CHANNELS, settings.hidden, key=key))(both[:, 0]),
        learner,
        steps=steps,
        priority=replace(settings, method="pmtl" if kind == "pmtl" else "mtl").priority(),
        replay=Replay(act_periods=0),
        chunks=Chunks(max(steps // 20, 1), on_chunk=on_chunk),
        problem_axes=0,
        key=both[:, 1],
    )
    # Runs are ordered by split, site and seed.
    sites = list(_SITE_NAMES) if kind == "stl" else [""]
    parts = [take(done.policy, slice(n, n + count)) for n in range(0, len(keys), count)]
    firsts = range(0, len(parts), len(sites))
    return [dict(zip(sites, parts[first:], strict=False)) for first in firsts]


def _garage_of(kind: str) -> str:
    """Return the kind of garages for a training method."""
    return kind if kind in ("plain", "cost") else "real"


def _try(
    kind: str, networks: dict[str, Policy], settings: ChargingSettings, about: dict[str, Any]
) -> pd.DataFrame:
    """Test a split's networks, averaged and one by one, and return the rows of all tests."""
    tables = []
    for where, days, test in _tests(kind, _garages(_garage_of(kind), settings), about):
        for site, own in networks.items():
            moved = site not in ("", where["site"])
            found = backtest.backtest_schedules(
                Ensemble(take(own, slice(0, settings.members))),
                days,
                **test,
                schedulers={},
                optimum=False,
                seed=settings.seed,
            )
            rows = _rows(found, days, [POLICY])
            if kind in _REPLICATED and not moved and where["stations"] == 10:
                energy = _simulate_networks(own, days, found.capacity_kw, found.members)
                drawn = {str(n): kwh for n, kwh in enumerate(energy)}
                each: Any = _rows(replace(found, drawn_kwh=drawn, cost={}), days, list(drawn))
                each = each[each.unit.isin(["day", "station", "all"])]
                keys = ["unit", "place"]
                mean = each.drop(columns="schedule").groupby(keys, sort=False).mean()
                rows = pd.concat([rows, mean.reset_index().assign(schedule=_NETWORK)])
            tables.append(rows.assign(**where, trained=_MOVED if moved else kind))
    return pd.concat(tables, ignore_index=True)


def _simulate_networks(
    networks: Policy, days: Days, feeders: np.ndarray, members: np.ndarray
) -> np.ndarray:
    """Return the energy under stacked networks; one program is hardly slower than one network."""
    sessions = days.garage.arrival.shape[2]
    lanes, joins = make_lanes(days.joins), np.append(days.joins, False)
    # A power of 8 rows lets tests and splits share a program; unused rows are empty days.
    least = lanes.shape[0] * len(members)
    lane, task = np.divmod(np.arange(8 ** -(-(least - 1).bit_length() // 3)), len(members))
    padded = np.pad(lanes, ((0, lane.max() + 1 - len(lanes)), (0, 0)), constant_values=-1)
    table, wiring = (jax.tree.map(jnp.asarray, x) for x in (pad_days(days.garage), days.wiring))
    count = len(jax.tree.leaves(eqx.filter(networks, eqx.is_array))[0])
    energy = np.zeros((count, len(members), len(days), members.shape[1], sessions), np.float32)
    feeder, state = jnp.asarray(feeders, jnp.float32)[task], None
    for today in padded.T[:, lane]:
        here, stations = gather(table, wiring, today, members[task].astype(np.int32))
        joined = jnp.asarray(joins[today])
        state, kwh, _ = _walk_networks(
            networks, state, here, stations, joined, feeder, days.physics
        )
        there = today >= 0
        energy[:, task[there], today[there]] = np.asarray(kwh)[:, there, :, :sessions]
    return move_to_first_days(energy, days.garage, members)


@eqx.filter_jit
def _walk_networks(
    networks: Policy,
    state: GarageState | None,
    today: Garage,
    stations: Stations,
    joins: Bool[Array, " rows"],
    feeder: Float[Array, " rows"],
    physics: Physics,
) -> Any:
    """Apply `walk_rows` to each network, starting from its own state."""

    def one(network: Policy, state: GarageState | None) -> Any:
        begun, schedules = start_day(state, stations, joins), (PolicySchedule(network),)
        return walk_rows(today, stations, begun, feeder, schedules, jnp.int32(0), physics)

    return eqx.filter_vmap(one)(networks, state)


def _schedule(
    cell: Cell, settings: ChargingSettings, about: dict[str, Any], progress: OnProgress
) -> pd.DataFrame:
    """Test the schedulers and model-predictive control at a site in a year, and return the rows."""
    tables, place = [], (cell["site"], cell["year"])
    # `backtest_schedules` needs a policy; the rows of this one are dropped.
    walk = partial(
        backtest.backtest_schedules,
        Pooled(CHANNELS, 1, key=jax.random.key(0)),
        optimum=False,
        seed=settings.seed,
    )
    progress(f"{cell.name}: reading sessions", 0.0)
    for where, days, test in _tests(_SCHEDULED, _garages("real", settings), about, *place):
        progress(f"{cell.name}: every scheduler, feeder {where['capacity']:.0%}", 0.3)
        planned = (where["stations"], where["capacity"]) == (10, _USUAL_CAPACITY)
        found = walk(days, **test, mpc=planned)
        rows = _rows(found, days, [*SCHEDULERS, *([MPC] if planned else [])])
        tables.append(rows.assign(**where))
    for where, days, test in _tests(_SCHEDULED, _garages("cost", settings), about, *place):
        if (where["stations"], where["capacity"]) == (10, _USUAL_CAPACITY):
            progress(f"{cell.name}: {_MPC_FOR_COST}", 0.7)
            found = walk(days, **test, schedulers={}, mpc=True, objective="cost")
            rows = _rows(found, days, [MPC])
            rows = rows[rows.unit == "cost"].assign(**where)
            tables.append(rows.assign(schedule=_MPC_FOR_COST))
    return pd.concat(tables, ignore_index=True)


def _tests(
    kind: str,
    garages: Garages,
    about: dict[str, Any],
    only_site: str | None = None,
    only_year: str | None = None,
) -> list[tuple[dict[str, Any], Days, dict[str, Any]]]:
    """Return the tests of a cell: identifying columns, days, and options of the backtest."""
    few = about["days_tested"]
    # Only MTL and the schedulers are tested in garages of other sizes.
    sizes = () if kind not in (_SCHEDULED, "mtl") else _SIZES if few is None else _SIZES[:1]
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
                chosen += [(size, _USUAL_CAPACITY, about["sized_garages"]) for size in sizes]
            for size, capacity, tasks in chosen:
                where = {"site": site, "test": name}
                where |= {"capacity": capacity, "stations": size}
                test = {"capacity": capacity, "task_size": size, "tasks": tasks}
                found.append((where, days, test))
    return found


def _rows(result: backtest.ChargingBacktest, days: Days, names: Sequence[str]) -> pd.DataFrame:
    """Energy of these schedules by day and by station, and measures of the departing cars."""
    tables = []
    dates = [str(day) for day in result.dates]
    cars = (result.need_kwh > 0).astype(float)
    for name in names:
        units = {
            unit: result.daily(name, objective)
            for objective, unit in _UNITS.items()
            if objective != "cost" or result.cost
        }
        # With a tolerance of a thousandth, because energies are sums in single precision.
        kept = cars * (result.drawn_kwh[name] >= 0.999 * _PROMISED * result.need_kwh)
        by_car = replace(result, need_kwh=cars, drawn_kwh={name: kept})
        parts = [{"unit": "all", "place": ""} | _measures(result, name)]
        for unit, own in (("station", result), ("promised", by_car)):
            kwh = {"drawn_kwh": own.by_station(name), "need_kwh": own.by_station()}
            parts.append({"unit": unit, "place": list(days.stations)} | kwh)
        for unit, (one, whole) in units.items():
            parts.append({"unit": unit, "place": dates, "drawn_kwh": one, "need_kwh": whole})
        tables += [pd.DataFrame(part).assign(schedule=name) for part in parts]
    return pd.concat(tables, ignore_index=True)


def _measures(result: backtest.ChargingBacktest, name: str) -> dict[str, Any]:
    """Share of cars left short, fairness, and the cost of a kWh."""
    found = {"left_short": [result.short(name)], "fairness": result.fairness(name)}
    return found | ({"cost_per_kwh": result.cost_per_kwh(name)} if result.cost else {})


def _best_rules(rows: Any) -> pd.DataFrame:
    """Return the best rule over all splits for each test and unit, one per row."""
    some = rows[(rows.trained == _SCHEDULED) & rows.schedule.isin(_RULES)]
    some = some[some.unit.isin([*_UNITS.values()])]
    keys = [*_TEST, "unit"]
    sums = some.groupby([*keys, "schedule"], sort=False)[["drawn_kwh", "need_kwh"]].sum()
    shares = (sums.drawn_kwh / sums.need_kwh).rename("share").reset_index()
    return shares.loc[shares.groupby(keys, sort=False).share.idxmax(), [*keys, "schedule"]]


def _read_later(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows that figures read: only compared schedules for objectives other than energy."""
    best = pd.MultiIndex.from_frame(_best_rules(rows))
    unit = rows.unit.replace({by_station: by_day for by_day, by_station in _STATIONS.items()})
    among = pd.MultiIndex.from_frame(rows[_TEST].assign(unit=unit, schedule=rows.schedule))
    compared = (rows.schedule == POLICY) & rows.trained.isin(["mtl", *_OBJECTIVES])
    compared |= rows.schedule.isin(["llf", "equal", _MPC_FOR_COST]) | among.isin(best)
    compared &= rows.stations == 10
    return rows.loc[rows.unit.isin(["day", "station", "all"]) | compared]


def _add_best(rows: Any) -> Any:
    """Add the rows of the best rule of each test and objective under one name."""
    best = _best_rules(rows)
    chosen = rows[rows.trained == _SCHEDULED].merge(best, on=[*_TEST, "unit", "schedule"])
    return pd.concat([rows, chosen.assign(schedule=_BEST)], ignore_index=True)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Return the figures from the rows of all cells."""
    rows = _add_best(rows)
    table = _summarise(rows)
    splits = settings["splits"]
    title = "Charging: one policy for every garage, at stations and in a year it never saw"
    notes = [
        _note(table),
        "The best rule is chosen for each test with hindsight, out of the eight that cannot see the "
        f"future and without {MPC}; no single one is best in all. {MPC} plans in all "
        f"{settings['garages'] * splits} garages of a test, behind feeders of {_USUAL_CAPACITY:.0%} alone.",
        f"{splits} splits of the stations, with {settings['seeds']} networks each of MTL, P-MTL, STL and "
        f"MTL without recall. Unless a claim says one network, {settings['training']['members']} are "
        "averaged. Intervals are clustered by days and by splits, which draw stations, garages and seeds.",
    ]
    found = (table, _verdicts(rows), lambda: _plot(table), tuple(notes))
    return [FigureResult("garages", title, *found), _by_objective(rows)]


def _by_objective(rows: Any) -> FigureResult:
    """Measure each policy by every objective, and compare it with the best rule for its own."""
    records, verdicts, leads = [], [], {said: {} for said in _OBJECTIVES.values()}
    best, equal, mpc = ((_SCHEDULED, name) for name in (_BEST, "equal", _MPC_FOR_COST))
    planned = dict(_whole_sites(rows[rows.capacity == _USUAL_CAPACITY]))
    for site, kwh in _whole_sites(rows):
        at = _SITE_NAMES[site]
        for one in [
            *((kind, POLICY) for kind in ("mtl", "fair", "promise", "cost")),
            (_SCHEDULED, "llf"),
            equal,
            best,
        ]:
            name = _LEARNED[one[0]] if one[1] == POLICY else one[1]
            record: dict[str, Any] = {"site": site, "schedule": name}
            for objective, said in _OBJECTIVES.items():
                unit = _UNITS[objective]
                record[said] = _level(kwh, one, unit)
                if one != best:
                    leads[said][f"{at}: {name}"] = _lead(kwh, one, best, unit)
            records.append(record)
        for claim, kind, second, unit in (
            ("for even shares it shares more evenly than the best rule", "fair", best, "fair"),
            ("for promises it keeps more of them than the best rule", "promise", best, "promise"),
            ("for energy it leaves fewer cars short than the best rule", "mtl", best, "promise"),
            ("for cost it nets more than the best rule", "cost", best, "cost"),
        ):
            claim = f"Trained {claim} ({at})"
            verdicts.append(_verdict(claim, kwh, (kind, POLICY), second, unit))
        claim = f"Trained for cost it nets more than mpc that plans for cost ({at}, feeder 15%)"
        verdicts.append(_verdict(claim, planned[site], ("cost", POLICY), mpc, "cost"))
    notes = [
        "All tests of ten stations together. The tariff is that of the sites' utility, "
        "a weekday in summer: dear from 12 to 18 o'clock, with a charge for the day's highest power; that "
        "a kWh in a car is worth .40 is our assumption.",
        "The best rule is the best of eight for the objective of the column, chosen for each test with "
        "hindsight. A car is left short if it gets less than 80 % of its need, and a promise is not kept.",
    ]
    title = "What an operator wants served: each objective, and what it costs in the others"
    draw = partial(forest, leads, "lead over the best rule for each objective", width=2.4)
    return FigureResult("objectives", title, pd.DataFrame(records), verdicts, draw, notes)


def _whole_sites(rows: Any) -> Iterator[tuple[str, _Kwh]]:
    """Pool each site's tests of ten stations. A day's tests at several feeders are one cluster;
    2019 and 2021 share no day.
    """
    for site, test in rows[rows.stations == 10].groupby("site", sort=False):
        yield str(site), _kwh_of(test)


def _note(table: pd.DataFrame) -> str:
    """Summarise all tests of ten stations: leads, gap to the clairvoyant, cars left short."""
    own, leads, beyond, short = _LEARNED["mtl"], [], [], []
    here = table[table.stations == 10]
    for _, test in here.groupby(_TEST, sort=False):
        named = test.set_index("schedule")
        leads.append(named.mtl_ahead[_BEST])
        beyond.append(100 * (named.served[CLAIRVOYANT] - named.served[own]))
        short.append(100 * (named.left_short[own] - named.left_short[_RULES].min()))
    ahead = sum(x >= 0 for x in leads)
    sure = int((select(here, schedule=_BEST).low > 0).sum())
    return (
        f"{own} is at least as good as the best rule in {ahead} of "
        f"{len(leads)} tests, and in {sure} the whole interval over days and splits is above 0, "
        f"before Holm's adjustment; its lead is {min(leads):.2f} to {max(leads):.2f} points, and the "
        f"clairvoyant scheduler serves {min(beyond):.2f} to {max(beyond):.2f} points more than it. Of its "
        f"cars {min(short):+.1f} to "
        f"{max(short):+.1f} points more than of the rule that leaves fewest short leave with less than "
        "80 % of their need."
    )


def _kwh_of(rows: Any) -> _Kwh:
    """Sum the rows of one or several tests into a table for each method, schedule and unit."""
    some = rows[rows.unit != "all"]
    keys = ["trained", "schedule", "unit", "split", "place"]
    sums = some.groupby(keys, sort=False)[["drawn_kwh", "need_kwh"]].sum()
    return {key: own.droplevel([0, 1, 2]) for key, own in sums.groupby(level=[0, 1, 2], sort=False)}


def _level(kwh: _Kwh, one: _Name, unit: str = "day") -> float:
    """Value of a schedule in a unit, in points."""
    found = kwh[(*one, unit)]
    return 100 * float(found.drawn_kwh.sum() / found.need_kwh.sum())


def _lead(kwh: _Kwh, first: _Name, second: _Name, unit: str = "day") -> Estimate:
    """Lead of one schedule over another, in points of the need or of another objective.

    Clusters are days and splits.
    """
    one, other = kwh[(*first, unit)], kwh[(*second, unit)]
    gains = 100 * (one.drawn_kwh - other.drawn_kwh)
    clusterings = []
    for level in ("place", "split"):
        gain, size = (x.groupby(level=level).sum().to_numpy() for x in (gains, one.need_kwh))
        clusterings.append((gain, size))
    return clustered_ratio(*clusterings)


def _verdict(claim: str, kwh: _Kwh, first: _Name, second: _Name, unit: str = "day") -> Verdict:
    """Test the claim that one schedule is better than another; the verdict has both levels."""
    names = [_SHOWN.get(one[0], one[1]) for one in (first, second)]
    both = zip(names, (first, second), strict=True)
    levels = {name: _level(kwh, one, unit) for name, one in both}
    return Verdict.of(claim, _lead(kwh, first, second, unit), paper=False, levels=levels)


def _summarise(rows: Any) -> pd.DataFrame:
    """Return a row per test and schedule: energy served, departing cars, MTL's lead over it."""
    found = []
    for key, test in rows.groupby(_TEST, sort=False):
        kwh, whole = _kwh_of(test), test[test.unit == "all"]
        for trained, schedule in dict.fromkeys(name[:2] for name in kwh):
            if schedule == _MPC_FOR_COST:
                continue
            some = select(whole, trained=trained, schedule=schedule)
            name = _SHOWN.get(trained, schedule)
            row: dict[str, Any] = dict(zip(_TEST, key, strict=True)) | {
                "schedule": f"{name}, one network" if schedule == _NETWORK else name,
                "served": _level(kwh, (trained, schedule)) / 100,
                "left_short": some.left_short.mean(),
                "fairness": some.fairness.mean(),
                "cost_per_kwh": some.cost_per_kwh.mean(),
                "days": kwh[trained, schedule, "day"].index.get_level_values("place").nunique(),
            }
            # Compare single networks with single networks, and averages with all others.
            mtl = ("mtl", _NETWORK if schedule == _NETWORK else POLICY)
            if (trained, schedule) != mtl:
                ahead = _lead(kwh, mtl, (trained, schedule))
                row |= {"mtl_ahead": ahead.value, "low": ahead.low, "high": ahead.high}
            found.append(row)
    return pd.DataFrame(found)


def _verdicts(rows: Any) -> Iterator[Verdict]:
    named = _best_rules(rows).set_index([*_TEST, "unit"]).schedule
    best = (_SCHEDULED, _BEST)
    for key, test in rows[rows.stations == 10].groupby(_TEST, sort=False):
        site, name, capacity, _ = key
        where = f"{_SITE_NAMES[site]}, {name}, feeder {capacity:.0%}"
        kwh, policy = _kwh_of(test), ("mtl", POLICY)
        found = _verdict(f"MTL serves more than the best rule ({where})", kwh, policy, best)
        mtl, rule = found.levels.items()
        # Name the rule beside its level and not in the claim: claims are the same for all seeds.
        yield replace(found, levels=dict([mtl, (named[(*key, "day")], rule[1])]))
        if capacity == _USUAL_CAPACITY:
            claim = f"MTL serves more than {MPC} ({where})"
            yield _verdict(claim, kwh, policy, (_SCHEDULED, MPC))
    for site, kwh in _whole_sites(rows):
        for schedule, size in ((_NETWORK, "one network each"), (POLICY, "averaged networks")):
            for claim, first, second in (
                ("MTL serves more than STL of its own site at equal updates", "mtl", "stl"),
                ("P-MTL serves more than MTL", "pmtl", "mtl"),
                ("MTL serves more than without recalling earlier days", "mtl", "plain"),
            ):
                both = (first, schedule), (second, schedule)
                yield _verdict(f"{claim}, {size} ({_SITE_NAMES[site]})", kwh, *both)
        for claim, kind, second in (
            ("PPO serves more than the best rule", "ppo", best),
            ("STL of the other site serves more than the best rule", _MOVED, best),
            ("STL of the other site serves more than STL of its own", _MOVED, ("stl", POLICY)),
        ):
            yield _verdict(f"{claim} ({_SITE_NAMES[site]})", kwh, (kind, POLICY), second)
    sized = rows[rows.stations != 10]
    for (site, stations), test in sized.groupby(["site", "stations"], sort=False):
        claim = f"Trained on 10 stations it serves more than the best rule on {stations}"
        where = f"{_SITE_NAMES[site]}, 2021"
        yield _verdict(f"{claim} ({where})", _kwh_of(test), ("mtl", POLICY), best)


def _plot(table: Any) -> Figure:
    """Plot MTL's lead over schedulers and other training methods in all tests of ten stations."""
    shown = {}
    for name in (
        _BEST,
        "llf",
        "equal",
        MPC,
        CLAIRVOYANT,
        "STL",
        "STL, one network",
        "P-MTL",
        "PPO",
    ):
        shown[f"over {name}"] = {
            f"{_SITE_NAMES[row.site]}, {row.test}, feeder {row.capacity:.0%}": (
                Estimate(row.mtl_ahead, row.low, row.high, row.days)
            )
            for row in select(table, schedule=name, stations=10).itertuples()
        }
    return forest(shown, "MTL's lead in energy, points of the need", width=1.8)
