"""What each client trains: a small classifier, as functions of a PyTree of parameters.

The paper's is one 5 x 5 convolution with ReLU and a softmax layer, no pooling. It is computed as a
product of patches: under `vmap` over clients a convolution would become a grouped one, which is
slow everywhere, while a product becomes a larger product.
"""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from apportion.errors import InputError

Parameters = dict[str, Array]
Images = Float[Array, "batch side side"]
Logits = Float[Array, "batch classes"]


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
        filter_key, out_key = jax.random.split(key)
        places = (self.side - self.kernel + 1) ** 2
        normal = jax.nn.initializers.he_normal()
        return {
            "filter": normal(filter_key, (self.kernel**2, self.channels)),
            "filter_bias": jnp.zeros(self.channels),
            "out": jax.nn.initializers.lecun_normal(in_axis=(0, 1))(
                out_key, (places, self.channels, self.classes)
            ),
            "out_bias": jnp.zeros(self.classes),
        }

    def logits(self, parameters: Parameters, images: Images) -> Logits:
        p = {name: leaf.astype(images.dtype) for name, leaf in parameters.items()}
        hidden = jax.nn.relu(self._patches(images) @ p["filter"] + p["filter_bias"])
        out = jnp.einsum(
            "bpc,pck->bk", hidden, p["out"], preferred_element_type=jnp.float32
        )
        return out + parameters["out_bias"]

    def _patches(self, images: Images) -> Float[Array, "batch places pixels"]:
        places = self.side - self.kernel + 1
        shifts = [
            images[:, i : i + places, j : j + places]
            for i in range(self.kernel)
            for j in range(self.kernel)
        ]
        return jnp.stack(shifts, -1).reshape(images.shape[0], places**2, self.kernel**2)


class Perceptron(ClientModel):
    """One hidden layer of `hidden` ReLU units."""

    side: int = eqx.field(static=True)
    hidden: int = eqx.field(static=True, default=64)
    classes: int = eqx.field(static=True, default=10)

    def start(self, *, key: PRNGKeyArray) -> Parameters:
        in_key, out_key = jax.random.split(key)
        normal = jax.nn.initializers.he_normal()
        return {
            "hidden": normal(in_key, (self.side**2, self.hidden)),
            "hidden_bias": jnp.zeros(self.hidden),
            "out": normal(out_key, (self.hidden, self.classes)),
            "out_bias": jnp.zeros(self.classes),
        }

    def logits(self, parameters: Parameters, images: Images) -> Logits:
        p = {name: leaf.astype(images.dtype) for name, leaf in parameters.items()}
        flat = images.reshape(images.shape[0], -1)
        hidden = jax.nn.relu(flat @ p["hidden"] + p["hidden_bias"])
        out = jnp.matmul(hidden, p["out"], preferred_element_type=jnp.float32)
        return out + parameters["out_bias"]
