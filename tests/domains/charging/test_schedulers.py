"""The schedulers, simulated days and the optimum: within limits, car by car, blind to the future."""

import dataclasses
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.domains.charging import schedulers
from apportion.domains.charging.garage import PERIODS, RATE_KW, Garage, draw, empty, see
from apportion.domains.charging.schedulers import (
    SCHEDULERS,
    best_energies,
    pour,
    simulate_all,
    simulate_days,
)
from apportion.errors import InputError
from domains.charging.garages import SCHEDULES, STATIONS, random_garage, stack, walk

SEEDS = st.integers(0, 10**6)
SHARES = st.sampled_from([0.03, 0.1, 0.2, 0.5, 2.0])
NAMES = sorted(SCHEDULES)


def feeder(phi: float) -> jax.Array:
    return jnp.float32(phi * STATIONS * RATE_KW)


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, phi=SHARES)
def test_offers_keep_to_limits_waste_nothing_and_follow_the_order_of_stations(name, seed, phi):
    day, capacity = random_garage(seed), feeder(phi)
    seen, offered, drawn = walk(name, day, capacity)
    limits = seen.limit_kw
    assert (offered >= 0).all()
    assert (offered <= limits + 1e-5).all()
    assert (offered.sum(-1) <= float(capacity) + 1e-4).all()
    if name != "clairvoyant":
        most = np.minimum(limits.sum(-1), float(capacity))
        assert offered.sum(-1) == pytest.approx(most, abs=1e-3)
    # Energy is neither made nor lost.
    assert (drawn >= 0).all()
    assert (drawn <= offered / 4 + 1e-5).all()
    assert (drawn[~seen.can_draw] == 0).all()
    order = np.random.default_rng(seed).permutation(STATIONS)
    turned = jax.tree.map(lambda x: np.asarray(x)[order], day)
    assert walk(name, turned, capacity)[1] == pytest.approx(offered[:, order], abs=1e-3)


def test_cars_that_agree_in_all_but_their_arrival_are_served_by_it():
    day = dataclasses.replace(
        jax.tree.map(lambda x: jnp.repeat(x[:1], 2, 0), random_garage(1, 2, 1)),
        arrival=jnp.array([[3], [3]], jnp.int32),
        departure=jnp.array([[9], [9]], jnp.int32),
        arrived=jnp.array([[2.9], [2.1]]),
        need_kwh=jnp.full((2, 1), 5.0),
    )

    @jax.jit
    def offers():
        seen = see(day, empty(2), jnp.int32(3), jnp.float32(4.0))
        return {name: schedule(seen) for name, schedule in SCHEDULERS.items()}

    for name, offer in offers().items():
        expected = [2.0, 2.0] if name == "equal" else [0.0, 4.0]
        assert offer.tolist() == pytest.approx(expected), name


def sessions(day: Garage) -> dict[str, np.ndarray]:
    """All that is known of cars, by its name, as an array (stations, sessions)."""
    return {name: np.array(x) for name, x in vars(day).items() if name != "to_come_kwh"}


def other_future(day: Garage, seen, offered, drawn, n: int, rng) -> Garage:
    """The same day up to period n, and anything after it: needs, departures, arrivals."""
    arrays, other = sessions(day), sessions(random_garage(int(rng.integers(1e6))))
    arrival, departure = arrays["arrival"].copy(), arrays["departure"].copy()
    got, short = seen.got_kwh[n], drawn * 4 < offered - 1e-5
    for station in range(arrival.shape[0]):
        busy_until = n + 1
        for place in range(arrival.shape[1]):
            a, d = arrival[station, place], departure[station, place]
            if a <= n < d:
                busy_until = int(rng.integers(n + 1, PERIODS + 1))
                arrays["departure"][station, place] = busy_until
                if not short[a:n, station].any():
                    arrays["need_kwh"][station, place] = got[station] + rng.uniform(0.01, 30)
        for place in range(arrival.shape[1]):
            if arrival[station, place] > n or departure[station, place] <= arrival[station, place]:
                for name in arrays:
                    arrays[name][station, place] = other[name][station, place]
                if arrays["arrival"][station, place] < busy_until:
                    for name in arrays:
                        arrays[name][station, place] = 0
                busy_until = max(busy_until, arrays["departure"][station, place])
    return dataclasses.replace(day, **{name: jnp.asarray(x) for name, x in arrays.items()})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "clairvoyant"])
