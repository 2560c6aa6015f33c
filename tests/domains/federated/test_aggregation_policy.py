"""The policy that starts as FedAvg: what it may depend on, what the gate lets through, how it learns."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.federated.aggregators import BySamples, Learned, passes, run_episodes
from apportion.domains.federated.clients import ClientModel, Perceptron
from apportion.domains.federated.data import mixture
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import AggregationPolicy, Decision
from apportion.domains.federated.states import client_state
from apportion.domains.federated.training import ThroughRounds, shortfall, walk
from apportion.errors import InputError
from apportion.memory import Replay
from apportion.policy import Recurrent
from apportion.problem import Observation
from apportion.runs.policy_file import load_policy, save_policy
from apportion.tasks import Task
from domains.federated.made_up import made_up_digits
from learning import SEED, assert_mean_above, optimised, train_seeds

KEY = jax.random.key(0)
DIGITS = made_up_digits()
KINDS = ("sizes", "two-labels", "flipped-3")
MIXTURE = mixture(
    DIGITS, [(kind, 6, seed) for kind in KINDS for seed in range(2)], np.arange(900), samples=30
)


def federation(model=None):
    return Federation(
        MIXTURE.digits, MIXTURE.partition, Perceptron(6, 8) if model is None else model,
        rounds=4, epochs=2, batch=10, learning_rate=0.3, evaluation=100, test=150,
        state=client_state("invariant"), drawn=(20, 60), gate=True,
    )  # fmt: skip


UNTRAINED = AggregationPolicy(17, 6, relative=True, key=KEY)


def opinionated(scale=0.5):
    """A policy whose decisions depend strongly on what it sees."""
    policy = UNTRAINED
    score, server = (jax.random.normal(KEY, part.shape) for part in (policy.score, policy.server))
    return eqx.tree_at(lambda p: (p.score, p.server), policy, (3 * score, scale * server))


def episodes(policy, tasks=MIXTURE.tasks):
    """Without the gate; one program for all policies."""
    return run_episodes(federation(), Learned(policy, gated=False), tasks, key=KEY)


@eqx.filter_jit
def decided(policy, history, mask):
    """What a policy decides, and what it reads of all clients together."""
    seen = Observation(history, jnp.full(len(mask), 1 / len(mask)))
    return policy.decide(seen, mask), policy.encode(history, mask).pooled


@pytest.fixture(scope="module")
def plain():
    return episodes(opinionated())


def test_the_untrained_policy_is_fedavg():
    here = episodes(UNTRAINED)
    there = run_episodes(federation(), BySamples(), MIXTURE.tasks, key=KEY)
    assert np.asarray(here.shares) == pytest.approx(np.asarray(there.shares), abs=1e-6)
    assert np.asarray(here.tested) == pytest.approx(np.asarray(there.tested), abs=0.01)
    # Clients of unequal size have unequal shares.
    assert float(jnp.ptp(here.shares[0, 0])) > 0.01


def test_permuting_the_clients_permutes_the_shares_and_nothing_else(plain):
    order = np.random.default_rng(0).permutation(6)
    tasks = MIXTURE.tasks
    there = episodes(opinionated(), Task(tasks.members[:, order], tasks.mask[:, order]))
    assert np.abs(np.asarray(plain.shares) - 1 / 6).max() > 0.05
    assert np.asarray(there.shares) == pytest.approx(np.asarray(plain.shares)[..., order], abs=1e-4)
    assert np.asarray(there.tested) == pytest.approx(np.asarray(plain.tested), abs=0.01)


class Renamed(ClientModel):
    """A model whose classes have other names: what it called c it calls names[c]."""

    model: Perceptron
    names: tuple[int, ...] = eqx.field(static=True)

    def start(self, *, key):
        return self.model.start(key=key)

    def logits(self, parameters, images):
        return self.model.logits(parameters, images)[:, np.argsort(self.names)]


def test_renaming_the_classes_changes_no_share(plain):
    names = np.random.default_rng(3).permutation(10)
    here = federation()
    there = eqx.tree_at(
        lambda f: (f.labels, f.local_labels),
        federation(model=Renamed(Perceptron(6, 8), tuple(names.tolist()))),
        (jnp.asarray(names)[here.labels], jnp.asarray(names)[here.local_labels]),
    )
    renamed = run_episodes(there, Learned(opinionated(), gated=False), MIXTURE.tasks, key=KEY)
    # The first round: later ones multiply the last digits' rounding, which order decides.
    first = np.asarray(plain.shares[:, 0])
    assert np.asarray(renamed.shares[:, 0]) == pytest.approx(first, abs=1e-6)
    assert np.asarray(renamed.shares) == pytest.approx(np.asarray(plain.shares), abs=1e-4)
    assert np.asarray(renamed.tested) == pytest.approx(np.asarray(plain.tested), abs=0.01)


def test_by_its_standing_a_client_is_judged_whatever_the_unit_of_what_is_seen():
    history = jax.random.normal(KEY, (5, 5, 17)).at[..., 0].set(jnp.log(0.2))
    mask = jnp.ones(5, bool)
    # What is seen itself is made to count for nothing: standing is left.
    policy = opinionated()
    alone = eqx.tree_at(
        lambda p: p.recurrence.from_input, policy, policy.recurrence.from_input.at[:17].set(0.0)
    )
    here, scaled, alike = (
        decided(alone, seen, mask)[0].shares
        for seen in (history, history.at[..., 1:].mul(8.0), history[:1].repeat(5, 0))
    )
    assert float(jnp.ptp(here)) > 0.05
    assert np.asarray(scaled) == pytest.approx(np.asarray(here), abs=0.01)
    assert np.asarray(alike) == pytest.approx(0.2, abs=1e-6)


def test_step_and_momentum_stay_within_their_bounds_and_go_on_learning_there():
    policy = opinionated(scale=100.0)
    history, mask = jax.random.normal(KEY, (5, 5, 17)), jnp.ones(5, bool)
    decision, _ = decided(policy, history, mask)
    assert 0.5 <= float(decision.step) <= 3
    assert 0 <= float(decision.momentum) <= 0.9
    momentum = eqx.filter_grad(lambda p: decided(p, history, mask)[0].momentum)
    assert float(jnp.abs(eqx.filter_jit(momentum)(policy).server).max()) > 0


def test_a_saved_policys_step_is_no_shorter_than_it_says(tmp_path):
    history, mask = jax.random.normal(KEY, (5, 5, 9)), jnp.ones(5, bool)
    for least in (0.5, 0.8):
        policy = AggregationPolicy(9, 4, least_step=least, key=KEY)
        _, pooled = decided(policy, history, mask)
        shortest = eqx.tree_at(lambda p: p.server, policy, -9 * jnp.stack([pooled, pooled], 1))
        save_policy(shortest, tmp_path / str(least))
        again = load_policy(tmp_path / str(least))
        assert bool(eqx.tree_equal(again, shortest))
        assert float(decided(again, history, mask)[0].step) == pytest.approx(least)
    with pytest.raises(InputError, match="least_step is 1.5"):
        AggregationPolicy(9, 4, least_step=1.5, key=KEY)


@pytest.mark.parametrize("given", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_the_gate_lets_pass_what_chance_explains_and_nothing_worse(given):
    everything = given(np.ones(40, bool))
    noise = np.random.default_rng(0).normal(size=40)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    error = 1 / np.sqrt(40)
    assert bool(passes(given(noise - 0.9 * error), everything))
    assert not bool(passes(given(noise - 1.1 * error), everything))
    assert bool(passes(given(noise + 1), everything))
    # Samples that are not kept for the gate have no say; without any, nothing speaks against it.
    half = np.arange(40) < 20
    assert bool(passes(given(np.where(half, 0.1, -9.0)), given(half)))
    assert bool(passes(given(np.full(40, -9.0)), given(np.zeros(40, bool))))


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


@optimised()
def test_behind_the_gate_a_harmful_policy_does_as_well_as_fedavg():
    # Long enough for FedAvg to learn what can be lost.
    problem = Federation(
        MIXTURE.digits, MIXTURE.partition, Perceptron(6, 8), rounds=8, epochs=4, batch=10,
        learning_rate=0.5, evaluation=150, test=150, state=client_state("blind"), drawn=(150, 150),
        gate=True,
    )  # fmt: skip

    @eqx.filter_jit
    def final(aggregator, keys):
        def one(key):
            return run_episodes(problem, aggregator, MIXTURE.tasks, key=key).tested[:, -1].mean()

        return jax.vmap(one)(keys)

    keys = jax.random.split(jax.random.fold_in(KEY, SEED), 8)
    open_, gated, fedavg = (
        np.asarray(final(Learned(Harmful(problem.channels, harm), gate), keys))
        for harm, gate in ((1.0, False), (1.0, True), (0.0, False))
    )
    assert_mean_above(fedavg - open_, 0.4)
    assert_mean_above(gated - fedavg, -0.06)


def test_a_policy_learns_to_do_better_than_fedavg():
    dealt = mixture(DIGITS, [("scaled", 5, seed) for seed in range(2)], np.arange(900), samples=30)
    problem = Federation(
        dealt.digits, dealt.partition, Perceptron(6, 8), rounds=4, batch=10, learning_rate=0.5,
        evaluation=100, test=150, state=client_state("invariant"),
    )  # fmt: skip
    policies = train_seeds(
        problem, dealt.tasks,
        lambda key: AggregationPolicy(problem.channels, 6, relative=True, key=key),
        ThroughRounds(1, 5e-2, updates=20), steps=20, seeds=4, scorer=shortfall,
        replay=Replay(act_periods=0),
    )  # fmt: skip

    def gain(policy):
        walked = jax.vmap(lambda task: walk(problem, policy, task, key=jax.random.key(9)))
        found = walked(dealt.tasks)
        return (found.plain - found.losses).mean()

    assert_mean_above(eqx.filter_jit(eqx.filter_vmap(gain))(policies), 0.0)


def test_beside_others_the_drawn_task_counts_by_its_weight():
    problem, tasks, policy = federation(), MIXTURE.tasks, opinionated()
    learner = ThroughRounds(1, 1e-2, updates=2, others=tasks, together=3)

    @eqx.filter_jit
    def updated(task, weight):
        started = learner.start(policy)
        update = learner.update(problem, task, None, policy, started, weight, key=KEY)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(update.state.optimiser)])

    first, second = (np.asarray(updated(tasks[n], jnp.zeros(()))) for n in (0, 3))
    assert np.abs(first).max() > 1e-3
    assert first == pytest.approx(second)
    assert np.abs(np.asarray(updated(tasks[0], jnp.ones(()))) - first).max() > 1e-3


def test_what_the_learner_cannot_train_is_refused():
    with pytest.raises(InputError, match="together"):
        ThroughRounds(updates=3, together=2)
    with pytest.raises(InputError, match="AggregationPolicy"):
        ThroughRounds(updates=3).start(Recurrent(1, 4, key=KEY))
