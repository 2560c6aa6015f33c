"""The digits and their files, and who holds which of them."""

from functools import cache

import numpy as np
import pytest

from apportion.domains.federated.data import (
    _COMBINED,
    HELD_BACK,
    KINDS,
    Digits,
    kinds_of,
    load_images,
    mixture,
    paper_split,
    skewed_tasks,
)
from apportion.errors import InputError
from domains.federated.made_up import made_up_digits


def write(path, **changes):
    arrays = {
        "x_train": np.zeros((6, 4, 4), np.uint8),
        "y_train": np.arange(6, dtype=np.uint8),
        "x_test": np.full((3, 4, 4), 255, np.uint8),
        "y_test": np.array([6, 7, 8], np.uint8),
    }
    arrays.update(changes)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_the_test_set_becomes_the_servers(tmp_path):
    digits = load_images(write(tmp_path / "mnist.npz"))
    assert digits.server.tolist() == [False] * 6 + [True] * 3
    assert digits.images.max() == 1.0
    assert digits.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_test": None}, "no array 'x_test'"),
        ({"y_train": np.arange(5, dtype=np.uint8)}, "a label for each"),
        ({"x_train": np.zeros((6, 4, 5), np.uint8)}, "square images"),
        ({"x_test": np.zeros((3, 5, 5), np.uint8)}, "square images of one size"),
        ({"y_test": np.array(7, np.uint8)}, "square images of one size"),
        ({"y_test": np.array([7, 8, 10**6])}, "from 7 to 1000000"),
        ({"x_test": np.zeros((3, 4, 4), np.float32)}, "whole numbers"),
        ({"y_train": np.array([{}] * 6, object)}, "not a readable npz"),
        ({"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)}, "all images are of one class"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        load_images(write(tmp_path / "mnist.npz", **changes))


def test_pooling_averages_squares_and_a_fingerprint_tells_other_images_apart():
    images = np.arange(16, dtype=np.float32).reshape(1, 4, 4)
    digits = Digits(images, np.zeros(1, int), np.ones(1, bool))
    assert digits.pooled(2).images[0].tolist() == [[2.5, 4.5], [10.5, 12.5]]
    with pytest.raises(InputError, match="squares of 3"):
        digits.pooled(3)
    assert digits.fingerprint != Digits(images + 1, digits.labels, digits.server).fingerprint
    assert digits.summary() == (
        f"1 digits, 1 of them the server's, fingerprint {digits.fingerprint}"
    )


LABELS = np.tile(np.arange(10), 100)
DIGITS = Digits(np.zeros((1000, 2, 2), np.float32), LABELS, np.arange(1000) >= 900)


@pytest.mark.parametrize("unlike", [False, True], ids=["alike", "unlike"])
def test_the_papers_split_gives_each_group_its_digits_and_no_image_twice(unlike):
    partition = paper_split(DIGITS, (12, 8), 40, unlike=unlike)
    rows = partition.index
    assert len(np.unique(rows)) == rows.size == 20 * 40
    assert not DIGITS.server[rows].any()
    for row, group in zip(rows, partition.groups, strict=True):
        assert set(LABELS[row]) <= (set(range(6)) if group == 0 else set(range(6, 10)))
    # The commonest of four digits: 25 % of a client's where all hold alike, and a little more by chance.
    commonest = [np.bincount(LABELS[row]).max() / 40 for row in rows[partition.groups == 1]]
    assert (np.mean(commonest) > 0.4) == unlike


def test_a_pool_that_is_short_by_a_few_images_is_dealt_out_evenly():
    partition = paper_split(DIGITS, (1, 11), 33, seed=1)
    minority = partition.counts[partition.groups == 1]
    assert minority.sum() == 360
    assert set(minority) == {32, 33}
    with pytest.raises(InputError, match="reduce either"):
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


def test_unlike_tasks_differ_in_their_minority():
    partition = paper_split(DIGITS, (20, 12), 20)
    for tasks in skewed_tasks(partition, 12, 12, seen=(10, 7), unlike=True):
        groups = partition.groups[np.asarray(tasks.members)]
        assert set(groups.sum(1)) == {1, 2, 3, 4}
        assert (np.diff(groups, axis=1) >= 0).all()


MADE_UP = made_up_digits()
PLACES = np.arange(0, 800)


@cache
def dealt(kind, clients=10, seed=0):
    return mixture(MADE_UP, [(kind, clients, seed)], PLACES, samples=40)


def own_labels(found, client):
    return found.partition.labels[client][: found.partition.counts[client]]


def held(found, client):
    return found.partition.index[client][: found.partition.counts[client]]


def true_labels(found, client):
    return found.digits.labels[held(found, client)]


def classes(found):
    """How many classes a client holds on average."""
    return np.mean([len(np.unique(true_labels(found, client))) for client in range(10)])


def test_clients_of_every_kind_hold_images_of_the_pool_and_none_twice():
    for kind in KINDS + _COMBINED:
        found = dealt(kind)
        assert found.partition.universe == 10
        everything = np.concatenate([held(found, client) for client in range(10)])
        if kind != "colluders":
            assert len(np.unique(everything)) == len(everything)
        added = everything >= len(MADE_UP.labels)
        assert np.isin(everything[~added], PLACES).all()
        assert added.any() == (kind == "noisy-images")
        assert not found.digits.server[everything].any()


def test_the_skews_are_what_their_names_say():
    assert all(len(np.unique(own_labels(dealt("two-labels"), c))) <= 3 for c in range(5))
    papers = dealt("paper")
    rare = {*own_labels(papers, 8), *own_labels(papers, 9)}
    common = {label for client in range(8) for label in own_labels(papers, client)}
    assert len(rare) == 4
    assert not rare & common
    sizes = dealt("sizes")
    assert np.ptp(sizes.partition.counts) > 10
    # Of few images as of many, each class has its part.
    assert np.mean([np.mean(own_labels(sizes, client)) for client in range(10)]) > 3.5
    assert classes(dealt("dirichlet-0.1")) < 5 < classes(dealt("equal"))


@pytest.mark.parametrize(
    ("kind", "malicious", "factor"),
    [("flipped-1", 1, 1.0), ("flipped-3", 3, 1.0), ("scaled", 1, 4.0), ("reversed", 2, -1.0)],
)
def test_as_many_clients_attack_as_the_kind_says(kind, malicious, factor):
    found = dealt(kind)
    flipped = [bool((own_labels(found, c) == 9 - true_labels(found, c)).all()) for c in range(10)]
    factors = found.partition.factors
    assert sum(flipped) == (0 if kind == "reversed" else malicious)
    if factor != 1:
        assert (factors == factor).sum() == malicious
    assert np.isin(factors, (1, factor)).all()


def test_colluders_share_one_model_sleepers_turn_and_free_riders_claim_much():
    colluders = dealt("colluders")
    wrong = [bool((own_labels(colluders, c) != true_labels(colluders, c)).all()) for c in range(10)]
    assert sum(wrong) == 4
    assert len(np.unique(colluders.partition.index[wrong], axis=0)) == 1
    assert len(np.unique(colluders.partition.identities[wrong])) == 1
    begins = dealt("sleepers").partition.begins
    assert sorted(begins) == [0.0] * 7 + [pytest.approx(0.4)] * 3
    riders = dealt("free-riders").partition
    assert ((riders.factors == 0) == (riders.claims == 5)).all()
    assert (riders.factors == 0).sum() == 3


@pytest.mark.parametrize("kind", ["symmetric-noise", "pairwise-noise", "noise-by-client"])
def test_everybody_mistakes_labels_as_the_kind_says(kind):
    found = dealt(kind)
    wrong = [own_labels(found, c) != true_labels(found, c) for c in range(10)]
    parts = np.array([own.mean() for own in wrong])
    # Of labels drawn at random, a tenth is right.
    assert parts.mean() == pytest.approx(0.3 if kind == "pairwise-noise" else 0.27, abs=0.08)
    assert (np.ptp(parts) > 0.4) == (kind == "noise-by-client")
    if kind == "pairwise-noise":
        for client, hit in enumerate(wrong):
            assert (
                own_labels(found, client)[hit] == (true_labels(found, client)[hit] + 1) % 10
            ).all()


def test_clients_come_and_go_as_the_kind_says():
    def there(kind):
        partition, lived = dealt(kind).partition, (np.arange(30)[:, None] + 0.5) / 30
        return (lived - partition.comes) % 1.0 < partition.stays

    late, returning = there("paper+late"), there("paper+returning")
    assert (late[:, :8] & returning[:, :8]).all()
    assert (late[:, 8:].all(1) == (np.arange(30) >= 10)).all()
    assert (returning[:, 8:].any(1) == (np.arange(30) // 10 != 1)).all()
    assert (there("dirichlet-0.3+newcomers").sum(1) == 5).all()
    assert there("paper").all()
    held_alone = set(own_labels(dealt("paper+late"), 9)) - set(own_labels(dealt("paper+late"), 0))
    assert len(held_alone) == 4


@pytest.mark.parametrize("classes", [2, 3, 26])
def test_images_of_any_number_of_classes_are_dealt_out(classes):
    labels = (np.arange(1200) % classes).astype(np.int32)
    images = Digits(np.zeros((1200, 4, 4), np.float32), labels, np.arange(1200) >= 900)
    assert images.classes == classes
    for kind in KINDS:
        found = mixture(images, [(kind, 5, 0)], np.arange(900), samples=30)
        assert found.partition.labels.max() < classes
        assert found.partition.labels.min() >= 0
    groups = paper_split(images, (2, 2), 30)
    assert len(np.unique(labels[groups.index[0]])) <= max(1, round(0.6 * classes))
    assert not set(labels[groups.index[0]]) & set(labels[groups.index[2]])


@pytest.mark.parametrize("kind", ["sizes", "noisy-images", "flipped-3"])
def test_a_federation_is_the_same_alone_and_among_others(kind):
    alone = dealt(kind, seed=5)
    among = mixture(MADE_UP, [("noisy-images", 6, 1), (kind, 10, 5)], PLACES, samples=40)
    assert [task.entities for task in among.tasks] == [list(range(6)), list(range(6, 16))]
    for client in range(10):
        assert (own_labels(alone, client) == own_labels(among, 6 + client)).all()
        here, there = (
            found.digits.images[found.partition.index[place]]
            for found, place in ((alone, client), (among, 6 + client))
        )
        assert (here == there).all()


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(InputError, match="reduce either"):
        dealt("equal", clients=30)
    for wrong in ("flipped-3+paper", "paper+", "paper+flipped-1+scaled"):
        with pytest.raises(InputError, match="a skew and a fault such as"):
            kinds_of(wrong)
    assert set(kinds_of("all")) == {*KINDS, *_COMBINED} - set(HELD_BACK)
