"""The kernels of the recurrence, held against the plain scan and what JAX derives from it."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion import recurrence, recurrence_gpu
from apportion.recurrence import Recurrence, last_state

TOLERANCE = 5e-5
SIZES = st.sampled_from([(1, 1, 1, 1), (5, 4, 3, 17)])
"""Entities, window, channels, hidden: each compiles programs of its own, so they are few."""


few = settings(max_examples=4)


@eqx.filter_jit
def reference(cell: Recurrence, history):
    return last_state(cell.from_input, cell.from_state, cell.bias, history)


@eqx.filter_jit
def by_kernel(cell: Recurrence, history):
    return cell(history)


def make(sizes, seed=0, times=()):
    entities, window, channels, hidden = sizes
    rng = np.random.default_rng(seed)
    bias = 0.3 * rng.normal(size=hidden)
    history = rng.normal(size=(*times, entities, window, channels))
    bias, history = (jax.device_put(array.astype(np.float32)) for array in (bias, history))
    cell = Recurrence(channels, hidden, key=jax.random.key(seed))
    return eqx.tree_at(lambda c: c.bias, cell, bias), history


def assert_close(found, expected, tolerance=TOLERANCE):
    """Each array to the tolerance, relative to its largest value where that exceeds one."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        one, other = (np.asarray(side, np.float64) for side in (one, other))
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * max(1, np.abs(other).max())


def weighted(function, cell, history):
    """A scalar in which every feature has a weight of its own."""
    features = function(cell, history)
    weights = jnp.cos(jnp.arange(features.size, dtype=features.dtype)).reshape(features.shape)
    return (weights * features).sum()


@cache
def gradients(function):
    """With respect to the parameters and the inputs."""
    return jax.jit(jax.grad(lambda both: weighted(function, *both)))


@few
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_the_kernel_is_the_plain_scan(sizes, seed):
    cell, history = make(sizes, seed)
    assert_close(cell(history), reference(cell, history))


@cache
def over_times(function):
    return lambda cell, histories: jax.vmap(partial(function, cell))(histories)


@cache
def of_runs(function):
    return jax.jit(jax.vmap(gradients(over_times(function))))


@few
@given(sizes=SIZES, runs=st.sampled_from([1, 3]), seed=st.integers(0, 99))
def test_runs_with_parameters_of_their_own_have_their_own_gradients(sizes, runs, seed):
    made = [make(sizes, seed + run, (2,)) for run in range(runs)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *made)
    found = jax.device_get(of_runs(by_kernel)(stacked))
    for run, both in enumerate(made):
        of_one = jax.tree.map(lambda leaf, run=run: leaf[run], found)
        assert_close(of_one, gradients(over_times(reference))(both))


def test_each_time_may_have_its_own_gradient():
    cell, histories = make((3, 4, 2, 5), times=(6,))

    def each(function):
        return jax.jit(jax.vmap(lambda one: jax.grad(partial(weighted, function))(cell, one)))

    assert_close(each(by_kernel)(histories), each(reference)(histories))


@pytest.mark.parametrize("members_outside", [True, False])
def test_members_of_an_ensemble_read_the_same_history(members_outside):
    keys = jax.random.split(jax.random.key(1), 3)
    members = jax.vmap(lambda key: Recurrence(2, 5, key=key))(keys)
    _, histories = make((4, 6, 2, 5), times=(7,))

    def read(function):
        if members_outside:
            return jax.vmap(lambda one: jax.vmap(partial(function, one))(histories))(members)
        of_time = lambda history: jax.vmap(lambda one: function(one, history))(members)  # noqa: E731
        return jax.vmap(of_time)(histories)

    assert_close(read(by_kernel), read(reference))


def test_forward_and_second_derivatives_are_those_of_the_plain_scan():
    cell, history = make((3, 4, 2, 5))

    def of_bias(function):
        return lambda bias: weighted(function, eqx.tree_at(lambda c: c.bias, cell, bias), history)

    for derive in (jax.jacfwd, jax.hessian):
        found = jax.jit(derive(of_bias(by_kernel)))(cell.bias)
        assert_close(found, jax.jit(derive(of_bias(reference)))(cell.bias))


def test_double_precision_stays_double():
    cell, history = make((4, 6, 3, 7))
    with jax.enable_x64(True):
        both = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), (cell, history)
        )
        found, expected = gradients(by_kernel)(both), gradients(reference)(both)
        assert jax.tree.leaves(found)[0].dtype == jnp.float64
        assert_close(found, expected, 1e-12)


