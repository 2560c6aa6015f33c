"""The schedulers, simulated days and the optimum: within limits, car by car, blind to the future."""

import dataclasses
import math
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
from live_garage import speaks

from apportion.errors import InputError
from apportion_charging import schedulers
from apportion_charging.garage import (
    REAL,
    Garage,
    draw,
    initial_state,
    learn,
    see,
)
from apportion_charging.schedulers import (
    SCHEDULERS,
    _pour,
    best_energies,
    simulate,
)

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
    # What is known of a car that has just come is nothing: its first offer is seen a period later.
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


def test_cars_that_agree_in_all_but_their_arrival_are_served_by_it():
    alike = jax.tree.map(lambda x: jnp.repeat(x[:1], 2, 0), random_garage(1))
    day = dataclasses.replace(
        jax.tree.map(lambda x: x[..., :1], alike),
        arrival=jnp.array([[3], [3]], jnp.int32),
        departure=jnp.array([[9], [9]], jnp.int32),
        arrived=jnp.array([[0.7], [0.5]]),
        need_kwh=jnp.full((2, 1), 5.0),
        to_come_kwh=alike.to_come_kwh,
        clock_hours=alike.clock_hours,
    )
    two = WIRING.at(np.array([0, 0]))

    @jax.jit
    def offers():
        seen = see(day, two, initial_state(two), jnp.int32(3), jnp.float32(4.0))
        return {name: schedule(seen) for name, schedule in SCHEDULERS.items()}

    for name, offer in offers().items():
        expected = [2.0, 2.0] if name == "equal" else [0.0, 4.0]
        assert offer.tolist() == pytest.approx(expected), name


def sessions(day: Garage) -> dict[str, np.ndarray]:
    """All that is known of cars, by its name, as an array (stations, sessions)."""
    return {
        name: np.array(x)
        for name, x in vars(day).items()
        if name not in ("to_come_kwh", "clock_hours")
    }


def other_future(day: Garage, seen, drawn, n: int, rng) -> Garage:
    """The same day up to period n, and anything after it: needs, departures, arrivals, cars."""
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
                    # Nothing has shown of it: it may be any other car.
                    arrays["car_a"][station, place] = rng.uniform(6, 32)
                    arrays["car_share"][station, place] = rng.choice([1.0, 1 / 3])
                    arrays["need_kwh"][station, place] = rng.uniform(0.1, 30)
                elif 0 < got < 0.7 * arrays["need_kwh"][station, place]:
                    # It does not taper yet, and need not for long.
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
    """So the test above would notice a scheduler that did."""
    day, capacity = random_garage(3), feeder(0.1)
    seen, drawn = walk("clairvoyant", day, capacity)

    def looked_ahead(n):
        future = other_future(day, seen, drawn, n, np.random.default_rng(n))
        then = walk("clairvoyant", future, capacity)[0].known.offered_a
        return not np.array_equal(seen.known.offered_a[: n + 2], then[: n + 2])

    assert any(map(looked_ahead, range(10, 80)))


def laxity(leaves: str, need: str):
    return lambda car: car[leaves] - max(car[need] - car["got"], 0) / car["usable"]


KEYS = {
    "fcfs": lambda car: car["arrived"],
    "edf": lambda car: car["stated_departure"],
    "llf": laxity("stated_departure", "requested_kwh"),
    "edf-predicted": lambda car: car["predicted_departure"],
    "llf-predicted": laxity("predicted_departure", "predicted_need_kwh"),
    "llf-recalled": laxity("recalled_departure", "recalled_need_kwh"),
    "largest-remaining": lambda car: -max(car["requested_kwh"] - car["got"], 0),
    "clairvoyant": laxity("leaves", "need_kwh"),
}


def plain_wishes(cars: list[dict], name: str, capacity: float) -> None:
    """What a scheduler wishes for each car, in kW, within what it is believed to take."""
    left = capacity
    if name == "equal":
        for number, car in enumerate(sorted(cars, key=lambda car: car["limit_kw"])):
            car["wish"] = min(car["limit_kw"], left / (len(cars) - number))
            left -= car["wish"]
        return
    for car in sorted(cars, key=lambda car: (KEYS[name](car), car["arrived"])):
        most = car["limit_kw"]
        if name == "clairvoyant":
            most = min(most, 4 * (car["need_kwh"] - car["got"]))
        car["wish"] = min(most, left)
        left -= car["wish"]


