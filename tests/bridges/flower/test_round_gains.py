"""What the gate of LearnedAggregation saw, round by round, as gains that can be certified."""

import os

import numpy as np
import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
pytest.importorskip("flwr")

from apportion.certificate import Certificate
from bridges.flower.test_strategy import (
    LABELS,
    TRUTH,
    begin,
    models,
    opinionated,
    reply,
    strategy_of,
)


def replies(seed):
    return [reply(i, table) for i, table in enumerate(models(4, seed))]


def chance(table):
    raised = np.exp(table - table.max(-1, keepdims=True))
    return (raised / raised.sum(-1, keepdims=True))[np.arange(60), LABELS]


def test_a_rounds_gain_is_that_of_both_aggregates_on_the_gates_samples():
    strategy = begin(strategy_of())
    made, metrics = strategy.aggregate_train(1, replies(0))
    fedavg = np.mean(models(4, 0), axis=0)
    kept = np.arange(60) % 4 == 3
    assert metrics["gate-passed"] == 1
    expected = (chance(made["scores"].numpy()) - chance(fedavg))[kept].mean()
    (gain,) = strategy.gains().values
    assert gain == pytest.approx(expected, abs=1e-5)
    assert abs(gain) > 1e-3


def test_the_gain_of_a_policy_that_is_turned_away_is_counted_all_the_same():
    strategy = begin(strategy_of(opinionated(sign=-1)))
    _, metrics = strategy.aggregate_train(1, replies(0))
    assert metrics["gate-passed"] == 0
    assert strategy.gains().values[0] < 0


def test_rounds_without_a_gate_or_a_model_are_missing_and_memory_keeps_the_others(tmp_path):
    file = tmp_path / "memory.safetensors"
    strategy = begin(strategy_of(keep=file))
    strategy.aggregate_train(1, replies(0))
    strategy.aggregate_train(2, [])
    strategy.aggregate_train(3, replies(1))
    found = strategy.gains().values
    assert np.isnan(found).tolist() == [False, True, False]
    again = strategy_of(keep=file).gains().values
    np.testing.assert_array_equal(again, found)
    certificate = strategy.gains().certify()
    assert isinstance(certificate, Certificate)
    assert (certificate.verdict, len(certificate.means)) == ("not yet", 2)
    without = begin(strategy_of(gate=False))
    without.aggregate_train(1, replies(0))
    assert np.isnan(without.gains().values).all()


def test_a_policy_that_is_better_in_every_round_is_certified():
    # The last client is right on every sample, and the policy gives it most.
    strategy = begin(strategy_of())
    for n in range(1, 80):
        tables = [*models(3, n), 4 * TRUTH]
        strategy.aggregate_train(n, [reply(i, table) for i, table in enumerate(tables)])
    certificate = strategy.gains().certify()
    assert certificate.means.min() > 0
    assert certificate.verdict == "certified"
