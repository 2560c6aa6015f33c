"""Model-predictive control: the optimum where all is known, within limits, over midnight, for cost."""

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import Predictor, add_forecasts
from apportion.domains.charging.garage import Garage, Physics
from apportion.domains.charging.mpc import simulate_mpc
from apportion.domains.charging.schedulers import SCHEDULERS, best_energies, simulate_all
from apportion.domains.charging.site import Prices, Site, Station

IDEAL, REAL = Physics(set_points=False, taper=False, gaps=0.0), Physics()
STATIONS, PERIODS = 6, 96


@cache
def random_days(
    seed: int,
    physics: Physics = REAL,
    days: int = 6,
    stations: int = STATIONS,
    nights: bool = True,
    shared: bool = False,
) -> Days:
    """Sessions that do not overlap, at stations of two rates, some across midnight."""
    rng, rows = np.random.default_rng(seed), []
    for station in range(stations):
        hour = rng.uniform(0, 20)
        while hour < 24 * days - 2:
            stay = rng.uniform(0.5, 14)
            if not nights:
                stay = min(stay, 23.9 - hour % 24)
            rows.append((f"S{station}", hour, hour + stay, rng.exponential(9.0) + 0.2))
            hour += stay + rng.uniform(0.1, 12)
            if not nights and hour % 24 > 22:
                hour += 4
    start = pd.Timestamp("2021-03-01")
    frame = pd.DataFrame(rows, columns=["station", "from", "to", "delivered_kwh"])
    hours = {name: start + pd.to_timedelta(frame[name], unit="h") for name in ("from", "to")}
    said = rng.random(len(frame)) < 0.8
    frame = frame.assign(
        site="north",
        arrival=hours["from"].dt.floor("s"),
        departure=hours["to"].dt.floor("s"),
        requested_kwh=np.where(said, frame.delivered_kwh * rng.uniform(0.5, 3, len(frame)), np.nan),
        stated_departure=(
            hours["to"] + pd.to_timedelta(rng.normal(0, 2, len(frame)), unit="h")
        ).dt.floor("s"),
    )
    site = Site(
        {f"S{i}": Station(16.0 if i % 3 == 2 and not shared else 32.0) for i in range(stations)},
        feeder_kw=100.0,
    )
    found = Days.of(frame, "north", site, physics=physics)
    return add_forecasts(found, Predictor.fit(found), recall=True)


def days_of(arrival, departure, need, rate_a=10.0) -> Days:
    """One day in which every station has one car, of whom everything is known."""
    days = random_days(0, IDEAL, stations=len(need), shared=True)
    shape = (1, len(need), 1)
    zeros, hours = np.zeros(shape, np.float32), np.reshape(departure, shape) / 4
    came, leaves, needs = (
        np.reshape(x, shape).astype(dtype)
        for x, dtype in ((arrival, np.int32), (departure, np.int32), (need, np.float32))
    )
    garage = Garage(
        came, leaves, came.astype(np.float32) / 4, needs,
        zeros + rate_a, zeros + 1, needs, hours.astype(np.float32), zeros > 1, zeros > 1,
        np.arange(len(need), dtype=np.int32).reshape(shape), (hours - came / 4).astype(np.float32),
        zeros[..., 0], needs, hours.astype(np.float32), needs, hours.astype(np.float32), zeros,
        np.zeros((1, len(need), 96), np.float32),
    )  # fmt: skip
    wiring = replace(days.wiring, max_a=np.full(len(need), rate_a, np.float32))
    return replace(days, garage=garage, dates=days.dates[:1], wiring=wiring)


def random_cars(seed, cars=7):
    rng = np.random.default_rng(seed)
    arrival = rng.integers(0, 90, cars)
    departure = np.minimum(arrival + rng.integers(1, 20, cars), PERIODS)
    return arrival, departure, rng.exponential(15, cars)


def test_a_plan_serves_no_more_than_the_optimum():
    days, tasks = random_days(4, days=20), np.array([[0, 1, 2], [5, 4, 3]])
    best = best_energies(days, 9.0, tasks)
    drawn = simulate_mpc(days, 9.0, tasks).energy_kwh[0].sum((1, 2, 3))
    assert (drawn <= best.sum(1) + 1e-2).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_that_knows_all_cars_and_their_future_is_the_optimum(seed):
    _, departure, need = random_cars(seed)
    days = days_of(np.zeros(7, int), departure, need)
    planned = simulate_mpc(days, 9.0)
    best = best_energies(days, 9.0)
    assert planned.energy_kwh.sum() == pytest.approx(best.sum(), rel=0.01)
    assert planned.energy_kwh.sum() == pytest.approx(planned.by_period_kwh.sum(), rel=1e-5)


def test_plans_go_on_over_midnight_and_are_made_for_each_garage():
    days, tasks = random_days(5), np.array([[0, 2, 4], [5, 1, 3]])
    assert days.joins.any()
    planned = simulate_mpc(days, 12.0, tasks)
    edf = simulate_all(days, [SCHEDULERS["edf"]], 12.0, tasks)[0]
    need = np.where(days.garage.begins, days.garage.need_kwh, 0)[:, tasks].swapaxes(0, 1)
    assert (planned.energy_kwh[0] <= need + 1e-3).all()
    assert planned.energy_kwh.sum() > edf.sum() * 0.98
    alone = simulate_mpc(days.at(tasks[1]), 12.0).energy_kwh[0, 0]
    assert alone.sum() == pytest.approx(planned.energy_kwh[0, 1].sum(), rel=0.01)


def test_a_plan_for_cost_waits_for_cheap_hours_and_keeps_the_peak_low():
    came, leaves = np.array([30, 30, 32, 34, 20]), np.array([70, 90, 60, 80, 60])
    days = days_of(came, leaves, np.array([10.0, 12.0, 5.0, 8.0, 9.0]))
    days = replace(days, physics=replace(IDEAL, fill=False))
    prices = Prices((0.1,) * 8 + (0.5,) * 8 + (0.1,) * 8, worth_per_kwh=2.0, peak_per_kw=0.3)
    clock = np.arange(PERIODS)[None] / 4
    cheap, fast = (simulate_mpc(days, 25.0, prices=p).by_period_kwh for p in (prices, None))
    assert cheap.sum() == pytest.approx(44.0, rel=1e-4)
    assert fast.sum() == pytest.approx(44.0, rel=1e-4)
    assert prices.cost(cheap, clock, 0.25).sum() < 0.5 * prices.cost(fast, clock, 0.25).sum()
    assert cheap.max() < 0.5 * fast.max() <= 25.0 / 8 + 1e-4