def plain_points(cars: list[dict], capacity: float) -> None:
    """Wishes as whole amperes: in their order, then who is on, then anybody."""
    room, least = capacity, 6
    for car in cars:
        car["told"], car["most"] = 0, math.floor(car["most_a"] + 1e-3)
    able = [car for car in cars if car["most"] >= least]
    order = sorted(
        able,
        key=lambda c: (-c["held"], -c["wish"] / c["kw_per_a"], -(c["on"] > 0), c["station"]),
    )
    for turn in ("wish", "on", "all"):
        for car in order:
            goal = car["most"]
            if turn == "wish":
                if not car["held"] and car["wish"] <= 0:
                    continue
                goal = min(max(math.ceil(car["wish"] / car["kw_per_a"] - 1e-3), least), goal)
            elif turn == "on" and not car["told"]:
                continue
            target = math.floor(min(goal, car["told"] + room / car["kw_per_a"] + 1e-3))
            if target >= least and target > car["told"]:
                room -= (target - car["told"]) * car["kw_per_a"]
                car["told"] = target


def plain_day(day: Garage, name: str, capacity: float) -> float:
    """A day car by car, in plain Python and double precision."""
    cars, known = [], sessions(day)
    for i, k in np.argwhere(known["departure"] > known["arrival"]):
        car = {name: float(values[i, k]) for name, values in known.items()}
        wired = {x: float(getattr(WIRING, x)[i]) for x in ("kw_per_a", "phases", "max_a")}
        fresh = {"got": 0.0, "limit_a": wired["max_a"], "single": False, "held": False}
        fresh |= dict.fromkeys(("on", "idle", "off"), 0)
        cars.append(car | wired | fresh | {"station": i, "leaves": car["departure"] / 4})
    for n in range(PERIODS):
        here = [c for c in cars if c["arrival"] <= n < c["departure"]]
        for car in here:
            done = car["idle"] >= 2
            probed = 6 if car["off"] >= 2 else 0
            car["most_a"], car["wish"] = probed if done else car["limit_a"], 0.0
            car["limit_kw"] = 0.0 if done else car["limit_a"] * car["kw_per_a"]
            car["usable"] = (
                car["limit_a"] * car["kw_per_a"] / (car["phases"] if car["single"] else 1)
            )
        plain_wishes([car for car in here if car["limit_kw"]], name, capacity)
        plain_points(here, capacity)
        for car in here:
            left, share = car["need_kwh"] - car["got"], car["car_share"] * car["kw_per_a"]
            past = max(1 - left / max(car["need_kwh"], 1e-6) - 0.8, 0) / 0.2
            current = car["car_a"] + (2 - car["car_a"]) * min(past, 1)
            kw = min(car["told"] * share, current * share, 4 * left) if left > 1e-6 else 0.0
            car["got"] += kw / 4
            told, evenly = car["told"], kw / car["kw_per_a"]
            car["on"], car["off"] = (car["on"] + 1, 0) if told else (0, car["off"] + 1)
            if not told or not speaks(int(car["number"]), n - int(car["arrival"])):
                continue
            car["single"] |= car["phases"] > 1 and 0.5 < evenly < 5.4
            taken = evenly * (car["phases"] if car["single"] else 1)
            car["idle"] = car["idle"] + 1 if taken < 0.5 else 0
            if taken < 0.9 * told:
                car["limit_a"] = min(max(math.ceil(taken) + 1, 6), car["max_a"])
            elif told > car["limit_a"] - 1:
                car["limit_a"] = min(car["max_a"], 1.5 * car["limit_a"])
    return sum(car["got"] for car in cars)


