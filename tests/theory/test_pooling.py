"""Whether to pool: the answer, and the interval behind it."""

import numpy as np
import pytest

from apportion.errors import InputError
from apportion.theory import random_family
from apportion.theory.pooling import (
    Transitions,
    draw_counts,
    draw_transitions,
    should_pool,
)


def family(spread, seed=0):
    return random_family(states=6, actions=3, tasks=8, spread=spread, gamma=0.7, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_equal_tasks_are_pooled_and_distant_ones_with_many_samples_are_not(seed):
    same = should_pool(draw_transitions(family(0.0, seed), 200, seed=seed), gamma=0.7)
    assert same.answer == "pool"
    assert same.distance.low == 0
    # With few samples noise outweighs the distance; most cells have no sample at all.
    few = should_pool(draw_transitions(family(0.3, seed), 12, seed=seed), gamma=0.7)
    assert few.answer != "do not pool"
    assert few.samples.tolist() == [12] * 8
    apart = should_pool(draw_transitions(family(0.3, seed), 600, seed=seed), gamma=0.7)
    assert apart.answer == "do not pool"
    low = np.array([distance.low for distance in apart.distances])
    assert (low**2 > apart.room).all()


def test_the_interval_covers_the_true_distance_of_most_tasks():
    covered, bias = [], []
    for seed in range(6):
        tasks = family(0.15, seed)
        average = tasks.average()
        value = average.optimal()[1]
        apart = tasks.backup(value) - average.backup(value)
        truth = np.sqrt((apart**2).mean((-1, -2)))
        found = should_pool(draw_transitions(tasks, 400, seed=seed), gamma=0.7).distances
        covered += [own.low <= d <= own.high for own, d in zip(found, truth, strict=True)]
        bias += [own.value - d for own, d in zip(found, truth, strict=True)]
    assert np.mean(covered) >= 0.9
    assert abs(np.mean(bias)) < 0.1 * truth.mean()


def test_the_estimation_errors_are_those_of_the_samples():
    tasks = family(0.0)
    few = should_pool(draw_transitions(tasks, 300, seed=1), gamma=0.7)
    many = should_pool(draw_transitions(tasks, 4800, seed=1), gamma=0.7, resamples=20)
    assert abs(few.single_errors[0] / many.single_errors[0] - 4) < 0.6
    assert abs(many.single_errors[0] / many.pool_errors[0] - np.sqrt(8)) < 0.1


def test_counted_samples_have_the_frequencies_of_the_mdp():
    tasks = family(0.5)
    counts = draw_counts(tasks, 400_000, rng=np.random.default_rng(0))
    seen = counts.moves / counts.visits[..., None]
    assert np.abs(seen - tasks.kernel).max() < 0.03
    assert np.abs(counts.rewards / counts.visits - tasks.reward).max() < 0.01
    assert counts.pooled().visits.sum() == 8 * 400_000


def test_samples_without_a_second_one_of_any_cell_are_refused():
    """Their noise would be measured as 0, and the answer would be wrong."""
    each = np.arange(2)
    with pytest.raises(InputError, match="no state-action pair of a task has two samples"):
        should_pool(Transitions(each, each, each, np.ones(2), each), gamma=0.7)
