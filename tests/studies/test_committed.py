"""The committed verdicts, tables and notes follow from the committed numbers, by the code of today."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from apportion.studies.registry import STUDIES, make_plan
from apportion.studies.study import Study

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FOLDERS = sorted(path.parent.name for path in RESULTS.glob("*/study.json"))


def test_every_study_is_committed():
    assert {
        json.loads((RESULTS / name / "study.json").read_text())["name"] for name in FOLDERS
    } == set(STUDIES)


def test_all_results_are_of_one_commit_and_those_of_the_registry_of_one_command():
    found = {name: json.loads((RESULTS / name / "study.json").read_text()) for name in FOLDERS}
    commits = {name: about["commit"] for name, about in found.items()}
    assert len(set(commits.values())) == 1, commits
    assert re.fullmatch("[0-9a-f]{40}", commits["fig1"]), commits
    runs = {name: about.get("run") for name, about in found.items() if name in STUDIES}
    assert len(set(runs.values())) == 1, runs
    assert str(runs["fig1"]).startswith("apportion study all --scale paper"), runs


def test_no_study_was_changed_since_it_was_computed():
    found = {name: json.loads((RESULTS / name / "study.json").read_text()) for name in FOLDERS}
    computed = {name: about.get("source") for name, about in found.items()}
    assert computed == {name: make_plan(about["name"]).source for name, about in found.items()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_committed_verdicts_follow_from_the_committed_numbers(folder):
    about = json.loads((RESULTS / folder / "study.json").read_text())
    rows = pd.read_parquet(RESULTS / folder / "rows.parquet")
    figures = make_plan(about["name"]).conclude(rows, about["settings"])
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
