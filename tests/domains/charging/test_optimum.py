from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import Predictor
from apportion.domains.charging.garage import PERIODS, RATE_KW
from apportion.domains.charging.schedulers import SCHEDULERS, best_energies, simulate
from apportion.domains.charging.sessions import read_sessions
from domains.charging.garages import MEDIANS, STATIONS, random_garage


def best_energy(arrival, departure, need, capacity):
    """The optimum of one day's sessions."""
    arrays = (np.reshape(x, (1, -1, 1)) for x in (arrival, departure, need))
    return float(best_energies(*arrays, capacity)[0, 0])


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


@given(seed=st.integers(0, 10**6), capacity=st.floats(0.5, 20))
def test_the_optimum_equals_the_smallest_cut(seed, capacity):
    rng = np.random.default_rng(seed)
    arrival = rng.integers(0, 90, 7)
    departure = np.minimum(arrival + rng.integers(1, 20, 7), PERIODS)
    need = rng.exponential(15, 7)
    assert best_energy(arrival, departure, need, capacity) == pytest.approx(
        smallest_cut(arrival, departure, need, capacity), rel=1e-6
    )


def test_a_garage_without_cars_needs_nothing():
    assert best_energy(np.zeros(3), np.zeros(3), np.zeros(3), 5.0) == 0


def test_days_solved_together_are_solved_as_if_alone():
    days = [random_garage(seed) for seed in range(35)]
    arrays = [np.stack([getattr(d, x) for d in days]) for x in ("arrival", "departure", "need_kwh")]
    tasks = np.array([[0, 1, 2], [5, 4, 3]])
    together = best_energies(*arrays, 5.0, tasks)
    alone = [[best_energy(*(x[d, t] for x in arrays), 5.0) for d in range(35)] for t in tasks]
    assert together == pytest.approx(np.array(alone))


@given(seed=st.integers(0, 10**6), phi=st.sampled_from([0.05, 0.15, 0.4]))
def test_no_scheduler_serves_more_than_the_optimum(seed, phi):
    day = random_garage(seed)
    capacity = phi * STATIONS * RATE_KW
    best = best_energy(*map(np.asarray, (day.arrival, day.departure, day.need_kwh)), capacity)
    stacked = jax.tree.map(lambda x: x[None], day)
    for peer in SCHEDULERS.values():
        assert simulate(stacked, peer, jnp.float32(capacity), MEDIANS).sum() <= best + 1e-3


def test_on_real_days_the_clairvoyant_comes_within_two_percent_of_the_optimum():
    days = Days.of(read_sessions(), "jpl").between("2019-11-01", "2019-11-14")
    predictor = Predictor.fit(days)
    tasks = np.arange(20).reshape(2, 10)
    capacity = 0.15 * 10 * RATE_KW
    best = best_energies(days.arrival, days.departure, days.need_kwh, capacity, tasks)
    knowing = simulate(
        days.garage(), SCHEDULERS["clairvoyant"], capacity, predictor.medians, tasks
    ).sum((2, 3))
    assert best.shape == knowing.shape == (2, len(days))
    assert (knowing <= best + 1e-3).all()
    assert knowing.sum() > 0.98 * best.sum()
