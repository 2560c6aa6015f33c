"""Tasks: subsets U_t of a universe U of M entities (Corollary 2 counts them, C(M, m)).

A `Task` is an index array into the universe; several tasks are one stack. Tasks of different sizes are
padded to the widest: `mask` is False for padding, which repeats the first entity of the task, so that
every index is valid in compiled code.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from apportion.errors import InputError
from apportion.trees import take


class Task(eqx.Module):
    """A subset of the universe, or a stack of subsets along leading axes.

    Index a stack as an array (`tasks[t]`, `tasks[:5]`), or map over it with `vmap`. If each of several
    runs has its own tasks, runs are the first axis (`apportion.trees.stack`).

    Parameters
    ----------
    members : array of int
        Indices of the entities in the universe, with shape (..., entities).
    mask : array of bool
        False for padding, with the same shape.

    Raises
    ------
    InputError
        If an index is negative or occurs twice in a task.

    Examples
    --------
    >>> tasks = Task.of([[0, 2, 3], [1, 4]])
    >>> len(tasks), tasks.width
    (2, 3)
    >>> tasks[1].names(["a", "b", "c", "d", "e"])
    ['b', 'e']
    """

    members: Int[Array, "*stack entities"] = eqx.field(converter=jnp.asarray)
    mask: Bool[Array, "*stack entities"] = eqx.field(converter=jnp.asarray)

    def __check_init__(self):
        if isinstance(self.members, Tracer) or isinstance(self.mask, Tracer):
            return
        mask = np.asarray(self.mask)
        # Padding gets distinct negative numbers, so that it never counts as a duplicate.
        members = np.where(mask, np.asarray(self.members), -1 - np.arange(self.width))
        if (members[mask] < 0).any():
            raise InputError(
                f"tasks: a task has entity {members[mask].min()}; indices must be >= 0"
            )
        ordered = np.sort(members, -1)
        twice = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
        if len(twice):
            raise InputError(f"tasks: a task has entity {twice[0]} twice; remove one of them")

    @classmethod
    def of(cls, subsets: Iterable[Sequence[int]], *, width: int | None = None) -> "Task":
        """Create a stack of tasks from lists of entity indices.

        Parameters
        ----------
        subsets : iterable of sequences of int
            Entities of each task.
        width : int, optional
            Entities per task including padding; by default the size of the largest task.

        Returns
        -------
        Task
            A stack with one task per list.
        """
        lists = [[int(i) for i in subset] for subset in subsets]
        if not lists:
            raise InputError("tasks: got none; pass at least one task")
        seen: dict[frozenset[int], int] = {}
        for number, subset in enumerate(lists):
            if not subset:
                raise InputError(f"tasks: task {number} is empty; a task needs at least one entity")
            other = seen.setdefault(frozenset(subset), number)
            if other != number:
                raise InputError(
                    f"tasks: tasks {other} and {number} are the same subset; remove one of them"
                )
        widest = max(map(len, lists))
        width = widest if width is None else width
        if width < widest:
            raise InputError(
                f"tasks: width {width} is less than the largest task, {widest} entities"
            )
        return _padded(lists, width)

    def __getitem__(self, index) -> "Task":
        return take(self, np.asarray(index) if isinstance(index, list) else index)

    def __len__(self) -> int:
        return self.members.shape[0]

    def __iter__(self) -> Iterator["Task"]:
        return (self[t] for t in range(len(self)))

    @property
    def count(self) -> int:
        """Number of tasks in the stack, per run if runs have their own."""
        return self.members.shape[-2]

    @property
    def width(self) -> int:
        """Number of entities per task including padding (m for tasks of one size)."""
        return self.members.shape[-1]

    @property
    def entities(self) -> list[int]:
        """Indices of the entities without padding."""
        return np.asarray(self.members)[np.asarray(self.mask)].tolist()

    def names(self, universe: Sequence[str]) -> list[str]:
        """Return the names of the entities, given the names of the universe."""
        return [universe[i] for i in self.entities]

    def with_entity(self, index: int) -> "Task":
        """Insert an entity, such as cash, at the front of every task."""
        front = jnp.full((*self.members.shape[:-1], 1), index, self.members.dtype)
        there = jnp.ones_like(front, dtype=bool)
        return Task(
            jnp.concatenate([front, self.members], -1), jnp.concatenate([there, self.mask], -1)
        )

    def joined(self, others: "Task") -> "Task":
        """Concatenate with other tasks of the same width."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], -2), self, others)

    def first(self, count: int) -> "Task":
        """Return the first `count` tasks of the stack, or of each run's stack."""
        return self[..., :count, :]

    @property
    def flat(self) -> "Task":
        """Tasks of all runs as one stack."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, self.width), self)


def _padded(lists: Sequence[Sequence[int]], width: int) -> Task:
    members = np.zeros((len(lists), width), np.int32)
    mask = np.zeros(members.shape, bool)
    for row, subset in enumerate(lists):
        members[row] = subset[0]
        members[row, : len(subset)] = subset
        mask[row, : len(subset)] = True
    return Task(jnp.asarray(members), jnp.asarray(mask))


def single_tasks(tasks: Task) -> Task:
    """Give each task a run of its own, for single-task learning of all tasks at once."""
    return tasks[:, None]


def count_tasks(universe: int, size: int) -> int:
    """Return the number of tasks of `size` entities in a universe, C(M, m) (Corollary 2).

    >>> count_tasks(50, 10)
    10272278170
    """
    return math.comb(universe, size)


def draw_tasks(
    universe: int | Sequence[int] | np.ndarray,
    size: int | Sequence[int],
    count: int,
    *,
    seed: int = 0,
) -> Task:
    """Sample distinct tasks, each a subset of the universe, uniformly.

    Parameters
    ----------
    universe : int or sequence of int
        Number of entities M, or the entities to choose from.
    size : int or sequence of int
        Entities per task. With several sizes, tasks are divided evenly between them.
    count : int
        Number of tasks T.
    seed : int
        Random seed; the same seed gives the same tasks.

    Returns
    -------
    Task
        A stack of `count` tasks.

    Raises
    ------
    InputError
        If the universe has fewer than `count` subsets of that size.

    Examples
    --------
    >>> draw_tasks(200, 20, 3, seed=1).members.shape
    (3, 20)
    """
    entities = np.arange(universe) if isinstance(universe, int) else np.asarray(universe)
    sizes = [size] if isinstance(size, int) else list(size)
    if len(np.unique(entities)) < len(entities):
        raise InputError("tasks: the universe has an entity twice; remove one of them")
    if count < 1:
        raise InputError(f"tasks: count is {count}; it must be >= 1")
    rng = random.Random(seed)
    subsets: list[list[int]] = []
    for position, m in enumerate(sizes):
        share = count // len(sizes) + (position < count % len(sizes))
        available = count_tasks(len(entities), m) if m > 0 else 0
        if not 1 <= m <= len(entities):
            raise InputError(
                f"tasks: size {m} does not fit a universe of {len(entities)} entities; "
                f"choose 1 to {len(entities)}"
            )
        if share > available:
            raise InputError(
                f"tasks: cannot draw {share} distinct tasks of size {m}: "
                f"{len(entities)} entities have only {available}"
            )
        ranks = _distinct_ranks(available, share, rng)
        subsets += entities[_unrank(ranks, len(entities), m)].tolist()
    rng.shuffle(subsets)
    return _padded(subsets, max(sizes))


def _distinct_ranks(available: int, count: int, rng: random.Random) -> list[int]:
    """Sample `count` distinct integers below `available` without rejection, by Floyd's algorithm."""
    chosen: set[int] = set()
    for top in range(available - count, available):
        rank = rng.randrange(top + 1)
        chosen.add(top if rank in chosen else rank)
    return sorted(chosen)


