"""Properties of every policy and every problem of the packages.

A new class without a line in the tables here fails the first test.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from garages import STATIONS, WIRING, random_garage

import apportion
import apportion_charging
import apportion_studies
from apportion.composition import (
    Ensemble,
    EqualShares,
    LimitedTurnover,
    PartialTrading,
    ShrunkToEqual,
)
from apportion.domains.budget.problem import Budget
from apportion.domains.federated.data import paper_split
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import PPOSettings
from apportion.domains.portfolio import SimulatedMarket
from apportion.domains.portfolio.market import Market
from apportion.domains.probes import ShownBest
from apportion.policy import Policy, Pooled, Recurrent
from apportion.problem import Observation, Problem, check_problem
from apportion.simplex import Head
from apportion.tasks import Task
from apportion_charging.garage import make_physics
from apportion_charging.objectives import Energy
from apportion_charging.problem import Charging
from apportion_studies.portfolio.mechanisms import Plain
from domains.federated.made_up import made_up_digits

M, WINDOW, CHANNELS = 6, 5, 3
MEMBERS = [2, 0, 4]
KEY = jax.random.key(0)


def awake(policy):
    """The same network far from equal shares."""
    return jax.tree.map(lambda x: 3 * x, policy)


def recurrent():
    return awake(Recurrent(CHANNELS, 4, key=KEY))


POLICIES = {
    AggregationPolicy: lambda: awake(AggregationPolicy(CHANNELS, 4, key=KEY)),
    Ensemble: lambda: Ensemble.of([recurrent(), Recurrent(CHANNELS, 4, key=jax.random.key(1))]),
    EqualShares: EqualShares,
    LimitedTurnover: lambda: LimitedTurnover(recurrent(), 0.3),
    PartialTrading: lambda: PartialTrading(recurrent(), 0.3),
    Pooled: lambda: awake(Pooled(CHANNELS, 4, key=KEY)),
    Recurrent: recurrent,
    ShrunkToEqual: lambda: ShrunkToEqual(recurrent(), 0.5),
}


def _charging():
    one_day = jax.tree.map(lambda x: x[None], random_garage(0))
    days, worth = jnp.ones(STATIONS, jnp.int32), jnp.ones(STATIONS)
    capacity = jnp.array([0.1, 0.2], jnp.float32)
    wiring, ideal = jax.tree.map(jnp.asarray, WIRING), make_physics(ideal=True)
    sizes = (STATIONS, ideal.periods)
    return Charging(one_day, wiring, days, worth, capacity, Energy(), False, ideal, *sizes)


def _federation():
    digits = made_up_digits()
    partition = paper_split(digits, (5, 3), 30)
    settings = PPOSettings(width=8, rounds=3, epochs=1, batch=10, evaluation=100, test=100)
    return Federation(digits, partition, settings)


PROBLEMS = {
    Budget: lambda: Budget.simulate(universe=8, periods=20),
    Charging: _charging,
    Federation: _federation,
    Market: lambda: Market.of(SimulatedMarket.draw(universe=8, days=60).prices, window=8),
    ShownBest: ShownBest,
}


def _later_prices(market, n):
    return eqx.tree_at(lambda m: m.prices, market, market.prices.at[market.window + n :].mul(1.3))


def _later_record(budget, n):
    later = (slice(None), slice(budget.window + n, None))
    record = (budget.efficiency.at[later].mul(1.3), budget.measured.at[later].add(0.3))
    return eqx.tree_at(lambda b: (b.efficiency, b.measured), budget, record)


def _later_cars(charging, n):
    garage = charging.garage
    later = garage.arrival > n
    names = ("need_kwh", "requested_kwh", "predicted_need_kwh", "recalled_need_kwh", "familiarity")
    values = {name: getattr(garage, name) for name in names}
    changed = {name: jnp.where(later, 0.3 * x, x) for name, x in values.items()}
    other = dataclasses.replace(garage, **changed)
    return eqx.tree_at(lambda c: c.garage, charging, other)


# The same problem with another record after period n.
OTHER_FUTURE = {Budget: _later_record, Charging: _later_cars, Market: _later_prices}
# What is drawn as it is lived, with the period's own key.
UNRECORDED = {Federation, ShownBest}


def concrete(base):
    """All concrete classes of the three packages, whatever module they are in."""
    for package in (apportion, apportion_charging, apportion_studies):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # The edges need extras; what they bring has tests of its own.
            if not module.name.startswith(("apportion.bridges", "apportion.__main__")):
                importlib.import_module(module.name)
    found, waiting = set(), [base]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            inside = kind.__module__.startswith(("apportion.", "apportion_"))
            if inside and not inspect.isabstract(kind) and "bridges" not in kind.__module__:
                found.add(kind)
    return found


def test_none_is_forgotten():
    # One that knows who the entities are, for comparison.
    assert concrete(Policy) == {*POLICIES, Plain}
    assert concrete(Problem) == set(PROBLEMS) == set(OTHER_FUTURE) | UNRECORDED


def observation(seed):
    """Within limits, one absent."""
    rng = np.random.default_rng(seed)
    limits = rng.uniform(0.3, 0.9, M).astype(np.float32)
    limits[0], limits[2] = 1, 0
    held = rng.dirichlet(np.ones(M)).astype(np.float32)
    held[2] = 0
    history = rng.normal(size=(M, WINDOW, CHANNELS)).astype(np.float32)
    return Observation(*map(jnp.asarray, (history, held / held.sum(), limits)))


def moved(seen, order):
    return jax.tree.map(lambda x: x[order], seen)


@pytest.mark.parametrize("kind", POLICIES, ids=lambda kind: kind.__name__)
def test_every_policy_is_equivariant_keeps_to_limits_and_ignores_padding(kind):
    policy = eqx.filter_jit(POLICIES[kind]())
    everyone = jnp.ones(M, bool)
    for seed in range(5):
        seen = observation(seed)
        plain = np.asarray(policy(seen, everyone))
        assert plain.sum() == pytest.approx(1, abs=1e-5)
        assert (plain >= -1e-6).all()
        assert (plain <= np.asarray(seen.limits) + 1e-5).all()
        order = np.random.default_rng(seed).permutation(M)
        permuted = np.asarray(policy(moved(seen, order), everyone))
        np.testing.assert_allclose(permuted, plain[order], atol=1e-5)
        # What an absent entity shows changes no share.
        loud = eqx.tree_at(lambda o: o.history, seen, seen.history.at[2].mul(100))
        np.testing.assert_allclose(policy(loud, everyone), plain, atol=1e-5)
        # A stranger in a padded place gets nothing and changes nobody, however loud.
        stranger = np.append(np.arange(M), 1)
        padded = moved(seen, stranger)
        padded = eqx.tree_at(lambda o: o.history, padded, padded.history.at[-1].mul(100))
        padded = eqx.tree_at(lambda o: o.held, padded, padded.held.at[-1].set(0))
        with_it = np.asarray(policy(padded, jnp.append(everyone, False)))
        assert with_it[-1] == 0
        np.testing.assert_allclose(with_it[:-1], plain, atol=1e-5)


@eqx.filter_jit
def walk(problem, padding):
    """An episode of three entities, with other shares in every period; the fourth place is padding."""
    task = Task(jnp.append(jnp.array(MEMBERS), padding), jnp.array([True, True, True, False]))
    first = problem.reset(task, key=KEY)

    def period(state, key):
        seen = problem.observe(task, state)
        shares = Head()(jax.random.normal(key, (4,)), task.mask, seen.bounds)
        step = problem.step(task, state, shares, key=key)
        return step.state, (jax.tree.map(lambda x: x[:3], seen), step.reward, shares)

    return first, *jax.lax.scan(period, first, jax.random.split(KEY, problem.horizon))[1]


@cache
def lived(kind):
    """A problem, and what was seen, paid and shared in an episode of it."""
    problem = PROBLEMS[kind]()
    return problem, *walk(problem, jnp.array(5))


@pytest.mark.parametrize("kind", PROBLEMS, ids=lambda kind: kind.__name__)
def test_every_problem_keeps_to_the_interface_and_lets_padding_change_nothing(kind):
    problem, _, *first = lived(kind)
    check_problem(problem, Task.of([[0, 1, 2], [3, 4]]))
    _, *second = walk(problem, jnp.array(2))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.asarray(first[-1])[:, 3].any()


@pytest.mark.parametrize("kind", OTHER_FUTURE, ids=lambda kind: kind.__name__)
def test_no_problem_shows_or_pays_what_has_not_happened(kind):
    problem, _, shown, rewards, _ = lived(kind)
    for n in (0, 3, problem.horizon // 2):
        _, other, others, _ = walk(OTHER_FUTURE[kind](problem, n), jnp.array(5))
        for one, then in zip(jax.tree.leaves(shown), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(one[: n + 1], then[: n + 1])
        np.testing.assert_array_equal(rewards[:n], others[:n])
        assert not np.array_equal(rewards[n:], others[n:])
