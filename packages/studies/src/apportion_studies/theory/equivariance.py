"""An equivariant network against a plain one with as many parameters, at equal updates.

Data: the synthetic problem, m = 10 entities, a record of 20, 100 or 500 states with noisy rewards; eps is
the range of the betas, 0 (identical entities) or .8 (different entities). Both networks learn by the
direct gradient on the whole record: one scores each entity separately with shared parameters, the other
reads all entities at once. Both are compared with the best allocation on fresh states, with the entities
in the same order and in another. Claims: sharing uses data better and does not depend on the order; and,
ours, a plain network is better if entities differ and data is plentiful. A cell is an eps and a size; a
row is a seed.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jaxtyping import Array, Float, PRNGKeyArray

from apportion.certify.statistics import compare, mean_over
from apportion.domains.synthetic import entropic_allocation, reward, spaced_betas
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion_studies.theory.common import by_run, means_by, one_by_one

_SCALES = {"quick": {"seeds": 5, "steps": 200}, "paper": {"seeds": 12, "steps": 600}}
_ENTITIES, _NOISE, _FRESH, _RATE = 10, 0.5, 1000, 3e-3
_EPSILONS = (0.0, 0.8)
_SIZES = (20, 100, 500)
_NETWORKS = ("equivariant", "plain")


class _Network(eqx.Module):
    """Shares from a scalar network applied to each entity, or from one network of all entities."""

    network: eqx.nn.MLP
    shared: bool = eqx.field(static=True)

    def __call__(self, x: Float[Array, " entities"]) -> Float[Array, " entities"]:
        scores = jax.vmap(self.network)(x[:, None])[:, 0] if self.shared else self.network(x)
        return jax.nn.softmax(scores)


def _make_network(name: str, key: PRNGKeyArray) -> _Network:
    """A fresh network, by name.

    >>> def count(name):
    ...     arrays = eqx.filter(_make_network(name, jax.random.key(0)), eqx.is_array)
    ...     return sum(leaf.size for leaf in jax.tree.leaves(arrays))
    >>> [count(name) for name in _NETWORKS]
    [321, 325]
    """
    if name == "equivariant":
        return _Network(eqx.nn.MLP(1, 1, 16, 2, jnp.tanh, key=key), True)
    return _Network(eqx.nn.MLP(_ENTITIES, _ENTITIES, 15, 1, jnp.tanh, key=key), False)


@eqx.filter_jit
def _regrets(name: str, betas, size: int, steps: int, keys) -> Float[Array, "runs orders"]:
    """Regret on fresh states of every seed: entities in their order, and in another.

    Adam learns on the mean reward of the whole record.
    """
    adam = optax.adam(_RATE)

    def returns(policy, x, noise, betas):
        """Reward of a policy in each state; the policy does not observe the noise."""
        return reward(x + noise, jax.vmap(policy)(x), betas)

    def one(key):
        network_key, state_key, noise_key, fresh_key = jax.random.split(key, 4)
        x = jax.random.uniform(state_key, (size, _ENTITIES))
        noise = _NOISE * jax.random.normal(noise_key, (size, _ENTITIES))
        network = _make_network(name, network_key)
        parameters, fixed = eqx.partition(network, eqx.is_inexact_array)

        def loss(parameters):
            return -returns(eqx.combine(parameters, fixed), x, noise, betas).mean()

        def step(carry, _):
            parameters, state = carry
            updates, state = adam.update(jax.grad(loss)(parameters), state)
            return (optax.apply_updates(parameters, updates), state), None

        (parameters, _), _ = jax.lax.scan(step, (parameters, adam.init(parameters)), length=steps)
        policy = eqx.combine(parameters, fixed)
        fresh = jax.random.uniform(fresh_key, (_FRESH, _ENTITIES))
        found = []
        for own in (betas, jnp.roll(betas, _ENTITIES // 2)):
            best = jax.vmap(entropic_allocation, (0, None))(fresh, own)
            gap = reward(fresh, best, own) - returns(policy, fresh, 0.0, own)
            found.append(gap.mean())
        return jnp.stack(found)

    return jax.vmap(one)(keys)


def equivariance(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """Both networks at every eps and number of states."""
    cells = tuple(
        Cell.alone(f"eps-{epsilon:g}-{size}", {"epsilon": epsilon, "size": size})
        for epsilon, size in product(_EPSILONS, _SIZES)
    )
    size = _SCALES[scale]
    measure = partial(_measure, runs=size["seeds"], steps=size["steps"], seed=seed)
    return Plan("equivariance", cells, partial(one_by_one, measure), _conclude, dict(size))


def _measure(epsilon: float, size: int, *, runs: int, steps: int, seed: int) -> pd.DataFrame:
    """Both networks on the same records, seeds as one vmap."""
    keys = jax.random.split(jax.random.key(seed), runs)
    betas = jnp.asarray(spaced_betas(_ENTITIES, epsilon), jnp.float32)
    frames = []
    for name in _NETWORKS:
        own, other = np.asarray(_regrets(name, betas, size, steps, keys), float).T
        columns = {"epsilon": epsilon, "size": size, "network": name, "run": np.arange(runs)}
        frames.append(pd.DataFrame({**columns, "own_order": own, "other_order": other}))
    return pd.concat(frames, ignore_index=True)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Table, verdicts and figure from the regret of every seed."""
    by = ["epsilon", "size", "network"]
    orders = ["own_order", "other_order"]
    long = rows.melt([*by, "run"], orders, var_name="order", value_name="regret")
    means = means_by(long, [*by, "order"], "regret", "seeds").round(6)
    table = means.sort_values(by, kind="stable", ignore_index=True)

    def mean(network, epsilon, size, order="own_order"):
        return _of(rows, network, epsilon, size, order).mean()

    notes = (
        *(
            f"eps = {epsilon:g}, {size} states: regret {mean('equivariant', epsilon, size):.4f} "
            f"equivariant, {mean('plain', epsilon, size):.4f} plain."
            for epsilon, size in product(_EPSILONS, _SIZES)
        ),
        "eps = .8, 500 states, entities in another order: "
        f"{mean('equivariant', 0.8, 500, 'other_order'):.4f} equivariant, "
        f"{mean('plain', 0.8, 500, 'other_order'):.4f} plain.",
    )
    shown = {
        f"ε = {epsilon:g}, {size} states": {
            f"{network}, {order.replace('_', ' ')}": mean_over(
                _of(rows, network, epsilon, size, order)
            )
            for network, order in product(_NETWORKS, orders)
        }
        for epsilon, size in product(_EPSILONS, _SIZES)
    }
    draw = partial(forest, shown, "regret on fresh states", 2.2)
    title = "An equivariant network against a plain one of as many parameters"
    return [FigureResult("equivariance", title, table, _verdicts(rows), draw, notes)]


