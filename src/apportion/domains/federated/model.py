"""What each client trains: a small classifier, as functions of a PyTree of parameters.

The paper's is one 5 x 5 convolution with ReLU and a softmax layer, no pooling; how it is computed is in
`convolution.py`.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from apportion.domains.federated.convolution import Images, Logits, through_layers
from apportion.errors import InputError

Parameters = dict[str, Array]


class ClientModel(eqx.Module):
    """A classifier of images; it computes in the images' precision and keeps float32 parameters."""

    @abstractmethod
    def start(self, *, key: PRNGKeyArray) -> Parameters:
        """First parameters."""

    @abstractmethod
    def logits(self, parameters: Parameters, images: Images) -> Logits:
        """Unnormalised log-probabilities of the classes, in float32."""


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
        return through_layers(*layers, images) + parameters["out_bias"]


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
    """Arrays uniform within their bounds, cut from one sample: each more takes seconds to compile."""
    sizes = [math.prod(shape) for shape, _ in wanted]
    sample = jax.random.uniform(key, (sum(sizes),), minval=-1.0, maxval=1.0)
    pieces = jnp.split(sample, np.cumsum(sizes)[:-1])
    return [bound * p.reshape(s) for p, (s, bound) in zip(pieces, wanted, strict=True)]
