import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from apportion.errors import InputError
from apportion.tasks import Task, count_tasks, draw_tasks, single_tasks, split_entities
from apportion.trees import stack


@given(st.integers(1, 30), st.data())
def test_drawn_tasks_are_distinct_subsets_of_the_right_size(universe, data):
    size = data.draw(st.integers(1, universe))
    count = data.draw(st.integers(1, min(40, math.comb(universe, size))))
    tasks = draw_tasks(universe, size, count, seed=data.draw(st.integers(0, 99)))
    subsets = {frozenset(row) for row in np.asarray(tasks.members).tolist()}
    assert len(subsets) == count
    assert all(len(s) == size and max(s) < universe for s in subsets)


def test_drawing_all_subsets_gives_each_once():
    tasks = draw_tasks(7, 3, 35)
    drawn = {tuple(row) for row in np.asarray(tasks.members).tolist()}
    assert drawn == set(itertools.combinations(range(7), 3))


def test_draws_are_uniform_over_the_subsets():
    seen = Counter()
    for seed in range(1500):
        (row,) = np.asarray(draw_tasks(5, 2, 1, seed=seed).members).tolist()
        seen[tuple(row)] += 1
    assert len(seen) == 10
    assert stats.chisquare(list(seen.values())).pvalue > 1e-3


def test_every_entity_is_as_likely_beyond_63_bits():
    assert count_tasks(200, 20) > 2**63
    tasks = draw_tasks(200, 20, 3000, seed=4)
    assert len({frozenset(r) for r in np.asarray(tasks.members).tolist()}) == 3000
    used = np.bincount(np.asarray(tasks.members).ravel(), minlength=200)
    # Twenty places of a subset are dependent: the variance of a count is n p (1 - p).
    z = (used - 300) / math.sqrt(3000 * 0.1 * 0.9)
    assert abs(z).max() < 4.5
    assert 0.8 < z.std() < 1.2


def test_tasks_are_those_of_the_seed_and_of_the_entities_named():
    first, same, other = (draw_tasks(50, 10, 20, seed=s).members for s in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    tasks = draw_tasks([3, 5, 8, 13], 2, 6)
    assert set(np.asarray(tasks.members).ravel().tolist()) == {3, 5, 8, 13}


def test_several_sizes_are_padded_and_masked():
    tasks = draw_tasks(20, [2, 5], 11, seed=3)
    assert tasks.width == 5
    assert sorted(np.asarray(tasks.mask).sum(-1).tolist()) == [2] * 6 + [5] * 5
    members, mask = np.asarray(tasks.members), np.asarray(tasks.mask)
    for row, real in zip(members, mask, strict=True):
        assert set(row[~real]) <= {row[0]}


def test_one_of_the_tasks_is_its_own_row_and_some_of_them_are_theirs():
    subsets = [[0, 1, 2], [3, 4], [5, 6, 7]]
    tasks = Task.of(subsets)
    assert [task.entities for task in tasks] == subsets
    assert tasks[-1].entities == subsets[-1]
    assert [task.entities for task in tasks[[2, 0]]] == [subsets[2], subsets[0]]
    assert [task.entities for task in tasks[1:]] == subsets[1:]


def test_runs_with_tasks_of_their_own_are_one_more_axis():
    runs = stack([Task.of([[0, 1], [1, 2]]), Task.of([[3, 4], [4, 5]])])
    assert (len(runs), runs.count, runs.width) == (2, 2, 2)
    assert [task.entities for task in runs[1]] == [[3, 4], [4, 5]]
    assert [task.entities for task in runs.flat] == [[0, 1], [1, 2], [3, 4], [4, 5]]
    assert [tasks[0].entities for tasks in runs.first(1)] == [[0, 1], [3, 4]]
    assert [tasks[0].entities for tasks in single_tasks(runs[1])] == [[3, 4], [4, 5]]


def test_split_entities_shares_nobody():
    seen, unseen = split_entities(68, 18, seed=7)
    assert (len(seen), len(unseen)) == (50, 18)
    assert set(seen) | set(unseen) == set(range(68))


def test_cash_comes_first_in_every_task():
    tasks = Task.of([[0, 1], [2]]).with_entity(9)
    assert np.asarray(tasks.members)[:, 0].tolist() == [9, 9]
    assert np.asarray(tasks.mask).sum(-1).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: draw_tasks(5, 6, 1), "size 6 does not fit a universe of 5"),
        (lambda: draw_tasks(5, 2, 11), "only 10"),
        (lambda: draw_tasks(5, 2, 0), "count is 0"),
        (lambda: Task.of([[1], []]), "task 1 is empty"),
        (lambda: Task.of([[1, 1]]), "entity 1 twice"),
        (lambda: Task([[0, 2, 3], [3, 3, 3]], [[True] * 3] * 2), "entity 3 twice"),
        (lambda: Task([[0, 0, 1]], [[True, False, True]])[0].with_entity(1), "entity 1 twice"),
        (lambda: Task([[0, -1]], [[True, True]]), "entity -1; indices must be >= 0"),
        (lambda: Task.of([[1, 2], [2, 1]]), "tasks 0 and 1 are the same subset"),
        (lambda: Task.of([[1, 2]], width=1), "width 1 is less"),
        (lambda: split_entities(5, 5), "at least one entity"),
    ],
)
def test_bad_tasks_get_one_sentence(make, words):
    with pytest.raises(InputError, match=words):
        make()
