"""The recurrence on a GPU: all periods in one kernel, with the state in registers.

Each program of the grid processes a block of rows of one run over the whole window. The previous state,
the inputs and a 1 for the bias are one tile, so that a period is one matrix product; inputs are loaded
one period ahead. Arrays have the shapes of `apportion.recurrence`. Parameters are padded to the powers of
two that the GPU's matrix units support, and other arrays are masked.
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
"""Largest padded size of a tile; larger matrices do not fit into registers."""
INTERPRET = False
"""Run kernels in the interpreter, for tests on machines without a GPU."""


def fits_kernel(from_input: Array) -> bool:
    """Whether the kernels support these sizes and this precision."""
    _, channels, hidden = from_input.shape
    return hidden + channels + 1 <= LARGEST and from_input.dtype in (jnp.float32, jnp.bfloat16)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the arrays and of the blocks that one program of the grid handles."""

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
    def seen(self) -> int:
        """Padded height of a tile: the previous state, the inputs and a 1 for the bias."""
        return max(16, pl.next_power_of_2(self.hidden + self.channels + 1))

    @property
    def block(self) -> int:
        """Rows per program; fewer if large blocks would leave multiprocessors idle."""
        # Tuned on an H200 with 1,090 rows for each of 1, 10, 90 and 900 runs, as are the warps below. The
        # backward pass also accumulates a matrix, and is slower with larger blocks.
        programs = self.runs * pl.cdiv(self.rows, 64)
        if programs < 1024:
            return 16
        return 128 if self.forward and programs >= 8192 else 64

    @property
    def warps(self) -> int:
        """Warps per program."""
        if self.forward:
            return 4 if self.block == 16 else 8
        # The accumulated matrix is divided between warps; a wider one does not fit into two.
        return 2 if self.seen <= 32 else 4

    @property
    def grid(self) -> tuple[int, int]:
        return self.runs, pl.cdiv(self.rows, self.block)


class _Tile:
    """Run and rows of one program, and the positions of their values in a tile."""

    def __init__(self, sizes: _Sizes):
        self.sizes = sizes
        self.run = pl.program_id(0)
        self.rows = pl.program_id(1) * sizes.block + jnp.arange(sizes.block)
        self.places = jnp.arange(sizes.seen)
        exists, ones = (self.rows < sizes.rows)[None, :], sizes.hidden + sizes.channels
        self.of_state = (self.places < sizes.hidden)[:, None]
        self.inside = self.of_state & exists
        self.read = ~self.of_state & (self.places < ones)[:, None] & exists
        self.is_one = (self.places == ones)[:, None]

    def state(self, ref: Any, *period: Any) -> Any:
        """Return a reference to the state of these rows."""
        return ref.at[*period, self.run, self.places[:, None], self.rows[None, :]]

    def inputs(self, ref: Any, k: Any) -> Any:
        """Return a reference to the inputs at period k, which follow the state in a tile."""
        channels = self.places - self.sizes.hidden
        return ref.at[k, self.run, channels[:, None], self.rows[None, :]]

    def load_state(self, ref: Any, *period: Any) -> Array:
        return triton.load(self.state(ref, *period), mask=self.inside, other=0).astype(jnp.float32)

    def load_inputs(self, ref: Any, k: Any) -> Array:
        """Load the inputs at period k and the ones; the state is 0."""
        x = triton.load(self.inputs(ref, k), mask=self.read, other=0).astype(jnp.float32)
        return jnp.where(self.is_one, 1, x)

    def load_seen(self, states: Any, inputs: Any, k: Any) -> Array:
        """Load the tile of period k."""
        here = self.state(states, jnp.maximum(k - 1, 0))
        before = triton.load(here, mask=self.inside & (k > 0), other=0).astype(jnp.float32)
        return jnp.where(self.of_state, before, self.load_inputs(inputs, k))


def _tanh(z: Array) -> Array:
    # One exponential and one division, exact in both limits.
    return 2 / (1 + jnp.exp(-2 * z)) - 1


