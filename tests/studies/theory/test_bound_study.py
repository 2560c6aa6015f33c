"""Measured suboptimality against both theorems."""

import pytest

from apportion.studies.theory import bound


def check(study):
    table = study.table
    assert (table.measured <= table.theorem_1_prime_total + 1e-9).all()
    assert (table.theorem_1_prime_total <= table.theorem_1_total + 1e-9).all()
    assert all(verdict.holds for verdict in study.verdicts)


def test_both_theorems_hold_in_every_run_and_the_tighter_one_is_below():
    study = bound.plan(families=100).run()
    assert len(study.table) == 100 * 8
    check(study)
    assert "Lemma 4 asks for" in study.summary()
    assert len(study.plot().axes) == 2


@pytest.mark.slow
def test_both_theorems_hold_in_five_hundred_runs():
    study = bound.plan(scale="paper").run()
    assert len(study.table) == 500 * 8
    check(study)
