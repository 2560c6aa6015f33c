"""The charging study's README sentences, its leads, and what its cells train."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion_studies.charging import charging
from apportion_studies.charging.charging import _kwh_of, _lead

COMMITTED = Path(__file__).parents[4] / "docs" / "results" / "charging"


def test_the_readme_says_what_the_verdicts_say():
    readme = (COMMITTED.parents[2] / "README.md").read_text()
    verdicts = json.loads((COMMITTED / "verdict.json").read_text())

    def found(claim):
        some = [v for v in verdicts if re.search(claim, v["claim"])]
        return some, sum(v["estimate"] >= 0 for v in some), sum(v["holds"] for v in some)

    best, ahead, sure = found("the best scheduler there [(](Caltech|JPL)")
    assert f"ahead in {ahead}, established in {sure}" in readme
    over_llf, _, sure = found("^MTL serves more than llf[, ].*[(](Caltech|JPL)")
    assert f"over least laxity first established in {sure}" in readme
    planned, ahead, sure = found("^MTL serves more than mpc [(](Caltech|JPL)")
    assert f"it is ahead in {ahead} of {len(planned)}, established in {sure}" in readme
    mixed, ahead, sure = found("the best scheduler there [(]mixed garage")
    assert f"in a mixed garage ahead in {ahead}, established in {sure}" in readme
    assert len(best) == len(over_llf) == len(mixed) == 12
    for verdict in found("than STL")[0]:
        low, high = verdict["interval"]
        assert f"+{verdict['estimate']:.2f} [{low:.2f}, {high:.2f}]" in readme


def test_a_lead_is_plain_arithmetic():
    rng = np.random.default_rng(0)
    tables = []
    for trained, schedule in (("mtl", "policy"), ("schedulers", "llf")):
        drawn, need = rng.uniform(50, 90, 30), np.full(30, 100.0)
        days = {
            "unit": "day",
            "place": np.arange(30).astype(str),
            "drawn_kwh": drawn,
            "need_kwh": need,
        }
        tables.append(pd.DataFrame(days).assign(trained=trained, schedule=schedule, policy=0))
    mtl, llf = tables
    expected = 100 * (mtl.drawn_kwh.sum() - llf.drawn_kwh.sum()) / mtl.need_kwh.sum()
    found = _lead(_kwh_of(pd.concat(tables)), ("mtl", "policy"), ("schedulers", "llf"))
    assert found.value == pytest.approx(expected, abs=1e-6)
    assert found.n == llf.place.nunique()


def test_a_single_task_policy_learns_from_one_garage(monkeypatch):
    seen: dict = {}

    def take_down(problem, tasks, *others, **options):
        seen.update(tasks=tasks, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(charging, "train", take_down)
    plan = charging.charging()
    names = [cell.name for cell in plan.cells]
    scheduled = names[len(charging._LEARNED) :]
    assert names == [*charging._LEARNED, *scheduled]
    # Of each garage, site and year; whoever computes them needs no policy.
    assert len(scheduled) == 12
    assert scheduled[0] == "schedulers-real-caltech-2019"
    with pytest.raises(KeyboardInterrupt):
        list(plan.compute([plan.cells[names.index("stl")]], lambda what, fraction: None))
    single = np.asarray(seen["tasks"].members)
    # Two policies, a garage of ten stations each, of other stations, at equal updates.
    assert single.shape == (2, 1, 10)
    assert (single[0] != single[1]).any()
    assert seen["steps"] == plan.settings["training"]["steps"]
    assert float(seen["priority"].alpha) == 0.0
