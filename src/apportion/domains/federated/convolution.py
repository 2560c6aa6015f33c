"""The layers of the paper's client: a convolution with ReLU, and the weights of the softmax layer.

Computed as products of patches: under `vmap` over clients a convolution would become a grouped one, which
is slow everywhere, while a product becomes a larger product. On a graphics card one kernel computes both
layers (`convolution_gpu`).
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from apportion.gpu import on_gpu

Filter = Float[Array, "pixels channels"]
Bias = Float[Array, " channels"]
Out = Float[Array, "channels places classes"]
Images = Float[Array, "batch side side"]
Logits = Float[Array, "batch classes"]


def through_layers(filter_: Filter, bias: Bias, out: Out, images: Images) -> Logits:
    """The logits, less the bias of the softmax layer; by kernels on a card, where their sizes suit."""
    if on_gpu():
        # Pallas takes long to import, and only a program for a graphics card needs it.
        from apportion.domains.federated import convolution_gpu

        if convolution_gpu.suits(filter_, images):
            return by_kernels(filter_, bias, out, images)
    return by_products(filter_, bias, out, images)


def by_products(filter_: Filter, bias: Bias, out: Out, images: Images) -> Logits:
    """Both layers as products, in the images' precision."""
    filter_, bias, out = (array.astype(images.dtype) for array in (filter_, bias, out))
    # Channels first: with models along a `vmap`, neither product then needs a transposed copy.
    hidden = jax.nn.relu(filter_.T @ _patches(images, filter_.shape[0]) + bias[:, None])
    hidden = hidden.reshape(bias.shape[0], images.shape[0], -1)
    return jnp.einsum("cbp,cpk->cbk", hidden, out, preferred_element_type=jnp.float32).sum(0)


def _patches(images: Images, pixels: int) -> Float[Array, "pixels places"]:
    """Every place of every image as a column of the pixels under the filter."""
    kernel = math.isqrt(pixels)
    places = images.shape[1] - kernel + 1
    rows = jnp.stack([images[:, i : i + places] for i in range(kernel)])
    patches = jnp.stack([rows[..., j : j + places] for j in range(kernel)], 1)
    return patches.reshape(pixels, -1)


@jax.custom_vjp
def by_kernels(filter_: Filter, bias: Bias, out: Out, images: Images) -> Logits:
    """Both layers in one kernel, there and back."""
    from apportion.domains.federated import convolution_gpu

    return convolution_gpu.forward(filter_, bias, out, images)


def _there(filter_: Filter, bias: Bias, out: Out, images: Images) -> tuple[Logits, Any]:
    return by_kernels(filter_, bias, out, images), (filter_, bias, out, images)


def _back(kept: Any, cotangent: Logits) -> tuple[Array, ...]:
    from apportion.domains.federated import convolution_gpu

    filter_, bias, out, images = kept
    of_layers = convolution_gpu.backward(filter_, bias, out, images, cotangent)
    # Nobody asks for the images' own gradient in training, and what nobody asks for is not computed.
    _, pull = jax.vjp(partial(by_products, filter_, bias, out), images)
    return *of_layers, *pull(cotangent)


by_kernels.defvjp(_there, _back)
