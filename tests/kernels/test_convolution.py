"""The paper's client in one kernel, held against the two products and what JAX derives from them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.federated import clients
from apportion.domains.federated.clients import Convolutional
from apportion.kernels import convolution

MODELS = 2
FUSED = partial(convolution.fused_layers, clients._by_products)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(convolution, "INTERPRET", True)


def make(sizes):
    """Parameters, images and a weight for each logit, of two models, in whole numbers: bfloat16 and sums
    in single precision hold them exactly, so that nothing is left to rounding.
    """
    side, kernel, channels, classes, batch = sizes
    places = (side - kernel + 1) ** 2
    shapes = (kernel**2, channels), (channels,), (channels, places, classes), (batch, classes)
    rng = np.random.default_rng(batch)
    *layers, weights = (
        rng.integers(-2, 3, (MODELS, *shape)).astype(np.float32) for shape in shapes
    )
    images = rng.integers(0, 3, (MODELS, batch, side, side))
    layers = tuple(map(jnp.asarray, layers))
    return layers, jnp.asarray(images, jnp.bfloat16), weights


@partial(jax.jit, static_argnums=0)
def values_and_gradients(through, layers, images, weights):
    """Of each model: logits, and the gradient of their weighted sum."""

    def one(layers, images, weights):
        logits, pull = jax.vjp(lambda layers: through(*layers, images), layers)
        return logits, *pull(weights)[0]

    return jax.vmap(one)(layers, images, weights)


# The paper's filter; images for one block, for part of one, and for more than one; sizes that are no
# powers of two; places that no number of programs divides.
@pytest.mark.parametrize("sizes", [(12, 5, 32, 10, 64), (9, 3, 20, 7, 5), (6, 2, 3, 2, 130)])
def test_the_kernel_is_both_layers(sizes, interpreted):
    layers, images, weights = make(sizes)
    found = values_and_gradients(FUSED, layers, images, weights)
    exact = images.astype(jnp.float32)
    expected = values_and_gradients(clients._by_products, layers, exact, weights)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_client_takes_the_kernel_on_a_card_where_it_suits(interpreted, monkeypatch):
    client = Convolutional(6, 4, 3)
    parameters = client.start(key=jax.random.key(0))
    images = jnp.ones((2, 6, 6), jnp.bfloat16)
    asked = []
    monkeypatch.setattr(
        convolution,
        "fused_layers",
        lambda plain, *layers: asked.append(True) or plain(*layers),
    )
    plain = client.logits(parameters, images)
    assert not asked
    monkeypatch.setattr(clients, "on_gpu", lambda: True)
    np.testing.assert_array_equal(client.logits(parameters, images), plain)
    assert len(asked) == 1
    client.logits(parameters, images.astype(jnp.float32))
    assert len(asked) == 1
    assert not convolution.suits_kernels(jnp.ones((9, 65)), images)


def test_the_images_have_their_gradient_too(interpreted):
    (filter_, bias, out), images, weights = make((9, 3, 20, 7, 5))

    def total(through, images):
        return (through(filter_[0], bias[0], out[0], images) * weights[0]).sum()

    found, expected = (
        jax.jit(jax.grad(partial(total, each)))(images[0]) for each in (FUSED, clients._by_products)
    )
    np.testing.assert_array_equal(found.astype(float), expected.astype(float))
    assert np.abs(expected.astype(float)).max() > 1
