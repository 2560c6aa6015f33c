"""Replay R_1..R_T: the states that each task has visited, stored as states and not as observations.

A slot is the ring buffer of one task, with `length` states. Its last row is the current state of the
task's episode, so n_t is the period of that row. With fewer slots than tasks, a task without a slot takes
the least recently used one and the evicted task starts over; a million tasks cost 4 bytes each plus the
slots. If a slot holds a whole episode, rows are periods. A memory of None, for learners that neither read
batches nor act, is returned unchanged by all functions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.errors import InputError
from apportion.kernels.gpu import read_before_write
from apportion.problem import Problem, State, equal_allocation
from apportion.tasks import Task

Index = Int[Array, ""]


_MAX_DEFAULT_LENGTH = 1024
"""Default of `Replay.length` for longer episodes."""


@dataclass(frozen=True)
class Replay:
    """Configuration of each task's memory: how it is filled and sampled (steps 2 and 5 of Algorithm 1).

    Parameters set to None are derived from the problem and the learner (`fitted`), so that memory covers
    the episodes. `Replay.paper()` has the paper's values.

    Parameters
    ----------
    length : int, optional
        States that a task's memory holds. By default one episode, at most 1,024.
    slots : int
        Number of tasks that have memory at the same time.
    warm_up : int, optional
        States of each task that are visited under equal shares before the first step. By default one
        episode if it fits into memory, and none if there are more tasks than slots.
    recency : float
        How strongly batches favour recent states: the probability falls by the factor 1 - recency for
        each period further back.
    act_periods : int, optional
        n_e, the periods acted in the sampled task after each update. By default half a batch, and none
        for a learner that makes its own rollouts. The paper gives no value.
    stops : bool
        Stop acting at the end of an episode and start the next one at the next update. By default acting
        continues in the next episode.

    Examples
    --------
    >>> Replay().fitted(horizon=50, batch=32, tasks=30)
    Replay(length=50, slots=4096, warm_up=50, recency=0.0, act_periods=16, stops=False)
    >>> Replay.paper().fitted(horizon=50, batch=32, tasks=30)
    Replay(length=50, slots=4096, warm_up=0, recency=5e-05, act_periods=10, stops=True)
    """

    length: int | None = None
    slots: int = 4096
    warm_up: int | None = None
    recency: float = 0.0
    act_periods: int | None = None
    stops: bool = False

    @classmethod
    def paper(cls, act_periods: int = 10) -> "Replay":
        """Return memory as Algorithm 1 prints it: empty, and filled by acting up to the end of an episode.

        Parameters
        ----------
        act_periods : int
            n_e. The paper gives no value; the study `literal` uses 10.

        Returns
        -------
        Replay
            The configuration. `recency` is the value of Jiang et al. (2017).
        """
        return cls(warm_up=0, recency=5e-5, act_periods=act_periods, stops=True)

    def fitted(self, *, horizon: int, batch: int, tasks: int) -> "Replay":
        """Resolve the parameters that are None, and check all of them."""
        acted = (batch + 1) // 2 if self.act_periods is None else self.act_periods
        if acted < 0:
            raise InputError(f"act_periods is {acted}; it must be >= 0")
        needed = max(batch, acted, 1)
        default = max(min(horizon, _MAX_DEFAULT_LENGTH), needed, self.warm_up or 0)
        length = default if self.length is None else self.length
        walked = min(horizon, length) if batch and tasks <= self.slots else 0
        warm_up = walked if self.warm_up is None else self.warm_up
        if length < needed:
            raise InputError(
                f"memory length is {length}; it must be at least the batch ({batch}) and the periods "
                f"acted ({acted})"
            )
        if warm_up > length:
            raise InputError(f"warm_up is {warm_up}; memory holds only {length} states")
        if not 0 <= self.recency < 1:
            raise InputError(f"recency is {self.recency}; it must be in [0, 1)")
        if self.slots < 1:
            raise InputError(f"slots is {self.slots}; it must be >= 1")
        if warm_up and self.slots < tasks:
            raise InputError(
                f"warm_up needs a slot for each of the {tasks} tasks, but slots is {self.slots}"
            )
        return replace(self, length=length, warm_up=warm_up, act_periods=acted)


class Batch(eqx.Module):
    """Consecutive states from the memory of one task."""

    states: State
    rows: Int[Array, " batch"]
    valid: Bool[Array, " batch"]
    """Whether the row has been written."""
    linked: Bool[Array, " batch"]
    """Whether the row's state is the successor of the previous row's."""


class Memory(eqx.Module):
    """Replay of all tasks and the current state of each task's episode."""

    states: State
    """Leaves have the shape (slots, length, ...)."""
    periods: Int[Array, "slots length"]
    count: Int[Array, " slots"]
    """States stored in a slot since its task took it."""
    slot_of: Int[Array, " tasks"]
    owner: Int[Array, " slots"]
    used: Int[Array, " slots"]

    @property
    def length(self) -> int:
        """Number of states in a slot."""
        return self.periods.shape[1]

    def position(self, slot: Index) -> Index:
        """Return n_t, the current period of the task's episode."""
        return self.periods[slot, self._last(slot)]

    def current(self, slot: Index) -> State:
        """Return the current state x_{n_t}."""
        row = self._last(slot)
        return jax.tree.map(lambda leaf: leaf[slot, row], self.states)

    def _last(self, slot: Index) -> Index:
        return (self.count[slot] - 1) % self.length


