"""The committed verdicts, tables and notes follow from the committed numbers, by the code of today."""

import json
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
