"""Do the tests notice? Each fault is made in a copy of the repository and its tests are run there.

    python tests/mutants/run.py [--only WORDS]

Writes docs/results/mutants/table.csv: killed (a test failed), survived (none did), or unclear (the text
is not there once, or pytest could not run).
"""

import argparse
import csv
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jax
import pytest
from faults import FAULTS, Fault

for _name in ("scipy.stats", "pandas", "optax", "equinox", "matplotlib.figure", "hypothesis"):
    importlib.import_module(_name)

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "results" / "mutants" / "table.csv"
SOURCES = ("src", "packages/charging/src", "packages/studies/src")
_COPIED = (
    "src",
    "packages",
    "tests",
    "benchmarks",
    "docs/results",
    "README.md",
    "conftest.py",
    "pyproject.toml",
)
_LIMIT_S = 300


def copy_to(folder: Path) -> None:
    """What the tests read."""
    kept = shutil.ignore_patterns("__pycache__", "*.png")
    for name in _COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=kept)
        else:
            shutil.copy(source, target)


def pytest_in(folder: Path, tests: list[str]) -> int | None:
    """The exit status of pytest on the copy; None where it did not end in time."""
    run = multiprocessing.get_context("fork").Process(target=_child, args=(folder, tests))
    run.start()
    run.join(_LIMIT_S)
    if run.exitcode is None:
        run.kill()
        run.join()
        return None
    return run.exitcode


def _child(folder: Path, tests: list[str]) -> None:
    """A fork of this process, which has the large libraries already and nothing of ours."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    os.chdir(folder)
    sources = [str(folder / source) for source in SOURCES]
    os.environ |= {"PYTHONPATH": os.pathsep.join(sources), "JAX_PLATFORMS": "cpu"}
    sys.path[:0] = sources
    jax.config.update("jax_compilation_cache_dir", str(folder / ".compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    # Without its threads' farewells, which a fork may wait for in vain.
    os._exit(int(pytest.main([*options, *tests])))


def outcome_of(fault: Fault, folder: Path) -> str:
    """What became of one fault; the copy is as before afterwards."""
    path = folder / fault.file
    source = path.read_text()
    if source.count(fault.text) != 1:
        return f"unclear: the text is there {source.count(fault.text)} times"
    path.write_text(source.replace(fault.text, fault.becomes))
    try:
        status = pytest_in(folder, fault.tests.split())
    finally:
        path.write_text(source)
    known = {0: "survived", 1: "killed", None: "killed: out of time"}
    return known.get(status, f"unclear: pytest ended with {status}")


def record(fault: Fault, found: str) -> None:
    """Put one outcome into the table, in place of what was known of that fault before."""
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
