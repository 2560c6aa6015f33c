"""Studies in several processes of this machine: whoever is free takes the cells of the next program.

One process seldom fills a GPU, and hands a study's cells to one processor where they do not fill all.
Each process claims a program's cells in the study's folder before it computes them, so that none are
computed twice; the cells of a process that dies are free again, for whoever comes by next. The first
process computes nothing while others do: it concludes each study whose cells are there.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from apportion.runs.runner import Stop, Stopped, interrupts
from apportion.studies.folder import compute_unclaimed
from apportion.studies.store import CellStore

if TYPE_CHECKING:
    from apportion.studies.cells import Cell, Progress

_PATIENCE = 0.5
"""Seconds between two looks at the folders."""
_GRACE = 20.0
"""Seconds that a process has to save what it has finished, when it is asked to stop."""


@dataclass(frozen=True)
class Workers:
    """The processes that compute while this one waits and concludes."""

    processes: tuple[BaseProcess, ...] = ()
    stop: Stop = field(default_factory=Stop)

    def completed(self, stores: dict[str, CellStore], progress: "Progress") -> Iterator[str]:
        """Each study as soon as its cells are there; then those that nobody is left to compute.

        Raises
        ------
        Stopped
            The user asked to stop.
        """
        waiting = dict(stores)
        total = sum(len(store.plan.cells) for store in stores.values())
        while waiting:
            alive = any(process.is_alive() for process in self.processes)
            there = total - sum(len(store.missing()) for store in waiting.values())
            for study in [name for name, one in waiting.items() if not alive or one.complete()]:
                self._heed(stores, there, total)
                del waiting[study]
                yield study
            if alive:
                progress(f"{there} of {total} cells", there / total)
                self._heed(stores, there, total)
                time.sleep(_PATIENCE)

    def _heed(self, stores: dict[str, CellStore], there: int, total: int) -> None:
        """Stop where the user has asked to."""
        if self.stop.requested:
            studies = " and ".join(stores) if len(stores) < 3 else f"{len(stores)} studies"
            folder = os.path.commonpath([store.folder for store in stores.values()])
            raise Stopped(
                f"stopped: {there} of {total} cells of {studies} are saved in {folder}; the same command "
                "goes on from there"
            )


def compute_in_turn(programs: Sequence[tuple[CellStore, Sequence["Cell"], str]]) -> None:
    """Compute whatever is nobody's, program after program, until nothing is: cells of a store, command.

    What a process leaves that dies, or that finds a GPU's memory full, is taken in the next round.
    """
    while sum(_attempt(*program) for program in programs):
        pass


def _attempt(store: CellStore, program: Sequence["Cell"], command: str) -> bool:
    """Whether there was anything to compute, and it is done."""
    try:
        return compute_unclaimed(store, program, command=command)
    except Stopped:
        raise
    except Exception:
        # What is wrong with a cell the first process says, when it comes to compute it itself.
        return False


@contextmanager
def workers(count: int, work: Callable[[int], None]) -> Iterator[Workers]:
    """So many processes that do some work, each with its number, until the block's end."""
    # JAX would keep three quarters of a GPU's memory for the first process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    started = tuple(
        context.Process(target=_begin, args=(work, number), daemon=True) for number in range(count)
    )
    # Also while a study is concluded: without this process nobody would end the others.
    with interrupts() as stop:
        for process in started:
            process.start()
        try:
            yield Workers(started, stop)
        finally:
            for process in started:
                process.terminate()
            until = time.monotonic() + _GRACE
            for process in started:
                process.join(max(until - time.monotonic(), 0.1))
                process.kill()


def _begin(work: Callable[[int], None], number: int) -> None:
    """What a process does: its work, and nothing else."""
    # Ctrl-C reaches every process of a terminal; the first one hears it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    with suppress(Exception):
        work(number)


def _end_with_the_first() -> None:
    """Ask this process to stop once the first one is gone, which may have been killed."""
    first = multiprocessing.parent_process()
    if first is not None:
        first.join()
        os.kill(os.getpid(), signal.SIGTERM)
