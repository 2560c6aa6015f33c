"""Replay R_1..R_T: for each task the states it has seen, kept compactly, never as observations.

A slot is one task's ring of `history` states; its last row is where the task's episode stands, so
n_t is that row's period. With fewer slots than tasks the least recently used slot goes to a task
that has none, and a task that comes back starts afresh: a million tasks cost 4 bytes each plus the
slots. Where `history` is the whole episode, rows are periods.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from apportion.problem import Problem, State, equal_shares
from apportion.tasks import Tasks

Index = Int[Array, ""]


class Batch(eqx.Module):
    """Consecutive states out of one task's memory."""

    states: State
    rows: Int[Array, " batch"]
    valid: Bool[Array, " batch"]
    """The row has been written."""
    linked: Bool[Array, " batch"]
    """The row's state is the successor of the row before it in the batch."""


class Memory(eqx.Module):
    """All tasks' replay, and where each task's episode stands."""

    states: PyTree[Array, "slots history ..."]
    periods: Int[Array, "slots history"]
    count: Int[Array, " slots"]
    """States ever stored in a slot since its task took it."""
    slot_of: Int[Array, " tasks"]
    owner: Int[Array, " slots"]
    used: Int[Array, " slots"]

    @property
    def history(self) -> int:
        return self.periods.shape[1]

    def position(self, slot: Index) -> Index:
        """n_t: the period at which the task's episode stands."""
        return self.periods[slot, self._last(slot)]

    def current(self, slot: Index) -> State:
        """x_{n_t}."""
        row = self._last(slot)
        return jax.tree.map(lambda leaf: leaf[slot, row], self.states)

    def _last(self, slot: Index) -> Index:
        return (self.count[slot] - 1) % self.history


def start(
    problem: Problem, tasks: Tasks, *, slots: int, history: int, warm_up: int, key: PRNGKeyArray
) -> Memory:
    """Empty memory for T tasks; with a slot for each, every one starts at its own first state.

    `warm_up` states of each task are seen beforehand under equal shares (all tasks at once).
    """
    total = len(tasks)
    if slots < total:
        shape = jax.eval_shape(lambda: problem.reset(tasks[0], key=key))
        states = jax.tree.map(lambda s: jnp.zeros((slots, history, *s.shape), s.dtype), shape)
        free = jnp.full((slots,), -1, jnp.int32)
        periods = jnp.zeros((slots, history), jnp.int32)
        count = jnp.zeros(slots, jnp.int32)
        return Memory(states, periods, count, jnp.full((total,), -1, jnp.int32), free, free)
    keys = jax.random.split(key, total)
    seen = jax.vmap(lambda task, key: _walk(problem, task, max(warm_up, 1), key))(tasks, keys)
    states, periods = jax.tree.map(
        lambda s: jnp.zeros((total, history, *s.shape[2:]), s.dtype).at[:, : s.shape[1]].set(s),
        seen,
    )
    everyone = jnp.arange(total, dtype=jnp.int32)
    count = jnp.full((total,), max(warm_up, 1), jnp.int32)
    return Memory(states, periods, count, everyone, everyone, jnp.zeros(total, jnp.int32))


def _walk(problem: Problem, task: Tasks, length: int, key: PRNGKeyArray):
    """The first `length` states of a task under equal shares, episode after episode."""

    def period(carry, key):
        state, n = carry
        shares = equal_shares(problem.observe(task, state), task.mask)
        following = advance(problem, task, state, n, shares, key)
        return following, (state, n)

    first_key, walk_key = jax.random.split(key)
    first = (problem.reset(task, key=first_key), jnp.zeros((), jnp.int32))
    _, seen = jax.lax.scan(period, first, jax.random.split(walk_key, length))
    return seen


def advance(problem: Problem, task: Tasks, state: State, n: Index, allocation, key):
    """Step once; at the end of the episode go back to a first state and period 0."""
    step_key, reset_key = jax.random.split(key)
    step = problem.step(task, state, allocation, key=step_key)
    ended = step.terminated | step.truncated
    fresh = problem.reset(task, key=reset_key)
    state = jax.tree.map(lambda a, b: jnp.where(ended, a, b), fresh, step.state)
    return state, jnp.where(ended, 0, n + 1)


