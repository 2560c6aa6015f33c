"""The paper's client as two products of patches: a convolution with ReLU, and a dense layer.

Under `vmap` over clients a convolution would become a grouped one, which is slow everywhere, while a
product becomes a larger product.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Filter = Float[Array, "pixels channels"]
Bias = Float[Array, " channels"]
Out = Float[Array, "channels places classes"]
Images = Float[Array, "batch side side"]
Logits = Float[Array, "batch classes"]


def by_products(filter_: Filter, bias: Bias, out: Out, images: Images) -> Logits:
    """The logits, less the bias of the softmax layer, as two products in the images' precision."""
    filter_, bias, out = (array.astype(images.dtype) for array in (filter_, bias, out))
    kernel = math.isqrt(filter_.shape[0])
    places = images.shape[1] - kernel + 1
    rows = jnp.stack([images[:, i : i + places] for i in range(kernel)])
    # Every place of every image is a column of the pixels under the filter.
    patches = jnp.stack([rows[..., j : j + places] for j in range(kernel)], 1)
    patches = patches.reshape(filter_.shape[0], -1)
    # Channels first: with models along a `vmap`, neither product then needs a transposed copy.
    hidden = jax.nn.relu(filter_.T @ patches + bias[:, None])
    hidden = hidden.reshape(bias.shape[0], images.shape[0], -1)
    return jnp.einsum("cbp,cpk->cbk", hidden, out, preferred_element_type=jnp.float32).sum(0)