@given(seed=SEEDS, phi=SHARES, n=st.integers(0, PERIODS - 1))
def test_nothing_seen_or_decided_up_to_a_period_depends_on_what_comes_after(name, seed, phi, n):
    day, capacity = random_garage(seed), feeder(phi)
    seen, offered, drawn = walk(name, day, capacity)
    future = other_future(day, seen, offered, drawn, n, np.random.default_rng(seed))
    seen_then, offered_then, _ = walk(name, future, capacity)
    assert np.array_equal(offered[: n + 1], offered_then[: n + 1])
    for field in dataclasses.fields(seen):
        if field.name != "truth":
            known, then = (jax.tree.leaves(getattr(s, field.name)) for s in (seen, seen_then))
            for x, y in zip(known, then, strict=True):
                assert np.array_equal(x[: n + 1], y[: n + 1]), field.name


def test_the_clairvoyant_does_look_ahead():
    """So the test above would notice a scheduler that did."""
    day, capacity = random_garage(3), feeder(0.1)
    seen, offered, drawn = walk("clairvoyant", day, capacity)

    def looked_ahead(n):
        future = other_future(day, seen, offered, drawn, n, np.random.default_rng(n))
        then = walk("clairvoyant", future, capacity)[1]
        return not np.array_equal(offered[: n + 1], then[: n + 1])

    assert any(map(looked_ahead, range(10, 80)))


def laxity(leaves: str, need: str):
    return lambda car: car[leaves] / 4 - max(car[need] - car["got"], 0) / RATE_KW


KEYS = {
    "fcfs": lambda car: car["arrived"],
    "edf": lambda car: car["stated_departure"],
    "llf": laxity("stated_departure", "requested_kwh"),
    "edf-predicted": lambda car: car["predicted_departure"],
    "llf-predicted": laxity("predicted_departure", "predicted_need_kwh"),
    "llf-recalled": laxity("recalled_departure", "recalled_need_kwh"),
    "largest-remaining": lambda car: -max(car["requested_kwh"] - car["got"], 0),
    "clairvoyant": laxity("departure", "need_kwh"),
}


def plain_day(day: Garage, name: str, capacity: float) -> float:
    """A day car by car, in plain Python and double precision."""
    cars, known = [], sessions(day)
    for i, k in np.argwhere(known["departure"] > known["arrival"]):
        car = {name: float(values[i, k]) for name, values in known.items()}
        cars.append(car | {"got": 0.0, "full": False})
    for n in range(PERIODS):
        here = [c for c in cars if c["arrival"] <= n < c["departure"] and not c["full"]]
        left = capacity
        for car in [] if name == "equal" else sorted(here, key=KEYS[name]):
            open_kw = (car["need_kwh"] - car["got"]) * 4
            car["offer"] = min(RATE_KW, left, open_kw if name == "clairvoyant" else RATE_KW)
            left -= car["offer"]
        for car in here:
            offer = min(RATE_KW, capacity / len(here)) if name == "equal" else car["offer"]
            drawn = min(offer, (car["need_kwh"] - car["got"]) * 4)
            car["got"] += drawn / 4
            car["full"] = offer > 0.3 and drawn < 0.9 * offer
    return sum(car["got"] for car in cars)


