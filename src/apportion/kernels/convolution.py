"""The paper's client network on a GPU: convolution, ReLU and dense layer fused, forward and backward.

Without fusion, moving the hidden layer (36 KB per image) dominates the cost. Here it stays in registers:
each program of the grid loops over some places of the images, holds the hidden units of a block of images
at one place, and recomputes them in the backward pass. Pixels are the first axis and images the last, so
that the patch of a place lies in rows. A constant pixel of 1 carries the bias of the filter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

Filter = Float[Array, "pixels channels"]
Bias = Float[Array, " channels"]
Out = Float[Array, "channels places classes"]
Images = Float[Array, "batch side side"]
Logits = Float[Array, "batch classes"]
Layers = Callable[[Filter, Bias, Out, Images], Logits]

BLOCK = 64
"""Images per program."""
LARGEST = 64
"""Largest number of channels or filter pixels; larger matrices do not fit into registers."""
INTERPRET = False
"""Run kernels in the interpreter, for tests on machines without a GPU."""


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the arrays and of the blocks that one program of the grid handles."""

    side: int
    kernel: int
    channels: int
    classes: int
    batch: int
    parts: int
    """Number of parts that the places are divided into; each part has its own program."""

    @classmethod
    def of(cls, out: Out, images: Images) -> "_Sizes":
        batch, side, _ = images.shape
        channels, places, classes = out.shape
        kernel = side + 1 - round(places**0.5)
        parts = next(n for n in (8, 4, 2, 1) if places % n == 0)
        return cls(side, kernel, channels, classes, batch, parts)

    @property
    def across(self) -> int:
        """Places per row of an image."""
        return self.side - self.kernel + 1

    @property
    def places(self) -> int:
        """Places per program."""
        return self.across**2 // self.parts

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.batch, BLOCK)

    @property
    def pixels(self) -> int:
        """Filter pixels and the constant pixel, padded."""
        return _padded(self.kernel**2 + 1)

    @property
    def units(self) -> int:
        return _padded(self.channels)

    @property
    def kinds(self) -> int:
        return _padded(self.classes)


def suits_kernels(filter_: Filter, images: Images) -> bool:
    """Whether the kernels support these sizes and this precision."""
    pixels, channels = filter_.shape
    return max(channels, pixels + 1) <= LARGEST and images.dtype == jnp.bfloat16


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_layers(plain: Layers, filter_: Filter, bias: Bias, out: Out, images: Images) -> Logits:
    """Compute the logits without the bias of the dense layer.

    `plain` computes the same without a kernel; it provides the gradient with respect to the images.
    """
    sizes = _Sizes.of(out, images)
    shape = jax.ShapeDtypeStruct((sizes.parts, sizes.kinds, sizes.blocks * BLOCK), jnp.float32)
    found = _call(partial(_forward_kernel, sizes), (sizes.blocks, sizes.parts), shape)(
        _columns(images, sizes), _with_bias(filter_, bias, sizes), out
    )
    return found.sum(0)[: sizes.classes, : sizes.batch].T


def _forward(
    plain: Layers, filter_: Filter, bias: Bias, out: Out, images: Images
) -> tuple[Logits, Any]:
    return fused_layers(plain, filter_, bias, out, images), (filter_, bias, out, images)


def _backward(plain: Layers, kept: Any, cotangent: Logits) -> tuple[Array, ...]:
    """Return the gradients with respect to the filter, its bias, the dense layer and the images."""
    filter_, bias, out, images = kept
    sizes = _Sizes.of(out, images)
    exact = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shapes = [exact(out.shape), exact((sizes.parts, sizes.units, sizes.pixels))]
    of_logits = _pad(cotangent.T, sizes.kinds, sizes.blocks * BLOCK).astype(images.dtype)
    by_out, by_filter = _call(partial(_backward_kernel, sizes), (1, sizes.parts), shapes)(
        _columns(images, sizes), _with_bias(filter_, bias, sizes), out, of_logits
    )
    by_filter = by_filter.sum(0)[: sizes.channels].T
    pixels = sizes.kernel**2
    # Training does not use the gradient of the images, so XLA removes this part.
    _, pull = jax.vjp(partial(plain, filter_, bias, out), images)
    return by_filter[:pixels], by_filter[pixels], by_out, *pull(cotangent)


fused_layers.defvjp(_forward, _backward)


