"""The gains by federation that an aggregation policy is certified on."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from made_up import made_up_digits

from apportion.composition import EqualShares
from apportion.domains.federated import evaluation
from apportion.domains.federated.aggregators import BySamples, ServerStep
from apportion.domains.federated.evaluation import federation_gains
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import GradientSettings, reduced_size
from apportion.domains.federated.states import client_state
from apportion.errors import InputError

SETTINGS = GradientSettings(
    pooling=1, samples=10, width=4, rounds=2, epochs=1, batch=5, evaluation=40, test=60
)
ABOUT = {"job": "federated", "kinds": ["equal", "paper"]}


def test_the_same_aggregator_gains_nothing_and_more_federations_go_on_from_the_first():
    digits = made_up_digits()
    halved = ServerStep(0.2)
    policy = EqualShares()
    found = [
        federation_gains(policy, ABOUT, SETTINGS, digits, halved, federations=n, bound=1.0)
        for n in (2, 4)
    ]
    assert np.abs(found[1].values).max() > 0
    assert found[0].values == pytest.approx(found[1].values[:2], abs=0.02)
    # Clients of these kinds have equally many images, so that FedAvg's shares are equal ones.
    same = federation_gains(policy, ABOUT, SETTINGS, digits, BySamples(), federations=2)
    assert same.values == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("state", "gated"), [("invariant", True), ("blind", False)])
def test_a_policy_without_samples_has_no_gate_to_hide_behind(state, gated, monkeypatch):
    asked = []

    def untried(world, aggregator, tasks, key):
        asked.append(aggregator)
        return np.zeros(len(tasks))

    monkeypatch.setattr(evaluation, "_last_accuracy", untried)
    policy = AggregationPolicy(client_state(state).channels(1), 2, key=jax.random.key(0))
    settings = replace(SETTINGS, state=state)
    found = federation_gains(policy, ABOUT, settings, made_up_digits(), "FedAvg", federations=1)
    assert asked[0].gated is gated
    # Flower's way to write it is as good.
    assert found.baseline == "fedavg"
    assert isinstance(asked[1], BySamples)


def test_the_papers_policy_is_tried_on_its_own_unseen_tasks():
    settings = replace(
        reduced_size(), pooling=1, samples=10, clients=(8, 4), seen=(5, 2), task_sizes=(2, 1),
        model="perceptron", width=4, rounds=2, epochs=1, batch=5, evaluation=40, test=60,
    )  # fmt: skip
    found = federation_gains(
        EqualShares(), {"job": "federated"}, settings, made_up_digits(), "fedavg", federations=3
    )
    assert found.values.shape == (3,)
    assert (found.baseline, found.period) == ("fedavg", "federation")


def test_what_cannot_be_compared_is_refused():
    digits = made_up_digits()
    for about, against, count, words in (
        ({"job": "budget"}, "fedavg", 2, "not to aggregate"),
        (ABOUT, "fedsgd", 2, "there is no aggregator 'fedsgd'"),
        (ABOUT, "fedavg", 0, "federations is 0"),
    ):
        with pytest.raises(InputError, match=words):
            federation_gains(EqualShares(), about, SETTINGS, digits, against, federations=count)
