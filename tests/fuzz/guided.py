"""One reader under Atheris: `guided.py READER INPUTS TABLE`; run.py starts it.

Atheris changes the bytes of one file at a time and keeps what reaches new lines of apportion.
"""

import csv
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import atheris

os.environ["MPLBACKEND"] = "Agg"
with atheris.instrument_imports(include=["apportion"]):
    from readers import READERS
    from run import COLUMNS, KEPT, _hung, outcome_of, row, write


def main() -> None:
    name, inputs, told = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    reader = READERS[name]
    sound = reader.files()
    found: Counter = Counter()
    place, corpus = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    numbers, slowest = itertools.count(1), 0.0
    for number, file in enumerate(sorted(sound)):
        # The first byte says which file it is.
        (corpus / str(number)).write_bytes(bytes([number]) + sound[file])

    def one(data: bytes) -> None:
        nonlocal slowest
        which = sorted(sound)[(data[0] if data else 0) % len(sound)]
        files = reader.mend(sound | {which: data[1:]})
        begun = time.monotonic()
        outcome = outcome_of(reader, files, place)
        slowest = max(slowest, time.monotonic() - begun)
        found[outcome] += 1
        if outcome not in ("read", "refused") and found[outcome] <= 3:
            write(files, KEPT / name / f"{outcome.partition(' ')[0]}-guided-{next(numbers)}")
        if found.total() >= inputs:
            # Here and not after, for Atheris ends the process.
            with told.open("w", newline="") as file:
                table = csv.DictWriter(file, COLUMNS)
                table.writeheader()
                table.writerow(row(name, "atheris", found, slowest))
            os._exit(0)

    signal.signal(signal.SIGALRM, _hung)
    atheris.Setup([sys.argv[0], "-max_len=20000", "-verbosity=0", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
