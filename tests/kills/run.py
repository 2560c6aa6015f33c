"""Kill jobs of every kind with SIGKILL at random moments; the same command must then end as undisturbed.

    python tests/kills/run.py [--kills N] [--only NAME ...] [--seed S] [--table FILE]

A third of the kills happen inside a save, just before or after a file gets its name; the others at any
moment. After each kill every file must be whole. After a few kills the job may end, and its files must be
bit for bit those of an undisturbed job. Writes docs/results/kills/table.csv, or FILE.
"""

import argparse
import csv
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "results" / "kills" / "table.csv"
COLUMNS = ("job", "stage", "kills", "resumed", "faults", "what")
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
sys.path.append(str(ROOT / "tests"))

# Slow imports: every start of a job is a fork of this process, which itself computes nothing.
from jobs import JOBS, Job, make_data, what_is_damaged  # noqa: E402

import apportion.report  # noqa: E402
import apportion.studies.executors  # noqa: E402, F401

IN_A_ROW = 8
"""Kills before a job is let end."""
LIMIT_S = 300


def start(job: Job, data: Path, out: Path, log: Path, dies_at: int | None = None) -> int:
    """Begin or continue a job in a process of its own; returns its id."""
    child = os.fork()
    if child:
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    if dies_at is not None:
        _die_in_save(dies_at)
    code = 1
    try:
        job.run(data, out)
        code = 0
    finally:
        # An ordinary exit would wait for threads that a fork does not have.
        os._exit(code)


def _die_in_save(number: int) -> None:
    """End this process at its n-th save: even ones before the file has its name, odd ones after."""
    rename, saves = os.replace, 0

    def broken(source, target):
        nonlocal saves
        saves += 1
        if saves > number // 2 and number % 2 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
        if saves > number // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = broken


def wait(child: int, seconds: float) -> bool:
    """Whether the process ended by itself within so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    return False


def to_the_end(job: Job, data: Path, out: Path, log: Path) -> float:
    """Run a job to its end; return the seconds it took."""
    begun = time.monotonic()
    child = start(job, data, out, log)
    if not wait(child, LIMIT_S):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return time.monotonic() - begun


def digest(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of each file."""
    found = {name: folder / name for name in names}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        for name, path in found.items()
    }


@dataclass
class Tally:
    """Kills, resumptions and faults of a job by stage."""

    kills: Counter = field(default_factory=Counter)
    resumed: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    what: dict[str, str] = field(default_factory=dict)

    def fault(self, stages: list[str], what: str) -> None:
        self.faults.update(stages)
        self.what |= dict.fromkeys(stages, what)


def kill_once(
    job: Job, data: Path, out: Path, log: Path, span: float, rng: random.Random
) -> str | None:
    """Start a job and kill it; return its stage, or None if it had ended before."""
    inside = rng.random() < 1 / 3
    child = start(job, data, out, log, rng.randrange(2, 24) if inside else None)
    ended = wait(child, LIMIT_S if inside else rng.uniform(0, span))
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    elif (out / job.done).exists() and not inside:
        return None
    return job.stage(out)


def kill_often(name: str, kills: int, data: Path, rng: random.Random) -> Tally:
    """Kill a job that many times; after every few kills let it end, and compare its files."""
    job, tally, place = JOBS[name], Tally(), data.parent
    log, out = place / "log.txt", place / "out"
    to_the_end(job, data, place / f"{name}-cold", log)
    span = to_the_end(job, data, place / f"{name}-whole", log)
    wanted = digest(place / f"{name}-whole", job.same)
    if "missing" in wanted.values():
        print(f"{name}: undisturbed it leaves {wanted}\n{log.read_text()[-2000:]}", flush=True)
        tally.fault(["undisturbed"], "ends without its files")
        return tally
    untouched = digest(data / "market", ("policy.safetensors", "results.json"))
    while tally.kills.total() < kills:
        shutil.rmtree(out, ignore_errors=True)
        stages: list[str] = []
        while len(stages) < min(IN_A_ROW, kills - tally.kills.total()):
            stage = kill_once(job, data, out, log, span, rng)
            if stage is None:
                break
            stages.append(stage)
            damaged = what_is_damaged(out) if out.exists() else []
            if damaged:
                tally.fault([stage], f"damaged: {damaged[0]}")
        tally.kills.update(stages)
        to_the_end(job, data, out, log)
        left = [path.name for path in out.rglob(".*.part")]
        if digest(out, job.same) == wanted and (out / job.done).exists() and not left:
            tally.resumed.update(stages)
        else:
            tally.fault(stages, f"other files: {left or log.read_text().splitlines()[-1:]}")
        if digest(data / "market", ("policy.safetensors", "results.json")) != untouched:
            tally.fault(stages, "the run that was read has changed")
    print(f"{name}: {span:.1f} s undisturbed, {tally.kills.total()} kills", flush=True)
    return tally


def save(tallies: dict[str, Tally], table: Path) -> None:
    """Write the table: a row for each job and stage."""
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, tally in tallies.items():
            for stage, kills in sorted(tally.kills.items()):
                counts = (kills, tally.resumed[stage], tally.faults[stage])
                writer.writerow([name, stage, *counts, tally.what.get(stage, "")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="over all jobs together")
    parser.add_argument("--only", nargs="+", default=[""], help="jobs whose name has one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory() as made:
        data = Path(made) / "data"
        data.mkdir()
        make_data(data)
        chosen = [name for name in JOBS if any(words in name for words in options.only)]
        if "backtest --out" in chosen:
            to_the_end(JOBS["train portfolio"], data, data / "market", Path(made) / "log.txt")
        for name in chosen:
            rng = random.Random(f"{options.seed} {name}")
            tallies[name] = kill_often(name, -(-options.kills * JOBS[name].kills // 200), data, rng)
            save(tallies, options.table)
            for stage, what in tallies[name].what.items():
                print(f"  fault, {stage}: {what}", flush=True)
    faults = sum(tally.faults.total() for tally in tallies.values())
    print(f"{faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
