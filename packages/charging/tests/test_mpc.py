"""Model-predictive control: optimal with full knowledge, within limits, over midnight, for cost."""

from dataclasses import replace

import numpy as np
import pytest
from garages import IDEAL, cars_of, nights

from apportion_charging.mpc import simulate_mpc
from apportion_charging.schedulers import SCHEDULERS, best_energies, simulate
from apportion_charging.site import Tariff


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_that_knows_all_cars_and_their_future_is_the_optimum(seed):
    rng = np.random.default_rng(seed)
    days = cars_of(np.zeros(7, int), rng.integers(1, 96, 7), rng.exponential(15, 7))
    planned = simulate_mpc(days, 9.0)
    assert planned.energy_kwh.sum() == pytest.approx(best_energies(days, 9.0).sum(), rel=0.01)
    assert planned.energy_kwh.sum() == pytest.approx(planned.by_period_kwh.sum(), rel=1e-5)


def test_plans_go_on_over_midnight_are_made_for_each_garage_and_serve_no_more_than_the_optimum():
    days, tasks = nights(5, days=3), np.array([[0, 2, 4], [5, 1, 3]])
    assert days.joins.any()
    planned = simulate_mpc(days, 12.0, tasks).energy_kwh[0]
    edf = simulate(days, [SCHEDULERS["edf"]], 12.0, tasks).energy_kwh[0]
    need = np.where(days.garage.begins, days.garage.need_kwh, 0)[:, tasks].swapaxes(0, 1)
    assert (planned <= need + 1e-3).all()
    assert (planned.sum((1, 2, 3)) <= best_energies(days, 12.0, tasks).sum(1) + 1e-2).all()
    assert planned.sum() > edf.sum() * 0.98
    alone = simulate_mpc(days.at(tasks[1]), 12.0).energy_kwh
    assert alone.sum() == pytest.approx(planned[1].sum(), rel=0.01)


def test_a_plan_for_cost_waits_for_cheap_hours_and_keeps_the_peak_low():
    came, leaves = np.array([30, 30, 32, 34, 20]), np.array([70, 90, 60, 80, 60])
    days = cars_of(came, leaves, np.array([10.0, 12.0, 5.0, 8.0, 9.0]))
    days = replace(days, physics=replace(IDEAL, fill=False))
    prices = Tariff((0.1,) * 8 + (0.5,) * 8 + (0.1,) * 8, worth_per_kwh=2.0, peak_per_kw=0.3)
    clock = np.arange(96)[None] / 4
    cheap, fast = (simulate_mpc(days, 25.0, prices=p).by_period_kwh for p in (prices, None))
    assert cheap.sum() == pytest.approx(44.0, rel=1e-4)
    assert fast.sum() == pytest.approx(44.0, rel=1e-4)
    assert prices.cost(cheap, clock, 0.25).sum() < 0.5 * prices.cost(fast, clock, 0.25).sum()
    assert cheap.max() < 0.5 * fast.max() <= 25.0 / 8 + 1e-4
