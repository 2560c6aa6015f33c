"""The schedulers, simulated days and the optimum: within limits, car by car, blind to the future."""

import dataclasses
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from garages import (
    FULL_KW,
    IDEAL,
    SCHEDULES,
    STATIONS,
    WIRING,
    by_session,
    cars_of,
    days_of,
    nights,
    random_garage,
    walk,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion_charging import schedulers
from apportion_charging.garage import REAL, Garage, draw, initial_state, learn, see
from apportion_charging.schedulers import SCHEDULERS, _pour, best_energies, simulate

SEEDS = st.integers(0, 10**6)
SHARES = st.sampled_from([0.03, 0.1, 0.2, 0.5, 2.0])
NAMES = sorted(SCHEDULES)
PERIODS = REAL.periods


def feeder(phi: float) -> jax.Array:
    return jnp.float32(phi * FULL_KW)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(seed=SEEDS, phi=SHARES)
def test_what_stations_are_told_keeps_to_every_limit_and_energy_is_neither_made_nor_lost(
    name, seed, phi
):
    day, capacity = random_garage(seed), feeder(phi)
    seen, drawn = walk(name, day, capacity)
    told = seen.known.offered_a[1:]
    # Nothing is known of a car that has just come: its first offer is seen a period later.
    told = np.where(seen.stays[1:], told, 0)
    assert ((told == 0) | (told >= WIRING.min_a)).all()
    assert (told <= WIRING.max_a).all()
    assert (told == np.round(told)).all()
    assert ((told * WIRING.kw_per_a).sum(-1) <= float(capacity) + 1e-3).all()
    assert (drawn >= 0).all()
    assert (drawn.sum(-1) <= float(capacity) / 4 + 1e-4).all()
    assert (drawn <= WIRING.max_kw / 4 + 1e-4).all()
    assert (drawn[~seen.plugged] == 0).all()
    assert (by_session(day, drawn) <= np.asarray(day.need_kwh) + 1e-3).all()


def sessions(day: Garage) -> dict[str, np.ndarray]:
    """Return the arrays (stations, sessions) of a day by name."""
    return {
        name: np.array(x)
        for name, x in vars(day).items()
        if name not in ("to_come_kwh", "clock_hours")
    }


def other_future(day: Garage, seen, drawn, n: int, rng) -> Garage:
    """Return the same day up to period n, with other needs, departures, arrivals and cars after."""
    arrays, other = sessions(day), sessions(random_garage(int(rng.integers(1e6))))
    arrival, departure = arrays["arrival"].copy(), arrays["departure"].copy()
    told = seen.known.offered_a[1 : n + 1]
    for station in range(arrival.shape[0]):
        busy_until = n + 1
        for place in range(arrival.shape[1]):
            a, d = arrival[station, place], departure[station, place]
            if a <= n < d:
                busy_until = int(rng.integers(n + 1, PERIODS + 1))
                arrays["departure"][station, place] = busy_until
                mine = slice(max(a, 0), n)
                got = drawn[mine, station].sum()
                if not told[mine, station].any():
                    # No offer has revealed anything about the car, so replace it by any other.
                    arrays["car_a"][station, place] = rng.uniform(6, 32)
                    arrays["car_share"][station, place] = rng.choice([1.0, 1 / 3])
                    arrays["need_kwh"][station, place] = rng.uniform(0.1, 30)
                elif 0 < got < 0.7 * arrays["need_kwh"][station, place]:
                    # The car does not taper yet, so its need may still be larger.
                    arrays["need_kwh"][station, place] = got / 0.75 + rng.uniform(0, 30)
        for place in range(arrival.shape[1]):
            if arrival[station, place] > n or departure[station, place] <= arrival[station, place]:
                for name in arrays:
                    arrays[name][station, place] = other[name][station, place]
                if arrays["arrival"][station, place] < busy_until:
                    for name in arrays:
                        arrays[name][station, place] = 0
                busy_until = max(busy_until, arrays["departure"][station, place])
    return dataclasses.replace(day, **{name: jnp.asarray(x) for name, x in arrays.items()})


HIDDEN = ("truth", "car_need_kwh", "car_a", "car_share", "car_metered")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "clairvoyant"])
@settings(max_examples=8)
@given(seed=SEEDS, phi=SHARES, n=st.integers(0, PERIODS - 1))
def test_nothing_seen_up_to_a_period_depends_on_what_comes_after_or_no_meter_has_shown(
    name, seed, phi, n
):
    day, capacity = random_garage(seed), feeder(phi)
    seen, drawn = walk(name, day, capacity)
    future = other_future(day, seen, drawn, n, np.random.default_rng(seed))
    seen_then, _ = walk(name, future, capacity)
    for field in dataclasses.fields(seen):
        if field.name not in HIDDEN:
            known, then = (jax.tree.leaves(getattr(s, field.name)) for s in (seen, seen_then))
            for x, y in zip(known, then, strict=True):
                if np.ndim(x) and len(x) == PERIODS:
                    assert np.array_equal(x[: n + 1], y[: n + 1]), field.name


