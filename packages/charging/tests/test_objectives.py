"""Objectives: rewards add up to the measure of a day; prices; power that is left unused."""

import tomllib
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from garages import FULL_KW, STATIONS, WIRING, by_session, days_of, opinionated, random_garage, walk

from apportion.errors import InputError
from apportion.problem import Observation
from apportion.trees import take
from apportion_charging.backtest import POLICY, ChargingBacktest, backtest_schedules
from apportion_charging.garage import REAL, Physics, draw, initial_state, make_physics, see
from apportion_charging.objectives import Energy, _Cost, _Fair, _Promise
from apportion_charging.problem import PolicySchedule, _add_spare
from apportion_charging.schedulers import SCHEDULERS, walk_day
from apportion_charging.sessions import read_sessions
from apportion_charging.settings import ChargingSettings
from apportion_charging.site import Site, Tariff, embedded_site
from apportion_charging.training import Garages, train_charging

PRICES = Tariff((0.1,) * 8 + (0.4,) * 8 + (0.2,) * 8, worth_per_kwh=0.5, peak_per_kw=0.3)
DAY = random_garage(5)
# No car arrives before midnight, so that a day's rewards are those of whole stays.
DAY = replace(DAY, arrival=jnp.maximum(DAY.arrival, 0))


def total(objective, seen, drawn):
    power = np.asarray(drawn).sum(1) * 4
    peak = np.maximum.accumulate(np.append(0.0, power))[:-1]
    each = jax.vmap(objective)(seen, jnp.asarray(drawn), jnp.asarray(peak, jnp.float32))
    return float(each.sum())


def test_rewards_add_up_to_what_a_day_is_judged_by():
    seen, drawn = walk("llf", DAY, jnp.float32(0.15 * FULL_KW))
    got, need = by_session(DAY, drawn), np.asarray(DAY.need_kwh)
    there = (need > 0) & (np.asarray(DAY.departure) > np.asarray(DAY.arrival))
    share = got[there] / need[there]
    assert (share < 0.75).any(), "everybody was served: nothing is asked here"
    assert total(Energy(), seen, drawn) == pytest.approx(got.sum(), rel=1e-4)
    fair = 10 * (np.sqrt(share + 0.05) - np.sqrt(0.05)).sum()
    assert total(_Fair(), seen, drawn) == pytest.approx(fair, rel=1e-3)
    kept = got.sum() + 10 * (np.minimum(share / 0.8, 1) ** 2).sum()
    assert total(_Promise(), seen, drawn) == pytest.approx(kept, rel=1e-3)
    cost = _Cost.of([replace(days_of(DAY), prices=PRICES)]).at(jnp.int32(2))
    paid = PRICES.cost(drawn.sum(1), np.arange(96) / 4 + 1e-3, 0.25)
    assert total(cost, seen, drawn) == pytest.approx(0.5 * got.sum() - paid, abs=1e-2)


@pytest.fixture(scope="module")
def seen():
    """The stations at 10:00, behind a feeder that is large enough for all of them."""
    at_ten = (DAY, WIRING, initial_state(WIRING), jnp.int32(40), jnp.float32(FULL_KW))
    found = eqx.filter_jit(see)(*at_ten)
    assert found.plugged.any()
    return found


def test_a_car_without_anything_has_a_finite_gradient_and_a_done_one_none_beyond_energy(seen):
    done = replace(seen, known=replace(seen.known, got_kwh=seen.car_need_kwh))
    gradient = eqx.filter_jit(jax.grad(lambda kwh, objective, view: objective(view, kwh, 0.0)))
    for objective, beyond in ((Energy(), 1), (_Fair(), 0), (_Promise(), 1)):
        first, last = (
            np.asarray(gradient(jnp.full(STATIONS, 0.1), objective, view)) for view in (seen, done)
        )
        assert np.isfinite(first).all()
        assert (first[np.asarray(seen.plugged)] > 0).all()
        assert (last[np.asarray(seen.plugged)] == beyond).all()


def test_power_nobody_wishes_for_stays_unused_where_it_has_a_price(seen):
    sparing = make_physics(objective="cost")
    assert sparing == Physics(fill=False)
    assert make_physics(objective="fair") == Physics()
    wishes, drawn = jnp.where(seen.plugged, 3.0, 0.0), eqx.filter_jit(draw)
    filled, spared = (drawn(seen, wishes, physics)[1].sum() * 4 for physics in (REAL, sparing))
    assert float(spared) <= float(wishes.sum()) + 1e-3
    assert float(spared) < float(filled)


