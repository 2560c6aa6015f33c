"""A network shared by all entities against a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion_studies.theory import equivariance


def test_one_network_is_equivariant_and_the_other_is_not():
    x = jax.random.uniform(jax.random.key(0), (equivariance._ENTITIES,))
    order = jnp.arange(equivariance._ENTITIES)[::-1]
    for name, same in (("equivariant", True), ("plain", False)):
        policy = equivariance._make_network(name, jax.random.key(1))
        assert policy(x).sum() == pytest.approx(1, abs=1e-5)
        assert np.allclose(policy(x[order]), policy(x)[order], atol=1e-6) == same


def made_up(shared, plain):
    rows = [
        (epsilon, size, network, run, regret + 1e-3 * run, regret + 1e-3 * run)
        for epsilon in equivariance._EPSILONS
        for size in equivariance._SIZES
        for network, regret in (("equivariant", shared), ("plain", plain))
        for run in range(3)
    ]
    columns = ["epsilon", "size", "network", "run", "own_order", "other_order"]
    return pd.DataFrame(rows, columns=columns)


@pytest.mark.parametrize(
    ("shared", "plain", "outcome"), [(0.1, 0.2, "holds"), (0.2, 0.1, "does-not-hold")]
)
def test_a_saving_holds_only_if_the_shared_network_regrets_less(shared, plain, outcome):
    [figure] = equivariance._conclude(made_up(shared, plain), {})
    savings = [verdict for verdict in figure.verdicts if "saving" in verdict.claim]
    assert len(savings) == 4
    assert all(verdict.outcome == outcome for verdict in savings)
    assert len(figure.plot().axes) == 6
