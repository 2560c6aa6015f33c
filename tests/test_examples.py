"""The numbered examples run and print the expected results."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture
def printed(capsys, monkeypatch):
    """A function that runs an example and returns its output."""

    def of(name):
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return of


def test_a_policy_trained_on_some_campaigns_gains_on_campaigns_never_seen(printed):
    text = printed("01_budget.py")
    assert "campaigns never seen: +" in text


def test_an_own_problem_takes_at_most_sixty_lines_and_gains_over_equal_shares(printed):
    assert len((EXAMPLES / "02_your_own_problem.py").read_text().splitlines()) <= 60
    text = printed("02_your_own_problem.py")
    assert "gain +" in text


def test_own_prices_lead_to_a_backtest_and_an_allocation(printed):
    text = printed("03_your_own_prices.py")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert float(rows["policy"][1]) > float(rows["equal-crp"][1])
    shares = [float(row[1].rstrip("%")) for name, row in rows.items() if name.startswith("X0")]
    assert sum(shares) == pytest.approx(100, abs=0.1)


def test_a_larger_share_for_the_minority_beats_fedavg_and_too_large_a_one_does_not(printed):
    pytest.importorskip("mlxtend")
    rows = printed("04_federation.py").strip().splitlines()
    fedavg, larger, too_large = (float(row.split()[-1]) for row in rows)
    assert larger > fedavg > too_large


def test_the_policy_walks_forward_beside_skfolio_s_own_optimisers(printed):
    pytest.importorskip("skfolio")
    text = printed("05_skfolio_walk_forward.py")
    for name in ("multi-task", "equal", "inverse volatility", "minimum variance"):
        row = next(line for line in text.splitlines() if name in line)
        assert row.count("%") == 2


def test_a_simulator_trains_under_the_compiler_s_own_options():
    """The tests compile without fusion emitters; users do not."""
    pytest.importorskip("gymnasium")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    script = EXAMPLES / "06_your_own_simulator.py"
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "gain +" in done.stdout
