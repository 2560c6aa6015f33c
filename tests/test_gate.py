"""The gate: trust that follows the evidence, up and down, and is rarely given to who has not earned it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.certify.betting import log_wealth, trust
from apportion.certify.certificate import Gains
from apportion.composition import EqualShares, PartialTrading
from apportion.errors import InputError
from apportion.gate import Gate
from apportion.policy import Recurrent
from apportion.problem import Observation


def gate(**options) -> Gate:
    policy = Recurrent(channels=2, hidden=4, key=jax.random.key(0))
    return Gate(
        policy, PartialTrading(EqualShares(), 0.1), **({"low": -1.0, "high": 1.0} | options)
    )


@eqx.filter_jit
def shares_of(policy, seen: Observation, here: jax.Array) -> jax.Array:
    return policy(seen, here)


@eqx.filter_jit
def trusts(first: Gate, gains: jax.Array) -> jax.Array:
    """Trust after each gain, (time, ...)."""
    parts, rest = eqx.partition(first, eqx.is_array)

    def step(parts, gain):
        after = eqx.combine(parts, rest).after(gain)
        return eqx.filter(after, eqx.is_array), after.trust

    return jax.lax.scan(step, parts, gains)[1]


def many(paths: np.ndarray, **options) -> np.ndarray:
    """Trust in each of many runs at once, (paths, time)."""
    first = gate(evidence=jnp.zeros((len(paths), 6)), **options)
    return np.asarray(trusts(first, jnp.asarray(paths.T, jnp.float32))).T


def test_without_evidence_the_baseline_decides_and_with_all_of_it_the_policy():
    seen = Observation(jax.random.normal(jax.random.key(1), (5, 4, 2)), jnp.full(5, 0.2))
    here = jnp.ones(5, bool)
    first = gate()
    found, expected = (shares_of(each, seen, here) for each in (first, first.baseline))
    assert found == pytest.approx(np.asarray(expected), abs=1e-6)
    for _ in range(40):
        first = first.after(0.5)
    assert float(first.trust) == pytest.approx(1)
    found, expected = (shares_of(each, seen, here) for each in (first, first.policy))
    assert found == pytest.approx(np.asarray(expected), abs=1e-6)


def test_trust_is_the_logarithm_of_the_wealth_of_the_bet():
    gains = np.array([0.2, -0.1, 0.3, 0.1, np.nan, 0.2, 3.0])
    found = np.asarray(trusts(gate(), jnp.asarray(gains)))
    wealth = log_wealth(np.clip(np.nan_to_num(gains), -1, 1), 0.0, -1.0)
    assert found == pytest.approx(np.clip(wealth / np.log(20), 0, 1), abs=1e-5)
    # A missing period changes nothing.
    assert found[4] == found[3]


def test_a_certificate_says_how_far_a_gate_would_trust():
    rng = np.random.default_rng(4)
    for shift in (-0.2, 0.0, 0.3):
        gains = np.clip(rng.normal(shift, 0.3, 60), -1, 1)
        found = np.asarray(trusts(gate(), jnp.asarray(gains)))
        assert trust(gains, -1.0, 0.05) == pytest.approx(found, abs=1e-4)
        assert Gains(gains, -1.0, 1.0).certify().trust == pytest.approx(found[-1], abs=1e-4)


def test_trust_comes_with_gains_and_goes_with_losses():
    rng = np.random.default_rng(1)
    better = np.clip(rng.normal(0.15, 0.3, (200, 200)), -1, 1)
    paths = np.concatenate([better, -better], axis=1)
    found = many(paths)
    # Of 2,000 paths all are trusted in full, and at the end none with more than half.
    assert (found[:, :200].max(1) >= 1 - 1e-6).mean() > 0.9
    assert (found[:, -1] > 0.5).mean() < 0.05
    # Long success buys no credit: after 60 good periods and after 200, half of the trust is gone in 6.
    short = many(np.concatenate([better[:, :60], np.full((200, 60), -0.2)], axis=1))[:, 60:]
    long = many(np.concatenate([better, np.full((200, 60), -0.2)], axis=1))[:, 200:]
    assert (long > 0.5).sum(1).mean() <= 12
    assert (short > 0.5).sum(1).mean() <= 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low": 0.0}, "0 must lie between"),
        ({"high": np.inf}, "0 must lie between"),
        ({"alpha": 1.0}, "alpha is 1"),
        ({"evidence": jnp.zeros(3)}, "shape \\(3,\\)"),
    ],
)
def test_a_gate_that_cannot_work_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        gate(**options)
