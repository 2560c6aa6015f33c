"""Suboptimality against the number of tasks, and the floor of their distance."""

import numpy as np
import pytest

from apportion.studies.theory import corollary1
from apportion.theory.mdp import random_family


@pytest.fixture(scope="module")
def far():
    return corollary1.measure(0.4, 12, seed=1)


def test_the_floor_is_what_the_best_policy_of_the_average_loses(far):
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


def test_distant_tasks_meet_a_floor_and_one_task_has_none(far):
    mean = far.groupby("tasks")[["loss", "floor"]].mean()
    assert mean.floor[1] == pytest.approx(0, abs=1e-12)
    assert mean.loss[64] == pytest.approx(mean.floor[64], rel=0.1)
    assert 0 < far.share.max() < 1


def test_equal_tasks_have_no_floor_and_sixteen_times_the_tasks_lose_far_less():
    near = corollary1.measure(0.0, 12, seed=1)
    mean = near.groupby("tasks")[["loss", "floor", "error"]].mean()
    assert mean.floor.max() == pytest.approx(0, abs=1e-12)
    assert mean.loss[64] < mean.loss[4] / 4
    assert 0.5 < mean.error[64] / (mean.error[16] / 2) < 2


def test_a_slope_of_one_curve_against_another_is_their_power():
    against = np.array([0.1, 0.3, 0.5])
    np.testing.assert_allclose(corollary1.log_slope(3 * against**2, against), 2)
