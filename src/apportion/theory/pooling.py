"""Should these tasks be pooled? The trade-off of Theorem 1, measured on samples of finite tasks.

With V the value learned on the pool, the backup r + gamma V(x') is averaged in every (x, a): alone, a
task's average misses the truth by its own noise; the pool's by less noise, plus the task's distance
d_t(x, a) = (T_t - T) V. Pooling is expected to help where pool error^2 + distance^2 < single error^2;
all three are then amplified alike by the horizon, up to 2/(1 - gamma).

Samples drawn here have independent and uniform state-action pairs, so that a pool of the tasks' samples
is a sample of the average MDP; a pool of per-task trajectories would not be.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy import sparse

from apportion.certify.statistics import Estimate, interval
from apportion.errors import InputError
from apportion.theory.mdp import MDP

Answer = Literal["pool", "do not pool", "unclear"]
_COLUMNS = ("task", "state", "action", "reward", "next_state")
"""Columns of a table of transitions."""


@dataclass(frozen=True)
class Counts:
    """Everything least squares uses of a sample of a finite MDP: n(x, a), n(x, a, y), summed rewards."""

    visits: Float[np.ndarray, "*batch states actions"]
    moves: Float[np.ndarray, "*batch states actions states"]
    rewards: Float[np.ndarray, "*batch states actions"]

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.visits + other.visits, self.moves + other.moves, self.rewards + other.rewards
        )

    def pooled(self) -> "Counts":
        """The counts of all tasks (the last leading axis) together."""
        return Counts(self.visits.sum(-3), self.moves.sum(-4), self.rewards.sum(-3))


def draw_counts(mdp: MDP, samples: int, *, noise: float = 0.1, rng: np.random.Generator) -> Counts:
    """`samples` independent transitions of each MDP of a stack, already counted.

    >>> from apportion.theory.mdp import random_family
    >>> family = random_family(states=3, actions=2, tasks=4, spread=0.1, gamma=0.5)
    >>> draw_counts(family, 60, rng=np.random.default_rng(0)).visits.sum((1, 2)).tolist()
    [60.0, 60.0, 60.0, 60.0]
    """
    lead, pairs = mdp.reward.shape[:-2], mdp.states * mdp.actions
    visits = rng.multinomial(samples, np.full(pairs, 1 / pairs), lead).reshape(mdp.reward.shape)
    # Rows sum to 1 only up to rounding, which NumPy refuses beyond the last entry.
    kernel = mdp.kernel / mdp.kernel.sum(-1, keepdims=True)
    moves = rng.multinomial(visits, kernel)
    shocks = noise * np.sqrt(visits) * rng.standard_normal(visits.shape)
    return Counts(visits.astype(float), moves.astype(float), visits * mdp.reward + shocks)


def draw_transitions(family: MDP, samples: int, *, seed: int = 0) -> pd.DataFrame:
    """`samples` independent transitions of each task of a family: a table that `should_pool` takes.

    Rewards have noise of deviation 0.1.
    """
    rng = np.random.default_rng(seed)
    task = np.repeat(np.arange(len(family)), samples)
    state = rng.integers(0, family.states, task.size)
    action = rng.integers(0, family.actions, task.size)
    reached = family.kernel[task, state, action].cumsum(-1)
    following = (rng.uniform(size=(task.size, 1)) > reached[:, :-1]).sum(-1)
    reward = family.reward[task, state, action] + 0.1 * rng.standard_normal(task.size)
    return pd.DataFrame(dict(zip(_COLUMNS, (task, state, action, reward, following), strict=True)))


@dataclass(frozen=True)
class _Transitions:
    """Samples of several finite tasks, a row each: tasks, states and actions by number."""

    task: Int[np.ndarray, " batch"]
    state: Int[np.ndarray, " batch"]
    action: Int[np.ndarray, " batch"]
    reward: Float[np.ndarray, " batch"]
    next_state: Int[np.ndarray, " batch"]
    names: tuple[str, ...]
    """The tasks'."""

    @classmethod
    def of(cls, frame: pd.DataFrame) -> "_Transitions":
        """The rows of a table; labels may be numbers or words."""
        missing = [column for column in _COLUMNS if column not in frame.columns]
        if missing:
            raise InputError(
                f'transitions: column "{missing[0]}" is missing; the columns are {", ".join(_COLUMNS)}'
            )
        if frame.empty:
            raise InputError("transitions: no rows; give at least two samples of two tasks")
        holes = frame[list(_COLUMNS)].isna().to_numpy().any(axis=1)
        if holes.any():
            raise InputError(
                f"transitions: row {int(np.argmax(holes)) + 1} has an empty field; fill or drop it"
            )
        reward = np.asarray(pd.to_numeric(frame["reward"], errors="coerce"), float)
        if not np.isfinite(reward).all():
            place = int(np.argmax(~np.isfinite(reward)))
            raise InputError(
                f'transitions: column "reward" of row {place + 1} is '
                f"{str(frame['reward'].iloc[place])!r}; it must be a finite number"
            )
        task, names = pd.factorize(frame["task"].astype(str))
        action, _ = pd.factorize(frame["action"].astype(str))
        both, _ = pd.factorize(pd.concat([frame["state"], frame["next_state"]]).astype(str))
        rows = np.bincount(task)
        if len(rows) < 2:
            raise InputError(
                "transitions: all rows are of one task; pooling needs at least two tasks"
            )
        if rows.min() < 2:
            raise InputError(
                f"transitions: task {names[rows.argmin()]} has one row; each task needs two or more"
            )
        state, next_state = np.split(both, 2)
        return cls(task, state, action, reward, next_state, tuple(map(str, names)))

    def check_recurrence(self) -> None:
        """Refuse samples that hardly ever meet: where nothing recurs there is no error to measure."""
        cells = np.stack([self.task, self.state, self.action], 1)
        states, rows = len(np.unique(self.state)), len(self.task)
        if states > rows / 2 or len(np.unique(cells, axis=0)) == rows:
            raise InputError(
                f"transitions: {states} different states in {rows} rows, which hardly recur, so that no "
                "error can be measured; bin continuous states, both columns alike, such as by "
                'frame["state"].round(1), or give more rows'
            )

    def pooled_value(self, gamma: float) -> np.ndarray:
        """V of the best policy in the pool's empirical MDP; an action without a sample stays put."""
        states = int(max(self.state.max(), self.next_state.max())) + 1
        actions = int(self.action.max()) + 1
        pairs, pair = states * actions, self.state * actions + self.action
        visits = np.bincount(pair, minlength=pairs).reshape(states, actions)
        moves = np.bincount(pair * states + self.next_state, minlength=pairs * states)
        rewards = np.bincount(pair, self.reward, pairs).reshape(states, actions)
        seen = np.maximum(visits, 1)
        kernel = np.where(
            visits[..., None] > 0,
            moves.reshape(states, actions, states) / seen[..., None],
            np.eye(states)[:, None],
        )
        reward = np.where(visits > 0, rewards / seen, self.reward.min())
        return MDP(kernel, reward, gamma).optimal()[1]


