"""LearnedAggregation where clients come late, go and return, lie alone, or mistake labels."""

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from apportion.bridges.flower import LearnedAggregation
from bridges.flower.small_federation import (
    SmallFederation,
    evenly,
    shuffled_digits,
    shuffled_patients,
)
from bridges.flower.test_strategy import (
    NOBODY,
    TRUTH,
    begin,
    models,
    replies_of,
    reply,
    strategy_of,
)

COMMON, RARE = range(8), (8, 9)


def by_digit(labels):
    """Eight clients hold the digits 0-5, two the others."""
    common, rare = np.flatnonzero(labels < 6), np.flatnonzero(labels >= 6)
    parts = [*np.array_split(common, 8), *np.array_split(rare, 2)]
    return [part[:80] for part in parts]


def split_digits(seed):
    return SmallFederation(*shuffled_digits(seed), by_digit, tested=500, samples=200, seed=seed)


WHEN = {
    "late": lambda n, client: client in COMMON or n >= 10,
    "returning": lambda n, client: client in COMMON or not 8 <= n < 16,
    "newcomers": lambda n, client: client in RARE or (n + client) % 8 < 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
def test_those_who_come_late_or_return_are_heard(when):
    gains = []
    for seed in range(2):
        own = split_digits(seed)
        strategy = own.learned()
        learned, plain = (own.run(each, 24, WHEN[when])[-1] for each in (strategy, own.fedavg()))
        assert "huge" not in set(strategy.to_frame()["outcome"])
        gains.append(learned - plain)
    assert np.mean(gains) > -0.003


def late_joiner(strategy, size=30.0):
    """Rounds whose updates shrink to a hundredth, and then one that goes far, to what is right."""
    tables = models(4)
    for n in range(1, 8):
        scores = tables[0] + 0.01 * n
        near = [scores + table / 100 ** (n / 7) for table in tables]
        begin(strategy, scores, n)
        strategy.aggregate_train(n, replies_of(near))
    begin(strategy, scores, 8)
    strategy.aggregate_train(8, [*replies_of(near), reply(9, scores + size * TRUTH)])
    return strategy.to_frame().query("round == 8").set_index("node")["outcome"][9]


def test_an_update_as_large_as_all_were_at_first_is_not_huge_and_beyond_that_the_samples_decide():
    without = LearnedAggregation(**NOBODY)
    assert late_joiner(without, 3.0) == "kept"
    assert late_joiner(LearnedAggregation(**NOBODY), 300.0) == "huge"
    assert late_joiner(strategy_of(), 300.0) == "kept"
    assert late_joiner(strategy_of(), -300.0) == "huge"


def flipped_digits(seed, flippers, **faults):
    """Three clients of 200 digits, of whom some call every digit d by 9 - d."""
    own = SmallFederation(
        *shuffled_digits(seed), evenly(3, 200), tested=500, samples=200, seed=seed, **faults
    )
    for client in flippers:
        images, labels = own.clients[client]
        own.clients[client] = images, 9 - labels
    return own


@pytest.mark.slow
def test_a_liar_alone_cannot_spoil_the_model_and_the_strategy_says_so():
    honest, alone = flipped_digits(0, ()), flipped_digits(0, (2,), crash=(0,), nan=(1,))
    strategy = honest.learned()
    begun = honest.run(strategy, 5)
    kept = strategy.kept_model.to_numpy_ndarrays()
    liar = alone.learned()
    found = alone.run(liar, 4, first=kept)
    assert begun[-1] > 0.8
    assert (found == begun[-1]).all()
    assert set(liar.to_frame().query("node == 2")["outcome"]) == {"harmful"}
    told = liar.summary()
    assert "the last one, all replies being harmful in 4" in told
    assert "node 0 failed 4 times; node 1 not finite 4 times; node 2 harmful 4 times" in told
    # From the first round on, too.
    assert alone.run(alone.learned(), 4)[-1] > 0.05


def mistaken(labels, part, seed):
    """Labels of which a part is the next class's."""
    hit = np.random.default_rng(seed).random(len(labels)) < part
    return np.where(hit, (labels + 1) % 10, labels)


@pytest.mark.slow
def test_where_everybody_mistakes_labels_it_is_not_far_below_fedavg():
    gains = []
    for seed in range(3):
        own = SmallFederation(
            *shuffled_digits(seed), evenly(10, 80), tested=700, samples=200, seed=seed
        )
        own.clients = [
            (images, mistaken(labels, 0.3, [seed, client]))
            for client, (images, labels) in enumerate(own.clients)
        ]
        both = (own.run(each, 30)[-5:].mean() for each in (own.learned(), own.fedavg()))
        learned, plain = both
        gains.append(learned - plain)
    # It was -.02 with a gate that looked at single rounds' confidence alone.
    assert np.mean(gains) > -0.01


@pytest.mark.slow
def test_two_classes_of_a_table_are_a_federation_too():
    def skewed(labels):
        ill, well = np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)
        return [*np.array_split(well, 5), *np.array_split(ill, 2)]

    late = lambda n, client: client < 5 or n >= 8  # noqa: E731
    gains = []
    for seed in range(2):
        own = SmallFederation(
            *shuffled_patients(seed), skewed, tested=150, samples=80, seed=seed, rate=0.05
        )
        learned, plain = (own.run(each, 16, late)[-1] for each in (own.learned(), own.fedavg()))
        assert learned > 0.9
        gains.append(learned - plain)
    assert np.mean(gains) > -0.02
