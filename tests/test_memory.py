"""Memory before the first step and with few slots; test_algorithm holds the rest of it against NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion import memory as replay
from apportion.tasks import draw_tasks
from probe_problems import ConstantBest

KEY = jax.random.key(0)
PROBLEM = ConstantBest()


def start(tasks, **settings):
    defaults = {"slots": len(tasks), "length": 5, "warm_up": 0, "key": KEY}
    return begin(PROBLEM, tasks, **(defaults | settings))


begin, open_slot = map(eqx.filter_jit, (replay.start, replay.open_slot))


def test_warm_up_fills_memory_with_the_states_of_equal_shares():
    memory = start(draw_tasks(12, 4, 2), length=16, warm_up=16)
    assert np.asarray(memory.periods).tolist() == [list(range(16))] * 2
    assert np.asarray(memory.states.held) == pytest.approx(0.25)


def test_with_few_slots_the_least_recently_used_task_makes_room():
    tasks = draw_tasks(12, 4, 5)
    memory = start(tasks, slots=2)
    slots = []
    for step, t in enumerate([0, 1, 0, 2, 1, 0]):
        drawn, step = jnp.asarray([t, step], jnp.int32)
        memory, slot = open_slot(memory, PROBLEM, tasks, drawn, step, key=KEY)
        slots.append(int(slot))
    # 2 takes 1's slot (0 was used later), 1 takes 0's, 0 takes 2's.
    assert slots == [0, 1, 0, 1, 0, 1]
    assert np.asarray(memory.slot_of).tolist() == [1, 0, -1, -1, -1]
    assert np.asarray(memory.owner).tolist() == [1, 0]
    assert np.asarray(memory.count).tolist() == [1, 1]
