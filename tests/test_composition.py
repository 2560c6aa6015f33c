"""The pieces around a policy: each does its one thing."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.composition import (
    Ensemble,
    EqualShares,
    LimitedTurnover,
    PartialTrading,
    ShrunkToEqual,
)
from apportion.errors import InputError
from apportion.policy import Recurrent
from apportion.problem import Observation

KEYS = jax.random.split(jax.random.key(0), 3)


def bold(key) -> Recurrent:
    """A policy far from equal shares."""
    policy = Recurrent(2, 5, key=key)
    return eqx.tree_at(lambda p: p.score.of_features, policy, jax.random.normal(key, (5,)))


@cache
def policies() -> list[Recurrent]:
    return [bold(key) for key in KEYS]


OBSERVATION = Observation(jax.random.normal(KEYS[0], (4, 6, 2)), jnp.array([0.4, 0.3, 0.2, 0.1]))
MASK = jnp.ones(4, bool)


@eqx.filter_jit
def asked(policy):
    return policy(OBSERVATION, MASK)


def test_an_ensemble_gives_the_mean_of_its_members():
    alone = [asked(policy) for policy in policies()]
    together = asked(Ensemble.of(policies()))
    np.testing.assert_allclose(together, np.mean(alone, 0), atol=1e-6)


def test_shrinking_runs_from_equal_shares_to_the_policy():
    wanted = asked(policies()[0])
    for k in (0.0, 0.25, 1.0):
        shares = asked(ShrunkToEqual(policies()[0], k))
        np.testing.assert_allclose(shares, (1 - k) / 4 + k * wanted, atol=1e-6)


def test_partial_trading_runs_from_holding_to_the_target():
    target = asked(policies()[0])
    for eta in (0.0, 0.1, 1.0):
        shares = asked(PartialTrading(policies()[0], eta))
        expected = OBSERVATION.held + eta * (target - OBSERVATION.held)
        np.testing.assert_allclose(shares, expected, atol=1e-6)


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.05, 0.5, 2.0]))
def test_turnover_stays_below_its_limit_and_reaches_the_target_where_that_is_near(seed, most):
    held = jnp.asarray(np.random.default_rng(seed).dirichlet(np.ones(4)), jnp.float32)
    observation = Observation(OBSERVATION.history, held)
    target, shares = _limited(policies()[0], observation, most)
    assert np.abs(shares - held).sum() <= most + 1e-6
    if np.abs(target - held).sum() <= most:
        np.testing.assert_allclose(shares, target, atol=1e-6)


@eqx.filter_jit
def _limited(policy, observation, most):
    return policy(observation, MASK), LimitedTurnover(policy, most)(observation, MASK)


def test_what_cannot_be_composed_is_refused():
    with pytest.raises(InputError, match="trade_fraction is 1.5"):
        PartialTrading(EqualShares(), 1.5)
    with pytest.raises(InputError, match="trust is -1"):
        ShrunkToEqual(EqualShares(), -1)
    with pytest.raises(InputError, match="between 0 and 2"):
        LimitedTurnover(EqualShares(), 2.5)
    with pytest.raises(InputError, match="differ in structure"):
        Ensemble.of([policies()[0], EqualShares()])
    with pytest.raises(InputError, match="at least one"):
        Ensemble.of([])
