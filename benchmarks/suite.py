"""Where the time of the test suite goes: seconds of the processor, and what JAX did in them.

    python benchmarks/suite.py [--out DIR] [PYTEST'S ARGUMENTS]

Runs what `make test` runs, or what the arguments say in its place, with this file as a plugin in every
worker, and writes suite.md and suite.json: the seconds in which programs were traced, lowered and
compiled, how many there were and how many of them had been compiled before, what of it was loops of
training, the processes that tests started, and the rest, which is what the tests compute and check.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

FOLDER = "SUITE_COUNTS"
STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
}
KEPT = "/jax/compilation_cache/cache_hits"
LOOPS = ("_advance", "_advance_runs")
EVERYTHING = ["--doctest-modules", "src", "tests"]
_counted: Counter[str] = Counter()


def pytest_configure(config) -> None:
    """Listen to what JAX says of its programs; the one that only hands out tests has none."""
    if FOLDER not in os.environ or not hasattr(config, "workerinput"):
        return
    import jax

    def listen(event: str, seconds: float, *, fun_name: str = "", **_: object) -> None:
        if event in STAGES:
            _counted[STAGES[event]] += seconds
            _counted[f"{STAGES[event]} programs"] += 1
            if fun_name.removeprefix("jit(").removesuffix(")") in LOOPS:
                _counted["loops"] += seconds
                _counted[f"{STAGES[event]} loops"] += 1

    def listen_to_cache(event: str, **_: object) -> None:
        _counted["kept"] += event == KEPT

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(listen_to_cache)


def pytest_sessionfinish(session) -> None:
    if FOLDER in os.environ and hasattr(session.config, "workerinput"):
        spent = os.times()
        own = {"own": spent.user + spent.system, "started": spent.children_user}
        path = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"
        path.write_text(json.dumps({**_counted, **own}))


def run(arguments: list[str]) -> tuple[Counter[str], float, str]:
    """What all workers counted, the wall time, and pytest's last line."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        own = {
            FOLDER: folder,
            # As in a fresh clone: what an earlier run compiled is not there.
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "compiled"),
            "PYTHONPATH": os.pathsep.join([str(here), os.getenv("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "suite", "-n", "auto"]
        command += ["--dist", "loadfile", "--no-loadscope-reorder", *arguments]
        begun = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=here.parent,
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=False,
        )
        wall = time.perf_counter() - begun
        found: Counter[str] = Counter()
        for path in Path(folder).glob("*.json"):
            found.update(json.loads(path.read_text()))
    last = done.stdout.strip().splitlines()[-1]
    if done.returncode:
        print(done.stdout[-4000:])
    return found, wall, last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options, arguments = parser.parse_known_args()
    from table import RESULTS, facts, write

    about = facts("pytest")
    found, wall, last = run(arguments or EVERYTHING)
    jax_seconds = sum(found[stage] for stage in STAGES.values())
    row = {
        "wall seconds": wall,
        "processor seconds of the workers": found["own"],
        **{f"{stage}": found[stage] for stage in STAGES.values()},
        "programs compiled": str(int(found["compiled programs"])),
        "of them compiled before": str(int(found["kept"])),
        "loops of training": str(int(found["compiled loops"])),
        "seconds of the loops": found["loops"],
        "rest": found["own"] - jax_seconds,
        "processes started": found["started"],
        "_tests": last,
    }
    text = "Seconds, all workers together; tracing, lowering and compiling by JAX's own clocks."
    write(
        "suite",
        "Where the time of the tests goes",
        text,
        [row],
        about,
        options.out or RESULTS,
    )


if __name__ == "__main__":
    main()
