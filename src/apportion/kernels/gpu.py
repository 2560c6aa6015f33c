"""GPU detection, compiler options for GPUs, and a barrier that orders reads before writes."""

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
    # Run independent kernels concurrently, since most kernels of a small step do not fill a GPU. Results
    # do not depend on this option (they do depend on the kernels that XLA selects by autotuning).
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""Compiler options for GPUs: run all loops as command buffers (CUDA graphs), so that steps do not wait
for the host."""


def on_gpu() -> bool:
    """Whether the default device is a GPU.

    >>> with jax.default_device("cpu"):
    ...     on_gpu()
    False
    """
    # A device, the name of a platform, or None.
    asked = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return (getattr(asked, "platform", asked) or jax.default_backend()) in ("gpu", "cuda")


@cache
def as_graphs() -> dict[str, Any]:
    """Return the options of `_GRAPHS` that this version of JAX supports; none without a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    return {name: value for name, value in _GRAPHS.items() if known(name, value)}


def known(option: str, value: Any) -> bool:
    """Whether this version of the compiler supports an option.

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
    # The annotations of `filter_jit` omit the arguments that it passes on to `jax.jit`.
    jit: Any = eqx.filter_jit

    # Deferred to the first call, because testing options starts JAX and importing must not.
    @cache
    def compiled() -> Callable[..., Any]:
        return jit(function, donate="all-except-first", compiler_options=as_graphs())

    return wraps(function)(lambda *given: compiled()(*given))


def read_before_write(read: Callable[[Int[Array, ""]], PyTree], index: Int[Array, ""]) -> PyTree:
    """Return `read(index)`, evaluated before any later write to the same buffers.

    Without it, XLA fuses small reads into their uses. If a use comes after a write to the same buffer, XLA
    copies the whole buffer at every step, which costs O(T). On a GPU an optimisation barrier prevents the
    fusion. On a CPU, XLA removes the barrier before it assigns buffers, so the read runs in a loop with
    one iteration whose length and index XLA cannot predict. On a GPU such a loop would take a quarter of
    the time of a small step.
    """
    if on_gpu():
        return jax.lax.optimization_barrier(read(index))
    blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(read, index))
    rounds = jnp.where(index < 0, 2, 1)
    return jax.lax.fori_loop(
        0, rounds, lambda i, _: read(index + jnp.minimum(i, 0).astype(index.dtype)), blank
    )
