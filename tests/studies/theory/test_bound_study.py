"""Measured suboptimality against both theorems."""

import pandas as pd
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


def test_one_broken_run_is_enough_to_break_a_theorem():
    table = pd.DataFrame(
        {
            "spread": 0.1,
            "run": [0, 0, 1, 1],
            "measured": [0.5, 1.2, 0.5, 0.9],
            "theorem_1_prime_total": 1.0,
            "theorem_1_total": 1.5,
        }
    )
    plain, prime, order = bound._share_verdicts(table)
    assert (prime.outcome, prime.estimate, prime.n) == ("does-not-hold", 0.5, 2)
    assert plain.outcome == order.outcome == "holds"
    assert all(verdict.exact and verdict.p is None for verdict in (plain, prime, order))