class _Tile:
    """Inputs of one program: the patches of a block of images, and the weights of a place."""

    def __init__(self, sizes: _Sizes, images: Any, filter_: Any, out: Any):
        self.sizes, self.images, self.out = sizes, images, out
        self.filter_ = filter_[...]
        self.first = pl.program_id(1) * sizes.places
        pixels = jnp.arange(sizes.pixels)
        self.under = pixels < sizes.kernel**2
        self.is_one = pixels == sizes.kernel**2
        offset = pixels // sizes.kernel * sizes.side + pixels % sizes.kernel
        self.offset = jnp.where(self.under, offset, 0)
        self.units, self.kinds = jnp.arange(sizes.units), jnp.arange(sizes.kinds)
        self.inside = (self.units < sizes.channels)[:, None] & (self.kinds < sizes.classes)[None, :]

    def patches(self, place: Any, block: Any) -> Array:
        corner = place // self.sizes.across * self.sizes.side + place % self.sizes.across
        where = self.images.at[(corner + self.offset)[:, None], _columns_of(block)[None, :]]
        found = triton.load(where, mask=self.under[:, None], other=0)
        return jnp.where(self.is_one[:, None], 1, found).astype(self.filter_.dtype)

    def hidden(self, patches: Array) -> Array:
        return jnp.maximum(_dot(self.filter_, patches), 0).astype(self.filter_.dtype)

    def weights(self, place: Any) -> Array:
        found = triton.load(self.weights_at(self.out, place), mask=self.inside, other=0)
        return found.astype(self.filter_.dtype)

    def weights_at(self, ref: Any, place: Any) -> Any:
        """Return a reference to the weights of a place, or to their gradient."""
        return ref.at[self.units[:, None], place, self.kinds[None, :]]

    def logits_at(self, ref: Any, block: Any, *part: Any) -> Any:
        return ref.at[*part, self.kinds[:, None], _columns_of(block)[None, :]]


def _columns_of(block: Any) -> Array:
    return block * BLOCK + jnp.arange(BLOCK)


def _forward_kernel(sizes: _Sizes, images: Any, filter_: Any, out: Any, found: Any) -> None:
    tile, block = _Tile(sizes, images, filter_, out), pl.program_id(0)

    def add(i: Any, total: Array) -> Array:
        place = tile.first + i
        return total + _dot(tile.weights(place).T, tile.hidden(tile.patches(place, block)))

    nothing = jnp.zeros((sizes.kinds, BLOCK), jnp.float32)
    total = lax.fori_loop(0, sizes.places, add, nothing)
    triton.store(tile.logits_at(found, block, pl.program_id(1)), total)


def _backward_kernel(
    sizes: _Sizes, images: Any, filter_: Any, out: Any, of_logits: Any, by_out: Any, by_filter: Any
) -> None:
    tile = _Tile(sizes, images, filter_, out)

    def add(i: Any, by_filter: Array) -> Array:
        place = tile.first + i
        weights = tile.weights(place)

        def add_block(block: Any, both: tuple[Array, Array]) -> tuple[Array, Array]:
            by_weights, by_filter = both
            given = triton.load(tile.logits_at(of_logits, block))
            patches = tile.patches(place, block)
            hidden = tile.hidden(patches)
            of_hidden = jnp.where(hidden > 0, _dot(weights, given), 0).astype(patches.dtype)
            return by_weights + _dot(hidden, given.T), by_filter + _dot(of_hidden, patches.T)

        nothing = jnp.zeros((sizes.units, sizes.kinds), jnp.float32)
        by_weights, by_filter = lax.fori_loop(0, sizes.blocks, add_block, (nothing, by_filter))
        triton.store(tile.weights_at(by_out, place), by_weights, mask=tile.inside)
        return by_filter

    nothing = jnp.zeros((sizes.units, sizes.pixels), jnp.float32)
    by_filter[pl.program_id(1)] = lax.fori_loop(0, sizes.places, add, nothing)


def _columns(images: Images, sizes: _Sizes) -> Array:
    """Return the images as columns of pixels, padded to whole blocks."""
    return _pad(images.reshape(sizes.batch, -1).T, sizes.side**2, sizes.blocks * BLOCK)


def _with_bias(filter_: Filter, bias: Array, sizes: _Sizes) -> Array:
    """Return the transposed filter with its bias as the weight of the constant pixel."""
    both = jnp.concatenate([filter_, bias[None]]).T.astype(jnp.bfloat16)
    return _pad(both, sizes.units, sizes.pixels)


def _dot(matrix: Array, other: Array) -> Array:
    return jnp.dot(matrix, other, preferred_element_type=jnp.float32)


def _padded(size: int) -> int:
    """Return the next size that the GPU's matrix units support."""
    return max(16, pl.next_power_of_2(size))


def _pad(matrix: Array, rows: int, columns: int) -> Array:
    """Pad with zeros at the end to the given sizes."""
    return jnp.pad(matrix, [(0, rows - matrix.shape[0]), (0, columns - matrix.shape[1])])


def _call(kernel: Callable[..., None], grid: tuple[int, int], out: Any) -> Callable[..., Any]:
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out,
        interpret=INTERPRET,
        compiler_params=triton.CompilerParams(num_warps=2, num_stages=3),
    )
