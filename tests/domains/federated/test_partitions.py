import numpy as np
import pytest

from apportion.domains.federated.data import Digits, paper_split, skewed_tasks
from apportion.errors import InputError

LABELS = np.tile(np.arange(10), 100)
DIGITS = Digits(np.zeros((1000, 2, 2), np.float32), LABELS, np.arange(1000) >= 900)


def owned(partition):
    return [row[:count] for row, count in zip(partition.index, partition.counts, strict=True)]


def test_the_papers_split_gives_each_group_its_digits_and_no_image_twice():
    partition = paper_split(DIGITS, (12, 8), 40)
    for row, group in zip(owned(partition), partition.groups, strict=True):
        assert set(LABELS[row]) <= (set(range(6)) if group == 0 else set(range(6, 10)))
    everything = np.concatenate(owned(partition))
    assert len(np.unique(everything)) == len(everything) == 20 * 40
    assert not DIGITS.server[everything].any()


def test_a_pool_that_is_short_by_a_few_images_is_dealt_out_evenly():
    partition = paper_split(DIGITS, (1, 11), 33, seed=1)
    minority = partition.counts[partition.groups == 1]
    assert minority.sum() == 360
    assert set(minority) == {32, 33}
    with pytest.raises(InputError, match="ask for fewer"):
        paper_split(DIGITS, (1, 7), 60)


def test_tasks_are_eight_and_two_and_unseen_clients_stay_unseen():
    partition = paper_split(DIGITS, (24, 12), 20)
    training, unseen = skewed_tasks(partition, 10, 4, seen=(14, 8))
    for tasks in (training, unseen):
        groups = partition.groups[np.asarray(tasks.members)]
        assert (groups[:, :8] == 0).all()
        assert (groups[:, 8:] == 1).all()
    assert not set(np.asarray(training.members).flat) & set(np.asarray(unseen.members).flat)
    with pytest.raises(InputError, match="only"):
        skewed_tasks(partition, 1000, 4, sizes=(14, 8), seen=(14, 8))
