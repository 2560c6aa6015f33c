"""Plant each fault in a copy of the repository and run its tests there.

    python tests/mutants/run.py [--only WORDS]

Writes docs/results/mutants/table.csv: killed (a test failed), survived (none did), or unclear (the text
is not there once, or pytest could not run).
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "results" / "mutants" / "table.csv"
SOURCES = ("src", "packages/charging/src", "packages/studies/src")
COPIED = ("src", "packages", "tests", "benchmarks", "docs/results")
COPIED_FILES = ("README.md", "conftest.py", "pyproject.toml")
LIMIT_SECONDS = 300


def copy_to(folder: Path) -> None:
    """Copy what the tests read."""
    ignored = shutil.ignore_patterns("__pycache__", "*.png")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in COPIED_FILES:
        shutil.copy(ROOT / name, folder / name)


def run_pytest(folder: Path, tests: list[str]) -> int | None:
    """Return the exit status of pytest on the copy, or None if it did not end in time."""
    sources = os.pathsep.join(str(folder / source) for source in SOURCES)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": sources, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_SECONDS,
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def outcome_of(fault: Fault, folder: Path) -> str:
    """Return the outcome of one fault, and restore the copy."""
    path = folder / fault.file
    source = path.read_text()
    if source.count(fault.text) != 1:
        return f"unclear: the text is there {source.count(fault.text)} times"
    path.write_text(source.replace(fault.text, fault.becomes))
    try:
        status = run_pytest(folder, fault.tests.split())
    finally:
        path.write_text(source)
    known = {0: "survived", 1: "killed", None: "killed: out of time"}
    return known.get(status, f"unclear: pytest ended with {status}")


def record(fault: Fault, found: str) -> None:
    """Replace the outcome of one fault in the table."""
    known = {}
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            known = {row["fault"]: row["outcome"] for row in csv.DictReader(file)}
    known[fault.name] = found
    rows = [(f.name, f.file, known.get(f.name, "not tried"), f.tests) for f in FAULTS]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("fault", "file", "outcome", "tests"), *rows]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name or file has these words")
    options = parser.parse_args()
    chosen = [f for f in FAULTS if options.only in f.name or options.only in f.file]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        copy_to(folder)
        killed = 0
        for fault in chosen:
            begun = time.monotonic()
            found = outcome_of(fault, folder)
            record(fault, found)
            killed += found.startswith("killed")
            print(f"{found:10} {time.monotonic() - begun:5.0f} s  {fault.name}", flush=True)
    print(f"{killed} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
