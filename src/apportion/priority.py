"""Task sampling: scores s_t, probabilities p_t and importance weights w_t, exact after every update.

p_t = s_t^alpha / sum_u s_u^alpha and w_t = (T p_t)^-beta / max_u (T p_u)^-beta, which equals
(min_u s_u^alpha / s_t^alpha)^beta. Trees with 128 children per node hold the sum and the minimum, so that
a step costs O(log T). Every parent is recomputed from its children, so rounding errors do not accumulate.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.errors import InputError
from apportion.kernels.gpu import read_before_write

_BRANCHING = 128
_LEAST_SCORE = 1e-6
"""Lower bound of scores: every task keeps a positive probability, and every weight is finite."""

Index = Int[Array, ""]
Scalar = Float[Array, ""]


class SumMinTree(eqx.Module):
    """Sum and minimum of T positive leaves, exact after each O(log T) update.

    Level 0 holds the leaves in blocks; each level above holds the sums and minima of the blocks below.
    Empty places are 0 in `sums` and infinity in `leasts`.
    """

    leaves: Float[Array, "blocks children"]
    sums: tuple[Float[Array, "_ children"], ...]
    leasts: tuple[Float[Array, "_ children"], ...]

    @classmethod
    def over(cls, leaves: Float[Array, " tasks"]) -> "SumMinTree":
        """Build the tree of an array of leaves."""
        bottom = _blocks(leaves, 0.0)
        sums, leasts = [], []
        total, least = bottom.sum(1), _least(bottom)
        while total.shape[0] > 1:
            sums.append(_blocks(total, 0.0))
            leasts.append(_blocks(least, jnp.inf))
            total, least = sums[-1].sum(1), leasts[-1].min(1)
        return cls(bottom, tuple(sums), tuple(leasts))

    @property
    def total(self) -> Scalar:
        """Sum of all leaves."""
        return (self.sums[-1] if self.sums else self.leaves)[0].sum()

    @property
    def least(self) -> Scalar:
        """Minimum of all leaves."""
        return self.leasts[-1][0].min() if self.leasts else _least(self.leaves)[0]

    def find(self, uniforms: Float[Array, " levels"]) -> Index:
        """Sample a leaf with probability leaf / total, by one uniform number per level, root first.

        A single float32 uniform has too few digits for a million leaves.
        """
        block = jnp.zeros((), jnp.int32)
        for level, uniform in zip((*reversed(self.sums), self.leaves), uniforms, strict=True):
            children = level[block]
            upto = jnp.cumsum(children)
            place = jnp.sum(upto <= uniform * upto[-1])
            # Rounding can select a place after the last child with mass.
            last = _BRANCHING - 1 - jnp.argmax(children[::-1] > 0)
            block = block * _BRANCHING + jnp.minimum(place, last).astype(jnp.int32)
        return block

    def path(self, leaf: Index) -> "SumMinTree":
        """Return the blocks from a leaf to the root, which are the ones that `put` changes."""
        block = leaf // _BRANCHING
        bottom, sums, leasts = self.leaves[block], [], []
        for level_sums, level_leasts in zip(self.sums, self.leasts, strict=True):
            block = block // _BRANCHING
            sums.append(level_sums[block])
            leasts.append(level_leasts[block])
        return SumMinTree(
            bottom[None], tuple(s[None] for s in sums), tuple(s[None] for s in leasts)
        )

    def put(self, leaf: Index, value: Scalar, path: "SumMinTree") -> "SumMinTree":
        """Set one leaf, given its current path; this only writes blocks (see `read_before_write`)."""
        block, place = leaf // _BRANCHING, leaf % _BRANCHING
        row = path.leaves[0].at[place].set(value)
        leaves = self.leaves.at[block].set(row)
        total, least = row.sum(), _least(row[None])[0]
        sums, leasts = [], []
        for k in range(len(self.sums)):
            block, place = block // _BRANCHING, block % _BRANCHING
            sum_row = path.sums[k][0].at[place].set(total)
            least_row = path.leasts[k][0].at[place].set(least)
            sums.append(self.sums[k].at[block].set(sum_row))
            leasts.append(self.leasts[k].at[block].set(least_row))
            total, least = sum_row.sum(), least_row.min()
        return SumMinTree(leaves, tuple(sums), tuple(leasts))


def _blocks(row: Float[Array, " places"], neutral: float) -> Float[Array, "blocks children"]:
    blocks = -(-row.shape[0] // _BRANCHING)
    filler = jnp.full((blocks * _BRANCHING - row.shape[0],), neutral, row.dtype)
    return jnp.concatenate([row, filler]).reshape(blocks, _BRANCHING)


def _least(leaves: Float[Array, "blocks children"]) -> Float[Array, " blocks"]:
    return jnp.where(leaves > 0, leaves, jnp.inf).min(1)


class Drawn(eqx.Module):
    """A sampled task with its s_t, p_t and w_t, and its path in the tree."""

    task: Index
    score: Scalar
    probability: Scalar
    weight: Scalar
    path: SumMinTree


def _all_at_least_zero(values: Array) -> bool:
    numbers = np.asarray(values)
    return bool((np.isfinite(numbers) & (numbers >= 0)).all())


class PriorityState(eqx.Module):
    """Scores, and the tree of their powers s_t^alpha."""

    scores: Float[Array, " tasks"]
    powers: SumMinTree


class Priority(eqx.Module):
    """The paper's prioritised task sampling; alpha = 0 is uniform multi-task learning.

    All methods are pure functions of a state that `start` creates.

    Parameters
    ----------
    alpha : float or array
        Degree of prioritisation, >= 0; 0 samples uniformly.
    beta : float, array or callable
        Exponent of the importance weights: 1 corrects the sampling bias fully, 0 not at all. A callable
        is a schedule, a function of the step.
    smoothing : float or array
        Weight of the old score in an update, in [0, 1).
    initial : float or array
        Initial score of every task.

    Examples
    --------
    >>> priority = Priority(smoothing=0.0)
    >>> state, step = priority.start(2), jnp.array(0)
    >>> drawn = priority.look(state, jnp.array(1), step)
    >>> state = priority.update(state, drawn, jnp.array(9.0))
    >>> priority.probabilities(state).tolist()
    [0.25, 0.75]
    """

    alpha: Float[Array, "*runs"]
    beta: Float[Array, "*runs"] | Callable[[Index], Scalar]
    smoothing: Float[Array, "*runs"]
    initial: Float[Array, "*runs"]

    def __init__(
        self,
        alpha: float | Array = 0.5,
        beta: float | Array | Callable[[Index], Scalar] = 1.0,
        smoothing: float | Array = 0.2,
        initial: float | Array = 1.0,
    ):
        self.alpha = jnp.asarray(alpha, float)
        self.beta = beta if callable(beta) else jnp.asarray(beta, float)
        self.smoothing = jnp.asarray(smoothing, float)
        self.initial = jnp.asarray(initial, float)
        # NumPy, because JAX would compile a program for every comparison.
        if not _all_at_least_zero(self.alpha):
            raise InputError(f"priority: alpha is {alpha}; it must be >= 0 (0 samples uniformly)")
        if not callable(self.beta) and not _all_at_least_zero(self.beta):
            raise InputError(f"priority: beta is {beta}; it must be >= 0 (1 corrects fully)")
        if not _all_at_least_zero(self.smoothing) or np.asarray(self.smoothing).max() >= 1:
            raise InputError(f"priority: smoothing is {smoothing}; it must be in [0, 1)")
        if not _all_at_least_zero(self.initial) or np.asarray(self.initial).min() == 0:
            raise InputError(f"priority: the initial score is {initial}; it must be positive")

    def start(self, tasks: int) -> PriorityState:
        """Return the state before the first step."""
        scores = jnp.full((tasks,), jnp.maximum(self.initial, _LEAST_SCORE))
        return PriorityState(scores, SumMinTree.over(scores**self.alpha))

    def draw(self, state: PriorityState, step: Index, *, key: PRNGKeyArray) -> Drawn:
        """Sample the next task t ~ p, with its s_t, p_t and w_t."""

        def read(step):
            uniforms = jax.random.uniform(key, (1 + len(state.powers.sums),))
            return self.look(state, state.powers.find(uniforms), step)

        return read_before_write(read, step)

    def look(self, state: PriorityState, task: Index, step: Index) -> Drawn:
        """Return s_t, p_t and w_t of a given task, as `draw` does."""
        path = state.powers.path(task)
        power = path.leaves[0, task % _BRANCHING]
        beta = self.beta(step) if callable(self.beta) else self.beta
        weight = (state.powers.least / power) ** beta
        return Drawn(task, state.scores[task], power / state.powers.total, weight, path)

    def update(self, state: PriorityState, drawn: Drawn, value: Scalar) -> PriorityState:
        """Update the score of the sampled task: s_t <- smoothing s_t + (1 - smoothing) value."""
        s = self.smoothing
        score = s * drawn.score + (1 - s) * jnp.maximum(value, _LEAST_SCORE)
        return PriorityState(
            state.scores.at[drawn.task].set(score),
            state.powers.put(drawn.task, score**self.alpha, drawn.path),
        )

    def probabilities(self, state: PriorityState) -> Float[Array, " tasks"]:
        """Return the probabilities of all tasks, in O(T)."""
        leaves = state.powers.leaves.reshape(-1)[: state.scores.shape[0]]
        return leaves / state.powers.total
