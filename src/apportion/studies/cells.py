"""A study as independent cells, each computed once: a method, a year, an experiment or a seed.

A `Plan` lists its cells, computes those it is handed and turns the rows of all of them into a `Study`.
Cells that share a program are computed as one batch, a `vmap` over cells; several devices share a
batch. Every cell's rows are saved when they are there, so that a study that was stopped goes on.

    cells/NAME.parquet   the rows of a finished cell, while others are missing
    rows.parquet         the rows of all cells
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pandas as pd

from apportion.errors import InputError
from apportion.runs.atomic import write_atomic

if TYPE_CHECKING:
    from apportion.studies.study import Study

Progress = Callable[[str, float], None]
"""Called with what was just done and the fraction of all work done so far."""


@dataclass(frozen=True)
class Cell:
    """One independent part of a study.

    Examples
    --------
    >>> Cell("mtl-2019-0", {"method": "mtl", "year": 2019, "experiment": 0}, program="mtl")["year"]
    2019
    """

    name: str
    """Unique in its study, and fit to be a file's name."""
    values: dict[str, Any] = field(compare=False)
    """What the cell is, in plain values."""
    program: str = ""
    """Cells of one program are computed together."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


Rows = Iterator[tuple[Cell, pd.DataFrame]]


@dataclass(frozen=True)
class Plan:
    """What a study computes, and what it concludes from it.

    Functions are module-level ones or `functools.partial` of them, so that a plan can be sent to
    another machine.
    """

    study: str
    cells: tuple[Cell, ...]
    compute: Callable[[Sequence[Cell], Progress], Rows]
    """The rows of cells of one program, each as soon as it is finished. A cell's rows depend on the cell
    alone, not on the others in its batch."""
    conclude: "Callable[[pd.DataFrame, dict[str, Any]], Study]"
    """Figure and verdicts from the rows of all cells, in the plan's order, and the settings."""
    settings: dict[str, Any]
    """Everything needed to run it again, in plain values; cells of other settings are refused."""
    family: str = ""
    """Studies of one family and equal settings share their cells."""

    @property
    def digest(self) -> str:
        """What the cells of two plans must agree in to be exchanged."""
        names = [cell.name for cell in self.cells]
        whole = {"family": self.family or self.study, "cells": names, "settings": self.settings}
        content = json.dumps(whole, sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class CellStore:
    """The cells of a plan in a folder: those that are there, and where the next one goes."""

    plan: Plan
    folder: Path

    def open(self) -> "CellStore":
        """Make the folder this plan's; one that holds cells of other settings is refused."""
        mark = self.folder / "cells.json"
        if mark.exists() and json.loads(mark.read_text()).get("digest") != self.plan.digest:
            raise InputError(
                f"{self.folder}: holds cells of a study with other settings or data; choose another "
                "folder, or give the settings it was begun with"
            )
        content = {"study": self.plan.study, "digest": self.plan.digest}
        write_atomic(mark, (json.dumps(content, indent=1) + "\n").encode())
        return self

    def adopt(self, others: Sequence[Path]) -> None:
        """Take the finished rows of a sibling study that computes the very same cells."""
        if (self.folder / "rows.parquet").exists():
            return
        for other in others:
            mark, rows = other / "cells.json", other / "rows.parquet"
            if mark.exists() and rows.exists():
                if json.loads(mark.read_text()).get("digest") == self.plan.digest:
                    write_atomic(self.folder / "rows.parquet", rows.read_bytes())
                    return

    def missing(self) -> list[Cell]:
        """Cells whose rows are not there yet, in the plan's order."""
        if (self.folder / "rows.parquet").exists():
            return []
        return [cell for cell in self.plan.cells if not self._file(cell).exists()]

    def save(self, cell: Cell, rows: pd.DataFrame) -> None:
        """Keep a finished cell's rows, at one stroke."""
        write_atomic(self._file(cell), _parquet(rows.assign(cell=cell.name)))

    def rows(self) -> pd.DataFrame:
        """The rows of all cells, in the plan's order; once all are there they are one file."""
        whole = self.folder / "rows.parquet"
        if not whole.exists():
            missing = self.missing()
            if missing:
                raise InputError(
                    f"{self.folder}: {len(missing)} of {len(self.plan.cells)} cells are missing "
                    f"(first: {missing[0].name}); compute them with the same command without --draw"
                )
            frames = [pd.read_parquet(self._file(cell)) for cell in self.plan.cells]
            write_atomic(whole, _parquet(pd.concat(frames, ignore_index=True)))
        for cell in self.plan.cells:
            self._file(cell).unlink(missing_ok=True)
        return pd.read_parquet(whole)

    def _file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.parquet"


def _parquet(rows: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    rows.to_parquet(buffer, index=False, compression="zstd")
    return buffer.getvalue()


def share_of(cells: Sequence[Cell], share: str) -> list[Cell]:
    """The I-th of N shares of the cells, as `--cells I/N` names it, programs kept together.

    >>> [cell.name for cell in share_of([Cell(n, {}) for n in "abcde"], "2/2")]
    ['d', 'e']
    """
    place, _, parts = share.partition("/")
    if not (place.isdigit() and parts.isdigit() and 1 <= int(place) <= int(parts)):
        raise InputError(f"cells {share!r}: write I/N with 1 <= I <= N, such as 1/4")
    bounds = np.linspace(0, len(cells), int(parts) + 1).round().astype(int)
    return list(cells[bounds[int(place) - 1] : bounds[int(place)]])


def batches(cells: Sequence[Cell], devices: int = 1) -> list[list[Cell]]:
    """Cells of one program together, split evenly among devices."""
    programs: dict[str, list[Cell]] = {}
    for cell in cells:
        programs.setdefault(cell.program, []).append(cell)
    found = []
    for members in programs.values():
        bounds = np.linspace(0, len(members), min(devices, len(members)) + 1).round().astype(int)
        found += [members[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    return found


def compute_here(
    plan: Plan,
    cells: Sequence[Cell],
    save: Callable[[Cell, pd.DataFrame], None],
    progress: Progress,
) -> None:
    """Compute cells on this machine's devices, each device a share of every program's cells."""
    devices = jax.local_devices()
    work = batches(cells, len(devices))
    done = dict.fromkeys(range(len(work)), 0.0)

    def one(number: int) -> None:
        def tell(what: str, fraction: float) -> None:
            done[number] = fraction * len(work[number])
            progress(what, sum(done.values()) / len(cells))

        with jax.default_device(devices[number % len(devices)]):
            for cell, rows in plan.compute(work[number], tell):
                save(cell, rows)
        done[number] = len(work[number])

    if len(devices) == 1:
        for number in range(len(work)):
            one(number)
        return
    with ThreadPoolExecutor(len(devices)) as pool:
        for finished in [pool.submit(one, number) for number in range(len(work))]:
            finished.result()
