"""The current code gives the committed verdicts and tables from the committed rows."""

import json
import re
import runpy
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from apportion.studies.engine import Cell, CellStore, perform_plans
from apportion.studies.executors import Serial
from apportion.studies.registry import installed_studies, make_plan

RESULTS = Path(__file__).parents[3] / "docs" / "results"
ABOUT = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/study.json"))
}

CHANGED = runpy.run_path(str(RESULTS.parent / "tables.py"))["CHANGED"]

# Making a plan reads the data of its study, so plans are cached.
plan_of = cache(make_plan)


def test_every_study_is_committed_of_one_commit_and_those_of_the_registry_of_one_command():
    """Results that are not recomputed yet are of one earlier commit and command."""
    assert {about["name"] for about in ABOUT.values()} == set(installed_studies())
    for earlier in (True, False):
        some = {name: one for name, one in ABOUT.items() if (one["name"] in CHANGED) == earlier}
        commits = {name: about["commit"] for name, about in some.items()}
        assert len(set(commits.values())) <= 1, commits
        assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits.values()), commits
        runs = {name: one.get("run") for name, one in some.items() if name in installed_studies()}
        assert len(set(runs.values())) <= 1, runs
        for run in runs.values():
            assert str(run).startswith("apportion study all --scale paper"), runs
    for path in RESULTS.glob("seed-1/*/study.json"):
        again, first = json.loads(path.read_text()), ABOUT[path.parent.name]
        assert (again["seed"], again["commit"]) == (1, first["commit"]), path


def folders():
    reason = "computed before the study was changed"
    changed = pytest.mark.xfail(strict=True, reason=reason)
    return [
        pytest.param(folder, marks=[changed] if about["name"] in CHANGED else [])
        for folder, about in ABOUT.items()
    ]


@pytest.mark.parametrize("folder", folders())
def test_the_study_is_unchanged_and_its_rows_give_the_committed_tables_and_verdicts(
    folder, tmp_path
):
    about, committed, drawn = ABOUT[folder], RESULTS / folder, tmp_path / folder
    assert about.get("source") == plan_of(about["name"]).source
    shutil.copytree(committed, drawn)
    # The data at paper size is not in the repository, so use the committed cells and settings.
    names = pd.read_parquet(committed / "rows.parquet", columns=["cell"])["cell"].unique()
    cells, settings = tuple(Cell(str(name), {}) for name in names), about["settings"]
    plan = replace(plan_of(about["name"]), cells=cells, settings=settings)
    # The digest in cells.json refuses other cells or settings.
    [_] = perform_plans([CellStore(plan, drawn)], Serial(), draw=True)
    facts = ("name", "settings", "command", "run", "commit", "source", "device", "seconds")
    again = json.loads((drawn / "study.json").read_text())
    assert {fact: again[fact] for fact in facts} == {fact: about[fact] for fact in facts}
    for before, now in zip(about["figures"], again["figures"], strict=True):
        assert (before["name"], before["title"]) == (now["name"], now["title"])
        tables = (pd.read_csv(one / before["table"]) for one in (committed, drawn))
        pd.testing.assert_frame_equal(*tables, rtol=1e-5, atol=1e-6)
    verdicts = (json.loads((one / "verdict.json").read_text()) for one in (committed, drawn))
    for before, now in zip(*verdicts, strict=True):
        numbers = [
            [one.pop("estimate"), *one.pop("interval"), one.pop("p")] for one in (before, now)
        ]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-6)
        # Means in single precision, of up to 100 points.
        assert before.pop("levels") == pytest.approx(now.pop("levels"), rel=1e-6, abs=1e-6)
        assert before == now
