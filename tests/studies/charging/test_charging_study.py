"""The charging study's conclusions follow from its rows, and from nothing else."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion.studies.charging import charging
from apportion.studies.charging.charging import kwh_of, lead

COMMITTED = Path(__file__).parents[3] / "docs" / "results" / "charging"


@pytest.fixture(scope="module")
def rows():
    return pd.read_parquet(COMMITTED / "rows.parquet")


@pytest.fixture(scope="module")
def figure(rows):
    [figure] = charging._conclude(rows, {})
    return figure


def test_the_readme_says_what_the_verdicts_say(figure):
    readme = (COMMITTED.parents[2] / "README.md").read_text()
    best = [v for v in figure.verdicts if "the best scheduler there" in v.claim]
    over_llf = [v for v in figure.verdicts if re.match("MTL serves more than llf[, ]", v.claim)]
    over_recalled = [v for v in figure.verdicts if "MTL serves more than llf-recalled" in v.claim]
    ahead, sure = sum(v.estimate >= 0 for v in best), sum(v.holds for v in best)
    assert len(best) == len(over_llf) == len(over_recalled) == 12
    assert f"ahead in {ahead}, established in {sure}" in readme
    assert f"over least laxity first established in {sum(v.holds for v in over_llf)}" in readme
    ahead, sure = sum(v.estimate > 0 for v in over_recalled), sum(v.holds for v in over_recalled)
    assert f"recalls them too is behind in {ahead} of 12, established in {sure}" in readme
    for verdict in figure.verdicts:
        if "than STL" in verdict.claim:
            low, high = verdict.interval
            assert f"+{verdict.estimate:.2f} [{low:.2f}, {high:.2f}]" in readme


def test_a_lead_is_plain_arithmetic(rows):
    some = rows[(rows.site == "jpl") & (rows.test == "2021") & (rows.capacity == 0.1)]
    some = some[some.stations == 10]
    days = some[some.unit == "day"]
    mtl = days[(days.trained == "mtl")]
    llf = days[(days.trained == "schedulers") & (days.schedule == "llf")]
    expected = 100 * (mtl.drawn_kwh.sum() - llf.drawn_kwh.sum()) / mtl.need_kwh.sum()
    found = lead(kwh_of(some), ("mtl", "policy"), ("schedulers", "llf"))
    assert found.value == pytest.approx(expected, abs=1e-6)
    assert found.n == llf.place.nunique()


def test_every_way_to_train_is_a_cell_of_its_own():
    plan = charging.charging()
    names = [cell.name for cell in plan.cells]
    assert names == ["schedulers", "mtl", "pmtl", "stl", "ppo", "only-caltech", "only-jpl", "plain"]
    assert plan.digest != charging.charging(scale="paper").digest


def test_a_single_task_policy_learns_from_one_garage(monkeypatch):
    seen: dict = {}

    def take_down(problem, tasks, *others, **options):
        seen.update(tasks=tasks, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(charging, "train_runs", take_down)
    plan = charging.charging()
    cells = {cell["trained"]: cell for cell in plan.cells}
    with pytest.raises(KeyboardInterrupt):
        list(plan.compute([cells["stl"]], lambda what, fraction: None))
    single = np.asarray(seen["tasks"].members)
    # Two policies, a garage of ten stations each, of other stations, at equal updates.
    assert single.shape == (2, 1, 10)
    assert (single[0] != single[1]).any()
    assert seen["steps"] == plan.settings["training"]["steps"]
    assert float(seen["selection"].alpha) == 0.0


def test_what_recalls_earlier_days_is_claimed_apart(rows):
    """On rows made of the committed ones: the plain policy draws a hundredth less, and least laxity
    first by recollections meets every need."""
    rows = rows[~rows.schedule.eq("llf-recalled") & ~rows.trained.eq("plain")]
    plain = rows[rows.trained == "mtl"].assign(trained="plain")
    best = rows[(rows.trained == "schedulers") & (rows.schedule == "llf")]
    plain = plain.assign(drawn_kwh=0.99 * plain.drawn_kwh)
    best = best.assign(schedule="llf-recalled", drawn_kwh=best.need_kwh)
    [found] = charging._conclude(pd.concat([rows, plain, best], ignore_index=True), {})
    claims = {verdict.claim: verdict for verdict in found.verdicts}
    assert not any("llf-recalled, the best" in claim for claim in claims)
    recalled = [v for claim, v in claims.items() if "than llf-recalled (" in claim]
    assert len(recalled) == 12
    assert all(v.estimate < 0 for v in recalled)
    for site in ("Caltech", "JPL"):
        gain = claims[f"MTL serves more than without recalling earlier days ({site})"]
        assert 0 < gain.estimate < 1
        assert gain.holds
    assert {"MTL without recall", "llf-recalled"} <= set(found.table.schedule)
