from dataclasses import replace
from types import SimpleNamespace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.federated.aggregators import (
    UNIFORM,
    BySamples,
    FineTuned,
    Fixed,
    Median,
    Received,
    ServerStep,
    TrimmedMean,
)
from apportion.domains.federated.federation import ServerSamples
from apportion.problem import Observation
from apportion_studies.federated.peers import Adaptive, Krum, NearestMixing


def received(models, mask=None, counts=None):
    models = jnp.asarray(models, float)
    m = len(models)
    mask = jnp.ones(m, bool) if mask is None else jnp.asarray(mask)
    counts = jnp.ones(m, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
    observation = Observation(jnp.zeros((m, 1, 1)), jnp.zeros(m))
    zero = jnp.zeros(models.shape[1])
    return Received(models, observation, counts, mask, mask, zero, zero, None, None, None)


# Operation by operation, every shape compiles dozens of programs.
aggregate = eqx.filter_jit(lambda aggregator, received: aggregator(received))
MODELS = np.random.default_rng(0).normal(size=(7, 5))
PADDED = np.vstack([MODELS, 100 * np.ones((2, 5))])
MASK = [True] * 7 + [False] * 2


@pytest.mark.parametrize(
    ("aggregator", "expected"),
    [
        (UNIFORM, MODELS.mean(0)),
        (Median(), np.median(MODELS, 0)),
        (TrimmedMean(0.3), np.sort(MODELS, 0)[2:-2].mean(0)),
        (BySamples(), MODELS.mean(0)),
        (Fixed(jnp.arange(9.0)), np.arange(7) @ MODELS / 21),
    ],
    ids=lambda value: type(value).__name__,
)
def test_aggregates_are_as_defined_and_padding_takes_no_part(aggregator, expected):
    model, shares = aggregate(aggregator, received(PADDED, MASK))
    assert np.asarray(model) == pytest.approx(expected, abs=1e-5)
    assert float(shares.sum()) == pytest.approx(1, abs=1e-5)
    assert (np.asarray(shares)[7:] == 0).all()


def test_the_median_of_an_even_number_is_between_the_middle_two():
    model, _ = aggregate(Median(), received(MODELS[:4]))
    assert np.asarray(model) == pytest.approx(np.median(MODELS[:4], 0), abs=1e-6)


def test_fine_tuning_trains_fedavgs_average_on_the_servers_real_samples_alone():
    def descend(model, owned, *, key):
        used = owned.labels[: int(owned.count)]
        return model + jnp.asarray([used.sum(), owned.count, *owned.index[: len(used)], key])

    server = SimpleNamespace(
        images=jnp.zeros((9, 2, 2)), labels=10 * jnp.arange(9), descend=descend
    )
    shown, kept = ([place in own for place in (5, 3, 7, 1)] for own in ((5,), (7, 1)))
    samples = ServerSamples(jnp.asarray([5, 3, 7, 1]), jnp.asarray(shown), jnp.asarray(kept))
    models, counts = [[0.0] * 6, [4.0] * 6], [3, 1]
    about = {"samples": samples, "federation": server, "key": 0.5}
    given = replace(received(models, counts=counts), **about)
    model, shares = FineTuned()(given)
    assert shares.tolist() == [0.75, 0.25]
    assert model.tolist() == [1 + 130, 1 + 3, 1 + 5, 1 + 7, 1 + 1, 1.5]


def test_samples_weigh_and_the_minority_gets_its_total():
    for counts, expected in (
        (range(1, 8), np.arange(1, 8) / 28),
        # Nobody takes over by claiming samples.
        ([10, 10, 10, 10**6], np.array([1, 1, 1, 10]) / 13),
    ):
        _, shares = aggregate(BySamples(), received(MODELS[: len(counts)], counts=counts))
        assert np.asarray(shares) == pytest.approx(expected)
    shares = Fixed.minority(0.45).shares
    assert float(shares[8:].sum()) == pytest.approx(0.45)
    assert float(shares.sum()) == pytest.approx(1)


@pytest.mark.parametrize("byzantine", [0, 3])
def test_krum_chooses_the_model_nearest_to_all_but_the_byzantine_and_two(byzantine):
    rng = np.random.default_rng(2)
    for _ in range(8):
        models = rng.normal(size=(8, 2))
        apart = ((models[:, None] - models) ** 2).sum(-1)
        near = np.sort(apart, 1)[:, 1 : 1 + 8 - byzantine - 2]
        chosen = near.sum(1).argmin()
        padded = np.vstack([models, np.zeros((2, 2))])
        model, shares = aggregate(Krum(byzantine), received(padded, [True] * 8 + [False] * 2))
        assert np.asarray(shares).tolist() == np.eye(10)[chosen].tolist()
        assert np.asarray(model) == pytest.approx(models[chosen])


def test_near_neighbours_are_mixed_before_the_trimmed_mean():
    model, shares = aggregate(NearestMixing(0.3), received(PADDED, MASK))
    mixed = np.stack([
        MODELS[np.argsort(((MODELS - own) ** 2).sum(1))[:5]].mean(0) for own in MODELS
    ])  # fmt: skip
    assert np.asarray(model) == pytest.approx(np.sort(mixed, 0)[2:-2].mean(0), abs=1e-5)
    assert float(shares.sum()) == pytest.approx(1, abs=1e-5)


step = eqx.filter_jit(lambda aggregator, received, memory: aggregator.step(received, memory))


def walk(aggregator, start, rounds):
    """The models after rounds in which every client sends its own model plus the aggregate."""
    model, move, memory, found = start, np.zeros_like(start), aggregator.begin(start), []
    for _ in range(rounds):
        base = received(MODELS + np.asarray(model))
        base = replace(base, start=jnp.asarray(model), move=jnp.asarray(move))
        following, _, memory = step(aggregator, base, memory)
        move, model = np.asarray(following) - np.asarray(model), np.asarray(following)
        found.append(model)
    return np.stack(found)


def test_momentum_repeats_a_part_of_the_last_move():
    update = MODELS.mean(0)
    moves = np.diff(walk(ServerStep(1.5, 0.5), jnp.zeros(5), 4), axis=0, prepend=0)
    expected = [1.5 * update]
    for _ in range(3):
        expected.append(1.5 * update + 0.5 * expected[-1])
    assert moves == pytest.approx(np.stack(expected), abs=1e-5)


@pytest.mark.parametrize("yogi", [False, True], ids=["adam", "yogi"])
def test_adaptive_servers_step_as_flowers_do(yogi):
    strategies = pytest.importorskip("flwr.serverapp.strategy")
    app = pytest.importorskip("flwr.app")
    flower = strategies.FedYogi(eta=0.05) if yogi else strategies.FedAdam(eta=0.05)
    model, expected = np.zeros(5), []
    for n in range(1, 4):
        flower.current_arrays = {"x": model}
        sent = [
            app.Message(
                content=app.RecordDict({
                    "arrays": app.ArrayRecord({"x": app.Array(own + model)}),
                    "metrics": app.MetricRecord({"num-examples": 1}),
                }),
                metadata=app.Metadata(1, "", node, 1, "x", "", 0.0, 60.0, "train"),
            )
            for node, own in enumerate(MODELS)
        ]  # fmt: skip
        arrays, _ = flower.aggregate_train(n, sent)
        model = arrays["x"].numpy()
        expected.append(model)
    found = walk(Adaptive(0.05, yogi=yogi), jnp.zeros(5), 3)
    assert found == pytest.approx(np.stack(expected), abs=1e-4)
