"""What tests that train have in common: several seeds at once, and a mean with room to spare."""

import os
from contextlib import contextmanager

import equinox as eqx
import jax
import numpy as np

from apportion.problem import evaluate
from apportion.training import Chunks, train

# What was shown under one seed is worth asking under others: PYTEST_SEED=3 make test.
SEED = int(os.environ.get("PYTEST_SEED", "0"))


@contextmanager
def optimised():
    """What is compiled in here takes half as long again to compile and runs several times as fast.

    Worth it where a program runs for seconds; what was compiled before stays as it was.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def train_seeds(problem, tasks, network, learner, *, steps, seeds=8, **options):
    """Policies of several seeds, stacked; `network` makes an untrained one from a key."""
    keys = jax.random.split(jax.random.key(SEED), seeds)
    policies = eqx.filter_jit(eqx.filter_vmap(network))(keys)
    return train(
        problem, tasks, policies, learner, steps=steps, chunks=Chunks(steps), key=keys, **options
    ).policy


def fractions_of_best(problem, policies, tasks, *, episodes=8):
    """What each policy earns on each task as a fraction of what the best one does, (seeds, tasks)."""
    return np.asarray(_fractions(problem, policies, tasks, episodes))


# With everything as an argument, so that tasks of one shape are one program.
@eqx.filter_jit
def _fractions(problem, policies, tasks, episodes):
    best = jax.vmap(problem.best)(tasks)

    def one(policy):
        path = evaluate(problem, policy, tasks, key=jax.random.key(5), episodes=episodes)
        return path.mean_reward.mean(1) / best

    return eqx.filter_vmap(one)(policies)


def assert_mean_above(values, bound):
    """The mean over seeds is above the bound by three standard errors: no seed's luck decides."""
    values = np.asarray(values, float)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert values.mean() - 3 * error > bound, (
        f"mean {values.mean():.4f} with standard error {error:.4f} over {len(values)} seeds is not "
        f"above {bound} by three of them"
    )
