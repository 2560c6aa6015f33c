"""Every reader of files against files made wrong: it may return or raise InputError, and nothing else.

    python tests/fuzz/run.py [--inputs N] [--only WORDS] [--seed S]

Writes docs/results/fuzz/table.csv: a row for each reader with the inputs tried, what became of them, and
the slowest. Inputs that found a fault are kept under build/fuzz.
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
KEPT = ROOT / "build" / "fuzz"
COLUMNS = ("reader", "inputs", "read", "refused", "faults", "kinds", "slowest_ms")
LIMIT_S = 10


class Hung(BaseException):
    """A reader took too long."""


def _hung(*_: Any) -> None:
    raise Hung


def outcome_of(reader: Reader, files: dict[str, bytes], folder: Path) -> str:
    """`read`, `refused`, or the kind of the fault with its place."""
    for old in sorted(folder.rglob("*"), reverse=True):
        old.rmdir() if old.is_dir() else old.unlink()
    write(files, folder)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        read_quietly(reader, folder)
        return "read"
    except InputError as error:
        return "refused" if str(error).strip() else "an empty sentence"
    except (Exception, Hung) as error:
        place = traceback.extract_tb(error.__traceback__)
        own = [
            frame for frame in place if "apportion" in frame.filename or "fuzz" in frame.filename
        ]
        return f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _fuzz(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """One reader under mutations of our own."""
    rng = random.Random(f"{seed} {name}")
    found, slowest = Counter(), 0.0
    with tempfile.TemporaryDirectory() as place:
        sound = outcome_of(READERS[name], READERS[name].files(), Path(place))
        if sound != "read":
            return row(name, Counter({f"the sound file is {sound}": 1}), 0.0)
        for number in range(inputs):
            files = changed(READERS[name], rng)
            begun = time.monotonic()
            outcome = outcome_of(READERS[name], files, Path(place))
            slowest = max(slowest, time.monotonic() - begun)
            found[outcome] += 1
            if outcome not in ("read", "refused") and found[outcome] <= 3:
                write(files, KEPT / name / f"{outcome.partition(' ')[0]}-{number}")
    return row(name, found, slowest)


def row(name: str, found: Counter, slowest: float) -> dict[str, Any]:
    """A row of the table."""
    faults = {kind: count for kind, count in found.items() if kind not in ("read", "refused")}
    values = (name, found.total(), found["read"], found["refused"], sum(faults.values()))
    kinds = "; ".join(f"{count} x {kind}" for kind, count in sorted(faults.items()))
    return dict(zip(COLUMNS, (*values, kinds, round(1000 * slowest)), strict=True))


def save(found: dict[str, Any]) -> None:
    """Put a row into the table, in place of what was known of the same reader before."""
    known: dict[str, dict[str, Any]] = {}
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            known = {row["reader"]: dict(row) for row in csv.DictReader(file)}
    known |= {found["reader"]: found}
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(known[name] for name in READERS if name in known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000, help="for a reader of usual speed")
    parser.add_argument("--only", default="", help="readers whose name has these words")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["MPLBACKEND"] = "Agg"
    signal.signal(signal.SIGALRM, _hung)
    faults = total = 0
    for name, reader in READERS.items():
        if options.only not in name:
            continue
        found = _fuzz(name, int(options.inputs * reader.share), options.seed)
        save(found)
        total, faults = total + found["inputs"], faults + found["faults"]
        print(" ".join(f"{found[column]}" for column in COLUMNS), flush=True)
    print(f"{total} inputs, {faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
