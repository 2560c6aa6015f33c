"""The kernels of the recurrence, held against the plain scan and what JAX derives from it."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion import recurrence
from apportion.kernels import recurrence as recurrence_gpu
from apportion.recurrence import Recurrence

TOLERANCE = 5e-5
SIZES = (5, 4, 3, 17)
"""Entities, window, channels, hidden: each compiles programs of its own, so they are few."""


def reference(cell: Recurrence, history):
    """The last state by a plain scan, which says what is computed."""

    def period(state, x):
        return jnp.tanh(x @ cell.from_input + state @ cell.from_state + cell.bias), None

    start = jnp.zeros((history.shape[0], cell.bias.shape[0]), history.dtype)
    return jax.lax.scan(period, start, history.swapaxes(0, 1))[0]


def by_kernel(cell: Recurrence, history):
    return cell(history)


def make(sizes=SIZES, seed=0, times=()):
    entities, window, channels, hidden = sizes
    rng = np.random.default_rng(seed)
    bias = 0.3 * rng.normal(size=hidden)
    history = rng.normal(size=(*times, entities, window, channels))
    bias, history = (jax.device_put(array.astype(np.float32)) for array in (bias, history))
    cell = Recurrence(channels, hidden, key=jax.random.key(seed))
    return eqx.tree_at(lambda c: c.bias, cell, bias), history


def make_runs(sizes=SIZES):
    """Three runs with parameters of their own, two times each."""
    made = [make(sizes, seed, (2,)) for seed in range(3)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


def assert_close(found, expected, tolerance=TOLERANCE):
    """Each array to the tolerance, relative to its largest value where that exceeds one."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        one, other = (np.asarray(side, np.float64) for side in (one, other))
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * max(1, np.abs(other).max())


def weighted(function, cell, histories):
    """A scalar in which every feature at every time has a weight of its own, and the features."""
    features = jax.vmap(partial(function, cell))(histories)
    weights = jnp.cos(jnp.arange(features.size, dtype=features.dtype)).reshape(features.shape)
    return (weights * features).sum(), features


@cache
def of_runs(function):
    """Features, and gradients with respect to the parameters and the inputs."""
    both = jax.value_and_grad(lambda run: weighted(function, *run), has_aux=True)
    return jax.jit(jax.vmap(both))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), SIZES])
def test_the_kernel_is_the_plain_scan_for_every_run_and_time(sizes):
    runs = make_runs(sizes)
    assert_close(of_runs(by_kernel)(runs), of_runs(reference)(runs))


def test_each_time_may_have_its_own_gradient():
    cell, histories = make(times=(6,))

    def each(function):
        def one(history):
            return jax.grad(lambda cell: weighted(function, cell, history[None])[0])(cell)

        return jax.jit(jax.vmap(one))(histories)

    assert_close(each(by_kernel), each(reference))


def test_members_of_an_ensemble_read_the_same_history_and_move_with_their_bias():
    members = jax.vmap(lambda key: Recurrence(3, 17, key=key))(
        jax.random.split(jax.random.key(1), 3)
    )
    _, histories = make(times=(7,))

    def read(function):
        def of_time(history):
            return jax.vmap(lambda member: function(member, history))(members)

        def of_member(member):
            return jax.vmap(partial(function, member))(histories)

        def of_bias(bias):
            member = jax.tree.map(lambda leaf: leaf[0], members)
            return function(eqx.tree_at(lambda m: m.bias, member, bias), histories[0])

        return (
            jax.vmap(of_time)(histories),
            jax.vmap(of_member)(members),
            jax.jvp(of_bias, (members.bias[0],), (jnp.ones(17),)),
        )

    assert_close(jax.jit(lambda: read(by_kernel))(), jax.jit(lambda: read(reference))())


def test_double_precision_stays_double():
    runs = make_runs()
    with jax.enable_x64(True):
        runs = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), runs)
        found, expected = of_runs(by_kernel)(runs), of_runs(reference)(runs)
        assert jax.tree.leaves(found)[0].dtype == jnp.float64
        assert_close(found, expected, 1e-12)


@pytest.mark.parametrize(
    ("sizes", "block", "dtype", "of_inputs", "tolerance"),
    [
        ((4, 2, 17, 37, 5), 16, "float32", True, TOLERANCE),
        ((3, 1, 1, 70, 16), 64, "bfloat16", False, 0.02),
    ],
)
def test_the_kernels_for_gpus_are_the_scans(sizes, block, dtype, of_inputs, tolerance, monkeypatch):
    monkeypatch.setattr(recurrence_gpu, "INTERPRET", True)
    monkeypatch.setattr(recurrence_gpu._Sizes, "block", block)
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

    def computed(last, states, gradients):
        # The way back starts from the same states for both.
        (known,) = recurrence._states(*parameters, inputs)
        back = (*parameters[:2], inputs, known, cotangent)
        read = last(*parameters, inputs), states(*parameters, inputs)
        return read, gradients(*back, of_inputs=of_inputs)

    kernels = recurrence_gpu.last, recurrence_gpu.states, recurrence_gpu.gradients
    scans = recurrence._last, recurrence._states, recurrence._backward
    found, expected = (jax.jit(lambda each=each: computed(*each))() for each in (kernels, scans))
    assert_close(found, expected, tolerance)


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