def test_the_clairvoyant_does_look_ahead():
    """The test above would therefore notice a scheduler that looks ahead."""
    day, capacity = random_garage(3), feeder(0.1)
    seen, drawn = walk("clairvoyant", day, capacity)

    def looked_ahead(n):
        future = other_future(day, seen, drawn, n, np.random.default_rng(n))
        then = walk("clairvoyant", future, capacity)[0].known.offered_a
        return not np.array_equal(seen.known.offered_a[: n + 2], then[: n + 2])

    assert any(map(looked_ahead, range(10, 80)))


def least_laxity(outlook):
    return lambda seen, k: (
        outlook(seen).hours_left - outlook(seen).open_kwh / outlook(seen).rate_kw
    )[k]


KEYS = {
    "fcfs": lambda seen, k: seen.arrived[k],
    "edf": lambda seen, k: seen.said.hours_left[k],
    "llf": least_laxity(lambda seen: seen.said),
    "edf-predicted": lambda seen, k: seen.predicted.hours_left[k],
    "llf-predicted": least_laxity(lambda seen: seen.predicted),
    "llf-recalled": least_laxity(lambda seen: seen.recalled),
    "largest-remaining": lambda seen, k: -seen.said.open_kwh[k],
    "clairvoyant": least_laxity(lambda seen: seen.truth),
}


def plain_wishes(seen, name: str, capacity: float) -> list[float]:
    """Compute a scheduler's wishes for the stations in a period, car by car in plain Python."""
    most, left = [float(kw) for kw in seen.limit_kw], capacity
    if name == "clairvoyant":
        most = [
            min(kw, 4 * float(open_kwh))
            for kw, open_kwh in zip(most, seen.truth.open_kwh, strict=True)
        ]
    wishes = [0.0] * STATIONS
    if name == "equal":
        for number, k in enumerate(sorted(range(STATIONS), key=lambda k: most[k])):
            wishes[k] = min(most[k], left / (STATIONS - number))
            left -= wishes[k]
        return wishes
    for k in sorted(range(STATIONS), key=lambda k: (KEYS[name](seen, k), seen.arrived[k])):
        wishes[k] = min(most[k], left)
        left -= wishes[k]
    return wishes


def twins(day: Garage) -> Garage:
    """Put the same cars at every station; only the minute of arrival differs and breaks ties."""
    same = jax.tree.map(lambda x: jnp.repeat(x[:1], STATIONS, 0), day)
    return dataclasses.replace(same, arrived=same.arrived - jnp.arange(STATIONS)[:, None] / 60)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_wishes_equal_those_made_car_by_car(name):
    for day in (*map(random_garage, range(3)), twins(random_garage(3))):
        seen, _ = walk("llf", day, feeder(0.2))
        found = jax.jit(jax.vmap(SCHEDULERS[name]))(seen)
        for n in range(PERIODS):
            view = jax.tree.map(lambda x, n=n: x[n], seen)
            assert found[n].tolist() == pytest.approx(
                plain_wishes(view, name, 0.2 * FULL_KW), abs=1e-3
            )


def test_tasks_schedules_and_groups_of_days_are_simulated_apart(monkeypatch):
    days = days_of(*[random_garage(seed) for seed in range(5)])
    tasks, names = np.array([[0, 2, 4], [5, 1, 3]]), ("llf", "edf")
    both = simulate(days, [SCHEDULERS[name] for name in names], 7.0, tasks).energy_kwh
    # Groups of two, the last one with an empty day.
    monkeypatch.setattr(schedulers, "_ROWS", 2 * STATIONS)
    for name, found in zip(names, both, strict=True):
        for task, energy in zip(tasks, found, strict=True):
            alone = simulate(days.at(task), [SCHEDULERS[name]], 7.0).energy_kwh[0, 0]
            assert alone == pytest.approx(energy, abs=1e-4)
    bare = dataclasses.replace(days.garage, predicted_need_kwh=None)
    with pytest.raises(InputError, match="no forecasts; see add_forecasts"):
        simulate(dataclasses.replace(days, garage=bare), [SCHEDULERS["llf"]], 7.0)


@settings(max_examples=4)
@given(seed=SEEDS)
def test_days_side_by_side_give_what_one_long_lane_gives_and_no_session_is_cut(seed):
    days, schedule = nights(seed), [SCHEDULERS["llf"]]
    # After a missing day, the energy of a car that stayed is unknown.
    missed = dataclasses.replace(days, dates=days.dates + (np.arange(len(days)) >= 3))
    assert days.joins[3]
    assert not missed.joins[3]
    for some in (missed, days):
        several = simulate(some, schedule, 12.0).energy_kwh
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedulers, "make_lanes", lambda joins: np.arange(len(joins))[None])
            one = simulate(some, schedule, 12.0).energy_kwh
        assert several == pytest.approx(one, abs=1e-4)
    # Energy drawn after midnight counts on the car's first day and never exceeds its need.
    need = np.where(days.garage.begins, days.garage.need_kwh, 0)
    assert (one[0, 0] <= need + 1e-3).all()
    assert one.sum() <= 12.0 * 24 * (len(days) + 2)
    beyond = days.garage.begins & (days.garage.departure > PERIODS)
    alone = simulate(days, schedule, 1000.0).energy_kwh[0, 0]
    assert alone[beyond] == pytest.approx(need[beyond], rel=0.2, abs=0.5)