@dataclass(frozen=True)
class _Cells:
    """Weighted counts, means and variances of the backups in every (task, state-action) cell.

    They are what tells tasks apart by their samples: a task's mean less the average task's is its
    Bellman difference, plus noise of a known size.
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
        """Mean square, over where the pool's samples lie, of a task's mean less the average task's."""
        present = self.counts > 0
        average = (self.means * present).sum(-2) / np.maximum(present.sum(-2), 1)
        gap = np.where(present, self.means - average[..., None, :], 0.0)
        weight = counts.sum(0) / counts.sum()
        return (weight * gap**2).sum(-1) / np.maximum((weight * present).sum(-1), 1e-12)


def _squared_errors(cells: _Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Squared standard errors, task by task, on average over the state-action pairs: of each task's cell
    means, of the average task's, and of their difference.
    """
    n, variance = cells.counts[0], cells.variances[0]
    weight = n.sum(0) / n.sum()
    # One variance for each state-action, from all tasks: a cell of two samples has none to speak of.
    freedom = np.maximum(n - 1, 0)
    common = (freedom * variance).sum() / max(freedom.sum(), 1)
    within = np.where(
        freedom.sum(0) > 0, (freedom * variance).sum(0) / np.maximum(freedom.sum(0), 1), common
    )
    # A cell without samples counts as if it had one: less than its true error, so that the answer
    # does not lean towards pooling.
    own = within / np.maximum(n, 1)
    present = n > 0
    share = present / np.maximum(present.sum(0), 1)
    average = (share**2 * own).sum(0)
    difference = np.where(present, (1 - share) ** 2 * own + average - share**2 * own, 0.0)
    scale = np.maximum((weight * present).sum(-1), 1e-12)
    pool = np.broadcast_to((weight * average).sum(-1), len(n))
    return (weight * own).sum(-1), pool, (weight * difference).sum(-1) / scale


@dataclass(frozen=True)
class TaskAnswer:
    """One task: the three terms, in units of reward per step, and what they say."""

    task: str
    samples: int
    distance: Estimate
    """eps_t, corrected for the noise it is measured with, with a 95 % bootstrap interval."""
    single_error: float
    """Root mean square error of the task's own backups at its N."""
    pool_error: float
    """The same for the pool of all tasks."""

    @property
    def room(self) -> float:
        """Squared error of estimation that pooling saves."""
        return self.single_error**2 - self.pool_error**2

    @property
    def answer(self) -> Answer:
        """What the interval of the distance leaves no doubt about, or that it does leave some."""
        return _answer(self.distance, self.room)

    @property
    def crossover(self) -> float:
        """The N per task beyond which the task is expected to do better alone."""
        if self.distance.value == 0:
            return np.inf
        return self.samples * self.room / self.distance.value**2


def _answer(distance: Estimate, room: float) -> Answer:
    if distance.high**2 < room:
        return "pool"
    return "do not pool" if distance.low**2 > room else "unclear"


@dataclass(frozen=True)
class Pooling:
    """The answer for every task, and for all together."""

    tasks: tuple[TaskAnswer, ...]
    distance: Estimate
    """Root mean square of the tasks' distances: surer than any one of them."""
    gamma: float
    covered: float
    """Share of the (task, state, action) cells with at least two samples."""

    @property
    def room(self) -> float:
        """Squared error of estimation that pooling saves, on average over the tasks."""
        return float(np.mean([t.room for t in self.tasks]))

    @property
    def answer(self) -> Answer:
        """For the tasks on average: what the interval of their distance leaves no doubt about."""
        return _answer(self.distance, self.room)

    @property
    def saved(self) -> Estimate:
        """Mean squared error of a backup that pooling is expected to save; negative where it costs."""
        far, room = self.distance, self.room
        return Estimate(room - far.value**2, room - far.high**2, room - far.low**2, len(self.tasks))

    def to_frame(self) -> pd.DataFrame:
        """One row per task."""
        return pd.DataFrame(
            {
                "task": t.task,
                "samples": t.samples,
                "distance": t.distance.value,
                "distance_low": t.distance.low,
                "distance_high": t.distance.high,
                "single_error": t.single_error,
                "pool_error": t.pool_error,
                "crossover": t.crossover,
                "answer": t.answer,
            }
            for t in self.tasks
        )

    def summary(self) -> str:
        """The answer, the terms behind it, and what it rests on."""
        alone, pool = (
            np.sqrt(np.mean([getattr(t, name) ** 2 for t in self.tasks]))
            for name in ("single_error", "pool_error")
        )
        far, saved = self.distance, self.saved
        said = [t.answer for t in self.tasks]
        crossover = float(np.median([t.crossover for t in self.tasks]))
        when = f"alone is expected to win from about N = {crossover:.3g} samples a task (median)"
        if np.isinf(crossover):
            when = "no number of samples is foreseen at which a task does better alone (median)"
        return "\n".join(
            [
                f"Pool these {len(self.tasks)} tasks? {self.answer.capitalize()}.",
                f"  estimation error of a task alone    {alone:.4g}",
                f"  estimation error of the pool        {pool:.4g}",
                f"  distance of a task from the pool    {far.value:.4g} "
                f"[{far.low:.4g}, {far.high:.4g}]",
                f"  (root mean squares of one backup; the horizon amplifies all by up to "
                f"{2 / (1 - self.gamma):.3g})",
                f"  squared error that pooling saves    {saved.value:.4g} "
                f"[{saved.low:.4g}, {saved.high:.4g}]",
                f"  by task: pool {said.count('pool')}, do not pool {said.count('do not pool')}, "
                f"unclear {said.count('unclear')}",
                f"  {when}",
                f"  {self.covered:.0%} of the task-state-action cells have two samples or more",
            ]
        )


def should_pool(transitions: pd.DataFrame, *, gamma: float, resamples: int = 400) -> Pooling:
    """Estimate the tasks' distances from their pool, and whether pooling is expected to help.

    Parameters
    ----------
    transitions
        Samples of several tasks with finite, or discretised, states and actions: a table with the columns
        task, state, action, reward and next_state. Labels may be numbers or words.
    gamma, resamples
        The discount, and the bootstrap resamples behind the distances' intervals.

    Examples
    --------
    >>> from apportion.theory.mdp import random_family
    >>> same = random_family(states=4, actions=2, tasks=5, spread=0.0, gamma=0.7)
    >>> should_pool(draw_transitions(same, 200), gamma=0.7).answer
    'pool'
    """
    if not 0 < gamma < 1:
        raise InputError(f"gamma: {gamma} is outside (0, 1); choose a discount inside it")
    rows = _Transitions.of(transitions)
    rows.check_recurrence()
    value = rows.pooled_value(gamma)
    backups = rows.reward + gamma * value[rows.next_state]
    samples, states, actions = rows.task.size, len(value), int(rows.action.max()) + 1
    shape = (len(rows.names), states * actions)
    cell = (rows.task * states + rows.state) * actions + rows.action
    member = sparse.csr_matrix(
        (np.ones(samples), (np.arange(samples), cell)), shape=(samples, np.prod(shape))
    )
    cells = _Cells.of(np.ones((1, samples)), member, backups, shape)
    counts = cells.counts[0]
    rng, again = np.random.default_rng(0), []
    # A few resamples at a time: their weights are as many as the samples.
    at_once = max(int(4e6) // samples, 1)
    for done in range(0, resamples, at_once):
        weights = rng.poisson(1.0, (min(at_once, resamples - done), samples)).astype(float)
        again.append(_Cells.of(weights, member, backups, shape).squared_distance(counts))
    single, pool, of_difference = _squared_errors(cells)
    # The measured difference holds the noise once, a resampled one twice; both are taken off.
    squared = cells.squared_distance(counts)[0] - of_difference
    resampled = np.concatenate(again) - 2 * of_difference
    answers = tuple(
        TaskAnswer(
            name,
            int(counts[t].sum()),
            _root(squared[t], resampled[:, t], int(counts[t].sum())),
            float(np.sqrt(single[t])),
            float(np.sqrt(pool[t])),
        )
        for t, name in enumerate(rows.names)
    )
    together = _root(squared.mean(), resampled.mean(1), int(counts.sum()))
    return Pooling(answers, together, gamma, float((counts >= 2).mean()))


def _root(squared: float, resampled: Float[np.ndarray, " resamples"], samples: int) -> Estimate:
    """A distance and its interval from its square, which noise may have carried below 0.

    The interval comes from resampled samples, which are many, and not from a few units.
    """
    low, high = interval(resampled)
    ends = np.maximum([squared, min(low, squared), max(high, squared)], 0.0)
    value, low, high = np.sqrt(ends).tolist()
    return Estimate(value, low, high, samples)