def test_what_stays_unused_is_an_entity_that_can_take_everything():
    shown = Observation(
        jnp.ones((STATIONS, 1, 24)), jnp.full(STATIONS, 0.1), jnp.full(STATIONS, 0.3)
    )
    wider = _add_spare(shown)
    assert wider.history.shape == (STATIONS + 1, 1, 24)
    assert wider.history[-1, 0].tolist() == [0.0] * 18 + [1.0] * 4 + [0.0, 1.0]
    assert wider.limits is not None
    assert wider.limits[-1] == 1
    assert wider.held[-1] == pytest.approx(0.4)
    feeder = jnp.float32(0.1 * FULL_KW)
    used, left = (
        walk_day(DAY, WIRING, PolicySchedule(opinionated(), spare), feeder, Physics(fill=False))[
            1
        ].sum()
        for spare in (False, True)
    )
    assert 0 < left < used


def test_prices_are_part_of_a_sites_file_but_not_of_its_wiring():
    site = embedded_site("jpl")
    assert site.prices is not None
    assert len(site.prices.per_kwh) == 24
    again = Site.of(tomllib.loads(site.to_toml()))
    assert again == site
    assert replace(site, prices=None).fingerprint == site.fingerprint
    plain = tomllib.loads(site.to_toml())
    slips = {
        "24 hours": {"per_kwh": [0.1] * 23},
        "needs per_kwh": {"peak_per_kw": 1.0},
        "peak_per_kw is -1": {"per_kwh": [0.1] * 24, "peak_per_kw": -1},
        "must be a number": {"per_kwh": [*[0.1] * 23, "cheap"], "worth_per_kwh": 1.0},
    }
    for said, prices in slips.items():
        with pytest.raises(InputError, match=said):
            Site.of(plain | {"prices": prices})
    assert Site.of(plain | {"prices": {"per_kwh": [0.1] * 24}}).prices == Tariff((0.1,) * 24, 0.2)
    with pytest.raises(InputError, match=r"no prices are known .* add a table \[prices\]"):
        _Cost.of([days_of(DAY)])


def test_objectives_that_there_are_not_are_refused():
    with pytest.raises(InputError, match="no objective 'fare'.*energy, fair, promise, cost"):
        ChargingSettings(objective="fare")


def test_every_schedule_is_shown_by_every_measure():
    def two_days(first: list[float], second: list[float]) -> np.ndarray:
        return np.array([first, second]).reshape(1, 2, 2, 1)

    # No car needs energy on the second day, so it counts in no mean.
    need = two_days([4, 10], [0, 0])
    drawn = {POLICY: two_days([4, 5], [0, 0]), "llf": two_days([3, 7], [0, 0])}
    cost = {POLICY: np.array([[1.8, 0]]), "llf": np.array([[3.0, 0]])}
    dates = np.array(["2021-03-01", "2021-03-02"], "datetime64[D]")
    test = ChargingBacktest(
        "north", dates, np.array([[0, 1]]), 2, np.array([5.0]), 0.2, need, drawn, None,
        cost=cost, worth_per_kwh=0.5,
    )  # fmt: skip
    assert test.measures(POLICY) == pytest.approx(
        {"served": 9 / 14, "left_short": 0.5, "fairness": 0.9, "kept": 0.5, "cost_per_kwh": 0.2}
    )
    assert test.measures("llf")["kept"] == 0
    leads = {
        "energy": -1 / 14,
        "fair": 0.9 - 1.45**2 / (2 * (0.75**2 + 0.7**2)),
        "promise": 0.5,
        "cost": (0.5 * 9 - 1.8 - (0.5 * 10 - 3.0)) / 14,
    }
    for objective, lead in leads.items():
        assert replace(test, objective=objective).ahead("llf").value == pytest.approx(lead)


@pytest.mark.slow
def test_a_policy_is_trained_for_cost_and_held_against_plans():
    settings = ChargingSettings(
        method="mtl", site=("jpl",), until="2019-06-30", tasks=4, task_size=4, steps=2, days=2,
        hidden=6, chunk=2, objective="cost",
    )  # fmt: skip
    frame = read_sessions().loc[lambda rows: rows.arrival < "2019-07-05"]
    garages = Garages.of(frame, settings)
    policy = take(train_charging(garages, settings).policy, 0)
    days = garages.all_days["jpl"].between("2019-07-01")
    test = backtest_schedules(
        policy, days, capacity=0.3, task_size=4, tasks=2, optimum=False, mpc=True,
        schedulers={"llf": SCHEDULERS["llf"]}, objective="cost",
    )  # fmt: skip
    worth = days.prices.worth_per_kwh
    value = {
        name: (worth - found["cost_per_kwh"]) * found["served"]
        for name in (POLICY, "llf", "mpc")
        for found in [test.measures(name)]
    }
    for other in ("llf", "mpc"):
        lead = value[POLICY] - value[other]
        assert test.ahead(other).value == pytest.approx(lead, abs=1e-6)
    assert set(test.to_frame().schedule) == {POLICY, "llf", "mpc"}
    assert "cost_per_kwh" in test.summary()
