"""What is exported gives the policy's own shares, for any number of entities."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from apportion import export_policy
from apportion.composition import Ensemble, LimitedTurnover, PartialTrading, ShrunkToEqual
from apportion.errors import InputError
from apportion.policy import Pooled, Recurrent
from apportion.problem import Observation
from apportion.simplex import Head

WINDOW, CHANNELS = 5, 3
KEYS = jax.random.split(jax.random.key(0), 3)


def shaken(policy):
    """The policy with parameters far from the first ones, where all shares are nearly equal."""
    leaves, structure = jax.tree.flatten(eqx.filter(policy, eqx.is_inexact_array))
    # In NumPy: every leaf has a shape of its own, for which JAX would compile.
    rng = np.random.default_rng(7)
    moved = [
        jax.device_put(np.asarray(x + 0.5 * rng.normal(size=x.shape), x.dtype))
        for x in map(np.asarray, leaves)
    ]
    return eqx.combine(jax.tree.unflatten(structure, moved), policy)


def pooled():
    return shaken(Pooled(CHANNELS, 12, head=Head(floor=0.04, cap=0.3), key=KEYS[0]))


def limited_team():
    members = eqx.filter_vmap(lambda key: Recurrent(CHANNELS, 6, key=key))(KEYS)
    team = PartialTrading(ShrunkToEqual(Ensemble(shaken(members)), 0.7), 0.4)
    return LimitedTurnover(team, jnp.array(0.3))


def observations(count, seed=0):
    """Random histories, shares, masks and limits of 1 and 9 entities, some absent, some all absent."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        m = (9, 9, 1)[number % 3]
        history = rng.normal(size=(m, WINDOW, CHANNELS)).astype(np.float32)
        held = rng.dirichlet(np.ones(m)).astype(np.float32)
        mask = np.arange(m) < rng.integers(1, m + 1)
        limits = np.where(rng.random(m) < 0.7, rng.random(m), 0).astype(np.float32)
        limits = np.zeros_like(limits) if number % 10 == 0 else limits
        yield history, held, mask, np.ones_like(limits) if number % 4 == 0 else limits


@eqx.filter_jit
def decide(policy, seen, mask):
    return policy(seen, mask)


def largest_gap(policy, run, count=12):
    gaps = []
    for history, held, mask, limits in observations(count):
        seen = Observation(*map(jnp.asarray, (history, held, np.where(mask, limits, 0))))
        wanted = np.asarray(decide(policy, seen, jnp.asarray(mask)))
        gaps.append(np.abs(np.asarray(run(history, held, mask, limits)) - wanted).max())
    return max(gaps)


@pytest.mark.parametrize("make", [pooled, limited_team])
def test_stablehlo_gives_the_policy_s_shares_for_any_number_of_entities(make, tmp_path):
    policy = make()
    file = export_policy(policy, tmp_path, window=WINDOW, channels=CHANNELS)
    program = export.deserialize(bytearray(file.read_bytes()))
    assert "entities" in str(program.in_avals[0])
    assert largest_gap(policy, program.call) <= 1e-6
    # It does not tell where it was made, and others' programs keep what they had.
    assert b".py" not in file.read_bytes()
    assert jax.config.jax_traceback_in_locations_limit > 0


def test_a_policy_that_cannot_read_the_history_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="Pooled cannot be exported for histories of 5 periods"):
        export_policy(pooled(), tmp_path, window=WINDOW, channels=CHANNELS + 1)
    assert list(tmp_path.iterdir()) == []
