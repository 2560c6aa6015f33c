"""A run is killed with SIGKILL at random moments, inside saves too, and must come out the same."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

KILLS = Path(__file__).parents[1] / "kills" / "run.py"


@pytest.mark.slow
def test_runs_killed_at_50_random_moments_end_bit_identical(tmp_path):
    """A quarter more than `make kills` gives to this job; it tries every other kind of job besides."""
    table = tmp_path / "table.csv"
    words = ["--only", "train budget", "--kills", "250", "--table", str(table)]
    done = subprocess.run([sys.executable, KILLS, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = pd.read_csv(table)
    assert found.kills.sum() == found.resumed.sum() >= 50
