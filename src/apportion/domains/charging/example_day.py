"""One day as an operator sees it: whose power when, and with what each car left."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float

from apportion.domains.charging.backtest import POLICY, ChargingBacktest, PolicySchedule
from apportion.domains.charging.days import Days
from apportion.domains.charging.garage import (
    PERIOD_HOURS,
    PERIODS,
    Garage,
    Medians,
    draw,
    empty,
    see,
)
from apportion.domains.charging.peers import Schedule
from apportion.domains.charging.sessions import RATE_KW
from apportion.policy import Policy

SHOWN = (POLICY, "llf", "edf", "equal", "clairvoyant")
"""Schedules whose result is shown for each car."""


def busiest(test: ChargingBacktest) -> tuple[int, int]:
    """The garage and the day of most need, by their places."""
    need = test.need_kwh.sum((2, 3))
    task, day = np.unravel_index(int(need.argmax()), need.shape)
    return int(task), int(day)


def power(
    policy: Policy, days: Days, medians: Medians, test: ChargingBacktest, task: int, day: int
) -> pd.DataFrame:
    """The kW each station draws, a row for each quarter of an hour in which anybody draws."""
    members = test.members[task]
    garage = days.garage().at(jnp.int32(day), jnp.asarray(members))
    capacity = jnp.float32(test.capacity * len(members) * RATE_KW)
    drawn = np.asarray(_drawn_kw(garage, PolicySchedule(policy), capacity, medians))
    names = pd.Index([days.stations[place] for place in members])
    minutes = pd.date_range(pd.Timestamp(days.dates[day]), periods=PERIODS, freq="15min")
    table = pd.DataFrame(drawn, columns=names).assign(
        unused=np.maximum(float(capacity) - drawn.sum(1), 0.0)
    )
    table.insert(0, "time", minutes.strftime("%Y-%m-%d %H:%M"))
    active = np.flatnonzero(drawn.sum(1) > 0)
    return table.iloc[max(active[0] - 2, 0) : active[-1] + 3] if len(active) else table


@eqx.filter_jit
def _drawn_kw(
    day: Garage, schedule: Schedule, capacity_kw: Float[Array, ""], medians: Medians
) -> Float[Array, "periods entities"]:
    def period(state, n):
        state, kwh = draw(day, state, n, schedule(see(day, state, n, capacity_kw, medians)))
        return state, kwh / PERIOD_HOURS

    start = empty(day.arrival.shape[0])
    return jax.lax.scan(period, start, jnp.arange(PERIODS, dtype=jnp.int32))[1]


def cars(days: Days, test: ChargingBacktest, task: int, day: int) -> pd.DataFrame:
    """A row for each car of the day: when it was there, what it needed, what each schedule gave it."""
    members = test.members[task]
    shown = {name: test.drawn_kwh[name] for name in SHOWN if name in test.drawn_kwh}
    rows = []
    for place, station in enumerate(members):
        for number in range(test.need_kwh.shape[3]):
            need = float(test.need_kwh[task, day, place, number])
            if need > 0:
                rows.append(
                    {
                        "station": days.stations[station],
                        "from": _clock(days.arrival[day, station, number]),
                        "to": _clock(days.departure[day, station, number]),
                        "needed kWh": round(need, 1),
                    }
                    | {
                        name: f"{float(drawn[task, day, place, number]) / need:.0%}"
                        for name, drawn in shown.items()
                    }
                )
    return pd.DataFrame(rows).sort_values(["from", "to", "station"], ignore_index=True)


def _clock(period: int) -> str:
    return f"{int(period) // 4:02d}:{15 * (int(period) % 4):02d}"
