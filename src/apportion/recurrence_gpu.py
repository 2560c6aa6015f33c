"""The recurrence on a graphics card: all periods in one kernel, the state kept in registers.

A program of the grid takes a block of one run's rows through the whole window. The arrays have the
shapes of `recurrence`; only the parameters are padded, to the powers of two that the card's matrix
units take, and what lies outside the others is masked.
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
from jaxtyping import Array

LARGEST = 128
"""Of the hidden units and of the channels; above it a program's matrices do not fit in registers."""
INTERPRET = False
"""Whether kernels are run by the interpreter, as tests do on machines without a card."""


def suits(from_input: Array) -> bool:
    """Whether the kernels take these sizes in this precision."""
    _, channels, hidden = from_input.shape
    small = max(channels + 1, hidden) <= LARGEST
    return small and from_input.dtype in (jnp.float32, jnp.bfloat16)


def last(from_input: Array, from_state: Array, bias: Array, inputs: Array) -> tuple[Array]:
    """The last state."""
    return (_forward(from_input, from_state, bias, inputs, keep=False),)


def states(from_input: Array, from_state: Array, bias: Array, inputs: Array) -> tuple[Array]:
    """The states after every period."""
    return (_forward(from_input, from_state, bias, inputs, keep=True),)


@dataclass(frozen=True)
class _Sizes:
    """The arrays' sizes, and those of what one program of the grid works on."""

    window: int
    runs: int
    channels: int
    rows: int
    hidden: int
    forward: bool

    @classmethod
    def of(cls, inputs: Array, hidden: int, *, forward: bool) -> "_Sizes":
        window, runs, channels, rows = inputs.shape
        return cls(window, runs, channels, rows, hidden, forward)

    @property
    def units(self) -> int:
        """Hidden units, padded."""
        return _padded(self.hidden)

    @property
    def features(self) -> int:
        """Channels and a constant one for the bias, padded."""
        return _padded(self.channels + 1)

    @property
    def block(self) -> int:
        """Rows of a program: few where large blocks would leave processors of the card idle."""
        # Measured on an H200. The way back keeps more in registers, and is slower in larger blocks.
        large = 128 if self.forward else 64
        return large if self.runs * pl.cdiv(self.rows, 64) >= 1024 else 16

    @property
    def grid(self) -> tuple[int, int]:
        return self.runs, pl.cdiv(self.rows, self.block)


class _Tile:
    """One program's run and rows, and where their values are."""

    def __init__(self, sizes: _Sizes):
        self.sizes = sizes
        self.run = pl.program_id(0)
        self.rows = pl.program_id(1) * sizes.block + jnp.arange(sizes.block)
        self.exists = self.rows < sizes.rows
        self.units = jnp.arange(sizes.units)
        self.inside = (self.units < sizes.hidden)[:, None] & self.exists[None, :]
        self.features = jnp.arange(sizes.features)
        self.read = (self.features < sizes.channels)[:, None] & self.exists[None, :]

    def state(self, ref: Any, *period: Any) -> Any:
        """Where the state of these rows is."""
        return ref.at[*period, self.run, self.units[:, None], self.rows[None, :]]

    def load_state(self, ref: Any, *period: Any) -> Array:
        return triton.load(self.state(ref, *period), mask=self.inside, other=0)

    def inputs(self, ref: Any, k: Any) -> Any:
        """Where the inputs of these rows at period k are."""
        return ref.at[k, self.run, self.features[:, None], self.rows[None, :]]

    def load_inputs(self, ref: Any, k: Any) -> Array:
        """The inputs at period k, with ones below them."""
        x = triton.load(self.inputs(ref, k), mask=self.read, other=0)
        return jnp.where((self.features == self.sizes.channels)[:, None], 1, x)


def _tanh(z: Array) -> Array:
    # An exponential and a quotient, with the exact limits on both sides.
    return 2 / (1 + jnp.exp(-2 * z)) - 1


