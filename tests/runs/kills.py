"""Kill a job with SIGKILL at random moments; the same command must then end as if undisturbed.

    python tests/runs/kills.py JOB KILLS

A third of the kills happen inside a save, just before or after a file gets its name; the others at any
moment. After each kill every file must be whole. After a few kills the job may end, and its files must be
bit for bit those of an undisturbed job.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
sys.path.append(str(ROOT / "tests"))

# Slow imports: every start of a job is a fork of this process, which itself computes nothing.
import apportion.report  # noqa: E402
import apportion.runs.runner  # noqa: E402, F401
from apportion.cli import main  # noqa: E402
from apportion.runs.files import read_arrays, read_json, read_rows  # noqa: E402
from studies.toys import perform, toy  # noqa: E402

BUDGET = "--universe 12 --held-out 4 --periods 24 --tasks 6 --task-size 3 --batch 8 --hidden 4"
IN_A_ROW = 8
"""Kills before a job is let end."""
READERS = {
    ".json": read_json,
    ".parquet": lambda path: read_rows(path, ""),
    ".safetensors": read_arrays,
}


def train(out: Path) -> None:
    begun = (out / "settings.toml").exists()
    words = f"resume {out}" if begun else f"train budget --out {out} {BUDGET} --steps 60 --chunk 5"
    with contextlib.suppress(SystemExit):
        main([*words.split(), "--quiet"])


JOBS = {
    "train": (train, ("policy.safetensors", "policy.json", "settings.toml", "results.json")),
    "study": (
        lambda out: perform(toy(cells=40), out),
        ("table.csv", "rows.parquet", "figure.png", "verdict.json"),
    ),
}
"""Jobs that begin or continue in a folder, with the files to compare; the last file marks the end."""


def start(job, out: Path, dies_at: int | None = None) -> int:
    """Begin or continue a job in a process of its own; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        if dies_at is not None:
            die_in_save(dies_at)
        job(out)
    finally:
        # An ordinary exit would wait for threads that a fork does not have.
        os._exit(0)


def die_in_save(number: int) -> None:
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


def kill_once(job, out: Path, seconds: float, rng: random.Random) -> None:
    """Start a job and kill it inside a save or within some seconds."""
    inside = rng.random() < 1 / 3
    child = start(job, out, rng.randrange(2, 24) if inside else None)
    if not inside:
        time.sleep(rng.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def kill_often(name: str, kills: int, place: Path) -> list[str]:
    """Kill a job that many times and return what was wrong."""
    (job, files), rng, faults = JOBS[name], random.Random(name), []
    for folder in ("cold", "whole"):
        begun = time.monotonic()
        os.waitpid(start(job, place / folder), 0)
    seconds = time.monotonic() - begun
    wanted = [(place / "whole" / file).read_bytes() for file in files]
    out = place / "out"
    for number in range(kills):
        kill_once(job, out, seconds, rng)
        for path in (path for path in out.rglob("[!.]*.*") if path.is_file()):
            try:
                READERS.get(path.suffix, Path.stat)(path)
            except Exception as error:
                faults.append(f"damaged: {error}")
        if number % IN_A_ROW == IN_A_ROW - 1 or number == kills - 1:
            os.waitpid(start(job, out), 0)
            found = [(out / file).read_bytes() if (out / file).exists() else b"" for file in files]
            if found != wanted or any(out.rglob(".*.part")):
                faults.append(f"other files after kill {number}")
            shutil.rmtree(out)
    return faults


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        wrong = kill_often(sys.argv[1], int(sys.argv[2]), Path(made))
    sys.exit("\n".join(wrong) or None)
