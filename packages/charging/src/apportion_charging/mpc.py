"""Model-predictive control: each period, a linear programme plans the rest of every car's stay.

Needs and stays are the recalled forecasts, which policies see too. Periods between two departures
form one interval. The plan contains the kWh x_{s,i} of car s in interval i, within the car's power,
its remaining need and every limit of the wiring. It maximises the energy served and, among equal
plans, prefers early energy and small laxity. With prices, it maximises the value of the energy less
its price and the charge for the day's peak. Only the first interval, the coming period, is applied.
Cars that have not arrived are ignored. HiGHS solves the programmes of many garages per call.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from apportion_charging.days import Days
from apportion_charging.garage import Physics, StationView, draw, see
from apportion_charging.schedulers import (
    Delivered,
    gather,
    make_lanes,
    move_to_first_days,
    pad_days,
    resolve_tasks,
    start_day,
)
from apportion_charging.site import Tariff

MPC = "mpc"
_TOGETHER = 256
"""Garages in one programme: calls have overhead, and large programmes solve slowly."""
_LATER = 1e-3
"""Discount of a kWh per hour of delay, to choose among equal plans."""
_LEAST_KWH = 0.1
"""Minimum remaining need of a car that can still draw."""


def simulate_mpc(
    days: Days,
    capacity_kw: np.ndarray | float,
    members: np.ndarray | None = None,
    prices: Tariff | None = None,
) -> Delivered:
    """Simulate days under model-predictive control, as `simulate` does for one schedule.

    Parameters
    ----------
    days, capacity_kw, members
        As in `simulate`.
    prices
        Prices, with which the plan maximises value less cost; otherwise it maximises energy.
    """
    garage, physics = days.garage, days.physics
    tasks, capacity = resolve_tasks(days, capacity_kw, members)
    lanes, joins = make_lanes(days.joins), np.append(days.joins, False)
    # A row for each task and lane.
    task, lane = np.divmod(np.arange(len(tasks) * len(lanes)), len(lanes))
    table, wiring = (jax.tree.map(jnp.asarray, x) for x in (pad_days(garage), days.wiring))
    feeder, state = jnp.asarray(capacity[task]), None
    shape = (len(tasks), len(days), tasks.shape[1], garage.arrival.shape[2])
    energy, by_period = np.zeros(shape), np.zeros((*shape[:2], physics.periods))
    for day in lanes.T[:, lane]:
        today, stations = gather(table, wiring, day, tasks[task].astype(np.int32))
        arrival, departure = np.asarray(today.arrival), np.asarray(today.departure)
        state = start_day(state, stations, joins[day])
        by_session = np.zeros(arrival.shape, np.float32)
        together, peak = [], np.zeros(len(task))
        for n in range(physics.periods):
            seen = _see(today, stations, state, jnp.int32(n), feeder, physics)
            wishes = _plan(seen, physics, peak, prices)
            state, drawn = _draw(seen, jnp.asarray(wishes, jnp.float32), physics)
            kwh = np.asarray(drawn)
            here = (arrival <= n) & (n < departure)
            by_session += np.where(here, kwh[..., None], 0)
            together.append(kwh.sum(-1))
            peak = np.maximum(peak, together[-1] / physics.period_hours)
        there = day >= 0
        energy[task[there], day[there]] = by_session[there][..., : shape[-1]]
        by_period[task[there], day[there]] = np.stack(together, 1)[there]
    return Delivered(move_to_first_days(energy[None], garage, tasks), by_period[None])


def _plan(
    seen: StationView, physics: Physics, peak_kw: np.ndarray, prices: Tariff | None = None
) -> np.ndarray:
    """Return the kW wished for in several garages, (garages, entities).

    Parameters
    ----------
    peak_kw
        Highest power of the day so far in each garage.
    """
    limit = np.asarray(seen.limit_kw, float)
    capacity = np.asarray(seen.capacity_kw, float)
    wishes = limit.copy()
    rows = np.flatnonzero(limit.any(-1))
    if prices is None:
        # Without a binding limit every car charges at full rate.
        loads = np.asarray(seen.stations.load) * (limit / seen.stations.kw_per_a)[:, None]
        short = (loads.sum(-1) > np.asarray(seen.stations.limit_a)).any(-1)
        rows = np.flatnonzero((limit.sum(-1) > capacity) | short)
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        wishes[some] = _solve(
            jax.tree.map(lambda x, some=some: np.asarray(x)[some], seen),
            physics.period_hours,
            peak_kw[some],
            prices,
        )
    return wishes


def _solve(seen: Any, hours: float, peak_kw: np.ndarray, prices: Tariff | None) -> np.ndarray:
    """Return the kW wished for in the first period of these garages' plans."""
    can, outlook, stations = seen.can_draw, seen.recalled, seen.stations
    garages, cars = can.shape
    rate = np.maximum(outlook.rate_kw, 1e-6).astype(float)
    need = np.where(can, np.maximum(outlook.open_kwh, _LEAST_KWH), 0.0)
    # Round stays to whole periods, so that there are few intervals.
    stay = np.clip(np.round(outlook.hours_left / hours), 1, 24 / hours) * hours
    ends = [np.full((garages, 1), hours), np.where(can, stay, hours)]
    if prices is not None:
        ends.append(_changes(prices, seen.hour, hours))
    ends = np.sort(np.concatenate(ends, 1), 1)
    starts = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
    length, intervals = ends - starts, ends.shape[1]
    inside = can[:, :, None] & (length > 1e-6)[:, None] & (ends[:, None] <= stay[..., None] + 1e-6)
    row, car, interval = np.nonzero(inside)
    lasts, count = length[row, interval], len(row)
    # Limits apply to offers; a car on one phase of several draws less than its offer.
    per_kw = seen.limit_kw / rate
    loads = np.concatenate(
        [np.ones((garages, 1, cars)), stations.load / stations.kw_per_a[:, None]], 1
    )
    limits = np.concatenate([seen.capacity_kw[:, None], stations.limit_a], 1).astype(float)
    taken = (loads * per_kw[:, None])[row, :, car]
    which, limit = np.nonzero(taken)
    place = (row[which] * limits.shape[1] + limit) * intervals + interval[which]
    sums = [
        # Equation, column and factor of each coefficient, and the upper bounds of the sums.
        (row * cars + car, np.arange(count), np.ones(count), need.ravel()),
        (place, which, taken[which, limit], (limits[..., None] * length[:, None]).ravel()),
    ]
    laxity = np.maximum(stay - need / rate, 0.0)[row, car]
    late = _LATER * starts[row, interval] * (1 + 1 / (1 + laxity))
    value, least, most = 1 - late, np.zeros(count), rate[row, car] * lasts
    if prices is not None:
        hour = (seen.hour[row] + starts[row, interval] + hours / 2) % 24
        value = prices.worth_per_kwh - np.asarray(prices.per_kwh)[hour.astype(int)] - 0.1 * late
        # One more variable per garage: its highest power, which bounds that of each interval.
        every = np.arange(garages * intervals)
        sums.append(
            (
                np.append(row * intervals + interval, every),
                np.append(np.arange(count), count + every // intervals),
                np.append(per_kw[row, car] / lasts, np.full(len(every), -1.0)),
                np.zeros(len(every)),
            )
        )
        value = np.append(value, np.full(garages, -prices.peak_per_kw))
        least, most = np.append(least, peak_kw), np.append(most, np.full(garages, np.inf))
    offset = np.cumsum([0, *(len(bound) for *_, bound in sums)])
    equation = np.concatenate([part[0] + first for part, first in zip(sums, offset, strict=False)])
    column, factor, bound = (np.concatenate([part[i] for part in sums]) for i in (1, 2, 3))
    solution = linprog(
        -value,
        A_ub=csr_array((factor, (equation, column)), shape=(len(bound), len(value))),
        b_ub=bound,
        bounds=np.stack([least, most], 1),
        method="highs",
    )
    if not solution.success:
        raise RuntimeError(f"the plan of {garages} garages failed: {solution.message}")
    wishes, first = np.zeros(can.shape), starts[row, interval] < 1e-6
    wishes[row[first], car[first]] = solution.x[:count][first] / hours
    return wishes * per_kw


def _changes(prices: Tariff, hour: np.ndarray, period_hours: float) -> np.ndarray:
    """Return the hours until each price change of the next 24 hours, (garages, changes)."""
    per_kwh = np.asarray(prices.per_kwh)
    changes = np.flatnonzero(per_kwh != np.roll(per_kwh, 1))
    ahead = (changes[None] - hour[:, None]) % 24
    return np.maximum(np.round(ahead / period_hours), 1) * period_hours


_see = eqx.filter_jit(eqx.filter_vmap(see, in_axes=(0, 0, 0, None, 0, None)))
_draw = eqx.filter_jit(eqx.filter_vmap(draw, in_axes=(0, 0, None)))
"""The functions `see` and `draw`, mapped over garages."""
