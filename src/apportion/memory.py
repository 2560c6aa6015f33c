"""Replay R_1..R_T: for each task the states it has seen, kept compactly, never as observations.

A slot is one task's ring of `length` states; its last row is the current state of the task's episode, so
n_t is that row's period. With fewer slots than tasks the least recently used slot goes to a task without
one, and an evicted task starts again: a million tasks cost 4 bytes each plus the slots. If `length` is
the whole episode, rows are periods. All functions take a memory of None, which a learner without batches
and acting has, and return it unchanged.
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
"""States a task's memory keeps where an episode is longer and nothing else was asked for."""


@dataclass(frozen=True)
class Replay:
    """How each task's memory is filled and read: step 2 and step 5 of Algorithm 1.

    What is None depends on the problem and the learner (`fitted`): memory then covers the episodes that
    the policy will meet. `Replay.paper()` has what the paper describes; it gives no n_e.

    Examples
    --------
    >>> Replay().fitted(horizon=50, batch=32, tasks=30)
    Replay(length=50, slots=4096, warm_up=50, recency=0.0, act_periods=16, stops=False)
    >>> Replay.paper().fitted(horizon=50, batch=32, tasks=30)
    Replay(length=50, slots=4096, warm_up=0, recency=5e-05, act_periods=10, stops=True)
    """

    length: int | None = None
    """States a task's memory keeps; by default an episode's, at most 1,024."""
    slots: int = 4096
    """Tasks that have memory at one time."""
    warm_up: int | None = None
    """States of each task seen under equal shares before the first step; by default an episode's, as far
    as memory holds it, and none where there are more tasks than slots."""
    recency: float = 0.0
    """How strongly batches favour recent states (see `sample`)."""
    act_periods: int | None = None
    """n_e, the periods acted in the drawn task after each update; by default half a batch, and none for a
    learner that makes its own rollouts. The paper gives no value."""
    stops: bool = False
    """Acting stops at an episode's end, and the next one begins at the next update; else it goes on."""

    @classmethod
    def paper(cls, act_periods: int = 10) -> "Replay":
        """Memory as Algorithm 1 prints it: empty at first, filled by acting alone, to an episode's end.

        Parameters
        ----------
        act_periods
            n_e. The paper gives no value; 10 is that of the study `literal`. The paper takes the
            geometric distribution of batches from Jiang et al. (2017), and so does `recency`.
        """
        return cls(warm_up=0, recency=5e-5, act_periods=act_periods, stops=True)

    def fitted(self, *, horizon: int, batch: int, tasks: int) -> "Replay":
        """With everything filled in and checked, for batches of so many periods of so many tasks."""
        acted = (batch + 1) // 2 if self.act_periods is None else self.act_periods
        if acted < 0:
            raise InputError(f"act_periods is {acted}; it counts periods, so >= 0")
        needed = max(batch, acted, 1)
        default = max(min(horizon, _MAX_DEFAULT_LENGTH), needed, self.warm_up or 0)
        length = default if self.length is None else self.length
        walked = min(horizon, length) if batch and tasks <= self.slots else 0
        warm_up = walked if self.warm_up is None else self.warm_up
        if length < needed:
            raise InputError(
                f"memory length is {length}; memory must hold a batch ({batch}) and the periods "
                f"acted ({acted})"
            )
        if warm_up > length:
            raise InputError(f"warm_up is {warm_up}; memory holds only {length} states")
        if not 0 <= self.recency < 1:
            raise InputError(f"recency is {self.recency}; it must be in [0, 1)")
        if self.slots < 1:
            raise InputError(f"slots is {self.slots}; at least one task needs memory")
        if warm_up and self.slots < tasks:
            raise InputError(
                f"warm_up needs a slot for each of the {tasks} tasks, but slots is {self.slots}"
            )
        return replace(self, length=length, warm_up=warm_up, act_periods=acted)


class Batch(eqx.Module):
    """Consecutive states out of one task's memory."""

    states: State
    rows: Int[Array, " batch"]
    valid: Bool[Array, " batch"]
    """The row has been written."""
    linked: Bool[Array, " batch"]
    """The row's state is the successor of the row before it in the batch."""


class Memory(eqx.Module):
    """The replay of all tasks, and the current state of each task's episode."""

    states: State
    """(slots, length, ...) in every leaf."""
    periods: Int[Array, "slots length"]
    count: Int[Array, " slots"]
    """States ever stored in a slot since its task took it."""
    slot_of: Int[Array, " tasks"]
    owner: Int[Array, " slots"]
    used: Int[Array, " slots"]

    @property
    def length(self) -> int:
        """States a slot keeps."""
        return self.periods.shape[1]

    def position(self, slot: Index) -> Index:
        """n_t: the current period of the task's episode."""
        return self.periods[slot, self._last(slot)]

    def current(self, slot: Index) -> State:
        """x_{n_t}."""
        row = self._last(slot)
        return jax.tree.map(lambda leaf: leaf[slot, row], self.states)

    def _last(self, slot: Index) -> Index:
        return (self.count[slot] - 1) % self.length


def start(
    problem: Problem, tasks: Task, *, slots: int, length: int, warm_up: int, key: PRNGKeyArray
) -> Memory:
    """Empty memory for T tasks; with a slot for each, every one starts at its own first state.

    `warm_up` states of each task are seen beforehand under equal shares (all tasks at once).
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
    """The first `length` states of a task under equal shares, episode after episode."""

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
    """Step once; at the end of the episode go back to a first state and period 0."""
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
    """The drawn task's slot; a task without one takes the least recently used and starts there."""
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
    # An index outside is dropped: no task is evicted.
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
    """`periods` consecutive states, their first drawn from a truncated geometric that favours the
    recent: the chance falls by the factor 1 - recency for each period further back. None for a learner
    that reads no batch.
    """
    if memory is None or periods == 0:
        return None
    return read_before_write(lambda slot: _read(memory, slot, periods, horizon, recency, key), slot)


def _read(
    memory: Memory, slot: Index, periods: int, horizon: int, recency: float, key: PRNGKeyArray
) -> Batch:
    length = memory.length
    filled = jnp.minimum(memory.count[slot], length)
    # A ring shorter than the episode is ordered by age; one that holds it whole, by period.
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
    """A whole number in 0..highest with P(k) proportional to (1 - recency)^k, in closed form."""
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
    """Replace the batch's linked rows by the states that today's policy arrives at, if there are any."""
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
    """From n_t on, n_e periods with the allocations that `choose` makes, storing the states reached."""
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
        # Period 0 is the start of the next episode: nothing after it is acted.
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
