"""Should these tasks be pooled? The trade-off of Theorem 1, measured on samples of finite tasks.

With V the value learned on the pool, the backup r + gamma V(x') is averaged in every (x, a): alone, a
task's average misses the truth by its own noise; the pool's by less noise, plus the task's distance
d_t(x, a) = (T_t - T) V. Pooling is expected to help where pool error^2 + distance^2 < single error^2;
all three are then amplified alike by the horizon, up to 2/(1 - gamma).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy import sparse

from apportion.errors import InputError
from apportion.statistics import Estimate, interval
from apportion.theory.backups import Cells, noise_of
from apportion.theory.mdp import MDP
from apportion.theory.samples import Counts, Transitions

Answer = Literal["pool", "do not pool", "unclear"]


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
    def gain(self) -> float:
        """Squared error that pooling is expected to save; negative where it costs."""
        return self.room - self.distance.value**2

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
        far = self.distance
        said = [t.answer for t in self.tasks]
        return "\n".join(
            [
                f"Pool these {len(self.tasks)} tasks? {self.answer.capitalize()}.",
                f"  estimation error of a task alone    {alone:.4g}",
                f"  estimation error of the pool        {pool:.4g}",
                f"  distance of a task from the pool    {far.value:.4g} "
                f"[{far.low:.4g}, {far.high:.4g}]",
                f"  (root mean squares of one backup; the horizon amplifies all by up to "
                f"{2 / (1 - self.gamma):.3g})",
                f"  by task: pool {said.count('pool')}, do not pool {said.count('do not pool')}, "
                f"unclear {said.count('unclear')}",
                f"  {_when(float(np.median([t.crossover for t in self.tasks])))}",
                f"  {self.covered:.0%} of the task-state-action cells have two samples or more",
            ]
        )

    def plot(self) -> Figure:
        """Each task's distance, with its interval, against the room that pooling leaves for it."""
        figure = Figure(figsize=(7.5, 0.9 + 0.4 * len(self.tasks)), layout="constrained")
        axis = figure.subplots()
        colours = {"pool": "#31a354", "do not pool": "#e6550d", "unclear": "0.5"}
        for row, t in enumerate(self.tasks):
            colour, ends = colours[t.answer], [t.distance.low, t.distance.high]
            axis.plot(ends, [row, row], color=colour, linewidth=3)
            axis.plot(t.distance.value, row, "o", color=colour)
            axis.plot(np.sqrt(max(t.room, 0)), row, "k|", markersize=14)
        axis.set_yticks(range(len(self.tasks)), [t.task for t in self.tasks])
        axis.set(
            xlabel="distance from the pool; the bar is where pooling breaks even",
            ylabel="task",
            title=f"Pool? {self.answer.capitalize()}.",
            xlim=(0, None),
        )
        axis.spines[["top", "right"]].set_visible(False)
        return figure


def _when(crossover: float) -> str:
    if np.isinf(crossover):
        return "no number of samples is foreseen at which a task does better alone (median)"
    return f"alone is expected to win from about N = {crossover:.3g} samples a task (median)"


