"""Multi-task against single-task LSPI: over N, and over the number of tasks and their distance."""

import numpy as np
import pytest

from apportion.theory.mdp import random_family
from apportion_studies.theory import crossover
from apportion_studies.theory.common import log_slope


def test_pooling_wins_early_and_near_and_loses_late_and_far():
    near, far = (crossover._measure_sizes(s, 20, 0).groupby("samples").mean() for s in (0.0, 0.4))
    assert near.multi[144] < near.single[144] / 4
    assert far.single[9216] < far.multi[9216] / 10
    slope = log_slope(near.error.to_numpy(), np.array(crossover.SIZES))
    assert -0.65 <= slope <= -0.40


@pytest.mark.parametrize(
    ("level", "crossed"), [(1 / 500, 500), (2e-9, np.inf), (2000, 0), (0, np.inf)]
)
def test_the_crossing_is_read_between_sizes(level, crossed):
    """Single tasks never overtake a pool without any loss."""
    falling = 1 / np.array(crossover.SIZES, float)
    found = np.exp(crossover.log_crossings(np.stack([falling, np.full_like(falling, level)])))
    np.testing.assert_allclose(found, crossed)


def test_the_predicted_crossover_is_plain_arithmetic():
    family = random_family(states=3, actions=2, tasks=8, spread=0.3, gamma=0.7, runs=2, seed=4)
    variances, backups = [], np.empty((2, 8, 3, 2))
    for run in range(2):
        kernel, reward = family.kernel[run].mean(0), family.reward[run].mean(0)
        value = np.zeros(3)
        for _ in range(200):
            value = (reward + 0.7 * kernel @ value).max(-1)
        for t, x, a in np.ndindex(8, 3, 2):
            chances = family.kernel[run, t, x, a]
            mean = (chances * value).sum()
            variances.append((chances * (value - mean) ** 2).sum())
            backups[run, t, x, a] = family.reward[run, t, x, a] + 0.7 * mean
    noise = 0.1**2 + 0.7**2 * np.mean(variances)
    distance = np.mean((backups - backups.mean(1, keepdims=True)) ** 2)
    # One task has N / 6 samples of each pair; the pool of 8 removes 7/8 of its noise.
    expected = 6 * noise * (7 / 8) / distance
    assert crossover._predicted_crossover(family) == pytest.approx(expected, rel=1e-6)


def test_distant_tasks_meet_the_floor_that_the_best_policy_of_their_average_has():
    far = crossover._measure_counts(0.4, 12, seed=1)
    mean = far.groupby("tasks")[["loss", "floor"]].mean()
    assert mean.floor[1] == pytest.approx(0, abs=1e-12)
    assert mean.loss[64] == pytest.approx(mean.floor[64], rel=0.1)
    assert 0 < far.share.max() < 1
    family = random_family(states=6, actions=3, tasks=64, spread=0.4, gamma=0.7, runs=12, seed=1)
    kernel, reward = family.kernel[0, :4].mean(0), family.reward[0, :4].mean(0)

    def evaluate(kernel, reward, policy=None):
        value = np.zeros(6)
        for _ in range(300):
            backup = reward + 0.7 * kernel @ value
            value = backup.max(-1) if policy is None else backup[np.arange(6), policy]
        return value, (reward + 0.7 * kernel @ value).argmax(-1)

    policy = evaluate(kernel, reward)[1]
    tasks = [(family.kernel[0, t], family.reward[0, t]) for t in range(4)]
    lost = [(evaluate(*task)[0] - evaluate(*task, policy)[0]).mean() for task in tasks]
    found = far[(far.tasks == 4) & (far.run == 0)].floor.item()
    assert found == pytest.approx(np.mean(lost), abs=1e-9)
