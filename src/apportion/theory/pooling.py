"""Whether to pool tasks: the trade-off of Theorem 1, estimated from samples of finite tasks.

With V the value learned on the pool, the backup r + gamma V(x') is averaged in every (x, a). The average
of a task alone has the error of its own noise. The average of the pool has less noise, plus the task's
distance d_t(x, a) = (T_t - T) V. Pooling is expected to help if pool error^2 + distance^2 is below single
error^2; the horizon amplifies all three by the same factor, at most 2/(1 - gamma).

The functions here sample independent and uniform state-action pairs, so that a pool of the tasks' samples
is a sample of the average MDP; a pool of per-task trajectories is not.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse

from apportion.certify.statistics import Estimate, interval
from apportion.errors import InputError
from apportion.theory.mdp import MDP

Answer = Literal["pool", "do not pool", "unclear"]


@dataclass(frozen=True)
class Counts:
    """Sufficient statistics of a sample of a finite MDP: n(x, a), n(x, a, y) and summed rewards."""

    visits: Float[np.ndarray, "*batch states actions"]
    moves: Float[np.ndarray, "*batch states actions states"]
    rewards: Float[np.ndarray, "*batch states actions"]

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.visits + other.visits, self.moves + other.moves, self.rewards + other.rewards
        )

    def pooled(self) -> "Counts":
        """Sum the counts over the tasks, the last leading axis."""
        return Counts(self.visits.sum(-3), self.moves.sum(-4), self.rewards.sum(-3))


def draw_counts(mdp: MDP, samples: int, *, noise: float = 0.1, rng: np.random.Generator) -> Counts:
    """Sample `samples` independent transitions of each MDP of a stack and count them.

    >>> from apportion.theory.mdp import random_family
    >>> family = random_family(states=3, actions=2, tasks=4, spread=0.1, gamma=0.5)
    >>> draw_counts(family, 60, rng=np.random.default_rng(0)).visits.sum((1, 2)).tolist()
    [60.0, 60.0, 60.0, 60.0]
    """
    lead, pairs = mdp.reward.shape[:-2], mdp.states * mdp.actions
    visits = rng.multinomial(samples, np.full(pairs, 1 / pairs), lead).reshape(mdp.reward.shape)
    # Rows sum to 1 only up to rounding, which `multinomial` does not accept.
    kernel = mdp.kernel / mdp.kernel.sum(-1, keepdims=True)
    moves = rng.multinomial(visits, kernel)
    shocks = noise * np.sqrt(visits) * rng.standard_normal(visits.shape)
    return Counts(visits.astype(float), moves.astype(float), visits * mdp.reward + shocks)


@dataclass(frozen=True)
class Transitions:
    """Transitions of several finite tasks; tasks, states and actions are numbers from 0."""

    task: Int[np.ndarray, " batch"]
    state: Int[np.ndarray, " batch"]
    action: Int[np.ndarray, " batch"]
    reward: Float[np.ndarray, " batch"]
    next_state: Int[np.ndarray, " batch"]


def draw_transitions(family: MDP, samples: int, *, seed: int = 0) -> Transitions:
    """Sample `samples` independent transitions of each task; rewards have noise of deviation 0.1."""
    rng = np.random.default_rng(seed)
    task = np.repeat(np.arange(len(family)), samples)
    state = rng.integers(0, family.states, task.size)
    action = rng.integers(0, family.actions, task.size)
    reached = family.kernel[task, state, action].cumsum(-1)
    following = (rng.uniform(size=(task.size, 1)) > reached[:, :-1]).sum(-1)
    reward = family.reward[task, state, action] + 0.1 * rng.standard_normal(task.size)
    return Transitions(task, state, action, reward, following)


def _pooled_value(rows: Transitions, gamma: float) -> Float[np.ndarray, " states"]:
    """Return V* of the pool's empirical MDP; an action without a sample keeps the state."""
    states = int(max(rows.state.max(), rows.next_state.max())) + 1
    actions = int(rows.action.max()) + 1
    pairs, pair = states * actions, rows.state * actions + rows.action
    visits = np.bincount(pair, minlength=pairs).reshape(states, actions)
    moves = np.bincount(pair * states + rows.next_state, minlength=pairs * states)
    rewards = np.bincount(pair, rows.reward, pairs).reshape(states, actions)
    seen = np.maximum(visits, 1)
    kernel = np.where(
        visits[..., None] > 0,
        moves.reshape(states, actions, states) / seen[..., None],
        np.eye(states)[:, None],
    )
    reward = np.where(visits > 0, rewards / seen, rows.reward.min())
    return MDP(kernel, reward, gamma).optimal()[1]


@dataclass(frozen=True)
class _Cells:
    """Weighted counts, means and variances of the backups in every (task, state-action) cell.

    A task's mean minus the average task's mean is its Bellman difference plus noise of known size.
    """

    counts: Float[np.ndarray, "resamples tasks cells"]
    means: Float[np.ndarray, "resamples tasks cells"]
    variances: Float[np.ndarray, "resamples tasks cells"]

    @classmethod
    def of(cls, weights, member, backups, shape) -> "_Cells":
        n, first, second = (
            (member.T @ (weights * factor).T).T.reshape(-1, *shape)
            for factor in (1.0, backups, backups**2)
        )
        seen = np.maximum(n, 1)
        means = first / seen
        return cls(
            n, means, np.maximum(second / seen - means**2, 0.0) * seen / np.maximum(seen - 1, 1)
        )

    def squared_distance(self, counts: Float[np.ndarray, "tasks cells"]) -> np.ndarray:
        """Mean square, weighted by the pool's samples, of a task's mean minus the average task's."""
        present = self.counts > 0
        average = (self.means * present).sum(-2) / np.maximum(present.sum(-2), 1)
        gap = np.where(present, self.means - average[..., None, :], 0.0)
        weight = counts.sum(0) / counts.sum()
        return (weight * gap**2).sum(-1) / np.maximum((weight * present).sum(-1), 1e-12)


