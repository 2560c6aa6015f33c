"""What a study may say of a claim, alone and beside its other claims."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy import stats

from apportion.certify.statistics import Estimate, _t_estimate, mean_over
from apportion.report import write_report
from apportion.studies.study import FigureResult, Study, Verdict, _adjusted_for_all


def at(value, error=1.0, freedom=9):
    return _t_estimate(value, error, freedom, int(freedom) + 1)


def with_p(p, sign=1):
    """A value whose two-sided p-value is p."""
    return at(sign * float(stats.t.isf(p / 2, 9)))


def test_a_point_beyond_the_bound_is_not_enough():
    assert Verdict.of("x is below 1", at(0.0), below=1.0).outcome == "not-established"
    assert Verdict.of("x is below 1", at(0.0, 0.1), below=1.0).outcome == "holds"
    assert Verdict.of("x is below 1", at(2.0, 0.1), below=1.0).outcome == "does-not-hold"


def test_all_of_several_hold_only_where_each_does():
    sure, open_ = at(5.0), at(1.0)
    assert Verdict.of_all("all above 0", [sure, sure]).holds
    mixed = Verdict.of_all("all above 0", [sure, open_])
    assert mixed.outcome == "not-established"
    # The one nearest to failing is shown.
    assert mixed.estimate == 1.0
    assert mixed.p == pytest.approx(open_.p)


def test_that_one_of_several_fails_must_show_after_allowing_for_their_number():
    slightly = with_p(0.03, -1)
    assert Verdict.of("above 0", slightly).outcome == "does-not-hold"
    several = Verdict.of_all("all above 0", [slightly, at(9.0), at(9.0)])
    assert several.outcome == "not-established"
    assert several.p == pytest.approx(0.09)
    clearly = Verdict.of_all("all above 0", [with_p(0.01, -1), at(9.0), at(9.0)])
    assert clearly.outcome == "does-not-hold"


def test_the_papers_claims_are_one_family_and_ours_another_and_exact_ones_are_left_alone():
    exact = Verdict("no run", True, 0.0, (0.0, 0.01), 500, exact=True)
    ours = [Verdict.of(f"ours {p}", with_p(p), paper=False) for p in (0.01, 0.045, 0.9)]
    verdicts = [Verdict.of(str(p), with_p(p)) for p in (0.001, 0.03, 0.04)]
    *own, first, second, third, last = _adjusted_for_all([*ours, *verdicts, exact])
    assert [v.outcome for v in own] == ["holds", "holds", "not-established"]
    assert [v.adjusted for v in own] == ["holds", "not-established", "not-established"]
    assert [v.outcome for v in (first, second, third)] == ["holds"] * 3
    assert first.adjusted == "holds"
    # Holm: 0.03 x 2 and then 0.04, not below the one before.
    assert second.adjusted == third.adjusted == "not-established"
    assert (last.adjusted, last.decision) == (None, "holds")
    # A family of one needs no adjustment.
    assert _adjusted_for_all([*ours, verdicts[2]])[-1].adjusted == "holds"
    # Our claims make none of the paper's harder: 0.02 x 2 is enough, x 5 is not.
    pair = [Verdict.of("paper", with_p(0.02)), Verdict.of("paper", with_p(0.02))]
    assert [v.adjusted for v in _adjusted_for_all([*pair, *ours])[:2]] == ["holds"] * 2


def test_a_refuted_claim_stays_refuted_where_it_is_clear_enough():
    verdicts = [Verdict.of("a", with_p(0.001, -1)), Verdict.of("b", at(0.0))]
    assert [v.adjusted for v in _adjusted_for_all(verdicts)] == ["does-not-hold", "not-established"]


def test_numbers_on_another_scale_keep_the_verdict():
    logs = Verdict.of("ratio above 2", at(1.0, 0.05), above=math.log(2.0))
    shown = logs.scaled(math.exp)
    assert shown.estimate == pytest.approx(math.e)
    assert (shown.outcome, shown.p) == (logs.outcome, logs.p)
    assert shown.interval[0] == pytest.approx(math.exp(logs.interval[0]))


def test_one_unit_establishes_nothing():
    alone = Verdict.of("above 0", mean_over(np.array([3.0])))
    assert (alone.outcome, alone.p) == ("not-established", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    levels = {"first arm": 2.5, "second arm": -1.25}
    verdicts = tuple(Verdict.of(str(p), with_p(p), levels=levels) for p in (0.03, 0.04))
    folder = tmp_path_factory.mktemp("verdicts")
    figure = FigureResult("toy", "Toy", pd.DataFrame({"x": [1.0]}), verdicts, Figure)
    Study("toy", (figure,)).save(folder)
    return folder


def test_every_way_to_read_a_study_shows_levels_and_the_outcome_after_all_comparisons(folder):
    written = json.loads((folder / "verdict.json").read_text())
    assert [v["adjusted"] for v in written] == ["not-established"] * 2
    assert [v["p"] for v in written] == pytest.approx([0.03, 0.04])
    assert [v["levels"] for v in written] == [{"first arm": 2.5, "second arm": -1.25}] * 2
    page = write_report(folder).read_text()
    assert "holds before Holm" in page
    assert "; first arm 2.5; second arm -1.25;" in page.replace("−", "-")
    assert page.count('<span class="mark">not established</span>') == 2
    assert 'alt="Toy: 0.03: not established; 0.04: not established"' in page
    claims = [Verdict.of("a", with_p(0.03), levels={"one": 1.0})] * 2
    summary = FigureResult("toy", "Toy", pd.DataFrame(), claims, Figure).summary()
    assert "  not established   a: " in summary
    assert "; one 1; holds before Holm's adjustment" in summary


def test_an_estimate_without_a_t_distribution_has_no_p_value():
    assert Estimate(1.0, 0.5, 1.5, 9).p is None
    assert "p" not in Estimate(1.0, 0.5, 1.5, 9).to_dict()