def _unrank(ranks: list[int], universe: int, size: int) -> np.ndarray:
    """Return the subsets with the given ranks in lexicographic order."""
    whole = count_tasks(universe, size)
    # Python integers if 63 bits are not enough.
    kind = np.int64 if whole < 2**63 else object
    rest = np.array(ranks, dtype=kind)
    needed = np.full(len(ranks), size)
    subsets = np.zeros((len(ranks), size), np.int64)
    for entity in range(universe):
        # Among the remaining subsets, those that contain `entity` come first.
        with_it = np.array(
            [math.comb(universe - entity - 1, k - 1) if k else 0 for k in range(size + 1)],
            dtype=kind,
        )[needed]
        take = (rest < with_it) & (needed > 0)
        take = take.astype(bool)
        subsets[take, size - needed[take]] = entity
        rest = np.where(take, rest, rest - with_it)
        needed = needed - take
    return subsets


def split_entities(universe: int, held_out: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Split a universe at random into entities for training and held-out entities.

    Parameters
    ----------
    universe : int
        Number of entities.
    held_out : int
        Number of entities to hold out.
    seed : int
        Random seed.

    Returns
    -------
    seen, unseen : array of int
        Sorted indices of the training entities and of the held-out entities.

    Examples
    --------
    >>> seen, unseen = split_entities(68, 18)
    >>> len(seen), len(unseen)
    (50, 18)
    """
    if not 0 <= held_out < universe:
        raise InputError(
            f"held-out entities: {held_out} of {universe}; keep at least one entity for training"
        )
    order = np.random.default_rng(seed).permutation(universe)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
