"""The current code gives the committed verdicts and tables from the committed rows."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from apportion.studies.engine import _HOW, Cell, CellStore, perform_plans
from apportion.studies.executors import Serial
from apportion.studies.registry import installed_studies, make_plan

RESULTS = Path(__file__).parents[3] / "docs" / "results"
ABOUT, SECOND = (
    {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/study.json"))}
    for folder in (RESULTS, RESULTS / "seed-1")
)

# Since their cells were computed, what these studies conclude from them changed: the intervals of charging,
# the choice of the number of updates in mechanisms, and a claim about twice as many updates in Figure 6. It
# is recomputed here. Their source then and now: any further change is noticed.
CONCLUDED_AGAIN = {
    "charging": ("7196fc508d3dfea9", "63afdd5a1a603324"),
    "fig6": ("63d697c95e643c41", "88cf51fadcaca926"),
    "mechanisms": ("f5086f484185c1c6", "bee028ec3617170d"),
}

# Making a plan reads the data of its study, so plans are cached.
plan_of = cache(make_plan)


def test_every_study_is_committed_of_one_commit_and_those_of_the_registry_of_one_command():
    """The second seed lacks Figure 6."""
    assert {about["name"] for about in ABOUT.values()} == set(installed_studies())
    assert set(SECOND) == set(installed_studies()) - {"fig6"}
    for seed, found in enumerate((ABOUT, SECOND)):
        [commit] = {about["commit"] for about in (*ABOUT.values(), *found.values())}
        assert re.fullmatch("[0-9a-f]{40}", commit)
        [run] = {found[name]["run"] for name in installed_studies() if name in found}
        assert run.startswith(f"apportion study all --scale paper --seed {seed}")
        assert {about["seed"] for about in found.values()} == {seed}


@pytest.mark.parametrize(
    "folder", [*ABOUT, *(pytest.param(f"seed-1/{name}", marks=pytest.mark.slow) for name in SECOND)]
)
def test_the_study_is_unchanged_and_its_rows_give_the_committed_tables_and_verdicts(
    folder, tmp_path
):
    committed, drawn = RESULTS / folder, tmp_path / folder
    about = json.loads((committed / "study.json").read_text())
    source = plan_of(about["name"]).source
    then_and_now = CONCLUDED_AGAIN.get(about["name"], (source, source))
    assert (about["source"], source) == then_and_now
    shutil.copytree(committed, drawn)
    # The data at paper size is not in the repository, so use the committed cells and settings.
    names = pd.read_parquet(committed / "rows.parquet", columns=["cell"])["cell"].unique()
    cells, settings = tuple(Cell(str(name), {}) for name in names), about["settings"]
    plan = replace(plan_of(about["name"]), cells=cells, settings=settings)
    # The digest in cells.json refuses other cells or settings.
    [_] = perform_plans([CellStore(plan, drawn)], Serial(), draw=True)
    facts = ("name", "settings", "seconds", "versions", *_HOW)
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