ONE = WIRING.at(np.array([0]))


def known_after(*periods: tuple[float, float | None]):
    """Return the knowledge of a car at a 22 kW station after periods of (offered A, metered kW)."""
    state = initial_state(ONE)
    for offered, kw in periods:
        heard = jnp.array([kw is not None])
        kw_now = jnp.array([0.0 if kw is None else kw])
        state = learn(state, ONE, jnp.array([offered]), kw_now, heard, jnp.float32(0.25))
    return jax.tree.map(lambda x: x[0].item(), state)


def test_a_cars_own_limit_shows_in_what_it_draws_and_silence_says_nothing():
    assert known_after((32.0, None)).limit_a == 32
    # 16 A on three phases is its limit; if it draws the whole offer, a larger one is tried.
    assert known_after((32.0, 16 * 0.69 - 1e-4)).limit_a == 17
    assert known_after((32.0, 11.0), (17.0, 11.7)).limit_a == pytest.approx(25.5)
    single = known_after((16.0, 16 * 0.23))
    assert single.single
    assert single.limit_a in (16, 17, 32)
    idle = known_after((6.0, 0.0), (6.0, None), (6.0, 0.1))
    assert idle.idle_hours == 0.5
    assert known_after((6.0, 0.0), (6.0, 0.0), (6.0, 4.0)).idle_hours == 0


@jax.jit
def served_by(day, offers, scale):
    def period(state, inputs):
        n, offer = inputs
        seen = see(day, WIRING, state, n, feeder(1.0), IDEAL)
        return draw(seen, scale * offer, IDEAL)

    periods = jnp.arange(PERIODS, dtype=jnp.int32)
    return jax.lax.scan(period, initial_state(WIRING), (periods, offers))[1].sum()


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


poured_over = jax.jit(_pour)


@given(
    limits=st.lists(st.floats(0, 10, width=32), min_size=8, max_size=8),
    capacity=st.floats(0, 60, width=32),
)
def test_pouring_fills_evenly_up_to_the_limits(limits, capacity):
    poured = np.asarray(poured_over(np.array(limits, np.float32), np.float32(capacity)))
    assert poured.sum() == pytest.approx(min(capacity, sum(limits)), abs=1e-3)
    level = poured.max()
    assert poured == pytest.approx(np.minimum(limits, level), abs=1e-3)


def smallest_cut(arrival, departure, need, capacity):
    """Compute the optimum by max-flow min-cut, over all subsets of sessions cut at their need."""
    periods = np.arange(PERIODS)
    there = (arrival[:, None] <= periods) & (periods < departure[:, None])
    cuts = []
    for kept in product([False, True], repeat=len(need)):
        kept = np.array(kept)
        most = np.minimum(there[kept].sum(0) * 6.9, capacity) / 4
        cuts.append(need[~kept].sum() + most.sum())
    return min(cuts)


@given(seed=SEEDS, capacity=st.floats(0.5, 20))
def test_the_optimum_equals_the_smallest_cut(seed, capacity):
    rng = np.random.default_rng(seed)
    arrival = rng.integers(0, 90, 7)
    departure = np.minimum(arrival + rng.integers(1, 20, 7), PERIODS)
    need = rng.exponential(15, 7)
    best = float(best_energies(cars_of(arrival, departure, need), capacity)[0, 0])
    assert best == pytest.approx(smallest_cut(arrival, departure, need, capacity), rel=1e-6)
    nobody = cars_of(np.zeros(3), np.zeros(3), np.zeros(3))
    assert best_energies(nobody, capacity)[0, 0] == 0


def test_days_solved_together_are_solved_as_if_alone_and_no_scheduler_serves_more():
    days = days_of(*[random_garage(seed) for seed in range(20)])
    tasks = np.array([[0, 1, 2], [5, 4, 3]])
    best = best_energies(days, 9.0, tasks)
    alone = [
        [float(best_energies(days.at(task).between(day, day), 9.0)[0, 0]) for day in days.dates]
        for task in tasks
    ]
    assert best == pytest.approx(np.array(alone))
    garage = days.garage
    drawn = simulate(days, list(SCHEDULERS.values()), 9.0, tasks).energy_kwh
    counted = np.where(garage.begins[:, tasks].swapaxes(0, 1), drawn, 0).sum((3, 4))
    assert (counted <= best + 1e-3).all()