def _of(rows: Any, network: str, epsilon: float, size: int, order: str) -> np.ndarray:
    return by_run(rows, order, network=network, epsilon=epsilon, size=size)


def _verdicts(rows: Any) -> Iterator[Verdict]:
    def saved(epsilon, size, order):
        """Regret of the plain network minus that of the equivariant one."""
        plain, shared = (_of(rows, name, epsilon, size, order) for name in ("plain", "equivariant"))
        return compare(plain, shared)

    least, most, far = _SIZES[0], _SIZES[-1], _EPSILONS[-1]
    plain = partial(_of, rows, "plain", far, most)
    claim = "entities alike: the equivariant network regrets less, at every size (least saving)"
    yield Verdict.of_all(claim, [saved(0.0, size, "own_order") for size in _SIZES])
    claim = (
        "eps = .8, 20 states: the equivariant network regrets less though entities differ (saving)"
    )
    yield Verdict.of(claim, saved(far, least, "own_order"))
    claim = (
        "eps = .8, entities in another order: the equivariant network regrets less (least saving)"
    )
    yield Verdict.of_all(claim, [saved(far, size, "other_order") for size in _SIZES])
    claim = (
        "eps = .8, 500 states: the plain network loses where entities change places (regret added)"
    )
    yield Verdict.of(claim, compare(plain("other_order"), plain("own_order")))
    claim = "eps = .8, 500 states: it still regrets less, in the order learnt (saving)"
    yield Verdict.of(claim, saved(far, most, "own_order"))
