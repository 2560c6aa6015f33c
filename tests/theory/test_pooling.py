"""Whether to pool: the answer, the interval behind it, and what is refused."""

import dataclasses

import numpy as np
import pytest

from apportion.errors import InputError
from apportion.statistics import Estimate
from apportion.theory import draw_counts, draw_transitions, random_family, should_pool
from apportion.theory.pooling import TaskAnswer


def family(spread, seed=0):
    return random_family(states=6, actions=3, tasks=8, spread=spread, gamma=0.7, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_equal_tasks_are_pooled_and_distant_ones_with_many_samples_are_not(seed):
    same = should_pool(draw_transitions(family(0.0, seed), 200, seed=seed), gamma=0.7)
    assert same.answer == "pool"
    assert same.distance.low == 0
    apart = should_pool(draw_transitions(family(0.3, seed), 600, seed=seed), gamma=0.7)
    assert apart.answer == "do not pool"
    assert all(task.answer == "do not pool" for task in apart.tasks)


def test_the_interval_covers_the_true_distance_of_most_tasks():
    covered, bias = [], []
    for seed in range(6):
        tasks = family(0.15, seed)
        average = tasks.average()
        value = average.optimal()[1]
        apart = tasks.backup(value) - average.backup(value)
        truth = np.sqrt((apart**2).mean((-1, -2)))
        found = should_pool(draw_transitions(tasks, 400, seed=seed), gamma=0.7).tasks
        covered += [
            t.distance.low <= d <= t.distance.high for t, d in zip(found, truth, strict=True)
        ]
        bias += [t.distance.value - d for t, d in zip(found, truth, strict=True)]
    assert np.mean(covered) >= 0.9
    assert abs(np.mean(bias)) < 0.1 * truth.mean()


def test_the_estimation_errors_are_those_of_the_samples():
    tasks = family(0.0)
    few = should_pool(draw_transitions(tasks, 300, seed=1), gamma=0.7).tasks[0]
    many = should_pool(draw_transitions(tasks, 4800, seed=1), gamma=0.7, resamples=20).tasks[0]
    assert abs(few.single_error / many.single_error - 4) < 0.6
    assert abs(many.single_error / many.pool_error - np.sqrt(8)) < 0.1


def test_more_samples_turn_the_answer_from_pooling_to_learning_alone():
    tasks = family(0.1, 3)
    answers = [should_pool(draw_transitions(tasks, n), gamma=0.7).answer for n in (60, 3000)]
    assert answers == ["pool", "do not pool"]


def test_cells_without_samples_are_no_trouble():
    transitions = draw_transitions(family(0.1), 12)
    result = should_pool(transitions, gamma=0.7)
    assert result.covered < 0.5
    assert not result.to_frame().isna().any(axis=None)
    assert "cells have two samples or more" in result.summary()


def test_the_answer_can_be_drawn():
    result = should_pool(draw_transitions(family(0.1), 100), gamma=0.7)
    assert "Pool?" in result.plot().axes[0].get_title()


def test_counted_samples_have_the_frequencies_of_the_mdp():
    tasks = family(0.5)
    counts = draw_counts(tasks, 400_000, rng=np.random.default_rng(0))
    seen = counts.moves / counts.visits[..., None]
    assert np.abs(seen - tasks.kernel).max() < 0.03
    assert np.abs(counts.rewards / counts.visits - tasks.reward).max() < 0.01
    assert counts.pooled().visits.sum() == 8 * 400_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reward": np.full(16, np.nan)}, "reward of row 0 is not finite"),
        ({"task": np.zeros(16, int)}, "at least two tasks"),
        ({"state": np.full(16, -1)}, "column state has a negative index"),
    ],
)
def test_transitions_that_cannot_be_used_are_refused(change, says):
    good = draw_transitions(family(0.1), 2)
    with pytest.raises(InputError, match=says):
        should_pool(dataclasses.replace(good, **change), gamma=0.7)


def test_a_discount_outside_its_range_is_refused():
    with pytest.raises(InputError, match="gamma: 1"):
        should_pool(draw_transitions(family(0.1), 20), gamma=1.0)


def test_the_crossover_is_where_the_noise_saved_equals_the_distance():
    answer = TaskAnswer("shop", 100, Estimate(0.1, 0.05, 0.2, 400), 0.5, 0.3)
    # 100 samples leave .5^2 - .3^2 = .16 to save; at 1600 it is .01, the distance squared.
    assert answer.crossover == pytest.approx(1600)
    assert answer.gain == pytest.approx(0.15)
    assert TaskAnswer("shop", 100, Estimate(0.0, 0.0, 0.2, 400), 0.5, 0.3).crossover == np.inf