def claim(
    memory: Memory, problem: Problem, task: Tasks, index: Index, step: Index, *, key: PRNGKeyArray
) -> tuple[Memory, Index]:
    """The slot of task `index`; a task that has none takes over the least recently used one."""
    if memory.owner.shape[0] == memory.slot_of.shape[0]:
        return memory, index
    known = memory.slot_of[index]
    absent = known < 0
    slot = jnp.where(absent, jnp.argmin(memory.used).astype(known.dtype), known)
    loser = memory.owner[slot]
    place = jnp.where(absent & (loser >= 0), loser, index)
    fresh = problem.reset(task, key=key)
    states = jax.tree.map(
        lambda leaf, new: leaf.at[slot, 0].set(jnp.where(absent, new, leaf[slot, 0])),
        memory.states,
        fresh,
    )
    return Memory(
        states,
        memory.periods.at[slot, 0].set(jnp.where(absent, 0, memory.periods[slot, 0])),
        memory.count.at[slot].set(jnp.where(absent, 1, memory.count[slot])),
        memory.slot_of.at[place].set(-1).at[index].set(slot),
        memory.owner.at[slot].set(index),
        memory.used.at[slot].set(step),
    ), slot


def recall(
    memory: Memory, slot: Index, length: int, *, horizon: int, recency: float, key: PRNGKeyArray
) -> Batch:
    """`length` consecutive states, their first drawn from a truncated geometric that favours the
    recent: the chance falls by the factor 1 - recency for each period further back.
    """
    history = memory.history
    filled = jnp.minimum(memory.count[slot], history)
    # A ring shorter than the episode is ordered by age; one that holds it whole, by period.
    oldest = jnp.where(memory.count[slot] > history, memory.count[slot] % history, 0)
    base = oldest if history < horizon else jnp.zeros_like(oldest)
    latest = jnp.maximum(filled - length, 0)
    offset = latest - truncated_geometric(latest, recency, key=key)
    places = offset + jnp.arange(length, dtype=jnp.int32)
    rows = (base + places) % history
    valid = places < filled
    periods = memory.periods[slot, rows]
    follows = jnp.append(False, periods[1:] == periods[:-1] + 1)
    states = jax.tree.map(lambda leaf: leaf[slot, rows], memory.states)
    return Batch(states, rows, valid, valid & follows)


def truncated_geometric(highest: Index, recency: float, *, key: PRNGKeyArray) -> Index:
    """A whole number in 0..highest with P(k) proportional to (1 - recency)^k, in closed form."""
    uniform = jax.random.uniform(key)
    if recency == 0:
        drawn = uniform * (highest + 1)
    else:
        rate = jnp.log1p(-recency)
        drawn = jnp.log1p(uniform * jnp.expm1((highest + 1) * rate)) / rate
    return jnp.clip(drawn.astype(jnp.int32), 0, highest)


def rewrite(
    memory: Memory, slot: Index, batch: Batch, states: State, wanted: Bool[Array, ""]
) -> Memory:
    """Replace the batch's linked rows by the states that today's policy arrives at."""
    write = batch.linked & wanted

    def put(leaf, new, old):
        shape = (-1,) + (1,) * (new.ndim - 1)
        return leaf.at[slot, batch.rows].set(jnp.where(write.reshape(shape), new, old))

    # Rows past the ring's content repeat others only where the batch is longer than the history.
    return eqx.tree_at(
        lambda m: m.states, memory, jax.tree.map(put, memory.states, states, batch.states)
    )


def store(
    memory: Memory,
    slot: Index,
    states: State,
    periods: Int[Array, " time"],
    wanted: Bool[Array, ""],
) -> Memory:
    """Append states; the last of them is where the episode now stands."""
    length = periods.shape[0]
    rows = (memory.count[slot] + jnp.arange(length, dtype=jnp.int32)) % memory.history

    def put(leaf, new):
        old = leaf[slot, rows]
        return leaf.at[slot, rows].set(jnp.where(wanted, new, old))

    return eqx.tree_at(
        lambda m: (m.states, m.periods, m.count),
        memory,
        (
            jax.tree.map(put, memory.states, states),
            put(memory.periods, periods),
            memory.count.at[slot].add(jnp.where(wanted, length, 0)),
        ),
    )
