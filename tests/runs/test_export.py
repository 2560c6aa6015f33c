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


@pytest.mark.parametrize("make", [pooled, limited_team])
def test_stablehlo_gives_the_policy_s_shares_for_any_number_of_entities(make, tmp_path):
    policy = make()
    file = export_policy(policy, tmp_path, window=WINDOW, channels=CHANNELS)
    program = export.deserialize(bytearray(file.read_bytes()))
    rng, decide = np.random.default_rng(0), eqx.filter_jit(policy)
    history = rng.normal(size=(9, WINDOW, CHANNELS)).astype(np.float32)
    held, mask = rng.dirichlet(np.ones(9)).astype(np.float32), np.arange(9) < 8
    some = np.where(np.arange(9) % 3, rng.random(9), 0).astype(np.float32)
    for limits in (some, np.ones_like(some), np.zeros_like(some)):
        seen = Observation(*map(jnp.asarray, (history, held, limits)))
        wanted = decide(seen, jnp.asarray(mask))
        np.testing.assert_allclose(program.call(history, held, mask, limits), wanted, atol=1e-6)
    # It does not tell where it was made, and others' programs keep what they had.
    assert b".py" not in file.read_bytes()
    assert jax.config.jax_traceback_in_locations_limit > 0


def test_a_policy_that_cannot_read_the_history_is_refused_in_one_sentence(tmp_path):
    policy = Pooled(CHANNELS, 12, key=KEYS[0])
    with pytest.raises(InputError, match="Pooled cannot be exported for histories of 5 periods"):
        export_policy(policy, tmp_path, window=WINDOW, channels=CHANNELS + 1)
    assert list(tmp_path.iterdir()) == []
