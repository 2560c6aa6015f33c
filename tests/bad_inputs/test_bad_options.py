"""Options of studies, demos and checks, and the folders they would write to."""

import subprocess
import sys

from refusals import WIDE, assert_refused, cases, cell, finished, of


@cases(
    ("no study", "study", "NAME requires an argument; see apportion study --help"),
    ("no such study", "study fig9 --out out", ("fig9", 'Did you mean "fig')),
    ("study, seed", "study fig1 --out out --seed=-1", "seed is -1"),
    ("study, scale", "study fig1 --out out --scale big", 'Choose from: "quick", "paper"'),
    ("study, address", "study fig1 --out out --address a", "needs --on ray"),
    ("study, processes", "study fig1 --out out --processes 0", "processes is 0"),
    ("study, drawn in processes", "study fig1 --out out --processes 2 --draw", "omit --draw"),
    ("study, on Ray in processes", "study fig1 --out out --processes 2 --on ray", "omit --on ray"),
    ("study, no prices", "study fig2 --out out --prices p.csv", "p.csv: no such file"),
    ("study, bad digits", "study fig6 --out out --images m.npz", "m.npz", {"m.npz": "x"}),
    ("study among others", "study fig1 --out d", "files, such as t.csv", {"d/t.csv": "mine"}),
    ("study, cells cut", "study fig1 --out d", "cells.json: not valid JSON", {"d/cells.json": "{"}),
    ("demo, seed", "demo --seed=-1", "seed is -1"),
    ("demo, no such domain", "demo budgit", "did you mean budget?"),
    ("demo of a domain without", "demo budget", "has no demo run"),
    ("demo in a file", "demo --out f", "f: is a file", {"f": "mine"}),
    ("demo among others", "demo --out d", "contains other files, such as f", {"d/f": "mine"}),
    ("check, what", "check --price p.csv", "did you mean --prices?"),
    ("no such command", "chekc", ("choose demo, train, resume", "did you mean check?")),
    *of("budget", ("demo over a run", "demo charging --out run", "already contains a run")),
)
def test_options_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


MISTAKES = (
    "check --prices bad.csv",
    "backtest run --prices bad.csv",
    "train portfolio --out run --prices bad.csv",
    "train portfolio --out new --prices bad.csv",
    "train budget --out new --seed=-1",
    "study fig1 --out run",
    "demo --out run",
    "resume nowhere",
)
GUARD = """
import sys, apportion.cli
for command in sys.argv[1:]:
    try:
        apportion.cli.main(command.split())
    except SystemExit as left:
        assert left.code == 2, command
    assert "jax" not in sys.modules, f"JAX was started by {command}"
"""


def test_a_mistake_is_reported_before_jax_is_started(tmp_path):
    (tmp_path / "bad.csv").write_text(cell(4, 2, "-3", WIDE))
    (tmp_path / "run").symlink_to(finished("portfolio"))
    command = [sys.executable, "-c", GUARD, *MISTAKES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(MISTAKES)
