"""Studies in several processes of this machine: whoever is free takes the cells of the next program.

One process seldom fills a GPU, and hands a study's cells to one processor where they do not fill all.
Each process claims a program's cells in the study's folder before it computes them, so that none are
computed twice; the cells of a process that dies are free again, and the first process computes them.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from apportion.runs.runner import Stopped, interrupts
from apportion.studies.folder import compute_unclaimed
from apportion.studies.store import CellStore

if TYPE_CHECKING:
    from apportion.studies.cells import Plan, Progress
    from apportion.studies.registry import Asked, Request

_PATIENCE = 0.5
"""Seconds between two looks at the folders."""
_GRACE = 20.0
"""Seconds that a process has to save what it has finished, when it is asked to stop."""


@dataclass(frozen=True)
class Workers:
    """The processes that compute while this one waits and concludes."""

    processes: tuple[BaseProcess, ...]

    def wait_for(self, plan: "Plan", folder: Path, progress: "Progress") -> None:
        """Return once all cells are there, or when nobody is left who computes them."""
        store, total = CellStore(plan, folder), len(plan.cells)
        with interrupts() as stop:
            while any(process.is_alive() for process in self.processes):
                missing = len(store.missing())
                if not missing and not store.claimed():
                    return
                progress(f"{total - missing} of {total} cells", 1 - missing / total)
                if stop.requested:
                    raise Stopped(
                        f"stopped: {total - missing} of {total} cells of {plan.study} are saved in "
                        f"{folder}; the same command goes on from there"
                    )
                time.sleep(_PATIENCE)


@contextmanager
def workers(count: int, name: str, out: Path, request: "Request") -> Iterator[Workers]:
    """So many processes that compute the cells of a study, or of all, until the block's end."""
    # JAX would keep three quarters of a GPU's memory for the first process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    started = tuple(
        context.Process(target=_work, args=(name, out, request), daemon=True) for _ in range(count)
    )
    for process in started:
        process.start()
    try:
        yield Workers(started)
    finally:
        for process in started:
            process.terminate()
        until = time.monotonic() + _GRACE
        for process in started:
            process.join(max(until - time.monotonic(), 0.1))
            process.kill()


def _work(name: str, out: Path, request: "Request") -> None:
    """What a worker does: whatever is nobody's, study by study."""
    from apportion.studies.registry import asked_for

    # Ctrl-C reaches every process of a terminal; the first one hears it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is wrong with a cell the first process says, when it comes to compute it itself.
    with suppress(Exception):
        for one in distinct(asked_for(name, out, request)).values():
            compute_unclaimed(one.plan, one.folder, command=one.command)


def distinct(asked: "Mapping[str, Asked]") -> "dict[str, Asked]":
    """The studies without those that will adopt the cells of one before them."""
    first: dict[str, str] = {}
    for study, one in asked.items():
        first.setdefault(one.plan.digest, study)
    return {study: asked[study] for study in first.values()}
