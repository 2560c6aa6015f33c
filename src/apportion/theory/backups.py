"""Backups r + gamma V(x') averaged in every (task, state, action) cell, and how noisy the averages are.

These are what tells tasks apart by their samples: a task's mean less the average task's is its Bellman
difference, plus noise of a known size.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class Cells:
    """Weighted counts, means and variances of the backups in every (task, state-action) cell."""

    counts: Float[np.ndarray, "resamples tasks cells"]
    means: Float[np.ndarray, "resamples tasks cells"]
    variances: Float[np.ndarray, "resamples tasks cells"]

    @classmethod
    def of(cls, weights, member, backups, shape) -> "Cells":
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


@dataclass(frozen=True)
class Noise:
    """Squared standard errors, task by task, on average over the state-action pairs."""

    single: Float[np.ndarray, " tasks"]
    pool: Float[np.ndarray, " tasks"]
    of_difference: Float[np.ndarray, " tasks"]


def noise_of(cells: Cells) -> Noise:
    """Variance of each task's cell means, of the average task's, and of their difference."""
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
    return Noise((weight * own).sum(-1), pool, (weight * difference).sum(-1) / scale)