def _forward(
    from_input: Array, from_state: Array, bias: Array, inputs: Array, *, keep: bool
) -> Array:
    sizes = _Sizes.of(inputs, bias.shape[1], forward=True)

    def kernel(inputs: Any, from_inputs: Any, from_state: Any, out: Any) -> None:
        tile = _Tile(sizes)
        of_inputs, of_state = from_inputs[tile.run], from_state[tile.run]

        def period(k: Any, h: Array) -> Array:
            h = _tanh(_dot(of_state, h) + _dot(of_inputs, tile.load_inputs(inputs, k)))
            if keep:
                triton.store(tile.state(out, k), h.astype(out.dtype), mask=tile.inside)
            return h

        start = jnp.zeros((sizes.units, sizes.block), jnp.float32)
        h = lax.fori_loop(0, sizes.window, period, start)
        if not keep:
            triton.store(tile.state(out), h.astype(out.dtype), mask=tile.inside)

    of_all = (sizes.window, sizes.runs, sizes.hidden, sizes.rows)
    shape = jax.ShapeDtypeStruct(of_all if keep else of_all[1:], inputs.dtype)
    from_inputs = jnp.concatenate([from_input, bias[:, None]], 1).swapaxes(1, 2)
    return _call(kernel, sizes, shape)(
        inputs,
        _pad(from_inputs, sizes.units, sizes.features),
        _pad(from_state.swapaxes(1, 2), sizes.units, sizes.units),
    )


def backward(
    from_input: Array,
    from_state: Array,
    inputs: Array,
    states: Array,
    cotangent: Array,
    *,
    of_inputs: bool,
) -> tuple[Array, ...]:
    """Gradients with respect to A, B and b, and the inputs too where `of_inputs` says so."""
    sizes = _Sizes.of(inputs, from_state.shape[1], forward=False)
    exact = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    # Every program adds up its own rows; the sum over programs is left to the compiler.
    out = [
        exact((*sizes.grid, sizes.units, sizes.units)),
        exact((*sizes.grid, sizes.units, sizes.features)),
        *([jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)] if of_inputs else []),
    ]
    results = _call(partial(_backward_kernel, sizes), sizes, out)(
        inputs,
        states,
        cotangent,
        _pad(from_input, sizes.features, sizes.units),
        _pad(from_state, sizes.units, sizes.units),
    )
    by_state, by_inputs = (
        part.sum(1)[:, : sizes.hidden].swapaxes(1, 2).astype(states.dtype) for part in results[:2]
    )
    n = sizes.channels
    of_parameters = by_inputs[:, :n], by_state[:, : sizes.hidden], by_inputs[:, n]
    return (*of_parameters, *results[2:])


def _backward_kernel(
    sizes: _Sizes,
    inputs: Any,
    states: Any,
    cotangent: Any,
    from_input: Any,
    from_state: Any,
    by_state: Any,
    by_inputs: Any,
    *of_inputs: Any,
) -> None:
    tile = _Tile(sizes)
    to_before, to_inputs = from_state[tile.run], from_input[tile.run]

    def period(i: Any, carry: Any) -> Any:
        k = sizes.window - 1 - i
        ahead, h, sum_state, sum_inputs = carry
        # Read once and carried on: the state before this period is the state of the one read next.
        here = tile.state(states, jnp.maximum(k - 1, 0))
        before = triton.load(here, mask=tile.inside & (k > 0), other=0)
        x = tile.load_inputs(inputs, k)
        of_sum = (ahead * (1 - h * h)).astype(x.dtype)
        for ref in of_inputs:
            of_x = _dot(to_inputs, of_sum).astype(ref.dtype)
            triton.store(tile.inputs(ref, k), of_x, mask=tile.read)
        sum_state += _dot(of_sum, before.T)
        sum_inputs += _dot(of_sum, x.T)
        return _dot(to_before, of_sum), before.astype(jnp.float32), sum_state, sum_inputs

    first = (
        tile.load_state(cotangent).astype(jnp.float32),
        tile.load_state(states, sizes.window - 1).astype(jnp.float32),
        jnp.zeros((sizes.units, sizes.units), jnp.float32),
        jnp.zeros((sizes.units, sizes.features), jnp.float32),
    )
    _, _, sum_state, sum_inputs = lax.fori_loop(0, sizes.window, period, first)
    by_state[tile.run, pl.program_id(1)] = sum_state
    by_inputs[tile.run, pl.program_id(1)] = sum_inputs


def _dot(matrix: Array, other: Array) -> Array:
    return jnp.dot(matrix, other.astype(matrix.dtype), preferred_element_type=jnp.float32)


def _padded(size: int) -> int:
    """The next size that the card's matrix units take."""
    return max(16, pl.next_power_of_2(size))


def _pad(array: Array, *sizes: int) -> Array:
    """Zeros at the end of the last two axes, up to these sizes."""
    short = (size - has for size, has in zip(sizes, array.shape[1:], strict=True))
    return jnp.pad(array, [(0, 0), *((0, more) for more in short)])


def _call(kernel: Callable[..., None], sizes: _Sizes, out: Any) -> Callable[..., Any]:
    warps = 2 if sizes.block == 16 else 4
    return pl.pallas_call(
        kernel,
        grid=sizes.grid,
        out_shape=out,
        interpret=INTERPRET,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
    )
