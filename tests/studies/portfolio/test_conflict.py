"""Tasks that conflict: two camps that want opposite things, and rules judged by the worse-off one."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from apportion.studies.portfolio import conflict
from apportion.studies.portfolio.prioritisation import SETTINGS, UNIFORM


@pytest.fixture(scope="module")
def world():
    return conflict.make_world(3, SETTINGS)


def test_moves_are_taken_back_in_one_camp_and_go_on_in_the_other(world):
    _, test, *_ = world
    closes = np.asarray(test.prices[..., 0])
    # The common factor is no part of what tells the camps apart.
    returns = np.diff(np.log(closes), axis=0)
    own = returns - returns.mean(1, keepdims=True)
    each = own.shape[1] // 2
    lag = [np.corrcoef(x[1:], x[:-1])[0, 1] for x in own.T]
    assert np.mean(lag[:each]) < -0.1
    assert np.mean(lag[each:]) > 0.1


def test_most_tasks_are_of_the_first_camp_and_held_out_ones_of_neither_s_training(world):
    *_, own, unseen = world
    each = conflict.TRAINED + conflict.HELD_OUT
    members = np.asarray(own.members)
    assert (members // each).max(1).tolist() == (members // each).min(1).tolist()
    assert np.bincount(members[:, 0] // each).tolist() == [24, 8]
    assert (members % each).max() < conflict.TRAINED
    for place, tasks in enumerate(unseen.values()):
        held = np.asarray(tasks.members)
        assert set((held // each).ravel()) == {place}
        assert (held % each).min() >= conflict.TRAINED


def test_rules_of_one_scorer_are_trained_side_by_side_with_their_own_priorities(monkeypatch):
    seen: dict = {}

    def take_down(market, tasks, settings, **others):
        seen.update(settings=settings, tasks=tasks, **others)
        raise KeyboardInterrupt

    monkeypatch.setattr(conflict, "train_in", take_down)
    plan = conflict.sized_plan(replace(SETTINGS, steps=4), seeds=2)
    cells = [cell for cell in plan.cells if cell.program == "realised-gain"]
    with pytest.raises(KeyboardInterrupt):
        list(plan.compute(cells, lambda what, fraction: None))
    assert seen["settings"].scorer == "realised-gain"
    np.testing.assert_array_equal(seen["selection"].alpha, [1, 1, 1, 1])
    np.testing.assert_array_equal(seen["selection"].beta, [0, 0, 1, 1])
    np.testing.assert_array_equal(seen["tasks"].members[0], seen["tasks"].members[2])


def made_up(most, others):
    """Growth of every rule but uniform, which has .5 and .1."""
    rng = np.random.default_rng(0)
    rows = [
        (rule.name, camp, seed, (usual if rule == UNIFORM else own) + 0.01 * rng.normal())
        for rule, (camp, own, usual), seed in product(
            conflict.TRIED, (("most", most, 0.5), ("others", others, 0.1)), range(8)
        )
    ]
    return pd.DataFrame(rows, columns=["rule", "camp", "seed", "growth"])


@pytest.mark.parametrize(
    ("most", "others", "outcome"),
    [(0.3, 0.3, "holds"), (0.9, 0.0, "does-not-hold"), (0.05, 0.9, "does-not-hold")],
)
def test_a_rule_is_judged_by_the_camp_that_it_serves_worse(most, others, outcome):
    study = conflict.conclude(made_up(most, others).sample(frac=1, random_state=1), {})
    served = [v for v in study.verdicts if "fares worse" in v.claim]
    assert len(served) == len(conflict.TRIED) - 1
    assert {v.outcome for v in served} == {outcome}
    assert served[0].estimate == pytest.approx(min(most, others) - 0.1, abs=0.02)
    assert len(study.plot().axes) == 2


def test_runs_that_differ_less_are_said_to():
    rows = made_up(0.5, 0.1)
    wide = rows.rule == UNIFORM.name
    rows.loc[wide, "growth"] += rows.seed[wide] - 3.5
    differ = [v for v in conflict.conclude(rows, {}).verdicts if "differ less" in v.claim]
    assert {v.outcome for v in differ} == {"holds"}
