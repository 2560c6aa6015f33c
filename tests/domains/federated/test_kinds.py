import numpy as np
import pytest

from apportion.domains.federated.data import COMBINED, KINDS, kinds_of, mixture
from apportion.errors import InputError
from domains.federated.made_up import made_up_digits

DIGITS = made_up_digits()
PLACES = np.arange(0, 800)


def dealt(kind, clients=10, seed=0):
    return mixture(DIGITS, [(kind, clients, seed)], PLACES, samples=40)


def own_labels(found, client):
    return found.partition.labels[client][: found.partition.counts[client]]


def true_labels(found, client):
    rows = found.partition.index[client][: found.partition.counts[client]]
    return found.digits.labels[rows]


@pytest.mark.parametrize("kind", KINDS + COMBINED)
def test_clients_of_every_kind_hold_images_of_the_pool_and_none_twice(kind):
    found = dealt(kind)
    partition = found.partition
    assert partition.universe == 10
    clean = [row[:n] for row, n in zip(partition.index, partition.counts, strict=True)]
    clean = np.concatenate(clean)
    assert len(np.unique(clean)) == len(clean)
    added = clean >= len(DIGITS.labels)
    assert np.isin(clean[~added], PLACES).all()
    assert added.any() == (kind == "noisy-images")
    assert not found.digits.server[clean].any()


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
    equal = [len(np.unique(own_labels(dealt("equal"), client))) for client in range(10)]
    skewed = [len(np.unique(own_labels(dealt("dirichlet-0.1"), client))) for client in range(10)]
    assert np.mean(skewed) < 5 < np.mean(equal)


@pytest.mark.parametrize(
    ("kind", "liars", "factor"),
    [("flipped-1", 1, 1.0), ("flipped-3", 3, 1.0), ("scaled", 1, 4.0), ("reversed", 2, -1.0)],
)
def test_as_many_clients_attack_as_the_kind_says(kind, liars, factor):
    found = dealt(kind)
    flipped = [bool((own_labels(found, c) == 9 - true_labels(found, c)).all()) for c in range(10)]
    factors = found.partition.factors
    assert sum(flipped) == (0 if kind == "reversed" else liars)
    if factor != 1:
        assert (factors == factor).sum() == liars
    assert np.isin(factors, (1, factor)).all()


@pytest.mark.parametrize("kind", [*COMBINED, "dirichlet-1+flipped-1"])
def test_a_combined_kind_has_the_skew_and_the_fault_of_its_parts(kind):
    skew, fault = kind.split("+")
    found, faulty = dealt(kind), dealt(fault)
    assert sorted(found.partition.factors) == sorted(faulty.partition.factors)
    flips = [bool((own_labels(found, c) != true_labels(found, c)).any()) for c in range(10)]
    assert sum(flips) == {"reversed": 0, "flipped-3": 3}.get(fault, 1)
    if skew == "sizes":
        assert np.ptp(found.partition.counts) > 10
        return
    kinds = np.mean([len(np.unique(true_labels(found, client))) for client in range(10)])
    assert kinds < 9 < np.mean([len(np.unique(true_labels(faulty, c))) for c in range(10)])


def test_combined_kinds_deal_clients_of_their_own():
    kinds = ("paper", "paper+flipped-3", "paper+scaled")
    held = [dealt(kind).partition.index.tobytes() for kind in kinds]
    assert len(set(held)) == 3


def test_a_mixture_has_tasks_of_every_kind_and_size_with_clients_of_their_own():
    wanted = [(kind, m, seed) for kind in ("equal", "paper") for m in (4, 7) for seed in (3, 4)]
    found = mixture(DIGITS, wanted, PLACES, samples=20)
    assert found.kinds == ("equal",) * 4 + ("paper",) * 4
    assert found.tasks.size.tolist() == [4, 4, 7, 7] * 2
    members = [client for task in found.tasks for client in task.entities]
    assert sorted(members) == list(range(2 * 22))
    rows = {tuple(found.partition.index[task.entities[0]]) for task in found.tasks}
    assert len(rows) == 8


@pytest.mark.parametrize("kind", ["sizes", "noisy-images", "flipped-3"])
def test_a_federation_is_the_same_alone_and_among_others(kind):
    alone = dealt(kind, seed=5)
    among = mixture(DIGITS, [("noisy-images", 6, 1), (kind, 10, 5)], PLACES, samples=40)
    for client in range(10):
        assert (own_labels(alone, client) == own_labels(among, 6 + client)).all()
        here, there = (
            found.digits.images[found.partition.index[place]]
            for found, place in ((alone, client), (among, 6 + client))
        )
        assert (here == there).all()


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(InputError, match="did you mean"):
        kinds_of("equall")
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
    assert kinds_of("all") == KINDS + COMBINED
    assert kinds_of("sizes+noisy-labels") == ("sizes+noisy-labels",)
