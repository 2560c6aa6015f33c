"""Models that are worked on block by block: the same numbers, and no more memory than a few models."""

import os
import tracemalloc

import numpy as np
import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
pytest.importorskip("flwr")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)

from apportion.bridges.flower import LearnedAggregation, updates

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


def test_blocks_make_the_mean_of_whole_models():
    given = models()
    made = updates.weighted_sum(SHARES, given)
    whole = np.tensordot(SHARES, np.stack([own["weight"] for own in given]).astype(float), 1)
    np.testing.assert_allclose(made["weight"], whole, atol=1e-6)
    assert made["weight"].dtype == np.float32
    assert made["steps"].dtype == given[0]["steps"].dtype
    assert made["steps"] == round(float(SHARES @ [1, 11, 21]))


def test_blocks_keep_step_and_momentum_of_whole_models():
    start, *given = models(4)
    move = {"weight": models(1, seed=1)[0]["weight"]}
    made = updates.moved(SHARES, given, start, move, 2.0, 0.5)
    whole = np.tensordot(SHARES, np.stack([own["weight"] for own in given]).astype(float), 1)
    expected = start["weight"] + 2 * (whole - start["weight"]) + 0.5 * move["weight"]
    np.testing.assert_allclose(made["weight"], expected, atol=1e-5)
    assert made["steps"] == round(float(SHARES @ [11, 21, 31]))


def test_blocks_keep_norms_and_angles():
    start, *given = models(4)
    move = {"weight": models(1, seed=1)[0]["weight"]}
    rows = updates.geometry(given, start, move)
    whole = [own["weight"].astype(float) - start["weight"] for own in given] + [move["weight"]]
    flat = np.stack([own.ravel() for own in whole])
    np.testing.assert_allclose(rows @ rows.T, flat @ flat.T, rtol=1e-6, atol=1e-3)
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


def test_a_client_that_names_its_arrays_in_another_order_changes_nothing():
    start, own = models(2)
    turned = dict(reversed(own.items()))
    assert list(updates.cast_like(turned, start)) == list(start)


def test_a_round_needs_memory_for_a_few_models_however_many_reply():
    size, clients = 200_000, 16
    rng = np.random.default_rng(0)
    first = np.zeros(size, np.float32)

    def reply(node):
        array = first + rng.normal(size=size).astype(np.float32)
        content = RecordDict(
            {
                "arrays": ArrayRecord([array]),
                "metrics": MetricRecord({"num-examples": 10}),
            }
        )
        facts = Metadata(1, "", node, 1, "x", "", 0.0, 60.0, "train")
        return Message(content=content, metadata=facts)

    class NoNodes:
        def get_node_ids(self):
            return []

    def answers(arrays):
        return arrays.to_numpy_ndarrays()[0][:60].reshape(20, 3)

    strategy = LearnedAggregation(
        answers, np.arange(20) % 3, min_train_nodes=0, min_available_nodes=0
    )

    def aggregated(n):
        list(strategy.configure_train(n, ArrayRecord([first]), ConfigRecord(), NoNodes()))
        replies = [reply(node) for node in range(clients)]
        if n > 1:  # the first round compiles
            tracemalloc.start()
        return strategy.aggregate_train(n, replies)[0]

    try:
        made = [aggregated(n) for n in (1, 2)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert all(own is not None for own in made)
    assert peak < 8 * first.nbytes
