"""Local training of a client: SGD on its own images, starting from the aggregate.

The paper's classifier is one 5 x 5 convolution with ReLU and a softmax layer, without pooling. Both
layers are computed as matrix products of patches: `vmap` over clients would turn a convolution into
a grouped one, which is slow on all devices, but turns a product into a larger product. On a GPU one
kernel computes both layers (`apportion.kernels.convolution`).
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.errors import InputError
from apportion.kernels.gpu import on_gpu

Parameters = dict[str, Array]
Images = Float[Array, "batch side side"]
Logits = Float[Array, "batch classes"]


class ClientModel(eqx.Module):
    """Image classifier that computes in the images' precision and keeps float32 parameters."""

    @abstractmethod
    def start(self, *, key: PRNGKeyArray) -> Parameters:
        """Draw initial parameters."""

    @abstractmethod
    def logits(self, parameters: Parameters, images: Images) -> Logits:
        """Compute the unnormalised log-probabilities of the classes, in float32."""


class Convolutional(ClientModel):
    """The paper's client: one convolution of `channels` filters, ReLU, softmax."""

    side: int = eqx.field(static=True)
    channels: int = eqx.field(static=True, default=32)
    kernel: int = eqx.field(static=True, default=5)
    classes: int = eqx.field(static=True, default=10)

    def __check_init__(self):
        if not 1 <= self.kernel <= self.side:
            raise InputError(f"client model: a kernel of {self.kernel} on {self.side} pixels")

    def start(self, *, key: PRNGKeyArray) -> Parameters:
        places = (self.side - self.kernel + 1) ** 2
        filters = (self.kernel**2, self.channels)
        out = (self.channels, places, self.classes)
        filter_, out_ = _uniform(
            ((filters, (6 / self.kernel**2) ** 0.5), (out, (3 / (places * self.channels)) ** 0.5)),
            key=key,
        )
        return {
            "filter": filter_,
            "filter_bias": jnp.zeros(self.channels),
            "out": out_,
            "out_bias": jnp.zeros(self.classes),
        }

    def logits(self, parameters: Parameters, images: Images) -> Logits:
        layers = (parameters["filter"], parameters["filter_bias"], parameters["out"])
        if on_gpu():
            # On an H200 the kernel makes the whole of Figure 6 1.7 times as fast. Pallas is slow to
            # import, so only programs for a GPU import it.
            from apportion.kernels import convolution

            if convolution.suits_kernels(layers[0], images):
                fused: Any = convolution.fused_layers(_by_products, *layers, images)
                return fused + parameters["out_bias"]
        return _by_products(*layers, images) + parameters["out_bias"]


class Perceptron(ClientModel):
    """One hidden layer of `hidden` ReLU units."""

    side: int = eqx.field(static=True)
    hidden: int = eqx.field(static=True, default=64)
    classes: int = eqx.field(static=True, default=10)

    def start(self, *, key: PRNGKeyArray) -> Parameters:
        first, second = (self.side**2, self.hidden), (self.hidden, self.classes)
        hidden, out = _uniform(
            ((first, (6 / self.side**2) ** 0.5), (second, (3 / self.hidden) ** 0.5)), key=key
        )
        return {
            "hidden": hidden,
            "hidden_bias": jnp.zeros(self.hidden),
            "out": out,
            "out_bias": jnp.zeros(self.classes),
        }

    def logits(self, parameters: Parameters, images: Images) -> Logits:
        p = {name: leaf.astype(images.dtype) for name, leaf in parameters.items()}
        flat = images.reshape(images.shape[0], -1)
        hidden = jax.nn.relu(flat @ p["hidden"] + p["hidden_bias"])
        out = jnp.matmul(hidden, p["out"], preferred_element_type=jnp.float32)
        return out + parameters["out_bias"]


def _uniform(
    wanted: Sequence[tuple[tuple[int, ...], float]], *, key: PRNGKeyArray
) -> list[Float[Array, "..."]]:
    """Draw uniform arrays from one sample, because each further call takes seconds to compile."""
    sizes = [math.prod(shape) for shape, _ in wanted]
    sample = jax.random.uniform(key, (sum(sizes),), minval=-1.0, maxval=1.0)
    pieces = jnp.split(sample, np.cumsum(sizes)[:-1])
    return [bound * p.reshape(s) for p, (s, bound) in zip(pieces, wanted, strict=True)]


def _by_products(
    filter_: Float[Array, "pixels channels"],
    bias: Float[Array, " channels"],
    out: Float[Array, "channels places classes"],
    images: Images,
) -> Logits:
    """Compute the logits without the last bias as two products, in the images' precision."""
    filter_, bias, out = (array.astype(images.dtype) for array in (filter_, bias, out))
    kernel = math.isqrt(filter_.shape[0])
    places = images.shape[1] - kernel + 1
    rows = jnp.stack([images[:, i : i + places] for i in range(kernel)])
    # Each column has the pixels under the filter at one place of one image.
    patches = jnp.stack([rows[..., j : j + places] for j in range(kernel)], 1)
    patches = patches.reshape(filter_.shape[0], -1)
    # With channels first, neither product needs a transposed copy under `vmap` over models.
    hidden = jax.nn.relu(filter_.T @ patches + bias[:, None])
    hidden = hidden.reshape(bias.shape[0], images.shape[0], -1)
    return jnp.einsum("cbp,cpk->cbk", hidden, out, preferred_element_type=jnp.float32).sum(0)


class Owned(eqx.Module):
    """A client's data: indices of its images, its labels, and the number of rows that are real."""

    images: Float[Array, "samples side side"]
    index: Int[Array, " owned"]
    labels: Int[Array, " owned"]
    count: Int[Array, ""]


def unravelled(model: ClientModel, flat: Float[Array, " parameters"]) -> Parameters:
    """Convert a flat vector into named parameters."""
    shapes = jax.eval_shape(lambda: model.start(key=jax.random.key(0)))
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return ravel_pytree(blank)[1](flat)


def descend(
    model: ClientModel,
    start: Float[Array, " parameters"],
    owned: Owned,
    *,
    epochs: int,
    batch: int,
    learning_rate: Float[Array, ""],
    key: PRNGKeyArray,
) -> Float[Array, " parameters"]:
    """Train for `epochs` of SGD in random order and return the parameters."""
    held = owned.index.shape[0]
    steps = -(-held // batch)

    def order(key):
        # Real images come first; padding has weight 0.
        chance = jax.random.uniform(key, (held,))
        ranked = jnp.argsort(jnp.where(jnp.arange(held) < owned.count, chance, 2.0))
        return jnp.pad(ranked, (0, steps * batch - held))

    orders = jax.vmap(order)(jax.random.split(key, epochs))
    weights = (jnp.arange(steps * batch) < owned.count).astype(jnp.float32)
    batches = orders.reshape(epochs * steps, batch)
    weights = jnp.tile(weights.reshape(steps, batch), (epochs, 1))

    @jax.grad
    def slope(parameters, images, labels, weight):
        logits = model.logits(parameters, images)
        own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - own
        return (weight * loss).sum() / jnp.maximum(weight.sum(), 1.0)

    def one(parameters, batch):
        order, weight = batch
        images = owned.images[owned.index[order]]
        gradient = slope(parameters, images, owned.labels[order], weight)
        return jax.tree.map(lambda p, g: p - learning_rate * g, parameters, gradient), None

    trained, _ = jax.lax.scan(one, unravelled(model, start), (batches, weights))
    return ravel_pytree(trained)[0]
