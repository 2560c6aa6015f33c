"""Whether to pool: the answer, the interval behind it, and what is refused."""

import numpy as np
import pandas as pd
import pytest

from apportion.certify.statistics import Estimate
from apportion.errors import InputError
from apportion.theory import random_family
from apportion.theory.pooling import TaskAnswer, draw_counts, draw_transitions, should_pool


def family(spread, seed=0):
    return random_family(states=6, actions=3, tasks=8, spread=spread, gamma=0.7, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_equal_tasks_are_pooled_and_distant_ones_with_many_samples_are_not(seed):
    same = should_pool(draw_transitions(family(0.0, seed), 200, seed=seed), gamma=0.7)
    assert same.answer == "pool"
    assert same.saved.low > 0
    assert same.distance.low == 0
    # With few samples noise outweighs the distance.
    assert (
        should_pool(draw_transitions(family(0.3, seed), 12, seed=seed), gamma=0.7).answer
        != "do not pool"
    )
    apart = should_pool(draw_transitions(family(0.3, seed), 600, seed=seed), gamma=0.7)
    assert apart.answer == "do not pool"
    assert apart.saved.high < 0
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


def test_cells_without_samples_are_no_trouble_and_the_answer_shows_itself():
    result = should_pool(draw_transitions(family(0.1), 12), gamma=0.7)
    assert result.covered < 0.5
    assert not result.to_frame().isna().any(axis=None)
    assert "cells have two samples or more" in result.summary()
    assert result.to_frame().samples.tolist() == [12] * 8


def test_counted_samples_have_the_frequencies_of_the_mdp():
    tasks = family(0.5)
    counts = draw_counts(tasks, 400_000, rng=np.random.default_rng(0))
    seen = counts.moves / counts.visits[..., None]
    assert np.abs(seen - tasks.kernel).max() < 0.03
    assert np.abs(counts.rewards / counts.visits - tasks.reward).max() < 0.01
    assert counts.pooled().visits.sum() == 8 * 400_000


def test_words_for_labels_get_the_answer_of_numbers():
    rows = draw_transitions(family(0.0, 1), 100)
    words = rows.assign(
        task=[f"shop {t}" for t in rows.task],
        state=[f"s{x}" for x in rows.state],
        next_state=[f"s{x}" for x in rows.next_state],
    )
    found = should_pool(words, gamma=0.7)
    assert found.answer == "pool"
    assert [task.task for task in found.tasks] == [f"shop {t}" for t in range(8)]
    plain = should_pool(rows, gamma=0.7).to_frame()
    pd.testing.assert_frame_equal(found.to_frame().drop(columns="task"), plain.drop(columns="task"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": "much"}, 'transitions: column "reward" of row 1 is .much.'),
        ({"state": None}, "row 1 has an empty field; fill or drop it"),
        ({"task": 0}, "all rows are of one task; pooling needs at least two"),
        ({"task": range(16)}, "task 0 has one row; each task needs two or more"),
    ],
)
def test_transitions_that_cannot_be_used_are_refused(changes, says):
    with pytest.raises(InputError, match=says):
        should_pool(draw_transitions(family(0.1), 2).assign(**changes), gamma=0.7)


def test_states_that_never_recur_are_refused():
    rows, rng = draw_transitions(family(0.1), 50), np.random.default_rng(0)
    continuous = rows.assign(state=rng.normal(size=len(rows)))
    with pytest.raises(InputError, match="400 different states in 400 rows, which hardly recur"):
        should_pool(continuous, gamma=0.7)


def test_no_rows_no_column_and_a_discount_of_1_are_refused():
    rows = draw_transitions(family(0.1), 2)
    for table, gamma, words in (
        (rows[:0], 0.7, "no rows"),
        (rows.drop(columns="task"), 0.7, '"task" is missing'),
        (rows, 1.0, "gamma: 1"),
    ):
        with pytest.raises(InputError, match=words):
            should_pool(table, gamma=gamma)


def test_the_crossover_is_where_the_noise_saved_equals_the_distance():
    answer = TaskAnswer("shop", 100, Estimate(0.1, 0.05, 0.2, 400), 0.5, 0.3)
    # 100 samples leave .5^2 - .3^2 = .16 to save; at 1600 it is .01, the distance squared.
    assert answer.crossover == pytest.approx(1600)
    assert TaskAnswer("shop", 100, Estimate(0.0, 0.0, 0.2, 400), 0.5, 0.3).crossover == np.inf