def test_a_simulated_day_equals_one_walked_car_by_car():
    days = [random_garage(seed) for seed in range(12)]
    stacked = stack(*days)
    for phi in (0.08, 0.25):
        capacity = phi * STATIONS * RATE_KW
        energies = simulate_all(stacked, list(SCHEDULERS.values()), capacity)[:, 0]
        assert (energies <= stacked.need_kwh + 1e-4).all()
        for name, energy in zip(SCHEDULERS, energies, strict=True):
            expected = [plain_day(day, name, capacity) for day in days]
            assert energy.sum((1, 2)) == pytest.approx(expected, rel=1e-4), name


def test_tasks_schedules_and_groups_of_days_are_simulated_apart(monkeypatch):
    days = stack(*[random_garage(seed) for seed in range(5)])
    tasks, names = np.array([[0, 2, 4], [5, 1, 3]]), ("llf", "edf")
    both = simulate_all(days, [SCHEDULERS[name] for name in names], 7.0, tasks)
    # Groups of two, the last one with an empty day.
    monkeypatch.setattr(schedulers, "_ROWS", 2 * STATIONS)
    for name, found in zip(names, both, strict=True):
        for task, energy in zip(tasks, found, strict=True):
            apart = jax.tree.map(lambda x, task=task: x[:, task], days)
            alone = simulate_all(apart, [SCHEDULERS[name]], 7.0)[0, 0]
            assert alone == pytest.approx(energy, abs=1e-4)
    bare = dataclasses.replace(days, predicted_need_kwh=None)
    with pytest.raises(InputError, match="no forecasts; see add_forecasts"):
        simulate_all(bare, [SCHEDULERS["llf"]], 7.0)


MANY, SIZES = 30, (8, 15, 30)
"""Stations enough that few and all of them are worked on by turns, and how many at once."""


def test_a_day_is_the_same_where_only_stations_that_can_draw_are_worked_on():
    days = [random_garage(seed, stations=MANY) for seed in range(3)]
    run = jax.jit(simulate_days, static_argnums=1)
    for phi in (0.05, 0.3):
        capacity = feeder(phi * MANY / STATIONS)
        energies = np.asarray(run(stack(*days), SCHEDULERS["llf"], capacity))
        for day, found in zip(days, energies, strict=True):
            drawn = walk("llf", day, capacity)[2]
            periods = np.arange(PERIODS)[:, None, None]
            here = (day.arrival <= periods) & (periods < day.departure)
            assert found == pytest.approx(np.where(here, drawn[..., None], 0).sum(0), abs=1e-4)


def test_few_stations_are_worked_on_where_few_can_draw_and_all_where_many_can():
    # One car more every three periods, and none is ever full.
    comes = np.arange(0, 3 * MANY, 3, dtype=np.int32)[:, None]
    day = dataclasses.replace(
        random_garage(0, stations=MANY, sessions=1),
        arrival=comes,
        departure=np.full_like(comes, PERIODS),
        need_kwh=np.full(comes.shape, 1e3, np.float32),
    )

    @jax.jit
    def drawn_by(size):
        """What is drawn where only so many stations at once are offered anything."""

        def offer(seen):
            return SCHEDULERS["equal"](seen) * (len(seen.plugged) == size)

        return simulate_days(stack(day), offer, feeder(1.0)).sum()

    for size in SIZES:
        assert drawn_by(size) > 0, f"nothing was drawn by {size} stations at once"


def test_a_car_that_takes_less_than_it_was_offered_is_full_until_it_leaves():
    day = dataclasses.replace(
        random_garage(0, stations=1, sessions=2),
        arrival=jnp.array([[0, 4]], jnp.int32),
        departure=jnp.array([[4, 6]], jnp.int32),
        need_kwh=jnp.array([[1.0, 5.0]]),
    )
    limits = walk("equal", day, jnp.float32(6.0))[0].limit_kw[:6, 0]
    assert limits.tolist() == pytest.approx([RATE_KW, 0, 0, 0, RATE_KW, RATE_KW])


