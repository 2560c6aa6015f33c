"""Jobs are killed with SIGKILL at random moments, inside saves too, and must come out the same."""

import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).with_name("kills.py")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["train", "study"])
def test_jobs_killed_at_50_random_moments_end_bit_identical(job):
    command = [sys.executable, KILLS, job, "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
