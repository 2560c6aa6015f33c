import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.federated.aggregators import (
    UNIFORM,
    BySamples,
    Fixed,
    Krum,
    Median,
    Received,
    TrimmedMean,
)
from apportion.problem import Observation


def received(models, mask=None, counts=None):
    models = jnp.asarray(models, float)
    m = len(models)
    mask = jnp.ones(m, bool) if mask is None else jnp.asarray(mask)
    counts = jnp.ones(m, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
    return Received(models, Observation(jnp.zeros((m, 1, 1)), jnp.zeros(m)), counts, mask)


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
    model, shares = aggregator(received(PADDED, MASK))
    assert np.asarray(model) == pytest.approx(expected, abs=1e-5)
    assert float(shares.sum()) == pytest.approx(1, abs=1e-5)
    assert (np.asarray(shares)[7:] == 0).all()


def test_an_even_number_of_models_has_the_mean_of_the_middle_two_as_its_median():
    model, _ = Median()(received(MODELS[:4]))
    assert np.asarray(model) == pytest.approx(np.median(MODELS[:4], 0), abs=1e-6)


def test_samples_weigh():
    _, shares = BySamples()(received(MODELS, counts=[1, 2, 3, 4, 5, 6, 7]))
    assert np.asarray(shares) == pytest.approx(np.arange(1, 8) / 28)


def test_krum_chooses_a_model_of_the_crowd_whatever_byzantine_clients_send():
    crowd = np.ones((6, 4)) + 0.01 * np.random.default_rng(1).normal(size=(6, 4))
    byzantine = np.array([[50.0] * 4, [-9.0] * 4])
    model, shares = Krum(2)(received(np.vstack([crowd, byzantine])))
    assert float(jnp.abs(model - 1).max()) < 0.1
    assert int(shares.argmax()) < 6
    assert float(shares.max()) == 1


def test_the_minority_gets_its_total():
    shares = Fixed.minority(0.45).shares
    assert float(shares[8:].sum()) == pytest.approx(0.45)
    assert float(shares.sum()) == pytest.approx(1)
