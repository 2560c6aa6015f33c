"""The policy that starts as FedAvg: what it may depend on, what the gate lets through, how it learns."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.federated.aggregators import (
    Learned,
    is_better,
    passes_gate,
    run_episodes,
)
from apportion.domains.federated.clients import ClientModel
from apportion.domains.federated.data import mixture
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import AggregationPolicy, Decision
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.states import shares_by_samples
from apportion.domains.federated.training import ThroughRounds
from apportion.errors import InputError
from apportion.problem import Observation
from apportion.tasks import Task
from domains.federated.made_up import made_up_digits
from learning import SEED, assert_mean_above, optimised

KEY = jax.random.key(0)
KINDS = ("sizes", "two-labels", "scaled")
MIXTURE = mixture(
    made_up_digits(), [(kind, 6, n) for kind in KINDS for n in range(2)], np.arange(900), samples=30
)
TASKS = MIXTURE.tasks
SETTINGS = GradientSettings(
    width=8, rounds=4, epochs=2, batch=10, client_rate=0.3, evaluation=100, test=150, block=100
)


class Renamed(ClientModel):
    """A model whose classes have other names: what it called c it calls names[c]."""

    model: ClientModel
    names: jax.Array

    def start(self, *, key):
        return self.model.start(key=key)

    def logits(self, parameters, images):
        return self.model.logits(parameters, images)[:, jnp.argsort(self.names)]


class RenamedFederation(Federation):
    """Federations that differ in names alone share a program."""

    def __init__(self, names=range(10)):
        super().__init__(
            MIXTURE.digits, MIXTURE.partition, SETTINGS, drawn=(20, 60), gate=True
        )  # fmt: skip
        names = jnp.asarray(names)
        self.model = Renamed(self.model, names)
        self.labels, self.local_labels = names[self.labels], names[self.local_labels]


FEDERATION = RenamedFederation()
UNTRAINED = AggregationPolicy(17, 6, relative=True, key=KEY)


def opinionated(scale=0.5):
    """A policy whose decisions depend strongly on what it sees."""
    policy = UNTRAINED
    score, server = (jax.random.normal(KEY, part.shape) for part in (policy.score, policy.server))
    return eqx.tree_at(lambda p: (p.score, p.server), policy, (3 * score, scale * server))


def episodes(policy, tasks=TASKS, federation=FEDERATION):
    """Without the gate; one program for all policies."""
    keys = jax.random.split(KEY, len(tasks))
    return run_episodes(federation, Learned(policy, gated=False), tasks, keys)


@eqx.filter_jit
def decided(policy, history, mask):
    return policy.decide(Observation(history, jnp.full(len(mask), 1 / len(mask))), mask)


@pytest.fixture(scope="module")
def plain():
    return episodes(opinionated())


def test_the_untrained_policy_is_fedavg_among_trusted_clients():
    found = np.asarray(episodes(UNTRAINED).shares)
    for task, rounds in zip(TASKS, found, strict=True):
        counts = np.asarray(FEDERATION.counts[task.members], np.float32)
        expected = [shares_by_samples(counts, shares > 0) for shares in rounds]
        np.testing.assert_allclose(rounds, expected, atol=1e-6)
    assert (found > 0).mean() > 0.9
    # Clients of unequal size have unequal shares.
    assert np.ptp(found[0, 0]) > 0.01


def test_permuting_the_clients_permutes_the_shares_and_nothing_else(plain):
    order = np.random.default_rng(0).permutation(6)
    there = episodes(opinionated(), Task(TASKS.members[:, order], TASKS.mask[:, order]))
    assert np.abs(np.asarray(plain.shares) - 1 / 6).max() > 0.05
    assert np.asarray(there.shares) == pytest.approx(np.asarray(plain.shares)[..., order], abs=1e-4)
    assert np.asarray(there.tested) == pytest.approx(np.asarray(plain.tested), abs=0.01)


def test_renaming_the_classes_changes_no_share(plain):
    names = np.random.default_rng(3).permutation(10)
    renamed = episodes(opinionated(), federation=RenamedFederation(names))
    # The first round: later ones multiply the last digits' rounding, which order decides.
    first = np.asarray(plain.shares[:, 0])
    assert np.asarray(renamed.shares[:, 0]) == pytest.approx(first, abs=1e-6)
    assert np.asarray(renamed.shares) == pytest.approx(np.asarray(plain.shares), abs=1e-4)
    assert np.asarray(renamed.tested) == pytest.approx(np.asarray(plain.tested), abs=0.01)


HISTORY = jax.random.normal(KEY, (5, 5, 17)).at[..., 0].set(jnp.log(0.2))
FIVE = jnp.ones(5, bool)


def test_step_and_momentum_stay_within_their_bounds_and_go_on_learning_there():
    policy = opinionated(scale=100.0)
    decision = decided(policy, HISTORY, FIVE)
    assert 0.5 - 1e-6 <= float(decision.step) <= 3 + 1e-6
    assert -1e-6 <= float(decision.momentum) <= 0.9 + 1e-6
    momentum = eqx.filter_grad(lambda p: decided(p, HISTORY, FIVE).momentum)
    assert float(jnp.abs(eqx.filter_jit(momentum)(policy).server).max()) > 0
    with pytest.raises(InputError, match="least_step is 1.5"):
        AggregationPolicy(17, 4, least_step=1.5, key=KEY)


@pytest.mark.parametrize("given", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_the_gate_takes_shares_that_are_not_worse_and_steps_that_are_better(given):
    everything, none = given(np.ones(40, bool)), given(np.zeros(40))
    noise = np.random.default_rng(0).normal(size=40)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    error = 1 / np.sqrt(40)
    assert bool(is_better(given(noise + 1.1 * error)))
    assert not bool(is_better(given(noise + 0.9 * error)))
    assert bool(is_better(given(noise + 0.9 * error), errors=0.5))
    for gain, passes in ((0.01, True), (-0.01, False)):
        assert bool(passes_gate(given(noise + gain), none, everything, everything)) == passes
    fewer = given(-np.eye(40)[0])
    assert not bool(passes_gate(given(noise + 1), fewer, everything, everything))
    # Samples that are not kept for the gate have no say; without any, nothing speaks against it.
    half = np.arange(40) < 20
    assert bool(passes_gate(given(np.where(half, 0.1, -9.0)), none, given(half), everything))
    no_sample = given(np.zeros(40, bool))
    assert bool(passes_gate(given(np.full(40, -9.0)), none, no_sample, everything))


class Harmful(AggregationPolicy):
    """Everything to the first client, backed by three steps at once; FedAvg where `harm` is 0."""

    harm: jax.Array

    def __init__(self, channels, harm):
        super().__init__(channels, 4, key=KEY)
        self.harm = jnp.asarray(harm)

    def decide(self, observation, mask):
        usual = jnp.exp(observation.history[:, -1, 0])
        first = jax.nn.one_hot(0, len(mask))
        shares = jnp.where(self.harm > 0, first, usual)
        return Decision(shares, 1.0 + 2 * self.harm, jnp.zeros(()))


@pytest.mark.slow
@optimised()
def test_behind_the_gate_a_harmful_policy_does_as_well_as_fedavg():
    # Long enough for FedAvg to learn what can be lost.
    settings = replace(SETTINGS, rounds=8, epochs=4, client_rate=0.5, evaluation=150)
    problem = Federation(
        MIXTURE.digits, MIXTURE.partition, settings, drawn=(150, 150), gate=True
    )  # fmt: skip

    keys = jax.random.split(jax.random.fold_in(KEY, SEED), 8)
    both = jnp.tile(TASKS.members, (8, 1)), jnp.tile(TASKS.mask, (8, 1))
    each = jax.vmap(lambda key: jax.random.split(key, len(TASKS)))(keys).reshape(-1)

    def final(harm, gate):
        policy = Learned(Harmful(problem.channels, harm), gate)
        tested = run_episodes(problem, policy, Task(*both), each).tested
        return np.asarray(tested[:, -1]).reshape(8, -1).mean(1)

    open_, gated, fedavg = final(1.0, False), final(1.0, True), final(0.0, False)
    assert_mean_above(fedavg - open_, 0.4)
    assert_mean_above(gated - fedavg, -0.06)


LEARNER = ThroughRounds(1, 5e-2, updates=20, others=TASKS, together=2)


def test_shares_are_learned_behind_the_gate_if_another_policy_decides_step_and_momentum():
    policy = opinionated()
    learner = ThroughRounds(1, 5e-2, updates=20, others=TASKS, gated=True, server=policy)
    update = eqx.filter_jit(learner.update)
    weight = jnp.ones(())
    made = update(FEDERATION, TASKS[4], None, policy, learner.start(policy), weight, key=KEY)
    assert (made.policy.server == policy.server).all()
    assert (made.policy.score != policy.score).all()


@eqx.filter_jit
def learn(policies, task, weight, keys):
    """Each seed's policy after its updates, and by how much of itself each update found the loss below
    FedAvg's on the same models.
    """

    def one(policy, keys):
        trained, rest = eqx.partition(policy, eqx.is_inexact_array)

        def update(carry, key):
            policy = eqx.combine(carry[0], rest)
            made = LEARNER.update(FEDERATION, task, None, policy, carry[1], weight, key=key)
            gain = jnp.log(made.evidence.equal_rewards / made.evidence.rewards).mean()
            return (eqx.filter(made.policy, eqx.is_inexact_array), made.state), gain

        (trained, _), gains = jax.lax.scan(update, (trained, LEARNER.start(policy)), keys)
        return trained, gains

    return eqx.filter_vmap(one)(policies, keys)


@pytest.mark.slow
def test_a_policy_learns_to_do_better_than_fedavg_and_the_drawn_task_counts_by_its_weight():
    keys = jax.random.split(jax.random.key(SEED), 8)
    policies = eqx.filter_jit(
        eqx.filter_vmap(lambda key: AggregationPolicy(17, 6, relative=True, key=key))
    )(keys)
    each = jax.vmap(lambda key: jax.random.split(key, 20))(keys)
    with optimised():
        attacked, gains = learn(policies, TASKS[4], jnp.ones(()), each)
        first, second = (learn(policies, TASKS[n], jnp.zeros(()), each)[0] for n in (0, 4))
    assert np.abs(np.asarray(gains[:, 0])).max() < 1e-5
    assert_mean_above(np.asarray(gains[:, -10:]).mean(1), 0.0)
    # Without weight it is the others that teach, whichever is drawn.
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.abs(np.asarray(first.score)).max() > 1e-3
    assert np.abs(np.asarray(attacked.score) - np.asarray(second.score)).max() > 1e-3