def _squared_errors(cells: _Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return squared standard errors per task: of its cell means, of the average task's, of the gap."""
    n, variance = cells.counts[0], cells.variances[0]
    weight = n.sum(0) / n.sum()
    # One variance per state-action pair, from all tasks: two samples in a cell are too few for one.
    freedom = np.maximum(n - 1, 0)
    common = (freedom * variance).sum() / max(freedom.sum(), 1)
    within = np.where(
        freedom.sum(0) > 0, (freedom * variance).sum(0) / np.maximum(freedom.sum(0), 1), common
    )
    # A cell without samples counts as one sample. This understates its error, so the answer is not
    # biased towards pooling.
    own = within / np.maximum(n, 1)
    present = n > 0
    share = present / np.maximum(present.sum(0), 1)
    average = (share**2 * own).sum(0)
    difference = np.where(present, (1 - share) ** 2 * own + average - share**2 * own, 0.0)
    scale = np.maximum((weight * present).sum(-1), 1e-12)
    pool = np.broadcast_to((weight * average).sum(-1), len(n))
    return (weight * own).sum(-1), pool, (weight * difference).sum(-1) / scale


@dataclass(frozen=True)
class Pooling:
    """Terms of the trade-off, in units of reward per step, and the resulting answer."""

    samples: Int[np.ndarray, " tasks"]
    distances: tuple[Estimate, ...]
    """eps_t of each task, corrected for its measurement noise, with a 95 % bootstrap interval."""
    distance: Estimate
    """Root mean square of the distances; its interval is narrower than that of any task."""
    single_errors: Float[np.ndarray, " tasks"]
    """Root mean square error of each task's own backups at its N."""
    pool_errors: Float[np.ndarray, " tasks"]
    """The same for the pool of all tasks."""

    @property
    def room(self) -> Float[np.ndarray, " tasks"]:
        """Squared estimation error that pooling saves for each task."""
        return self.single_errors**2 - self.pool_errors**2

    @property
    def answer(self) -> Answer:
        """Answer for the average task; "unclear" if the interval of the distance allows both answers."""
        room = float(self.room.mean())
        if self.distance.high**2 < room:
            return "pool"
        return "do not pool" if self.distance.low**2 > room else "unclear"


def should_pool(transitions: Transitions, *, gamma: float, resamples: int = 400) -> Pooling:
    """Estimate the distances between tasks and their pool, and whether pooling is expected to help.

    Parameters
    ----------
    transitions
        Samples of several tasks with finite, or discretised, states and actions.
    gamma
        The discount.
    resamples
        Bootstrap resamples for the intervals of the distances.

    Raises
    ------
    InputError
        If no state-action pair of any task has two samples, so that the noise cannot be estimated.

    Examples
    --------
    >>> from apportion.theory.mdp import random_family
    >>> same = random_family(states=4, actions=2, tasks=5, spread=0.0, gamma=0.7)
    >>> should_pool(draw_transitions(same, 200), gamma=0.7).answer
    'pool'
    """
    value = _pooled_value(transitions, gamma)
    task, state, action = transitions.task, transitions.state, transitions.action
    backups = transitions.reward + gamma * value[transitions.next_state]
    samples, states, actions = task.size, len(value), int(action.max()) + 1
    shape = (int(task.max()) + 1, states * actions)
    cell = (task * states + state) * actions + action
    member = sparse.csr_matrix(
        (np.ones(samples), (np.arange(samples), cell)), shape=(samples, np.prod(shape))
    )
    cells = _Cells.of(np.ones((1, samples)), member, backups, shape)
    counts = cells.counts[0]
    if counts.max() < 2:
        raise InputError(
            "transitions: no state-action pair of a task has two samples, so the noise cannot be "
            "estimated; round continuous states, or pass more samples"
        )
    rng, again = np.random.default_rng(0), []
    # In blocks, because each resample has as many weights as there are samples.
    at_once = max(int(4e6) // samples, 1)
    for done in range(0, resamples, at_once):
        weights = rng.poisson(1.0, (min(at_once, resamples - done), samples)).astype(float)
        again.append(_Cells.of(weights, member, backups, shape).squared_distance(counts))
    single, pool, of_difference = _squared_errors(cells)
    # The measured difference contains the noise once, a resampled one twice; both are subtracted.
    squared = cells.squared_distance(counts)[0] - of_difference
    resampled = np.concatenate(again) - 2 * of_difference
    sizes = counts.sum(-1).astype(int)
    distances = map(_root, squared, resampled.T, sizes.tolist())
    together = _root(squared.mean(), resampled.mean(1), int(sizes.sum()))
    return Pooling(sizes, tuple(distances), together, np.sqrt(single), np.sqrt(pool))


def _root(squared: float, resampled: Float[np.ndarray, " resamples"], samples: int) -> Estimate:
    """Return a distance and its bootstrap interval from its square, which noise can make negative."""
    low, high = interval(resampled)
    ends = np.maximum([squared, min(low, squared), max(high, squared)], 0.0)
    value, low, high = np.sqrt(ends).tolist()
    return Estimate(value, low, high, samples)
