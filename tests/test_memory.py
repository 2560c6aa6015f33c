import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from apportion import memory as replay
from apportion.tasks import Task, draw_tasks
from probe_problems import ConstantBest

KEY = jax.random.key(0)
PROBLEM = ConstantBest()


def start(tasks, **settings):
    defaults = {"slots": len(tasks), "length": 5, "warm_up": 0, "key": KEY}
    return begin(PROBLEM, tasks, **(defaults | settings))


begin, store, sample, find_slot, assign_slot = map(
    eqx.filter_jit,
    (replay.start, replay.store, replay.sample, replay.find_slot, replay.assign_slot),
)
reset = eqx.filter_jit(PROBLEM.reset)


def test_memory_starts_with_each_tasks_first_state():
    memory = start(draw_tasks(12, 4, 3))
    assert np.asarray(memory.count).tolist() == [1, 1, 1]
    assert int(memory.position(jnp.asarray(1))) == 0


def test_warm_up_fills_memory_with_the_states_of_equal_shares():
    memory = start(draw_tasks(12, 4, 2), length=16, warm_up=16)
    assert np.asarray(memory.periods).tolist() == [list(range(16))] * 2
    assert np.asarray(memory.states.held) == pytest.approx(0.25)


def test_storing_wraps_round_the_ring_and_the_last_row_is_where_the_task_stands():
    memory = start(draw_tasks(12, 4, 2))
    slot = jnp.asarray(1)
    state = memory.current(slot)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    periods = jnp.arange(1, 5, dtype=jnp.int32)
    memory = store(memory, slot, states, periods, jnp.array(True))
    memory = store(memory, slot, states, periods + 4, jnp.array(True))
    assert np.asarray(memory.periods[1]).tolist() == [5, 6, 7, 8, 4]
    assert int(memory.position(slot)) == 8
    assert np.asarray(memory.periods[0]).tolist() == [0, 0, 0, 0, 0]


def test_a_batch_is_consecutive_and_knows_where_it_is_linked():
    memory = start(draw_tasks(12, 4, 1), length=6)
    slot = jnp.asarray(0)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 6), memory.current(slot))
    # Periods 1, 2, 3, then a new episode 0, 1, 2: six of the seven states fit.
    periods = jnp.asarray([1, 2, 3, 0, 1, 2], jnp.int32)
    memory = store(memory, slot, states, periods, jnp.array(True))
    batch = sample(memory, slot, 6, horizon=16, recency=0.0, key=KEY)
    assert np.asarray(memory.periods[0, batch.rows]).tolist() == [1, 2, 3, 0, 1, 2]
    assert np.asarray(batch.linked).tolist() == [False, True, True, False, True, True]
    assert np.asarray(batch.valid).all()


def test_a_young_memory_gives_what_it_has():
    memory = start(draw_tasks(12, 4, 1))
    batch = sample(memory, jnp.asarray(0), 4, horizon=16, recency=0.0, key=KEY)
    assert np.asarray(batch.valid).tolist() == [True, False, False, False]


@pytest.mark.parametrize("recency", [0.0, 0.05, 0.5])
def test_the_truncated_geometric_has_its_probabilities(recency):
    highest = jnp.asarray(9, jnp.int32)
    draw = jax.vmap(lambda key: replay.truncated_geometric(highest, recency, key=key))
    drawn = np.asarray(draw(jax.random.split(KEY, 50_000)))
    expected = (1 - recency) ** np.arange(10)
    observed = np.bincount(drawn, minlength=10)
    assert stats.chisquare(observed, 50_000 * expected / expected.sum()).pvalue > 1e-3


def test_with_few_slots_the_least_recently_used_task_makes_room():
    tasks = draw_tasks(12, 4, 5)
    memory = start(tasks, slots=2)
    slots = []
    for step, t in enumerate([0, 1, 0, 2, 1, 0]):
        slot = find_slot(memory, jnp.asarray(t, jnp.int32))
        fresh = reset(tasks[t], key=KEY)
        step = jnp.asarray(step, jnp.int32)
        memory = assign_slot(memory, slot, jnp.asarray(t, jnp.int32), fresh, step)
        slots.append(int(slot.index))
    # 2 takes 1's slot (0 was used later), 1 takes 0's, 0 takes 2's.
    assert slots == [0, 1, 0, 1, 0, 1]
    assert np.asarray(memory.slot_of).tolist() == [1, 0, -1, -1, -1]
    assert np.asarray(memory.owner).tolist() == [1, 0]
    assert np.asarray(memory.count).tolist() == [1, 1]


def test_refreshing_writes_linked_rows_alone():
    memory = start(Task.of([[0, 1]]), length=4, warm_up=4)
    slot = jnp.asarray(0)
    batch = sample(memory, slot, 3, horizon=16, recency=0.0, key=KEY)
    new = jax.tree.map(lambda leaf: leaf + 7, batch.states)
    after = replay.rewrite(memory, slot, batch, new, jnp.array(True))
    changed = np.asarray(after.states.n[0] != memory.states.n[0])
    expected = np.zeros(4, bool)
    expected[np.asarray(batch.rows)[1:]] = True
    assert changed.tolist() == expected.tolist()
    untouched = replay.rewrite(memory, slot, batch, new, jnp.array(False))
    assert np.array_equal(untouched.states.n, memory.states.n)
