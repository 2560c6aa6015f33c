"""Every reader of files against damaged files: it may return or raise InputError, and nothing else.

    python tests/fuzz/run.py [--inputs N] [--only WORDS] [--seed S]

Writes docs/results/fuzz/table.csv: for each reader the inputs tried, what became of them, and the slowest.
Inputs that found a fault are kept under build/fuzz.
"""

import argparse
import csv
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from readers import READERS, Reader, changed, read_quietly, write

from apportion.errors import InputError

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "results" / "fuzz" / "table.csv"
COLUMNS = ("reader", "inputs", "read", "refused", "faults", "kinds", "slowest_ms")
LIMIT_S = 10


class Hung(BaseException):
    """A reader took too long."""


def _hung(*_: Any) -> None:
    raise Hung


def outcome_of(reader: Reader, files: dict[str, bytes]) -> str:
    """`read`, `refused`, or the kind of the fault with its place."""
    with tempfile.TemporaryDirectory() as folder:
        write(files, Path(folder))
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            read_quietly(reader, Path(folder))
            return "read"
        except InputError as error:
            return "refused" if str(error).strip() else "an empty sentence"
        except (Exception, Hung) as error:
            places = traceback.extract_tb(error.__traceback__)
            own = [
                frame
                for frame in places
                if "apportion" in frame.filename or "fuzz" in frame.filename
            ]
            return f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def fuzz(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """A row of the table: one reader on that many damaged files."""
    rng, reader = random.Random(f"{seed} {name}"), READERS[name]
    found, slowest = Counter(), 0.0
    for number in range(inputs):
        files = changed(reader, rng)
        begun = time.monotonic()
        outcome = outcome_of(reader, files)
        slowest = max(slowest, time.monotonic() - begun)
        found[outcome] += 1
        if outcome not in ("read", "refused") and found[outcome] <= 3:
            write(files, ROOT / "build" / "fuzz" / name / f"{outcome.partition(' ')[0]}-{number}")
    faults = {kind: count for kind, count in found.items() if kind not in ("read", "refused")}
    kinds = "; ".join(f"{count} x {kind}" for kind, count in sorted(faults.items()))
    values = (name, inputs, found["read"], found["refused"], sum(faults.values()), kinds)
    return dict(zip(COLUMNS, (*values, round(1000 * slowest)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000, help="for a reader of usual speed")
    parser.add_argument("--only", default="", help="readers whose name has these words")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["MPLBACKEND"] = "Agg"
    signal.signal(signal.SIGALRM, _hung)
    with TABLE.open(newline="") as file:
        known = {row["reader"]: row for row in csv.DictReader(file)}
    faults = 0
    for name in [name for name in READERS if options.only in name]:
        found = fuzz(name, int(options.inputs * READERS[name].share), options.seed)
        print(*found.values(), flush=True)
        faults += found["faults"]
        known[name] = found
        with TABLE.open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(known[name] for name in READERS if name in known)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