def test_a_simulated_day_equals_one_walked_car_by_car():
    days = [random_garage(seed) for seed in range(8)]
    for phi in (0.08, 0.25):
        # Cars that were there before count here on the day, too: nothing is moved.
        for name in SCHEDULERS:
            energy = np.array([walk(name, day, feeder(phi))[1].sum() for day in days])
            expected = [plain_day(day, name, phi * FULL_KW) for day in days]
            # In single precision a car may come to be believed an ampere apart.
            assert energy == pytest.approx(expected, rel=1e-2), name
            assert np.median(np.abs(energy / expected - 1)) < 1e-4, name


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
    # After a day that was left out nobody knows what the car that stayed had got.
    missed = dataclasses.replace(days, dates=days.dates + (np.arange(len(days)) >= 3))
    assert days.joins[3]
    assert not missed.joins[3]
    for some in (missed, days):
        several = simulate(some, schedule, 12.0).energy_kwh
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedulers, "make_lanes", lambda joins: np.arange(len(joins))[None])
            one = simulate(some, schedule, 12.0).energy_kwh
        assert several == pytest.approx(one, abs=1e-4)
    # What a car draws after midnight counts on its first day, and is never more than its need.
    need = np.where(days.garage.begins, days.garage.need_kwh, 0)
    assert (one[0, 0] <= need + 1e-3).all()
    assert one.sum() <= 12.0 * 24 * (len(days) + 2)
    beyond = days.garage.begins & (days.garage.departure > PERIODS)
    alone = simulate(days, schedule, 1000.0).energy_kwh[0, 0]
    assert alone[beyond] == pytest.approx(need[beyond], rel=0.2, abs=0.5)


MANY, SIZES = 30, (8, 15, 30)
"""Stations enough that few and all of them are worked on by turns, and how many at once."""
WIDE = WIRING.at(np.arange(MANY) % STATIONS)


def test_few_stations_are_worked_on_where_few_have_a_car_all_where_many_do_and_a_day_is_the_same():
    # One car more every three periods, and none is ever full; and any other day.
    comes = np.arange(0, 3 * MANY, 3, dtype=np.int32)[:, None]
    crowd = dataclasses.replace(
        random_garage(0, stations=MANY, sessions=1),
        arrival=comes,
        departure=np.full_like(comes, PERIODS),
        need_kwh=np.full(comes.shape, 1e3, np.float32),
        car_a=np.full(comes.shape, 16.0, np.float32),
    )
    other = random_garage(1, stations=MANY, sessions=1)
    start = np.maximum(other.arrival, 0)
    leaves = np.where(other.departure > start, other.departure, 0)
    days = [crowd, dataclasses.replace(other, arrival=start, departure=leaves)]
    widths = set()

    def schedule(seen):
        widths.add(len(seen.plugged))
        return SCHEDULERS["llf"](seen)

    names = tuple(map(str, range(MANY)))
    wide = dataclasses.replace(days_of(*days), stations=names, wiring=WIDE)
    for phi in (0.05, 0.3):
        capacity = feeder(phi * MANY / STATIONS)
        energies = simulate(wide, [schedule], float(capacity)).energy_kwh[0, 0]
        assert widths == set(SIZES)
        for day, found in zip(days, energies, strict=True):
            drawn = schedulers.walk_day(day, WIDE, SCHEDULERS["llf"], capacity, REAL)[1]
            assert found == pytest.approx(by_session(day, drawn), rel=1e-5, abs=1e-4)


ONE = WIRING.at(np.array([0]))


def known_after(*periods: tuple[float, float | None]):
    """What is known of a car at a station of 22 kW after periods of (amperes offered, kW metered)."""
    state = initial_state(ONE)
    for offered, kw in periods:
        heard = jnp.array([kw is not None])
        kw_now = jnp.array([0.0 if kw is None else kw])
        state = learn(state, ONE, jnp.array([offered]), kw_now, heard, jnp.float32(0.25))
    return jax.tree.map(lambda x: x[0].item(), state)


def test_a_cars_own_limit_shows_in_what_it_draws_and_silence_says_nothing():
    assert known_after((32.0, None)).limit_a == 32
    # 16 A on three phases: it cannot take more; once it takes all it is offered, more is tried.
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
    """The same by the theorem of flows and cuts: over every choice of sessions cut at their need."""
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
