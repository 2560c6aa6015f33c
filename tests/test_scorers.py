import jax.numpy as jnp
import numpy as np
import pytest

from apportion.scorers import SCORERS, Evidence


@pytest.fixture
def evidence():
    rng = np.random.default_rng(0)
    shares = np.zeros((6, 4))
    shares[:, :3] = rng.dirichlet(np.ones(3), 6)
    return Evidence(
        jnp.asarray(shares, jnp.float32),
        jnp.tile(jnp.array([1 / 3, 1 / 3, 1 / 3, 0.0]), (6, 1)),
        jnp.asarray(rng.normal(size=6), jnp.float32),
        jnp.asarray(rng.normal(size=6) - 2, jnp.float32),
        jnp.arange(6) < 5,
        jnp.arange(4) < 3,
        jnp.asarray(0.3),
        jnp.asarray(1.7),
    )


def test_scorers_are_their_formulas_over_the_valid_periods(evidence):
    shares = np.asarray(evidence.allocations)[:5, :3]
    rewards = np.asarray(evidence.rewards)[:5]
    equal = np.asarray(evidence.equal_rewards)[:5]
    gaps = np.abs(shares - 1 / 3).max(1)
    expected = {
        "max-deviation": gaps.max(),
        "mean-deviation": gaps.mean(),
        "reward-variance": rewards.var(),
        "gradient-norm": 1.7,
        "realised-gain": max((rewards - equal).mean(), 0) + 1e-5,
    }
    assert {name: float(scorer(evidence)) for name, scorer in SCORERS.items()} == pytest.approx(
        expected, rel=1e-5
    )
