"""Models that are worked on block by block: the same numbers, and no more memory than a few models."""

import tracemalloc

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord

from apportion.bridges.flower import LearnedAggregation, updates
from bridges.flower.test_strategy import NOBODY, begin, replies_of

SHARES = np.array([0.5, 0.3, 0.2])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(updates, "BLOCK", 1 << 12)


def models(count=3, shape=(100, 131), seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"weight": rng.normal(size=shape).astype(np.float32), "steps": np.array(10 * i + 1)}
        for i in range(count)
    ]


def test_blocks_make_the_numbers_of_whole_models():
    start, *given = models(4)
    move = {"weight": models(1, seed=1)[0]["weight"]}
    flat = np.stack([own["weight"].astype(float) for own in given])
    whole, steps = np.tensordot(SHARES, flat, 1), round(float(SHARES @ [11, 21, 31]))
    mean, made = (
        updates.weighted_sum(SHARES, given),
        updates.moved(given, start, move, SHARES, 2.0, 0.5),
    )
    np.testing.assert_allclose(mean["weight"], whole, atol=1e-6)
    expected = start["weight"] + 2 * (whole - start["weight"]) + 0.5 * move["weight"]
    np.testing.assert_allclose(made["weight"], expected, atol=1e-5)
    assert mean["weight"].dtype == np.float32
    assert mean["steps"].dtype == given[0]["steps"].dtype
    assert mean["steps"] == made["steps"] == steps
    # Norms and angles, too.
    rows = updates.geometry(given, start, move)
    apart = np.stack([*(flat - start["weight"]), move["weight"]]).reshape(4, -1)
    np.testing.assert_allclose(rows @ rows.T, apart @ apart.T, rtol=1e-6, atol=1e-3)
    for own, row in zip(given, rows, strict=False):
        assert updates._distance(own, start) == pytest.approx(np.linalg.norm(row), rel=1e-6)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype=np.int64).reshape(3, 4)),
        np.array(7, np.int32),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
    ],
    ids=["rows", "columns", "number", "empty", "booleans"],
)
def test_arrays_are_read_where_they_lie(array):
    read = updates.read_model(ArrayRecord({"x": Array(array)}))["x"]
    np.testing.assert_array_equal(read, array)
    assert (read.dtype, read.shape) == (array.dtype, array.shape)


def test_a_round_needs_memory_for_a_few_models_however_many_reply():
    size, clients = 200_000, 16
    rng = np.random.default_rng(0)
    first = np.zeros(size, np.float32)
    strategy = LearnedAggregation(
        lambda arrays: arrays["scores"].numpy()[:60].reshape(20, 3), np.arange(20) % 3, **NOBODY
    )
    try:
        for n in (1, 2):
            begin(strategy, first, n)
            replies = replies_of(rng.normal(size=(clients, size)))
            if n > 1:  # the first round compiles
                tracemalloc.start()
            assert strategy.aggregate_train(n, replies)[0] is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * first.nbytes
