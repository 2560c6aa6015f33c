"""The committed verdicts, tables and notes follow from the committed numbers, by the code of today."""

import json
import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from apportion.studies.registry import installed_studies, make_plan
from apportion.studies.study import Study

RESULTS = Path(__file__).parents[3] / "docs" / "results"
ABOUT = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/study.json"))
}

# A plan reads its study's data.
plan_of = cache(make_plan)


def test_every_study_is_committed_of_one_commit_and_those_of_the_registry_of_one_command():
    assert {about["name"] for about in ABOUT.values()} == set(installed_studies())
    commits = {name: about["commit"] for name, about in ABOUT.items()}
    assert len(set(commits.values())) == 1, commits
    assert re.fullmatch("[0-9a-f]{40}", commits["fig1"]), commits
    runs = {name: about.get("run") for name, about in ABOUT.items() if name in installed_studies()}
    assert len(set(runs.values())) == 1, runs
    assert str(runs["fig1"]).startswith("apportion study all --scale paper"), runs


def test_no_study_was_changed_since_it_was_computed():
    computed = {name: about.get("source") for name, about in ABOUT.items()}
    assert computed == {name: plan_of(about["name"]).source for name, about in ABOUT.items()}


@pytest.mark.parametrize("folder", ABOUT)
def test_the_committed_verdicts_follow_from_the_committed_numbers(folder):
    about = ABOUT[folder]
    rows = pd.read_parquet(RESULTS / folder / "rows.parquet")
    figures = plan_of(about["name"]).conclude(rows, about["settings"])
    now = Study(about["name"], tuple(figures)).verdicts()
    committed = json.loads((RESULTS / folder / "verdict.json").read_text())
    for before, found in zip(committed, now, strict=True):
        numbers = [before.pop("estimate"), *before.pop("interval"), before.pop("p")]
        assert [found.pop("estimate"), *found.pop("interval"), found.pop("p")] == pytest.approx(
            numbers, abs=1e-6
        )
        assert found == before
    for figure, written in zip(figures, about["figures"], strict=True):
        assert (figure.name, figure.title) == (written["name"], written["title"])
        table = pd.read_csv(RESULTS / folder / written["table"])
        assert list(figure.table.columns) == list(table.columns)
        assert len(figure.table) == len(table)