def should_pool(
    transitions: Transitions,
    *,
    gamma: float,
    names: list[str] | None = None,
    resamples: int = 400,
    seed: int = 0,
) -> Pooling:
    """Estimate the tasks' distances from their pool, and say whether pooling is expected to help.

    Parameters
    ----------
    transitions, names
        Samples of several tasks with finite, or discretised, states and actions; the tasks' names.
    gamma, resamples
        The discount, and the bootstrap resamples behind the distances' intervals.

    Examples
    --------
    >>> from apportion.theory.mdp import random_family
    >>> from apportion.theory.samples import draw_transitions
    >>> same = random_family(states=4, actions=2, tasks=5, spread=0.0, gamma=0.7)
    >>> should_pool(draw_transitions(same, 200), gamma=0.7).answer
    'pool'
    """
    _check(transitions, gamma)
    cells, counts, resample = _cells(transitions, gamma, seed)
    noise = noise_of(cells)
    # A few resamples at a time: their weights are as many as the samples.
    at_once = max(int(4e6) // transitions.task.size, 1)
    again = [resample(min(at_once, resamples - done)) for done in range(0, resamples, at_once)]
    # The measured difference holds the noise once, a resampled one twice; both are taken off.
    squared = cells.squared_distance(counts)[0] - noise.of_difference
    resampled = np.concatenate(again) - 2 * noise.of_difference
    tasks = len(counts)
    names = [str(t) for t in range(tasks)] if names is None else names
    own, pooled = np.sqrt(noise.single), np.sqrt(noise.pool)
    answers = tuple(
        TaskAnswer(
            names[t],
            int(counts[t].sum()),
            _root(squared[t], resampled[:, t], int(counts[t].sum())),
            float(own[t]),
            float(pooled[t]),
        )
        for t in range(tasks)
    )
    together = _root(squared.mean(), resampled.mean(1), int(counts.sum()))
    return Pooling(answers, together, gamma, float((counts >= 2).mean()))


def _cells(
    transitions: Transitions, gamma: float, seed: int
) -> tuple[Cells, np.ndarray, Callable[[int], np.ndarray]]:
    """Backups by task, state and action; how many there are; and their squared distances, resampled."""
    tasks, states, actions = (
        int(column.max()) + 1
        for column in (
            transitions.task,
            np.maximum(transitions.state, transitions.next_state),
            transitions.action,
        )
    )
    value = _pooled_value(transitions, states, actions, gamma)
    backups = transitions.reward + gamma * value[transitions.next_state]
    cell = (transitions.task * states + transitions.state) * actions + transitions.action
    shape = (tasks, states * actions)
    member = sparse.csr_matrix(
        (np.ones(cell.size), (np.arange(cell.size), cell)),
        shape=(cell.size, tasks * states * actions),
    )
    counts = np.asarray(member.sum(0)).reshape(shape)
    rng = np.random.default_rng(seed)

    def resample(number: int) -> np.ndarray:
        weights = rng.poisson(1.0, (number, cell.size)).astype(float)
        return Cells.of(weights, member, backups, shape).squared_distance(counts)

    return Cells.of(np.ones((1, cell.size)), member, backups, shape), counts, resample


def _root(squared: float, resampled: Float[np.ndarray, " resamples"], samples: int) -> Estimate:
    """A distance and its interval from its square, which noise may have carried below 0.

    The interval is of resampled samples, of which there are many, and not of a few units.
    """
    low, high = interval(resampled)
    ends = np.maximum([squared, min(low, squared), max(high, squared)], 0.0)
    value, low, high = np.sqrt(ends).tolist()
    return Estimate(value, low, high, samples)


def _check(transitions: Transitions, gamma: float) -> None:
    if not 0 < gamma < 1:
        raise InputError(f"gamma: {gamma} is outside (0, 1); choose a discount inside it")
    if transitions.task.size == 0:
        raise InputError("transitions: there are none; give at least two samples of two tasks")
    if not np.isfinite(transitions.reward).all():
        place = int(np.argmax(~np.isfinite(transitions.reward)))
        raise InputError(f"transitions: the reward of row {place} is not finite")
    for name in ("task", "state", "action", "next_state"):
        if getattr(transitions, name).min() < 0:
            raise InputError(f"transitions: column {name} has a negative index; indices start at 0")
    per_task = np.bincount(transitions.task)
    if len(per_task) < 2:
        raise InputError("transitions: all rows are of one task; pooling needs at least two tasks")
    if per_task.min() < 2:
        raise InputError(
            f"transitions: task {int(per_task.argmin())} has {per_task.min()} rows; each needs two or more"
        )


def _pooled_value(transitions: Transitions, states: int, actions: int, gamma: float) -> np.ndarray:
    """V of the best policy in the pool's empirical MDP; where it has no sample, an action stays put."""
    pair = transitions.state * actions + transitions.action
    visits = np.bincount(pair, minlength=states * actions).reshape(states, actions)
    moves = np.bincount(
        pair * states + transitions.next_state, minlength=states * actions * states
    ).reshape(states, actions, states)
    rewards = np.bincount(pair, transitions.reward, states * actions).reshape(states, actions)
    counts = Counts(visits.astype(float), moves.astype(float), rewards)
    seen = np.maximum(counts.visits, 1)
    stay = np.broadcast_to(np.eye(states)[:, None], counts.moves.shape)
    kernel = np.where(counts.visits[..., None] > 0, counts.moves / seen[..., None], stay)
    worst = transitions.reward.min()
    return MDP(kernel, np.where(counts.visits > 0, counts.rewards / seen, worst), gamma).optimal()[
        1
    ]
