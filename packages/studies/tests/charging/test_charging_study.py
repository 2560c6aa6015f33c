"""The charging study's leads, and what its cells train."""

import numpy as np
import pandas as pd
import pytest

from apportion_studies.charging import charging
from apportion_studies.charging.charging import _kwh_of, _lead


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
