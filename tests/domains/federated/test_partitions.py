import numpy as np
import pytest

from apportion.domains.federated.digits import Digits
from apportion.domains.federated.partitions import dirichlet_split, paper_split, skewed_tasks
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


def test_a_small_concentration_gives_each_client_few_labels():
    def labels_held(concentration):
        partition = dirichlet_split(DIGITS, (9,), 40, concentration)
        assert len(np.unique(np.concatenate(owned(partition)))) == 360
        return np.mean([len(set(LABELS[row])) for row in owned(partition)])

    assert labels_held(0.05) < 4 < 8 < labels_held(100.0)


def test_quantity_skew_spreads_the_counts_and_keeps_the_largest():
    partition = paper_split(DIGITS, (12, 8), 40).with_quantity_skew(1.0, least=5)
    assert partition.counts.max() == 40
    assert partition.counts.min() >= 5
    assert partition.counts.std() > 5


def test_byzantine_clients_flip_and_noisy_clients_scatter_their_labels_alone():
    honest = paper_split(DIGITS, (12, 8), 40)
    flipped = honest.with_flipped_labels([2])
    assert (flipped.labels[2] == 9 - honest.labels[2]).all()
    noisy = honest.with_noisy_labels([3], 1.0)
    assert set(noisy.labels[3]) - set(range(6))
    for changed, client in ((flipped, 2), (noisy, 3)):
        others = np.arange(20) != client
        assert (changed.labels[others] == honest.labels[others]).all()
