"""The cells of a study in its folder, each saved as soon as it is finished: a study goes on.

cells.json           which plan the cells are of
cells/NAME.parquet   the rows of a finished cell, while others are missing
rows.parquet         the rows of all cells
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from filelock import FileLock, Timeout

from apportion.errors import InputError, first_line
from apportion.runs.atomic import read_json, write_atomic, write_json
from apportion.studies.cells import Cell, Plan, batches


@dataclass(frozen=True)
class CellStore:
    """The cells of a plan in a folder: those that are there, and where the next one goes."""

    plan: Plan
    folder: Path

    def open(self) -> "CellStore":
        """Make the folder this plan's; one that holds cells of other settings is refused."""
        self.check()
        content = {"study": self.plan.study, "digest": self.plan.digest}
        write_json(self.folder / "cells.json", content)
        return self

    def check(self) -> None:
        """Refuse a folder that holds cells of other settings."""
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file; choose a folder")
        if _digest_in(self.folder) not in (None, self.plan.digest):
            raise InputError(
                f"{self.folder}: holds cells of a study with other settings or data; choose another "
                "folder, or give the settings it was begun with"
            )

    def adopt(self, others: Sequence[Path]) -> Path | None:
        """Take the finished rows of a sibling study that computes the very same cells; say whose."""
        if (self.folder / "rows.parquet").exists():
            return None
        for other in others:
            rows = other / "rows.parquet"
            if rows.exists() and _digest_in(other) == self.plan.digest:
                self.open()
                write_atomic(self.folder / "rows.parquet", rows.read_bytes())
                return other
        return None

    def missing(self, cells: Sequence[Cell] | None = None) -> list[Cell]:
        """Cells whose rows are not there yet, of these or of all, in their order."""
        wanted = self.plan.cells if cells is None else cells
        missing = [cell for cell in wanted if not self._file(cell).exists()]
        # Looked for last, because another process may just have put the cells together.
        return [] if (self.folder / "rows.parquet").exists() else missing

    def save(self, cell: Cell, rows: pd.DataFrame) -> None:
        """Keep a finished cell's rows, at one stroke."""
        content = rows.assign(cell=cell.name).to_parquet(index=False, compression="zstd")
        # Another process may just be putting all cells together, and then removes the single ones.
        with self.lock():
            if not (self.folder / "rows.parquet").exists():
                write_atomic(self._file(cell), content)

    def rows(self) -> pd.DataFrame:
        """The rows of all cells, in the plan's order; once all are there they are one file."""
        whole = self.folder / "rows.parquet"
        missing = self.missing()
        if missing:
            raise InputError(
                f"{self.folder}: {len(missing)} of {len(self.plan.cells)} cells are missing "
                f"(first: {missing[0].name}); compute them with the same command without --draw"
            )
        with self.lock():
            if not whole.exists():
                frames = [_read_rows(self._file(cell), [cell]) for cell in self.plan.cells]
                write_atomic(whole, self._together(frames))
            for needless in ("cells", ".claims"):
                shutil.rmtree(self.folder / needless, ignore_errors=True)
        return _read_rows(whole, self.plan.cells)

    def _together(self, frames: list[pd.DataFrame]) -> bytes:
        try:
            whole = pd.concat(frames, ignore_index=True)
            return whole.to_parquet(index=False, compression="zstd")
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{self.folder / 'cells'}: the cells do not fit together ({first_line(error)}); remove "
                "the one that was changed, and the same command computes it again"
            ) from None

    @contextmanager
    def claim(self, cells: Sequence[Cell]) -> Iterator[bool]:
        """Whether cells that are computed together are this process's to compute, until the block's end.

        Another process may be at them; one that dies gives its cells back.
        """
        folder = self.folder / ".claims"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{cells[0].name}.lock", blocking=False)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def complete(self) -> bool:
        """Whether all cells are there, and no process is about to say how long they took."""
        return not self.missing() and not self._claimed()

    def _claimed(self) -> bool:
        for program in batches(self.plan.cells):
            with self.claim(program) as ours:
                if not ours:
                    return True
        return False

    def lock(self) -> FileLock:
        """Held while files are rewritten, for several processes may compute cells in one folder."""
        return FileLock(self.folder / ".lock")

    def _file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.parquet"


def _digest_in(folder: Path) -> str | None:
    mark = folder / "cells.json"
    if not mark.exists():
        return None
    content = read_json(mark)
    if not isinstance(content, dict) or not isinstance(content.get("digest"), str):
        raise InputError(f"{mark}: is damaged; put it back from a copy")
    return content["digest"]


def _read_rows(path: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """The rows of these cells, in their order; a file of anything else is refused."""
    try:
        rows = pd.read_parquet(path)
        names = list(dict.fromkeys(rows["cell"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        names, rows, reason = [], pd.DataFrame(), first_line(error)
    else:
        reason = "it holds rows of other cells"
    if names != [cell.name for cell in cells]:
        raise InputError(
            f"{path}: is not what the study wrote ({reason}); put it back, or remove it, and the same "
            "command computes it again"
        )
    return rows