def start(
    problem: Problem, tasks: Task, *, slots: int, length: int, warm_up: int, key: PRNGKeyArray
) -> Memory:
    """Create memory for T tasks, with `warm_up` states of each task visited under equal shares.

    If there are fewer slots than tasks, all slots are empty.
    """
    total = len(tasks)
    if slots < total:
        shape = jax.eval_shape(lambda: problem.reset(tasks[0], key=key))
        states = jax.tree.map(lambda s: jnp.zeros((slots, length, *s.shape), s.dtype), shape)
        free = jnp.full((slots,), -1, jnp.int32)
        periods = jnp.zeros((slots, length), jnp.int32)
        count = jnp.zeros(slots, jnp.int32)
        return Memory(states, periods, count, jnp.full((total,), -1, jnp.int32), free, free)
    keys = jax.random.split(key, total)
    seen = jax.vmap(lambda task, key: _walk(problem, task, max(warm_up, 1), key))(tasks, keys)
    states, periods = jax.tree.map(
        lambda s: jnp.zeros((total, length, *s.shape[2:]), s.dtype).at[:, : s.shape[1]].set(s),
        seen,
    )
    everyone = jnp.arange(total, dtype=jnp.int32)
    count = jnp.full((total,), max(warm_up, 1), jnp.int32)
    return Memory(states, periods, count, everyone, everyone, jnp.zeros(total, jnp.int32))


def _walk(problem: Problem, task: Task, length: int, key: PRNGKeyArray):
    """Return the first `length` states of a task under equal shares, over several episodes if needed."""

    def period(carry, key):
        state, n = carry
        equal = equal_allocation(problem, task, state)
        following = _move_on(problem, task, state, n, equal, key)
        return following, (state, n)

    first_key, walk_key = jax.random.split(key)
    first = (problem.reset(task, key=first_key), jnp.zeros((), jnp.int32))
    _, seen = jax.lax.scan(period, first, jax.random.split(walk_key, length))
    return seen


def _move_on(problem: Problem, task: Task, state: State, n: Index, allocation, key):
    """Step once; at the end of the episode, reset the state and the period."""
    step_key, reset_key = jax.random.split(key)
    step = problem.step(task, state, allocation, key=step_key)
    ended = step.terminated | step.truncated
    fresh = problem.reset(task, key=reset_key)
    state = jax.tree.map(lambda a, b: jnp.where(ended, a, b), fresh, step.state)
    return state, jnp.where(ended, 0, n + 1)


def open_slot(
    memory: Memory | None,
    problem: Problem,
    tasks: Task,
    drawn: Index,
    step: Index,
    *,
    key: PRNGKeyArray,
) -> tuple[Memory | None, Index]:
    """Return the slot of the sampled task; without one, it takes the least recently used slot."""
    if memory is None or memory.owner.shape[0] == memory.slot_of.shape[0]:
        return memory, drawn
    kept = memory

    def find(drawn):
        known = kept.slot_of[drawn]
        slot = jnp.where(known < 0, jnp.argmin(kept.used).astype(known.dtype), known)
        state = jax.tree.map(lambda leaf: leaf[slot, 0], kept.states)
        return slot, known < 0, kept.owner[slot], (state, kept.periods[slot, 0], kept.count[slot])

    slot, absent, owner, before = read_before_write(find, drawn)
    fresh = problem.reset(tasks[drawn], key=key)
    state, period, count = jax.tree.map(
        lambda new, old: jnp.where(absent, new, old),
        (fresh, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)),
        before,
    )
    # An index out of range is dropped, so no task is evicted.
    evicted = jnp.where(absent & (owner >= 0), owner, kept.slot_of.shape[0])
    opened = Memory(
        jax.tree.map(lambda leaf, new: leaf.at[slot, 0].set(new), kept.states, state),
        kept.periods.at[slot, 0].set(period),
        kept.count.at[slot].set(count),
        kept.slot_of.at[evicted].set(-1, mode="drop").at[drawn].set(slot),
        kept.owner.at[slot].set(drawn),
        kept.used.at[slot].set(step),
    )
    return opened, slot