@jax.jit
def served_by(day, offers, scale):
    def period(state, inputs):
        n, offer = inputs
        seen = see(day, state, n, feeder(1.0))
        return draw(seen, scale * offer)

    periods = jnp.arange(PERIODS, dtype=jnp.int32)
    return jax.lax.scan(period, empty(STATIONS), (periods, offers))[1].sum()


served_gradient = jax.jit(jax.grad(served_by, argnums=2))


@given(seed=SEEDS)
def test_what_is_drawn_has_the_gradient_of_finite_differences(seed):
    day = random_garage(seed)
    offers = jnp.asarray(np.random.default_rng(seed).uniform(0.1, 1, (PERIODS, STATIONS)))
    step = 1e-2
    here, above, below = (served_by(day, offers, 1 + e) for e in (0.0, step, -step))
    sides = [float(above - here) / step, float(here - below) / step]
    if abs(sides[0] - sides[1]) < 0.05:  # no corner between
        assert served_gradient(day, offers, 1.0) == pytest.approx(sum(sides) / 2, abs=0.05)


poured_over = jax.jit(pour)


@given(
    limits=st.lists(st.floats(0, 10, width=32), min_size=8, max_size=8),
    capacity=st.floats(0, 60, width=32),
)
def test_pouring_fills_evenly_up_to_the_limits(limits, capacity):
    poured = np.asarray(poured_over(np.array(limits, np.float32), np.float32(capacity)))
    assert poured.sum() == pytest.approx(min(capacity, sum(limits)), abs=1e-3)
    level = poured.max()
    assert poured == pytest.approx(np.minimum(limits, level), abs=1e-3)


def best_energy(arrival, departure, need, capacity):
    """The optimum of one day's sessions."""
    arrival, departure, need = (np.reshape(x, (1, -1, 1)) for x in (arrival, departure, need))
    zeros = np.zeros(need.shape)
    day = Garage(arrival.astype(int), departure.astype(int), zeros, need, zeros, zeros, zeros > 0)
    return float(best_energies(day, capacity)[0, 0])


def smallest_cut(arrival, departure, need, capacity):
    """The same by the theorem of flows and cuts: over every choice of sessions cut at their need."""
    periods = np.arange(PERIODS)
    there = (arrival[:, None] <= periods) & (periods < departure[:, None])
    cuts = []
    for kept in product([False, True], repeat=len(need)):
        kept = np.array(kept)
        most = np.minimum(there[kept].sum(0) * RATE_KW, capacity) / 4
        cuts.append(need[~kept].sum() + most.sum())
    return min(cuts)


@given(seed=SEEDS, capacity=st.floats(0.5, 20))
def test_the_optimum_equals_the_smallest_cut(seed, capacity):
    rng = np.random.default_rng(seed)
    arrival = rng.integers(0, 90, 7)
    departure = np.minimum(arrival + rng.integers(1, 20, 7), PERIODS)
    need = rng.exponential(15, 7)
    assert best_energy(arrival, departure, need, capacity) == pytest.approx(
        smallest_cut(arrival, departure, need, capacity), rel=1e-6
    )
    assert best_energy(np.zeros(3), np.zeros(3), np.zeros(3), capacity) == 0


def test_days_solved_together_are_solved_as_if_alone_and_no_scheduler_serves_more():
    days = stack(*[random_garage(seed) for seed in range(20)])
    arrays = [days.arrival, days.departure, days.need_kwh]
    tasks = np.array([[0, 1, 2], [5, 4, 3]])
    best = best_energies(days, 5.0, tasks)
    alone = [[best_energy(*(x[d, t] for x in arrays), 5.0) for d in range(20)] for t in tasks]
    assert best == pytest.approx(np.array(alone))
    drawn = simulate_all(days, list(SCHEDULERS.values()), 5.0, tasks).sum((3, 4))
    assert (drawn <= best + 1e-3).all()
