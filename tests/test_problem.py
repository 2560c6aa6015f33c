import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.composition import EqualShares
from apportion.errors import InputError
from apportion.problem import (
    Observation,
    Problem,
    Step,
    check_allocation,
    check_problem,
    evaluate,
    rollout,
)
from apportion.simplex import Head
from apportion.tasks import Task

KEY = jax.random.key(0)
TASKS = Task.of([[0, 1, 2], [3, 4]])


class Countdown(Problem):
    """Pays the period's number to whoever holds the first entity; ends after `last` periods."""

    universe: int = 5
    horizon: int = 6
    last: int = 4
    by_rule: bool = True

    def reset(self, task, *, key):
        return jnp.zeros((), jnp.int32)

    def observe(self, task, state):
        return Observation(jnp.ones((task.width, 2, 1)) * state, task.mask / task.mask.sum())

    def step(self, task, state, allocation, *, key):
        n = state + 1
        over = n >= self.last
        return Step(n, n * allocation[0], over & self.by_rule, over & (not self.by_rule))


def test_a_rollout_stops_counting_at_the_end_of_the_episode():
    path = rollout(Countdown(), EqualShares(), TASKS[0], key=KEY)
    assert np.asarray(path.alive).tolist() == [True] * 4 + [False] * 2
    assert np.asarray(path.rewards) == pytest.approx(np.array([1, 2, 3, 4, 0, 0]) / 3)
    assert float(path.mean_reward) == pytest.approx(10 / 3 / 4)


def test_evaluation_covers_all_tasks_and_episodes_with_paired_randomness():
    path = evaluate(Countdown(), EqualShares(), TASKS, key=KEY, episodes=2)
    assert path.rewards.shape == (2, 2, 6)
    assert np.asarray(path.allocations)[1, 0, 0].tolist() == [0.5, 0.5, 0]


class Limited(Countdown):
    """The first entity takes a tenth at most."""

    def observe(self, task, state):
        limits = jnp.ones(task.width).at[0].set(0.1)
        return replace(super().observe(task, state), limits=limits)


@pytest.mark.parametrize(
    ("problem", "shares", "words"),
    [
        (Countdown(), [2.0, 2.0, 0.0], r"\(sum 4, smallest 0\); .* sum to 1"),
        (Countdown(), [1.5, -0.5, 0.0], "smallest -0.5"),
        (Countdown(), [np.nan, 1.0, 0.0], "not finite"),
        (Countdown(), [0.5, 0.0, 0.5], "0 where the mask is False"),
        (Limited(), [0.5, 0.5, 0.0], "entity 0 gets 0.5, above its limit of 0.1"),
    ],
)
def test_evaluation_refuses_shares_that_are_no_allocation(problem, shares, words):
    def mine(observation, mask):
        # Wrong in the last period that counts, and of the second task alone.
        wrong = (observation.history[0, 0, 0] == 3) & ~mask[2]
        fair = Head()(jnp.zeros(3), mask, observation.bounds)
        return jnp.where(wrong, jnp.array(shares), fair)

    with pytest.raises(InputError, match=f"^mine: .*{words}"):
        evaluate(problem, mine, TASKS, key=KEY)


def evaluate_equal_shares(problem, tasks):
    return inspect.unwrap(evaluate)(problem, EqualShares(), tasks, key=KEY)


def broken(**methods):
    """Countdown with some methods replaced by plain functions."""

    class Broken(Problem):
        universe: int = 5
        horizon: int = methods.pop("horizon", 6)

        def reset(self, task, *, key):
            return methods.get("reset", Countdown().reset)(task, key=key)

        def observe(self, task, state):
            return methods.get("observe", Countdown().observe)(task, state)

        def step(self, task, state, allocation, *, key):
            return methods.get("step", Countdown().step)(task, state, allocation, key=key)

    return Broken()


HELD = jnp.ones(3) / 3
NO, GOOD = jnp.array(False), Countdown().step


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"horizon": 0}, "horizon is 0"),
        ({"observe": lambda t, s: (1, 2)}, "observe returned tuple; return an Observation"),
        (
            {"observe": lambda t, s: Observation(jnp.ones((1, 4, 2, 1)), jnp.ones((1, 4)))},
            r"history has shape \(1, 4, 2, 1\); it must be \(entities, window, channels\) with 3",
        ),
        (
            {"observe": lambda t, s: Observation(jnp.ones((3, 2, 1)).at[1].set(jnp.nan), HELD)},
            r"observe: observation history is nan at index \(1, 0, 0\) .*\[0, 1, 2\]",
        ),
        ({"step": lambda t, s, a, key: 3}, "step returned int; return a Step"),
        (
            {"step": lambda t, s, a, key: Step(s, jnp.ones(3), NO, NO)},
            r"reward has shape \(3,\); it must be a scalar",
        ),
        (
            {"step": lambda t, s, a, key: Step(s + 0.5, jnp.ones(()), NO, NO)},
            r"next state is float32\[\], but Broken.reset returned int32\[\]",
        ),
        # Works on numbers, and not in a compiled program.
        (
            {"step": lambda t, s, a, key: Step(s, jnp.asarray(float(np.asarray(a)[0])), NO, NO)},
            r"Broken.step cannot be compiled .*from_gymnasium",
        ),
    ],
)
def test_a_broken_problem_is_told_which_method_and_what_shape(methods, words):
    with pytest.raises(InputError, match=words) as one:
        check_problem(broken(**methods), TASKS)
    assert "\n" not in str(one.value)


def test_a_step_that_returns_a_tuple_is_refused_in_an_evaluation():
    tuples = broken(step=lambda task, state, shares, key: (state, 1.0, NO, NO))
    with pytest.raises(InputError, match="Broken.step returned tuple; return a Step"):
        evaluate(tuples, EqualShares(), TASKS, key=KEY)


@pytest.mark.parametrize("check", [check_problem, evaluate_equal_shares])
def test_tasks_outside_the_universe_or_not_a_stack_are_refused(check):
    for tasks, words in (
        (Task.of([[0, 7]]), "entity 7 is outside Countdown's universe of 5"),
        (TASKS[0], r"members have shape \(3,\); pass a stack"),
        ([[0, 1]], "expected a Task but got a list"),
    ):
        with pytest.raises(InputError, match=words):
            # Without the types that tests check.
            inspect.unwrap(check)(Countdown(), tasks)


def test_an_allocation_of_another_shape_is_refused():
    with pytest.raises(InputError, match=r"shape \(2,\); it must be \(3,\)"):
        check_allocation(jnp.array([0.5, 0.5]), jnp.array([True, True, False]), "mine")