def test_half_precision_stays_half_and_close_to_single():
    single = make((6, 8, 3, 16))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), single)
    found = gradients(by_kernel)(half)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))
    assert_close(found, gradients(reference)(single), 0.05)


def test_an_empty_window_leaves_the_state_at_zero():
    cell, _ = make((3, 1, 2, 5))
    assert cell(jnp.zeros((3, 0, 2))).tolist() == np.zeros((3, 5)).tolist()


def test_times_become_rows_of_one_product():
    cell, histories = make((10, 6, 3, 5), times=(7,))
    text = str(jax.make_jaxpr(lambda cell: jax.vmap(cell)(histories).sum())(cell))
    assert "recurrence_last" in text
    assert "f32[1,5,70]" in text


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(recurrence_gpu, "INTERPRET", True)


SINGLE, HALF = ("float32", TOLERANCE), ("bfloat16", 0.02)


@pytest.mark.parametrize(
    ("sizes", "dtype", "tolerance"),
    [((5, 2, 3, 37, 25), *SINGLE), ((2, 3, 17, 5, 3), *SINGLE), ((3, 1, 1, 20, 16), *HALF)],
)
def test_the_kernels_for_gpus_are_the_scans(sizes, dtype, tolerance, interpreted):
    window, runs, channels, rows, hidden = sizes
    shapes = (
        (runs, channels, hidden),
        (runs, hidden, hidden),
        (runs, hidden),
        (window, runs, channels, rows),
        (runs, hidden, rows),
    )
    rng = np.random.default_rng(0)
    made = [rng.normal(size=shape) / hidden**0.5 for shape in shapes]
    *parameters, inputs, cotangent = (jax.device_put(array.astype(dtype)) for array in made)
    assert recurrence_gpu.fits_kernel(parameters[0])
    (states,) = jax.jit(recurrence._states)(*parameters, inputs)
    assert_close(jax.jit(recurrence_gpu.states)(*parameters, inputs), (states,), tolerance)
    assert_close(jax.jit(recurrence_gpu.last)(*parameters, inputs), (states[-1],), tolerance)
    back = (*parameters[:2], inputs, states, cotangent)
    for of_inputs in (True, False):
        found, expected = (
            jax.jit(partial(kernels, of_inputs=of_inputs))(*back)
            for kernels in (recurrence_gpu.gradients, recurrence._backward)
        )
        assert_close(found, expected, tolerance)


@pytest.mark.parametrize("runs", [1, 60, 500])
def test_programs_grow_with_the_rows_and_cover_them(runs):
    inputs = jax.ShapeDtypeStruct((31, runs, 3, 1090), jnp.float32)
    forward, back = (
        recurrence_gpu._Sizes.of(inputs, 25, forward=forward) for forward in (True, False)
    )
    assert [forward.block, back.block] == {1: [16, 16], 60: [64, 64], 500: [128, 64]}[runs]
    for sizes in (forward, back):
        assert 0 <= sizes.grid[1] * sizes.block - 1090 < sizes.block


@pytest.mark.parametrize("block", [64, 128])
def test_rows_of_a_program_change_nothing(block, interpreted, monkeypatch):
    rng = np.random.default_rng(0)
    shapes = ((1, 3, 5), (1, 5, 5), (1, 5), (2, 1, 3, 70))
    given = [jax.device_put(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    (states,) = jax.jit(recurrence._states)(*given)
    monkeypatch.setattr(recurrence_gpu._Sizes, "block", block)
    assert_close(jax.jit(recurrence_gpu.states)(*given), (states,))
    back = (*given[:2], given[3], states, states[-1])
    found, expected = (
        jax.jit(partial(kernels, of_inputs=True))(*back)
        for kernels in (recurrence_gpu.gradients, recurrence._backward)
    )
    assert_close(found, expected)


def lowered_for_cuda(cell, histories) -> str:
    def loss(cell):
        return jax.vmap(cell)(histories).sum()

    traced = jax.jit(jax.grad(loss)).trace(cell)
    try:
        return traced.lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:
        # From JAX 0.11 on, lowering for a GPU needs one.
        if "No supported GPU devices" in str(error):
            pytest.skip(str(error))
        raise


def test_a_gpu_gets_one_kernel_each_way_and_no_loop():
    text = lowered_for_cuda(*make((10, 6, 3, 25), times=(7,)))
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert "stablehlo.while" not in text


def test_sizes_beyond_the_kernels_are_scanned_on_a_gpu_too():
    text = lowered_for_cuda(*make((2, 3, 2, 129), times=(2,)))
    assert "__gpu$xla.gpu.triton" not in text
    assert text.count("stablehlo.while") == 2
