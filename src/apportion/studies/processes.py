"""Studies in several processes of this machine: whoever is free takes the cells of the next program.

One process seldom fills a GPU, and hands a study's cells to one processor where they do not fill all.
Each process claims a program's cells in the study's folder before it computes them, so that none are
computed twice; the cells of a process that dies are free again, and the first process computes them.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from apportion.runs.runner import Stopped, interrupts
from apportion.studies.store import CellStore

if TYPE_CHECKING:
    from apportion.studies.cells import Plan, Progress

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
def workers(count: int, work: Callable[[], None]) -> Iterator[Workers]:
    """So many processes that do some work, until the block's end."""
    # JAX would keep three quarters of a GPU's memory for the first process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    started = tuple(context.Process(target=_begin, args=(work,), daemon=True) for _ in range(count))
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


def _begin(work: Callable[[], None]) -> None:
    """What a process does: its work, and nothing else."""
    # Ctrl-C reaches every process of a terminal; the first one hears it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is wrong with a cell the first process says, when it comes to compute it itself.
    with suppress(Exception):
        work()
