"""GPU detection, compiler options for GPUs, and a barrier that keeps reads before writes."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

_GRAPHS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,"
    "DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
    # Kernels that do not touch each other's memory run side by side, for most of a small step's are too
    # small to fill a GPU. Each computes what it would alone: a run's numbers do not depend on this, but
    # on the kernels that the compiler chose by timing them.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""Compiler options for GPUs: loops run as recorded graphs, inner loops too, so that steps do not wait for
the processor."""


def on_gpu() -> bool:
    """Whether programs are compiled for a GPU here and now.

    >>> with jax.default_device("cpu"):
    ...     on_gpu()
    False
    """
    # A device, its platform's name, or None.
    asked = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return (getattr(asked, "platform", asked) or jax.default_backend()) in ("gpu", "cuda")


@cache
def as_graphs() -> dict[str, Any]:
    """The options of `_GRAPHS` that this JAX knows; none without a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    return {name: value for name, value in _GRAPHS.items() if known(name, value)}


def known(option: str, value: Any) -> bool:
    """Whether the compiler has such an option: they are its own, and come and go.

    >>> known("xla_gpu_graph_min_graph_size", 1), known("xla_gpu_no_such_thing", 1)
    (True, False)
    """
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def compiled_as_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit with GPU options; donates all arguments except the first."""
    # Its types leave out what it hands on to `jax.jit`.
    jit: Any = eqx.filter_jit

    # Not before the first call: the compiler is asked for its options, and importing starts no JAX.
    @cache
    def compiled() -> Callable[..., Any]:
        return jit(function, donate="all-except-first", compiler_options=as_graphs())

    return wraps(function)(lambda *given: compiled()(*given))


def read_before_write(read: Callable[[Int[Array, ""]], PyTree], index: Int[Array, ""]) -> PyTree:
    """Return `read(index)`, completed before any later write to the same buffers.

    Without it XLA fuses small reads into their uses, even after a write to the same buffer, and copies
    the whole buffer at every step to do so: that is O(T). On a GPU an optimisation barrier prevents it.
    On a CPU that barrier is removed before buffers are assigned, so the read runs in a loop of one round
    whose length and index XLA cannot predict; on a GPU such a loop costs a quarter of a small step.
    """
    if on_gpu():
        return jax.lax.optimization_barrier(read(index))
    blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(read, index))
    rounds = jnp.where(index < 0, 2, 1)
    return jax.lax.fori_loop(
        0, rounds, lambda i, _: read(index + jnp.minimum(i, 0).astype(index.dtype)), blank
    )
