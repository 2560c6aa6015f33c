"""A study in its folder: the missing cells computed and saved one by one, then table, figure, verdicts.

A study that is stopped, or dies, goes on from its saved cells when it is started again with the same
settings; the cells may also be computed in shares, at several places.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from apportion.errors import InputError
from apportion.runs.runner import Stopped, interrupts
from apportion.studies.cells import Cell, Place, Plan, Progress, ThisMachine, share_of
from apportion.studies.record import Record, stretches_in
from apportion.studies.store import CellStore
from apportion.studies.study import Study

_RECORD_EVERY = 1.0
"""Seconds between two notes in `study.json` of how many cells there are."""


@dataclass(frozen=True)
class Performed:
    """A study after one invocation: concluded, or with cells still missing."""

    name: str
    folder: Path
    study: Study | None
    cells: int
    missing: int
    computing: tuple[dict[str, Any], ...] = ()
    """Every stretch of computing it took; `seconds_of` adds them up."""


def complete(
    plan: Plan,
    folder: Path,
    *,
    place: Place | None = None,
    cells: str = "",
    draw: bool = False,
    progress: Progress = lambda what, fraction: None,
    command: str = "",
) -> Performed:
    """Compute what is missing of a plan and, when all cells are there, conclude.

    Parameters
    ----------
    plan
        The study.
    folder
        Where its files are; the rows of a study of the same family beside it are adopted.
    place
        Where to compute; this machine unless given.
    cells
        `I/N` computes the I-th of N shares of the cells alone.
    draw
        Compute nothing: conclude from the cells that are there.
    progress
        Called with what is being done and the fraction done.
    command
        How to compute the same again, for `study.json`.
    """
    store = CellStore(plan, Path(folder))
    store.check()
    adopted = store.adopt(_siblings(store)) if plan.family else None
    record = Record(store, command)
    due = store.missing(share_of(plan.cells, cells) if cells else None)
    if due and not draw:
        _compute(store, due, place or ThisMachine(), record, progress)
    missing = len(store.missing())
    if missing and not draw:
        computing = tuple(stretches_in(store.folder))
        return Performed(plan.study, store.folder, None, len(plan.cells), missing, computing)
    study = conclude(store)
    computing = stretches_in(store.folder) or ([] if adopted is None else stretches_in(adopted))
    with store.lock():
        study.save(store.folder, record.facts(computing))
    return Performed(plan.study, store.folder, study, len(plan.cells), 0, tuple(computing))


def compute_unclaimed(store: CellStore, program: Sequence[Cell], *, command: str = "") -> bool:
    """Compute what is missing of a program's cells, unless another process is at them; conclude nothing.

    Returns
    -------
    bool
        Whether there was anything to compute.
    """
    if not store.missing(program):
        return False
    with store.claim(program) as ours:
        # Who was at them before may have finished them meanwhile.
        due = store.missing(program) if ours else []
        if due:
            _compute(store, due, ThisMachine(), Record(store, command))
    return bool(due)


def conclude(store: CellStore) -> Study:
    """Table, figure and verdicts from the rows of all cells.

    Raises
    ------
    InputError
        Cells are missing, or a file in the folder is not what the study wrote.
    """
    rows = store.rows()
    try:
        return store.plan.conclude(rows, store.plan.settings)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"{store.folder / 'rows.parquet'}: nothing can be concluded from it "
            f"({type(error).__name__}: {error}); put back what the study wrote, and if this is what it "
            "wrote, please report a bug in apportion"
        ) from error


def _siblings(store: CellStore) -> list[Path]:
    """The folders of studies beside this one."""
    return sorted(mark.parent for mark in store.folder.absolute().parent.glob("*/cells.json"))


def _compute(
    store: CellStore,
    due: Sequence[Cell],
    place: Place,
    record: Record,
    progress: Progress = lambda what, fraction: None,
) -> None:
    """Compute cells and save each, until all are there or the user asks to stop."""
    store.open()
    saved, recorded = 0, -math.inf
    with interrupts() as stop:

        def stop_if_requested() -> None:
            if stop.requested:
                total = len(store.plan.cells)
                there = total - len(store.missing())
                raise Stopped(
                    f"stopped: {there} of {total} cells of {store.plan.study} are saved in "
                    f"{store.folder}; the same command goes on from there"
                )

        def report(what: str, fraction: float) -> None:
            progress(what, fraction)
            stop_if_requested()

        def save(cell: Cell, rows: pd.DataFrame) -> None:
            nonlocal saved, recorded
            store.save(cell, rows)
            saved += 1
            # A program may end with a hundred cells at once, and others wait for the record.
            if time.monotonic() - recorded > _RECORD_EVERY:
                record.write(place.device(store.plan), saved)
                recorded = time.monotonic()
            stop_if_requested()

        try:
            place.compute(store.plan, due, save, report)
        finally:
            record.write(place.device(store.plan), saved)
