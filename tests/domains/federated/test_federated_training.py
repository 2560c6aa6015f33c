from types import SimpleNamespace

import equinox as eqx
import jax
import numpy as np
import pytest

from apportion.domains.federated import training
from apportion.domains.federated.federation import paper_world
from apportion.domains.federated.settings import GradientSettings, PPOSettings
from apportion.domains.federated.training import train_mixture, train_paper_policies
from apportion.trees import take
from domains.federated.made_up import made_up_digits

SETTINGS = PPOSettings(
    pooling=1, clients=(18, 8), seen=(10, 5), samples=25, model="perceptron", width=8, rounds=3,
    epochs=1, batch=10, client_rate=0.3, evaluation=60, test=100, block=60, tasks=3, unseen=2,
    steps=4, rollouts=2, hidden=4, chunk=2, state="accuracy",
)  # fmt: skip
DIGITS = made_up_digits()
FEDERATION, [(TASKS, _), (OTHERS, _)] = paper_world(SETTINGS, DIGITS, [0, 1])
MIXED = TASKS[:1].joined(OTHERS[1:])


@pytest.fixture(scope="module")
def trained():
    """Every method on the tasks, then on tasks of which the first alone is the same; seeds agree."""
    methods = ("stl", "mtl", "pmtl")
    tasks = [TASKS] * 3 + [MIXED] * 3
    return train_paper_policies(SETTINGS, FEDERATION, tasks, methods * 2, [7] * 6)


def parameters(policies, run):
    leaves = jax.tree.leaves(eqx.filter(take(policies, run), eqx.is_array))
    return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])


def test_single_task_learning_learns_from_its_first_task_alone_and_the_others_from_all(trained):
    for run in (1, 2):
        assert (parameters(trained.policy, run) != parameters(trained.policy, run + 3)).any()
    assert (parameters(trained.policy, 0) == parameters(trained.policy, 3)).all()
    own = trained.algorithm.tasks.members
    assert (own[0] == TASKS.members[0]).all()
    assert (own[1] == TASKS.members).all()


def test_scores_begin_on_the_scale_of_what_they_are(trained):
    """From 1 the variances of accuracies, which are a hundred times smaller, would never show."""
    first = float(trained.algorithm.priority.initial[2])
    scores = np.asarray(trained.state.priority_state.scores)[2]
    assert (scores != first).any()
    assert 0.01 < scores.min() / first <= scores.max() / first < 100
    # An accuracy that climbs from .55 to .90 in an episode varies by about as much.
    assert 0.001 < first < 0.02
    assert float(PPOSettings(scorer="max-deviation").priority().initial) == 1


def test_every_seed_deals_the_clients_anew_and_a_task_stays_within_its_deal():
    federation, tasks = paper_world(SETTINGS, DIGITS, [3, 4, 3])
    clients = sum(SETTINGS.clients)
    assert federation.universe == 2 * clients
    first, second = np.split(np.asarray(federation.index), 2)
    assert (first != second).any()
    for deal in (first, second):
        assert len(np.unique(deal)) == deal.size
    np.testing.assert_array_equal(federation.identities, 2 * [*range(clients)])
    for (own, unseen), where in zip(tasks, (0, 1, 0), strict=True):
        for each in (own, unseen):
            assert (np.asarray(each.members) // clients == where).all()
    np.testing.assert_array_equal(tasks[0][1].members, tasks[2][1].members)
    assert (tasks[0][1].members != tasks[1][1].members - clients).any()


def test_a_mixture_of_fewer_tasks_than_go_together_is_trained_as_the_settings_say(monkeypatch):
    """What the learner and the policy are made of; that they learn is asked of them elsewhere."""
    settings = GradientSettings(
        kinds="sizes+reversed", copies=1, sizes=(3, 3), pooling=1, samples=10, width=4, rounds=1, epochs=1,
        batch=10, server_samples=(5, 10), block=60, hidden=4, steps=7, rollouts=3,
    )  # fmt: skip
    asked = {}

    def untrained(federation, tasks, policy, learner, **options):
        asked.update(options, federation=federation, tasks=tasks, learner=learner)
        return SimpleNamespace(policy=policy)

    monkeypatch.setattr(training, "train", untrained)
    policy = train_mixture(settings, DIGITS)
    assert (policy.channels, policy.hidden, policy.relative) == (17, 4, True)
    learner = asked["learner"]
    assert (len(asked["tasks"]), learner.together, learner.rollouts) == (1, 1, 3)
    assert (asked["steps"], learner.updates, learner.logarithm) == (7, 7, True)
    # The training world's server has images that clients of the unseen world never hold.
    held = asked["federation"].index[asked["tasks"].members[0]]
    assert not np.isin(held, asked["federation"].evaluation).any()
