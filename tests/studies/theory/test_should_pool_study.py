"""Whether to pool, from a file or on the demonstration family."""

import pandas as pd
import pytest

from apportion.errors import InputError
from apportion.studies.theory import should_pool
from apportion.theory import draw_transitions, random_family


def write(folder, spread, samples, **changes):
    family = random_family(states=6, actions=3, tasks=8, spread=spread, gamma=0.7, seed=1)
    rows = draw_transitions(family, samples)
    frame = pd.DataFrame(
        {
            "task": [f"shop {t}" for t in rows.task],
            "state": [f"s{x}" for x in rows.state],
            "action": rows.action,
            "reward": rows.reward,
            "next_state": [f"s{x}" for x in rows.next_state],
        }
    ).assign(**changes)
    file = folder / "transitions.csv"
    frame.to_csv(file, index=False)
    return file


def test_a_file_of_equal_tasks_is_answered_with_pool(tmp_path):
    study = should_pool.plan(file=write(tmp_path, 0.0, 100)).run()
    assert "Pool these 8 tasks? Pool." in study.summary()
    assert study.verdicts[0].holds
    assert list(study.table.task) == [f"shop {t}" for t in range(8)]
    study.save(tmp_path / "out")
    assert (tmp_path / "out" / "figure.png").stat().st_size > 1000


def test_a_file_of_distant_tasks_is_answered_with_do_not_pool(tmp_path):
    study = should_pool.plan(file=write(tmp_path, 0.6, 500)).run()
    assert "Do not pool." in study.summary()
    assert not study.verdicts[0].holds


def test_without_a_file_a_demonstration_family_is_used():
    assert len(should_pool.plan(spread=0.0).run().table) == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": "much"}, 'column "reward" of row 1 is .much.'),
        ({"state": None}, "row 1 has an empty field"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        should_pool.plan(file=write(tmp_path, 0.1, 10, **changes))


def test_a_missing_column_or_file_is_named(tmp_path):
    file = tmp_path / "transitions.csv"
    pd.DataFrame({"task": [0], "state": [0], "action": [0], "reward": [1.0]}).to_csv(
        file, index=False
    )
    with pytest.raises(InputError, match='column "next_state" is missing'):
        should_pool.plan(file=file)
    with pytest.raises(InputError, match="there is no such file"):
        should_pool.plan(file=tmp_path / "none.csv")
