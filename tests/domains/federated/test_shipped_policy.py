"""The policy that comes with the package: what it makes of how much its clients hold.

Its last unit alone says how far the clients' counts are discounted; `former` is the policy without it.
"""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.federated.aggregators import Learned, run_episodes
from apportion.domains.federated.data import embedded_digits, halves, mixture
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import shipped_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.states import shares_by_samples
from apportion.problem import Observation


@cache
def former():
    """The shipped policy with its last unit silenced: nothing goes into it, and nothing comes out."""
    policy, last = shipped_policy(), shipped_policy().hidden - 1
    recurrence = policy.recurrence
    shape = (last + 1, 3, last + 1)
    joint = policy.joint.weight.reshape(shape).at[last].set(0.0).at[..., last].set(0.0)
    return eqx.tree_at(
        lambda p: (*jax.tree.leaves(p.recurrence), p.joint.weight, p.joint.bias, p.score, p.server),
        policy,
        (
            recurrence.from_input.at[:, last].set(0.0),
            recurrence.from_state.at[last].set(0.0).at[:, last].set(0.0),
            recurrence.bias.at[last].set(0.0),
            joint.reshape(last + 1, -1),
            policy.joint.bias.at[last].set(0.0),
            policy.score.at[last].set(0.0),
            policy.server.reshape(2, last + 1, 2).at[:, last].set(0.0).reshape(-1, 2),
        ),
    )


@eqx.filter_jit
def decided(policy, history, mask):
    return policy.decide(Observation(history, mask / mask.sum()), mask)


def decisions(history, mask):
    """Of the policy as it is, and as it was."""
    return tuple(decided(policy, history, mask) for policy in (shipped_policy(), former()))


def seen_of(counts, present, seed):
    """Clients that hold so much, of whom nothing else is as in any federation."""
    mask = jnp.arange(len(counts)) < present
    rng = np.random.default_rng(seed)
    history = jnp.asarray(2 * rng.normal(size=(len(counts), 5, 17)), jnp.float32)
    share = shares_by_samples(jnp.asarray(counts, jnp.float32), mask)
    log_share = jnp.log(jnp.maximum(share, 1e-12))
    return history.at[..., 0].set(jnp.where(mask, log_share, 0.0)[:, None]), mask


EQUAL = [(np.full(12, 37), present) for present in (1, 2, 7, 12)]
UNEQUAL = (np.array([10, 20, 40, 80, 120, 160, 200, 200, 1, 1, 1, 1]), 8)


@pytest.mark.parametrize(("counts", "present"), [*EQUAL, UNEQUAL])
def test_counts_move_shares_alone_and_nothing_where_all_hold_as_much(counts, present):
    for seed in range(3):
        now, before = decisions(*seen_of(counts, present, seed))
        assert float(now.step) == pytest.approx(float(before.step), rel=1e-6)
        assert float(now.momentum) == pytest.approx(float(before.momentum), abs=1e-6)
        moved = float(jnp.abs(now.shares - before.shares).max())
        assert moved > 0.01 if np.ptp(counts) else moved < 1e-6


def test_who_understates_its_count_gains_no_more_than_fedavg_gives_for_overstating():
    # Ten times the median is the most that a claim counts for.
    honest = jnp.zeros((12, 5, 17)).at[..., 0].set(jnp.log(1 / 12))
    mask = jnp.ones(12, bool)

    def odds(claim):
        share = shares_by_samples(jnp.full(12, 200.0).at[0].set(claim), mask)
        history = honest.at[..., 0].set(jnp.log(share)[:, None])
        now, before = decisions(history, mask)
        return (now.shares[0] / now.shares[1]) / (before.shares[0] / before.shares[1])

    # Beside what the policy itself makes of a count, and of FedAvg's own share for it.
    gained = [float(odds(claim)) * claim / 200 for claim in (1.0, 5.0, 20.0, 40.0, 80.0, 150.0)]
    assert max(gained) < 10


@pytest.mark.slow
def test_small_clients_keep_between_half_and_twice_of_fedavgs_share():
    settings = GradientSettings(rounds=10, evaluation=200, test=200)
    digits = embedded_digits().pooled(2)
    wanted = [("sizes", 10, seed) for seed in range(3)]
    dealt = mixture(digits, wanted, halves(digits)[1], samples=settings.samples)
    sets = {"drawn": (200, 200), "gate": True}
    federation = Federation(dealt.digits, dealt.partition, settings, **sets)

    smallest = np.argsort(np.asarray(federation.counts).reshape(3, 10), 1)[:, None, :4]

    def small(policy):
        """Mean share of the four smallest clients over the later rounds, by federation."""
        aggregator = Learned(policy, gated=False)
        keys = jax.random.split(jax.random.key(1), 3)
        record = run_episodes(federation, aggregator, dealt.tasks, keys)
        return np.take_along_axis(np.asarray(record.shares)[:, 5:], smallest, 2).sum(2).mean(1)

    counts = np.asarray(federation.counts, np.float32).reshape(3, 10)
    plain = jax.vmap(shares_by_samples, (0, None))(counts, jnp.ones(10, bool))
    plain = np.take_along_axis(np.asarray(plain), smallest[:, 0], 1).sum(1)
    assert (small(former()) < plain / 2).all()
    now = small(shipped_policy())
    assert ((now > plain / 2) & (now < plain * 2)).all()
