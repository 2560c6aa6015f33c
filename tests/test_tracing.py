"""Problems that work on numbers and not in a compiled program, and steps without a slope."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.errors import InputError
from apportion.learners.direct import Direct
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Recurrent
from apportion.problem import Observation, Problem, Step, check_problem
from apportion.tasks import draw_tasks
from apportion.training import Chunks, train

KEY = jax.random.key(0)
TASKS = draw_tasks(6, 3, 2)


class Prizes(Problem):
    """Each entity pays its number for its share; `style` is how the step is written."""

    style: str = eqx.field(static=True, default="smooth")
    universe: int = eqx.field(static=True, default=6)
    horizon: int = eqx.field(static=True, default=8)

    def reset(self, task, *, key):
        return jnp.zeros((), jnp.int32)

    def observe(self, task, state):
        history = jnp.broadcast_to(task.members[:, None, None] / 6.0, (task.width, 2, 1))
        return Observation(history, task.mask / task.mask.sum())

    def step(self, task, state, allocation, *, key):
        prize = task.members.astype(float)
        if self.style == "numpy":
            reward = jnp.asarray(float(np.sum(np.asarray(prize) * np.asarray(allocation))))
        elif self.style == "branch":
            reward = allocation[0] if allocation[0] > 0.5 else allocation[1]
        elif self.style == "rounded":
            reward = (jnp.round(10 * allocation) * prize).sum()
        else:
            reward = (prize * allocation).sum()
        return Step(state + 1, reward, jnp.array(False), state + 1 >= self.horizon)


@pytest.mark.parametrize("style", ["numpy", "branch"])
def test_a_step_that_cannot_be_compiled_is_refused_with_the_way_out(style):
    with pytest.raises(InputError, match=r"Prizes.step cannot be compiled .*from_gymnasium") as one:
        check_problem(Prizes(style), TASKS)
    assert "\n" not in str(one.value)


def trained(style: str, learner) -> list[str]:
    """What is warned of while a few updates are made."""
    policy = Recurrent(channels=1, hidden=4, key=KEY)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(
            Prizes(style), TASKS, policy, learner, steps=4,
            replay=Replay(length=8, warm_up=8), chunks=Chunks(2), key=KEY,
        )  # fmt: skip
    return [str(warning.message) for warning in said if "gradient" in str(warning.message)]


def test_a_step_without_a_slope_is_warned_of_once():
    (warning,) = trained("rounded", Direct(4))
    assert "Direct: the gradient was 0" in warning
    assert "Prizes.step" in warning


def test_a_smooth_step_and_a_learner_that_needs_no_slope_are_not_warned_of():
    assert trained("smooth", Direct(4)) == []
    assert trained("rounded", PPO()) == []
