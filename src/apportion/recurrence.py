"""The paper's recurrent network: h_k = tanh(x_k A + h_{k-1} B + b) over an entity's window.

`Recurrence` uses the layout (feature, row), where a row is one entity at one time. It runs custom kernels
(`apportion.kernels.recurrence`) on a GPU and scans elsewhere. A `vmap` over times adds rows, and a `vmap`
over runs with different parameters adds runs; however they are nested, the compiled program has one axis
of runs and one of rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, PRNGKeyArray

History = Float[Array, "entities window channels"]
Features = Float[Array, "entities hidden"]

# Parameters A, B and b, inputs and states, with one axis of runs and one of rows.
_FromInput = Float[Array, "runs channels hidden"]
_FromState = Float[Array, "runs hidden hidden"]
Bias = Float[Array, "runs hidden"]
Inputs = Float[Array, "window runs channels rows"]
States = Float[Array, "window runs hidden rows"]
_HiddenState = Float[Array, "runs hidden rows"]


class Recurrence(eqx.Module):
    """Last state of a tanh recurrent cell over the window, shared by all entities."""

    from_input: Float[Array, "channels hidden"]
    from_state: Float[Array, "hidden hidden"]
    bias: Float[Array, " hidden"]

    def __init__(self, channels: int, hidden: int, *, key: PRNGKeyArray):
        input_key, state_key = jax.random.split(key)
        self.from_input = jax.nn.initializers.glorot_uniform()(input_key, (channels, hidden))
        self.from_state = jax.nn.initializers.orthogonal()(state_key, (hidden, hidden))
        self.bias = jnp.zeros(hidden)

    def __call__(self, history: History) -> Features:
        if 0 in history.shape:
            return jnp.zeros((history.shape[0], self.bias.shape[0]), history.dtype)
        return _read(self.from_input, self.from_state, self.bias, history)


@partial(jax.jit, inline=True)
def _read(from_input: Array, from_state: Array, bias: Array, history: Array) -> Array:
    dtype = jnp.promote_types(history.dtype, bias.dtype)
    inputs = history.astype(dtype).transpose(1, 2, 0)[:, None]
    parameters = (each.astype(dtype)[None] for each in (from_input, from_state, bias))
    (last,) = _last_p.bind(*parameters, inputs)
    return last[0].T


def _product(a: Array, b: Array) -> Array:
    """Matrix product for each run, accumulated in float32 or higher."""
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _forward(
    from_input: _FromInput, from_state: _FromState, bias: Bias, inputs: Inputs, *, keep: bool
) -> tuple[States] | tuple[_HiddenState]:
    """Return the states after every period, or the last one."""
    # One product with [x; h] is faster than two products with thin matrices.
    both = jnp.concatenate([from_input, from_state], 1).swapaxes(1, 2)

    def period(h, x):
        z = _product(both, jnp.concatenate([x, h], 1)) + bias[:, :, None]
        h = jnp.tanh(z).astype(h.dtype)
        return h, h if keep else None

    nothing = jnp.zeros((*bias.shape, inputs.shape[-1]), inputs.dtype)
    last, states = lax.scan(period, nothing, inputs)
    kept: Any = states if keep else last
    return (kept,)


_last, _states = (partial(_forward, keep=keep) for keep in (False, True))


def _tangent(
    from_input: _FromInput,
    from_state: _FromState,
    bias: Bias,
    inputs: Inputs,
    states: States,
    *tangents: Array,
) -> tuple[_HiddenState]:
    """Return the tangent of the last state; its transpose, `_backward`, needs `states`."""
    return jax.jvp(_last, (from_input, from_state, bias, inputs), tangents)[1]


def _backward(
    from_input: _FromInput,
    from_state: _FromState,
    inputs: Inputs,
    states: States,
    cotangent: _HiddenState,
    *,
    of_inputs: bool,
) -> tuple[Array, ...]:
    """Return the gradients with respect to A, B, b and, if `of_inputs`, the inputs.

    They are accumulated during the reverse scan; storing one term per period would read them all again.
    """
    window, runs, channels, rows = inputs.shape
    hidden = from_state.shape[1]
    exact = jnp.promote_types(states.dtype, jnp.float32)
    ones = jnp.ones((runs, 1, rows), inputs.dtype)

    def period(carry, here):
        of_state, gradient = carry
        k, x, h = here
        # Indexing avoids a shifted copy of all states, which would be written and read again.
        before = jnp.where(k > 0, states[jnp.maximum(k - 1, 0)], 0)
        of_sum = (of_state * (1 - h * h)).astype(h.dtype)
        seen = jnp.concatenate([x, ones, before], 1)
        # einsum sums over rows in place; a product with the transpose would first write the transpose.
        gradient += jnp.einsum("rhn,rfn->rhf", of_sum, seen, preferred_element_type=exact)
        of_x = _product(from_input, of_sum).astype(x.dtype) if of_inputs else None
        return (_product(from_state, of_sum), gradient), of_x

    nothing = jnp.zeros((runs, hidden, channels + 1 + hidden), exact)
    series = (jnp.arange(window), inputs, states)
    (_, gradient), of_x = lax.scan(period, (cotangent.astype(exact), nothing), series, reverse=True)
    gradient = gradient.swapaxes(1, 2).astype(states.dtype)
    of_parameters = gradient[:, :channels], gradient[:, channels + 1 :], gradient[:, channels]
    return of_parameters if of_x is None else (*of_parameters, of_x)


# Positions of the axes of runs and rows; parameters have no rows.
_PARAMETER, _SERIES, _STATE = (0, None), (1, 3), (0, 2)
_Layout = tuple[int, int | None]


def _batched(
    primitive: Primitive,
    taken: Sequence[_Layout],
    given: Sequence[_Layout],
    args: Sequence[Array],
    axes: Sequence[int | None],
    **options: bool,
) -> tuple[Sequence[Array], Sequence[int]]:
    """Batching rule: the mapped axis becomes more rows, or more runs if parameters differ along it."""
    size = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
    differ = any(rows is None for _, rows in given) or any(
        axis is not None and rows is None for axis, (_, rows) in zip(axes, taken, strict=True)
    )
    which = 0 if differ else 1

    def merge(arg: Array, axis: int | None, layout: _Layout) -> Array:
        place = layout[which]
        if place is None:
            return arg
        whole = batching.bdim_at_front(arg, axis, size)
        return lax.collapse(jnp.moveaxis(whole, 0, place), place, place + 2)

    results = primitive.bind(*map(merge, args, axes, taken), **options)
    places = [layout[which] or 0 for layout, _ in zip(given, results, strict=False)]
    parted = [
        result.reshape(*result.shape[:place], size, -1, *result.shape[place + 1 :])
        for result, place in zip(results, places, strict=True)
    ]
    return parted, places


def _primitive(
    name: str, scan: Callable[..., Any], taken: Sequence[_Layout], given: Sequence[_Layout]
) -> Primitive:
    """Define a primitive with the semantics of `scan`, on one axis of runs and one of rows."""
    primitive = Primitive(f"recurrence_{name}")
    primitive.multiple_results = True

    def shapes(*args: Any, **options: bool) -> list[Any]:
        out = jax.eval_shape(partial(scan, **options), *args)
        return [ShapedArray(one.shape, one.dtype) for one in out]

    primitive.def_impl(scan)
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = partial(_batched, primitive, taken, given)
    mlir.register_lowering(primitive, mlir.lower_fun(scan, multiple_results=True))
    return primitive


_PRIMALS = (_PARAMETER, _PARAMETER, _PARAMETER, _SERIES)
_last_p = _primitive("last", _last, _PRIMALS, (_STATE,))
_states_p = _primitive("states", _states, _PRIMALS, (_SERIES,))
_tangent_p = _primitive("tangent", _tangent, (*_PRIMALS, _SERIES, *_PRIMALS), (_STATE,))
_backward_p = _primitive(
    "backward", _backward, (_PARAMETER, _PARAMETER, _SERIES, _SERIES, _STATE), _PRIMALS
)


def _derivative(primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
    (states,) = _states_p.bind(*primals)
    changes = map(ad.instantiate_zeros, tangents)
    return [states[-1]], _tangent_p.bind(*primals, states, *changes)


def _transposed(cotangents: Sequence[Any], *args: Any) -> list[Any]:
    (from_input, from_state, _, inputs, states), changes = args[:5], args[5:]
    wanted = [ad.is_undefined_primal(change) for change in changes]
    known = (from_input, from_state, inputs, states, ad.instantiate_zeros(cotangents[0]))
    gradients = _backward_p.bind(*known, of_inputs=wanted[3])
    kept = [gradients[i] if want else None for i, want in enumerate(wanted)]
    return [None] * 5 + kept


ad.primitive_jvps[_last_p] = _derivative
ad.primitive_transposes[_tangent_p] = _transposed


def _on_gpu(name: str, scan: Callable[..., Any]) -> Callable[..., Any]:
    """Return the GPU kernel of this name; it falls back to the scan for unsupported sizes."""

    def kernel(from_input: Array, from_state: Array, *others: Array, **options: bool) -> Any:
        # Imported here because Pallas is slow to import and only GPU programs need it.
        from apportion.kernels import recurrence as kernels

        chosen = getattr(kernels, name) if kernels.fits_kernel(from_input) else scan
        return chosen(from_input, from_state, *others, **options)

    return kernel


# The only place that chooses kernels over the compiled scans.
for _name, _scan, _p in (
    ("last", _last, _last_p),
    ("states", _states, _states_p),
    ("gradients", _backward, _backward_p),
):
    _kernel = mlir.lower_fun(_on_gpu(_name, _scan), multiple_results=True)
    mlir.register_lowering(_p, _kernel, platform="cuda")
