"""A slip is told before JAX is started: the processes here may not import it."""

import subprocess
import sys

import pytest
from refusals import WIDE, cell, finished

GUARD = (
    "import sys, apportion.cli\n"
    "try:\n    apportion.cli.main(sys.argv[1:])\n"
    "finally:\n    assert 'jax' not in sys.modules, 'JAX was started'\n"
)


@pytest.mark.parametrize(
    "command",
    [
        "check --prices bad.csv",
        "backtest run --prices bad.csv",
        "allocate run --prices bad.csv",
        "train portfolio --out run --prices bad.csv",
        "train portfolio --out new --prices bad.csv",
        "train budget --out new --seed=-1",
        "study fig1 --out run",
        "demo --out run",
        "resume nowhere",
    ],
)
def test_a_slip_is_told_before_jax_is_started(command, tmp_path):
    (tmp_path / "bad.csv").write_text(cell(4, 2, "-3", WIDE))
    (tmp_path / "run").symlink_to(finished("portfolio"))
    done = subprocess.run(
        [sys.executable, "-c", GUARD, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