def sample(
    memory: Memory | None,
    slot: Index,
    periods: int,
    *,
    horizon: int,
    recency: float,
    key: PRNGKeyArray,
) -> Batch | None:
    """Sample `periods` consecutive states; None for a learner that reads no batch.

    The start has a truncated geometric distribution: its probability falls by the factor 1 - recency for
    each period further back.
    """
    if memory is None or periods == 0:
        return None
    return read_before_write(lambda slot: _read(memory, slot, periods, horizon, recency, key), slot)


def _read(
    memory: Memory, slot: Index, periods: int, horizon: int, recency: float, key: PRNGKeyArray
) -> Batch:
    length = memory.length
    filled = jnp.minimum(memory.count[slot], length)
    # A ring shorter than the episode is read by age; a ring that holds the episode, by period.
    oldest = jnp.where(memory.count[slot] > length, memory.count[slot] % length, 0)
    base = oldest if length < horizon else jnp.zeros_like(oldest)
    latest = jnp.maximum(filled - periods, 0)
    offset = latest - _truncated_geometric(latest, recency, key=key)
    places = offset + jnp.arange(periods, dtype=jnp.int32)
    rows = (base + places) % length
    valid = places < filled
    seen = memory.periods[slot, rows]
    follows = jnp.append(False, seen[1:] == seen[:-1] + 1)
    states = jax.tree.map(lambda leaf: leaf[slot, rows], memory.states)
    return Batch(states, rows, valid, valid & follows)


def _truncated_geometric(highest: Index, recency: float, *, key: PRNGKeyArray) -> Index:
    """Sample k in 0..highest with P(k) proportional to (1 - recency)^k, by the inverse CDF."""
    uniform = jax.random.uniform(key)
    if recency == 0:
        drawn = uniform * (highest + 1)
    else:
        rate = jnp.log1p(-recency)
        drawn = jnp.log1p(uniform * jnp.expm1((highest + 1) * rate)) / rate
    return jnp.clip(drawn.astype(jnp.int32), 0, highest)


def rewrite(
    memory: Memory | None, slot: Index, batch: Batch | None, states: State | None
) -> Memory | None:
    """Replace the linked rows of a batch with the states that the current policy reaches."""
    if memory is None or batch is None or states is None:
        return memory
    rows = jnp.where(batch.linked, batch.rows, memory.length)
    put = jax.tree.map(
        lambda leaf, new: leaf.at[slot, rows].set(new, mode="drop"), memory.states, states
    )
    return eqx.tree_at(lambda m: m.states, memory, put)


def act(
    memory: Memory | None,
    slot: Index,
    problem: Problem,
    task: Task,
    choose: Callable[[State, PRNGKeyArray], Float[Array, " entities"]],
    replay: Replay,
    *,
    key: PRNGKeyArray,
) -> Memory | None:
    """Act for n_e periods from n_t with `choose` and store the states."""
    if memory is None or not replay.act_periods:
        return memory

    def period(carry, key):
        state, n = carry
        noise_key, step_key = jax.random.split(key)
        following = _move_on(problem, task, state, n, choose(state, noise_key), step_key)
        return following, following

    here = read_before_write(lambda slot: (memory.current(slot), memory.position(slot)), slot)
    _, (states, periods) = jax.lax.scan(period, here, jax.random.split(key, replay.act_periods))
    acted = jnp.ones(periods.shape, bool)
    if replay.stops:
        # Period 0 is the start of the next episode; later periods are discarded.
        begun = jnp.cumsum(periods == 0)
        acted = begun - (periods == 0) == 0
    count = memory.count[slot]
    rows = (count + jnp.arange(replay.act_periods, dtype=jnp.int32)) % memory.length
    rows = jnp.where(acted, rows, memory.length)
    put = jax.tree.map(
        lambda leaf, seen: leaf.at[slot, rows].set(seen, mode="drop"),
        (memory.states, memory.periods),
        (states, periods),
    )
    count = memory.count.at[slot].add(acted.sum(dtype=count.dtype))
    return eqx.tree_at(lambda m: (m.states, m.periods, m.count), memory, (*put, count))
