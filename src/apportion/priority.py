"""Which task next: scores s_t to probabilities p_t to importance weights w_t, exactly, at every step.

p_t = s_t^alpha / sum_u s_u^alpha and w_t = (T p_t)^-beta / max_u (T p_u)^-beta, which is
(min_u s_u^alpha / s_t^alpha)^beta. The sum and the minimum live in trees of branching 128, so that a
step costs O(log T); every parent is recomputed from its children, so no error builds up.
"""

from abc import abstractmethod
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from apportion.errors import InputError

BRANCHING = 128
LEAST_SCORE = 1e-6
"""Scores are clipped here from below: no task dies, and no weight is infinite."""

Index = Int[Array, ""]
Scalar = Float[Array, ""]


class Tree(eqx.Module):
    """A reduction over T leaves that one leaf's change updates in O(log T)."""

    levels: tuple[Float[Array, "blocks children"], ...]
    reduce: Callable[[Array], Array] = eqx.field(static=True)

    @classmethod
    def over(cls, leaves: Float[Array, " tasks"], reduce: Callable, neutral: float) -> "Tree":
        """Build the tree; `neutral` fills the places without a leaf."""
        levels = []
        row = leaves
        while True:
            blocks = -(-row.shape[0] // BRANCHING)
            filler = jnp.full((blocks * BRANCHING - row.shape[0],), neutral, row.dtype)
            level = jnp.concatenate([row, filler]).reshape(blocks, BRANCHING)
            levels.append(level)
            if blocks == 1:
                return cls(tuple(levels), reduce)
            row = reduce(level, axis=1)  # pyright: ignore[reportCallIssue]

    @property
    def total(self) -> Scalar:
        """The reduction over all leaves."""
        return self.reduce(self.levels[-1][0])

    def leaf(self, index: Index) -> Scalar:
        """One leaf."""
        return self.levels[0][index // BRANCHING, index % BRANCHING]

    def put(self, index: Index, value: Scalar) -> "Tree":
        """Change one leaf, and its ancestors."""
        levels = []
        for level in self.levels:
            block, place = index // BRANCHING, index % BRANCHING
            level = level.at[block, place].set(value)
            levels.append(level)
            index, value = block, self.reduce(level[block])
        return Tree(tuple(levels), self.reduce)

    def find(self, uniforms: Float[Array, " levels"]) -> Index:
        """The leaf drawn with probability leaf / total: one uniform for each level, root first.

        A fresh uniform at every level keeps the draw exact at a million leaves, where one float32
        uniform has too few digits.
        """
        block = jnp.zeros((), jnp.int32)
        for level, uniform in zip(reversed(self.levels), uniforms, strict=True):
            children = level[block]
            upto = jnp.cumsum(children)
            place = jnp.sum(upto <= uniform * upto[-1])
            # Rounding may step past the last child that has mass; it never may leave it.
            last = BRANCHING - 1 - jnp.argmax(children[::-1] > 0)
            block = block * BRANCHING + jnp.minimum(place, last).astype(jnp.int32)
        return block


class Selection(eqx.Module):
    """How Algorithm 1 picks tasks. Pure functions over a state made by `start`."""

    @abstractmethod
    def start(self, tasks: int) -> PyTree[Array]:
        """The state before the first step."""

    @abstractmethod
    def draw(self, state: PyTree[Array], step: Index, *, key: PRNGKeyArray) -> Index:
        """The next task."""

    @abstractmethod
    def score(self, state: PyTree[Array], task: Index) -> Scalar:
        """s_t."""

    @abstractmethod
    def probability(self, state: PyTree[Array], task: Index) -> Scalar:
        """p_t."""

    @abstractmethod
    def weight(self, state: PyTree[Array], task: Index, step: Index) -> Scalar:
        """w_t, at most 1."""

    @abstractmethod
    def update(self, state: PyTree[Array], task: Index, value: Scalar) -> PyTree[Array]:
        """s_t <- smoothing s_t + (1 - smoothing) value, for the drawn task alone."""

    @abstractmethod
    def scores(self, state: PyTree[Array]) -> Float[Array, " tasks"]:
        """All scores, for looking at."""

    @abstractmethod
    def probabilities(self, state: PyTree[Array]) -> Float[Array, " tasks"]:
        """All probabilities, for looking at."""


def _smooth(score: Scalar, value: Scalar, smoothing: Array) -> Scalar:
    return smoothing * score + (1 - smoothing) * jnp.maximum(value, LEAST_SCORE)


class PriorityState(eqx.Module):
    """Scores with the sum and the minimum of their powers."""

    scores: Float[Array, " tasks"]
    powers: Tree
    least: Tree


class Priority(Selection):
    """The paper's prioritised task selection; alpha = 0 is uniform multi-task learning.

    Parameters
    ----------
    alpha
        Degree of prioritisation, 0 (uniform) or more.
    beta
        Correction of the sampling bias: 1 corrects fully, 0 not at all; or a schedule, a function
        of the step.
    smoothing
        Weight of the old score in an update.
    initial
        Every task's first score.
    """

    alpha: Float[Array, "*runs"]
    beta: Float[Array, "*runs"] | Callable[[Index], Scalar]
    smoothing: Float[Array, "*runs"]
    initial: Float[Array, "*runs"]

    def __init__(
        self,
        alpha: float | Array = 0.5,
        beta: float | Array | Callable = 1.0,
        smoothing: float | Array = 0.2,
        initial: float | Array = 1.0,
    ):
        self.alpha = jnp.asarray(alpha, float)
        self.beta = beta if callable(beta) else jnp.asarray(beta, float)
        self.smoothing = jnp.asarray(smoothing, float)
        self.initial = jnp.asarray(initial, float)
        if not bool(jnp.all(jnp.isfinite(self.alpha) & (self.alpha >= 0))):
            raise InputError(f"priority: alpha is {alpha}; it must be >= 0 (0 draws uniformly)")
        if not callable(beta) and not bool(jnp.all((self.beta >= 0) & jnp.isfinite(self.beta))):
            raise InputError(f"priority: beta is {beta}; it must be >= 0 (1 corrects fully)")
        if not bool(jnp.all((self.smoothing >= 0) & (self.smoothing < 1))):
            raise InputError(f"priority: smoothing is {smoothing}; it must be in [0, 1)")
        if not bool(jnp.all((self.initial > 0) & jnp.isfinite(self.initial))):
            raise InputError(f"priority: the initial score is {initial}; it must be positive")

    def start(self, tasks: int) -> PriorityState:
        scores = jnp.full((tasks,), jnp.maximum(self.initial, LEAST_SCORE))
        powers = scores**self.alpha
        return PriorityState(
            scores, Tree.over(powers, jnp.sum, 0.0), Tree.over(powers, jnp.min, jnp.inf)
        )

    def draw(self, state: PriorityState, step: Index, *, key: PRNGKeyArray) -> Index:
        return state.powers.find(jax.random.uniform(key, (len(state.powers.levels),)))

    def score(self, state: PriorityState, task: Index) -> Scalar:
        return state.scores[task]

    def probability(self, state: PriorityState, task: Index) -> Scalar:
        return state.powers.leaf(task) / state.powers.total

    def weight(self, state: PriorityState, task: Index, step: Index) -> Scalar:
        beta = self.beta(step) if callable(self.beta) else self.beta
        return (state.least.total / state.powers.leaf(task)) ** beta

    def update(self, state: PriorityState, task: Index, value: Scalar) -> PriorityState:
        score = _smooth(state.scores[task], value, self.smoothing)
        power = score**self.alpha
        return PriorityState(
            state.scores.at[task].set(score),
            state.powers.put(task, power),
            state.least.put(task, power),
        )

    def scores(self, state: PriorityState) -> Float[Array, " tasks"]:
        return state.scores

    def probabilities(self, state: PriorityState) -> Float[Array, " tasks"]:
        leaves = state.powers.levels[0].reshape(-1)[: state.scores.shape[0]]
        return leaves / state.powers.total


class RoundRobin(Selection):
    """Every task in turn; scores are kept for looking at and steer nothing."""

    smoothing: Float[Array, "*runs"]

    def __init__(self, smoothing: float | Array = 0.2):
        self.smoothing = jnp.asarray(smoothing, float)

    def start(self, tasks: int) -> Float[Array, " tasks"]:
        return jnp.ones(tasks)

    def draw(self, state: Float[Array, " tasks"], step: Index, *, key: PRNGKeyArray) -> Index:
        return step % state.shape[0]

    def score(self, state: Float[Array, " tasks"], task: Index) -> Scalar:
        return state[task]

    def probability(self, state: Float[Array, " tasks"], task: Index) -> Scalar:
        return jnp.asarray(1 / state.shape[0])

    def weight(self, state: Float[Array, " tasks"], task: Index, step: Index) -> Scalar:
        return jnp.ones(())

    def update(self, state: Float[Array, " tasks"], task: Index, value: Scalar):
        return state.at[task].set(_smooth(state[task], value, self.smoothing))

    def scores(self, state: Float[Array, " tasks"]) -> Float[Array, " tasks"]:
        return state

    def probabilities(self, state: Float[Array, " tasks"]) -> Float[Array, " tasks"]:
        return jnp.full(state.shape, 1 / state.shape[0])