def _forward(
    from_input: Array, from_state: Array, bias: Array, inputs: Array, *, keep: bool
) -> tuple[Array]:
    sizes = _Sizes.of(inputs, bias.shape[1], forward=True)

    def kernel(inputs: Any, parameters: Any, out: Any) -> None:
        tile = _Tile(sizes)
        matrix = parameters[tile.run]

        def period(k: Any, seen: Array) -> Array:
            ahead = tile.load_inputs(inputs, jnp.minimum(k + 1, sizes.window - 1))
            h = _tanh(_dot(matrix, seen))
            if keep:
                triton.store(tile.state(out, k), h.astype(out.dtype), mask=tile.inside)
            return jnp.where(tile.of_state, h, ahead)

        seen = lax.fori_loop(0, sizes.window, period, tile.load_inputs(inputs, 0))
        if not keep:
            triton.store(tile.state(out), seen.astype(out.dtype), mask=tile.inside)

    of_all = (sizes.window, sizes.runs, sizes.hidden, sizes.rows)
    shape = jax.ShapeDtypeStruct(of_all if keep else of_all[1:], inputs.dtype)
    matrix = _matrix(sizes, from_state, from_input, bias)
    return (_call(kernel, sizes, shape)(inputs, matrix.swapaxes(1, 2)),)


last, states = (partial(_forward, keep=keep) for keep in (False, True))


def gradients(
    from_input: Array,
    from_state: Array,
    inputs: Array,
    states: Array,
    cotangent: Array,
    *,
    of_inputs: bool,
) -> tuple[Array, ...]:
    """Return the gradients with respect to A, B, b and, if `of_inputs`, the inputs."""
    sizes = _Sizes.of(inputs, from_state.shape[1], forward=False)
    # Each program sums over its own rows; XLA sums over programs.
    out = [
        jax.ShapeDtypeStruct((*sizes.grid, sizes.seen, sizes.seen), jnp.float32),
        *([jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)] if of_inputs else []),
    ]
    # The backward pass needs no bias.
    nothing = jnp.zeros_like(from_state[:, 0])
    by_program, *rest = _call(partial(_backward_kernel, sizes), sizes, out)(
        inputs, states, cotangent, _matrix(sizes, from_state, from_input, nothing)
    )
    hidden, ones = sizes.hidden, sizes.hidden + sizes.channels
    gradient = by_program.sum(1)[:, :hidden].swapaxes(1, 2).astype(states.dtype)
    return gradient[:, hidden:ones], gradient[:, :hidden], gradient[:, ones], *rest


def _backward_kernel(
    sizes: _Sizes,
    inputs: Any,
    states: Any,
    cotangent: Any,
    parameters: Any,
    by_program: Any,
    *of_inputs: Any,
) -> None:
    tile = _Tile(sizes)
    matrix = parameters[tile.run]

    def period(i: Any, carry: Any) -> Any:
        k = sizes.window - 1 - i
        ahead, h, seen, total = carry
        # Each tile is loaded once: the previous state of this period is the state of the next iteration.
        before = tile.load_seen(states, inputs, jnp.maximum(k - 1, 0))
        of_sum = jnp.where(tile.of_state, ahead * (1 - h * h), 0).astype(matrix.dtype)
        of_seen = _dot(matrix, of_sum)
        for ref in of_inputs:
            triton.store(tile.inputs(ref, k), of_seen.astype(ref.dtype), mask=tile.read)
        return of_seen, seen, before, total + _dot(of_sum, seen.T)

    last = sizes.window - 1
    first = (
        tile.load_state(cotangent),
        tile.load_state(states, last),
        tile.load_seen(states, inputs, last),
        jnp.zeros((sizes.seen, sizes.seen), jnp.float32),
    )
    *_, total = lax.fori_loop(0, sizes.window, period, first)
    by_program[tile.run, pl.program_id(1)] = total


def _matrix(sizes: _Sizes, from_state: Array, from_input: Array, bias: Array) -> Array:
    """Return the parameters as one matrix per run, padded with zeros to the size of a tile."""
    seen = jnp.concatenate([from_state, from_input, bias[:, None]], 1)
    short = [(0, sizes.seen - size) for size in seen.shape[1:]]
    return jnp.pad(seen, [(0, 0), *short])


def _dot(matrix: Array, other: Array) -> Array:
    return jnp.dot(matrix, other.astype(matrix.dtype), preferred_element_type=jnp.float32)


def _call(kernel: Callable[..., None], sizes: _Sizes, out: Any) -> Callable[..., Any]:
    return pl.pallas_call(
        kernel,
        grid=sizes.grid,
        out_shape=out,
        interpret=INTERPRET,
        name="recurrence_forward" if sizes.forward else "recurrence_backward",
        compiler_params=triton.CompilerParams(num_warps=sizes.warps, num_stages=1),
    )
