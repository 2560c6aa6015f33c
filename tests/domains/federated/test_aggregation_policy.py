"""The policy that starts as FedAvg: what it may depend on, and what the gate lets through."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.federated.aggregators import BySamples, Learned, passes, run_episodes
from apportion.domains.federated.clients import ClientModel, Perceptron
from apportion.domains.federated.data import mixture
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import AggregationPolicy, Decision, averaged
from apportion.domains.federated.states import STATES, client_state
from apportion.domains.federated.training import ThroughRounds, shortfall, walk
from apportion.errors import InputError
from apportion.memory import Replay
from apportion.policy import Recurrent
from apportion.problem import Observation
from apportion.runs.policy_file import load_policy, save_policy
from apportion.tasks import Tasks
from domains.federated.made_up import made_up_digits
from learning import SEED, assert_mean_above, train_seeds

KEY = jax.random.key(0)
DIGITS = made_up_digits()
KINDS = ("sizes", "two-labels", "flipped-3")
MIXTURE = mixture(
    DIGITS, [(kind, 6, seed) for kind in KINDS for seed in range(2)], np.arange(900), samples=30
)


def federation(state="invariant", model=None, drawn=(20, 60)):
    return Federation(
        MIXTURE.digits, MIXTURE.partition, Perceptron(6, 8) if model is None else model,
        rounds=4, epochs=2, batch=10,
        learning_rate=0.3, evaluation=100, test=150, state=client_state(state), drawn=drawn,
        gate=True,
    )  # fmt: skip


def opinionated(channels, scale=0.5, relative=True):
    """A policy whose decisions depend strongly on what it sees."""
    policy = AggregationPolicy(channels, 6, relative=relative, key=KEY)
    score, server = (jax.random.normal(KEY, part.shape) for part in (policy.score, policy.server))
    return eqx.tree_at(lambda p: (p.score, p.server), policy, (3 * score, scale * server))


@pytest.mark.parametrize("state", ["invariant", "blind"])
def test_the_untrained_policy_is_fedavg(state):
    problem = federation(state)
    policy = AggregationPolicy(problem.channels, 6, relative=state == "invariant", key=KEY)
    untrained = Learned(policy, gated=False)
    here, there = (
        run_episodes(problem, aggregator, MIXTURE.tasks, key=KEY)
        for aggregator in (untrained, BySamples())
    )
    assert np.asarray(here.shares) == pytest.approx(np.asarray(there.shares), abs=1e-6)
    assert np.asarray(here.tested) == pytest.approx(np.asarray(there.tested), abs=0.01)
    # Clients of unequal size have unequal shares.
    assert float(jnp.ptp(here.shares[0, 0])) > 0.01


def test_permuting_the_clients_permutes_the_shares_and_nothing_else():
    problem, tasks = federation(), MIXTURE.tasks
    aggregator = Learned(opinionated(problem.channels), gated=False)
    order = np.random.default_rng(0).permutation(6)
    permuted = Tasks(tasks.members[:, order], tasks.mask[:, order])
    here, there = (run_episodes(problem, aggregator, t, key=KEY) for t in (tasks, permuted))
    assert np.abs(np.asarray(here.shares) - 1 / 6).max() > 0.05
    assert np.asarray(there.shares) == pytest.approx(np.asarray(here.shares)[..., order], abs=1e-4)
    assert np.asarray(there.tested) == pytest.approx(np.asarray(here.tested), abs=0.01)


@eqx.filter_jit
def decided(policy, seen, mask):
    """What a policy decides, and what it reads of all clients together."""
    return policy.decide(seen, mask), policy.encode(seen.history, mask).pooled


@pytest.mark.parametrize("relative", [False, True])
def test_an_average_decides_on_the_mean_of_its_members_scores_steps_and_momenta(relative, tmp_path):
    keys = jax.random.split(KEY, 3)
    members = [
        eqx.tree_at(
            lambda p: (p.score, p.server),
            policy,
            (jax.random.normal(key, (n,)), 0.02 * jax.random.normal(key, policy.server.shape)),
        )
        for n, key in zip((4, 6, 5), keys, strict=True)
        for policy in [AggregationPolicy(9, n, relative=relative, key=key)]
    ]
    save_policy(averaged(members), tmp_path)
    one = load_policy(tmp_path)
    assert isinstance(one, AggregationPolicy)
    history = jax.random.normal(KEY, (7, 5, 9))
    mask = jnp.arange(7) < 6
    seen = Observation(history, jnp.full(7, 1 / 7))
    apart, pooled = zip(*(jax.device_get(decided(p, seen, mask)) for p in members), strict=True)
    together, _ = jax.device_get(decided(one, seen, mask))
    weights = np.exp(np.mean([np.log(d.shares[:6]) for d in apart], 0))
    assert np.ptp([d.shares for d in apart], axis=0).max() > 0.1
    assert together.shares[:6] == pytest.approx(weights / weights.sum(), rel=1e-4)
    steps = [np.log(d.step) for d in apart]
    assert np.log(together.step) == pytest.approx(sum(steps) / 3, abs=1e-5)
    read = [of @ np.asarray(p.server)[:, 1] for of, p in zip(pooled, members, strict=True)]
    momentum = np.clip(sum(read) / 3, 0.0, 0.9)
    assert together.momentum == pytest.approx(momentum, abs=1e-5)


def test_the_servers_step_is_no_shorter_than_the_policy_says(tmp_path):
    seen = Observation(jax.random.normal(KEY, (5, 5, 9)), jnp.full(5, 0.2))
    mask = jnp.ones(5, bool)
    for least in (0.5, 0.8):
        policy = AggregationPolicy(9, 4, least_step=least, key=KEY)
        _, pooled = decided(policy, seen, mask)
        shortest = eqx.tree_at(lambda p: p.server, policy, -9 * jnp.stack([pooled, pooled], 1))
        save_policy(shortest, tmp_path / str(least))
        again = load_policy(tmp_path / str(least))
        assert isinstance(again, AggregationPolicy)
        assert float(decided(again, seen, mask)[0].step) == pytest.approx(least)
    with pytest.raises(InputError, match="least_step is 1.5"):
        AggregationPolicy(9, 4, least_step=1.5, key=KEY)


def test_policies_that_read_differently_have_no_average():
    with pytest.raises(InputError, match="differ in what they read"):
        averaged(
            [AggregationPolicy(9, 4, relative=relative, key=KEY) for relative in (False, True)]
        )


class Renamed(ClientModel):
    """A model whose classes have other names: what it called c it calls names[c]."""

    model: Perceptron
    names: tuple[int, ...] = eqx.field(static=True)

    def start(self, *, key):
        return self.model.start(key=key)

    def logits(self, parameters, images):
        return self.model.logits(parameters, images)[:, np.argsort(self.names)]


def test_renaming_the_classes_changes_no_share():
    names = np.random.default_rng(3).permutation(10)
    here = federation()
    there = eqx.tree_at(
        lambda f: (f.labels, f.local_labels),
        federation(model=Renamed(Perceptron(6, 8), tuple(names.tolist()))),
        (jnp.asarray(names)[here.labels], jnp.asarray(names)[here.local_labels]),
    )
    aggregator = Learned(opinionated(here.channels))
    plain, renamed = (
        run_episodes(problem, aggregator, MIXTURE.tasks, key=KEY) for problem in (here, there)
    )
    assert float(jnp.ptp(plain.shares)) > 0.1
    # The first round: later ones multiply the last digits' rounding, which order decides.
    first = np.asarray(plain.shares[:, 0])
    assert np.asarray(renamed.shares[:, 0]) == pytest.approx(first, abs=1e-6)
    assert np.asarray(renamed.shares) == pytest.approx(np.asarray(plain.shares), abs=1e-4)
    assert np.asarray(renamed.tested) == pytest.approx(np.asarray(plain.tested), abs=0.01)


def test_by_its_standing_a_client_is_judged_whatever_the_unit_of_what_is_seen():
    history = jax.random.normal(KEY, (5, 5, 17)).at[..., 0].set(jnp.log(0.2))
    mask = jnp.ones(5, bool)
    # What is seen itself is made to count for nothing: standing is left.
    policy = opinionated(17)
    alone = eqx.tree_at(
        lambda p: p.recurrence.from_input, policy, policy.recurrence.from_input.at[:17].set(0.0)
    )
    here, scaled, alike = (
        decided(alone, Observation(seen, jnp.full(5, 0.2)), mask)[0].shares
        for seen in (history, history.at[..., 1:].mul(8.0), history[:1].repeat(5, 0))
    )
    assert float(jnp.ptp(here)) > 0.05
    assert np.asarray(scaled) == pytest.approx(np.asarray(here), abs=0.01)
    assert np.asarray(alike) == pytest.approx(0.2, abs=1e-6)


def test_step_and_momentum_stay_within_their_bounds_and_go_on_learning_there():
    policy = opinionated(17, scale=100.0)
    history = jax.random.normal(KEY, (5, 5, 17))
    mask = jnp.ones(5, bool)

    @eqx.filter_jit
    def decide(policy):
        return policy.decide(Observation(history, jnp.full(5, 0.2)), mask)

    decision = decide(policy)
    assert 0.5 <= float(decision.step) <= 3
    assert 0 <= float(decision.momentum) <= 0.9
    slope = eqx.filter_jit(eqx.filter_grad(lambda p: decide(p).momentum))(policy)
    assert float(jnp.abs(slope.server).max()) > 0


def test_the_gate_lets_pass_what_chance_explains_and_nothing_worse():
    everything = jnp.ones(40, bool)
    noise = jax.random.normal(KEY, (40,))
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    error = 1 / jnp.sqrt(40)
    assert bool(passes(noise - 0.9 * error, everything))
    assert not bool(passes(noise - 1.1 * error, everything))
    assert bool(passes(noise + 1, everything))
    # Samples that are not kept for the gate have no say.
    half = jnp.arange(40) < 20
    assert bool(passes(jnp.where(half, 0.1, -9.0), half))


class Harmful(AggregationPolicy):
    """Everything to the first client, backed by three steps at once."""

    def decide(self, observation, mask):
        first = jax.nn.one_hot(0, len(mask))
        return Decision(first, jnp.asarray(3.0), jnp.zeros(()))


def test_behind_the_gate_a_harmful_policy_does_as_well_as_fedavg():
    # Long enough for FedAvg to learn what can be lost.
    problem = Federation(
        MIXTURE.digits, MIXTURE.partition, Perceptron(6, 8), rounds=8, epochs=4, batch=10,
        learning_rate=0.5, evaluation=150, test=150, state=client_state("blind"), drawn=(150, 150),
        gate=True,
    )  # fmt: skip
    harmful = Harmful(problem.channels, 4, key=KEY)

    @eqx.filter_jit
    def final(aggregator, keys):
        def one(key):
            return run_episodes(problem, aggregator, MIXTURE.tasks, key=key).tested[:, -1].mean()

        return jax.vmap(one)(keys)

    keys = jax.random.split(jax.random.fold_in(KEY, SEED), 16)
    open_, gated, fedavg = (
        np.asarray(final(aggregator, keys))
        for aggregator in (Learned(harmful, False), Learned(harmful), BySamples())
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
        found = walked(dealt.tasks.each)
        return (found.plain - found.losses).mean()

    assert_mean_above(eqx.filter_jit(eqx.filter_vmap(gain))(policies), 0.0)


def test_of_tasks_together_the_one_that_has_all_the_weight_decides():
    problem, tasks, policy = federation(), MIXTURE.tasks, opinionated(17)

    usual = ThroughRounds(updates=2).weigh

    def updated(policy, **options):
        learner = ThroughRounds(1, 1e-2, updates=2, **options)
        started = learner.start(policy)
        update = learner.update(problem, tasks[0], None, policy, started, jnp.ones(()), key=KEY)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(update.state.optimiser)])

    # One program for both weights: it takes seconds to compile.
    @eqx.filter_jit
    def together(policy, first_decides):
        def weigh(gains):
            first = jnp.zeros_like(gains).at[0].set(len(gains))
            return jnp.where(first_decides, first, usual(gains))

        return updated(policy, others=tasks, together=3, weigh=weigh)

    alone = np.asarray(eqx.filter_jit(updated)(policy))
    all_, decided = (np.asarray(together(policy, jnp.array(first))) for first in (False, True))
    assert decided == pytest.approx(alone, rel=1e-3, abs=1e-6)
    assert np.abs(all_ - alone).max() > 1e-3


def test_tasks_together_need_others_to_choose_from():
    with pytest.raises(InputError, match="together"):
        ThroughRounds(updates=3, together=2)


def test_other_policies_are_refused_before_training():
    with pytest.raises(InputError, match="AggregationPolicy"):
        ThroughRounds(updates=3).start(Recurrent(1, 4, key=KEY))


def test_a_policy_is_saved_and_loaded(tmp_path):
    policy = opinionated(STATES["invariant"].channels(10))
    save_policy(policy, tmp_path)
    assert bool(eqx.tree_equal(load_policy(tmp_path), policy))
