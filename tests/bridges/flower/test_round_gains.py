"""What the gate of LearnedAggregation saw, round by round, as gains that can be certified."""

import numpy as np
import pytest

pytest.importorskip("flwr")

from apportion.bridges.flower.strategy import _mix_decisions
from apportion.bridges.flower.updates import moved, weighted_sum
from apportion.certify.certificate import Certificate
from apportion.domains.federated.domain import DOMAIN, CertifyOptions
from bridges.flower.test_strategy import (
    LABELS,
    TRUTH,
    begin,
    models,
    replies_of,
    strategy_of,
)


def replies(seed):
    return replies_of(models(4, seed))


def one_right(seed):
    """The last client is right on every sample, and the policy of `strategy_of` gives it most."""
    return replies_of([*models(3, seed), 4 * TRUTH])


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


def test_rounds_without_a_gate_or_a_model_are_missing_and_memory_keeps_the_others(tmp_path):
    file = tmp_path / "memory.safetensors"
    strategy = begin(strategy_of(checkpoint_path=file))
    strategy.aggregate_train(1, replies(0))
    strategy.aggregate_train(2, [])
    strategy.aggregate_train(3, replies(1))
    found = strategy.gains().values
    assert np.isnan(found).tolist() == [False, True, False]
    again = strategy_of(checkpoint_path=file).gains().values
    np.testing.assert_array_equal(again, found)
    certificate = strategy.gains().certify(block=1)
    assert isinstance(certificate, Certificate)
    assert (certificate.verdict, len(certificate.means)) == ("not yet", 2)
    without = begin(strategy_of(gate=False))
    without.aggregate_train(1, replies(0))
    assert np.isnan(without.gains().values).all()


def test_a_part_of_the_way_to_the_policys_model_is_a_decision_like_any_other():
    rng = np.random.default_rng(0)
    start, move, *sent = ({"w": rng.normal(size=(3, 2))} for _ in range(6))
    usual, shares = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
    whole = moved(sent, start, move, shares, 0.7, 0.4)
    mixed, step, momentum = _mix_decisions(0.3, usual, shares, 0.7, 0.4)
    assert mixed.sum() == pytest.approx(1)
    there = weighted_sum(np.array([0.7, 0.3]), [weighted_sum(usual, sent), whole])
    np.testing.assert_allclose(moved(sent, start, move, mixed, step, momentum)["w"], there["w"])


def test_a_policy_that_must_earn_its_place_begins_as_fedavg_and_is_certified_by_what_it_has_earned(
    tmp_path,
):
    file = tmp_path / "memory.safetensors"
    strategy = begin(strategy_of(alpha=0.05, checkpoint_path=file))
    made, metrics = strategy.aggregate_train(1, replies(0))
    np.testing.assert_allclose(made["scores"].numpy(), np.mean(models(4, 0), axis=0), rtol=1e-5)
    assert metrics["gate-passed"] == 0
    trusted = []
    for n in range(2, 40):
        strategy.aggregate_train(n, one_right(n))
        trusted.append(strategy.trust)
    assert 0 < trusted[1] < trusted[3] < 1
    assert trusted[-1] == 1
    assert strategy.trust == strategy.gains().certify(alpha=0.05, block=1).trust
    assert strategy_of(alpha=0.05, checkpoint_path=file).trust == 1
    # The file that the server keeps says the same.
    certificate = strategy.gains().certify(block=1)
    again = DOMAIN.gains(file, "FedAvg", CertifyOptions()).certify()
    assert (again.block, len(again.means), again.verdict) == (5, 7, "not yet")
    assert again.gains.values.tolist() == certificate.gains.values.tolist()
    free = begin(strategy_of())
    assert free.trust == 1
