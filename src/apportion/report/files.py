"""The files of a run or a study, read, or one sentence on what is wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from apportion.errors import InputError
from apportion.runs import settings

_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".parquet": pd.read_parquet,
    ".csv": pd.read_csv,
}


def table_path(folder: Path, name: str) -> Path | None:
    """Where a table of the folder is, if it has it."""
    return next((path for s in _READERS if (path := folder / (name + s)).exists()), None)


def read_table(folder: Path, name: str, *, indexed: bool = False) -> pd.DataFrame | None:
    """A table of the folder, CSV or Parquet; `indexed` by its first column."""
    path = table_path(folder, name)
    if path is None:
        return None
    try:
        frame = _READERS[path.suffix](path)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: cannot be read as a table ({error}); write it again") from error
    if indexed and isinstance(frame.index, pd.RangeIndex):
        frame = frame.set_index(frame.columns[0])
    return frame


def read_json(path: Path) -> Any:
    """What the file says; nothing, as an empty mapping, where there is none."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); write it again") from error


def read_toml(path: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none."""
    return settings.read_toml(path) if path.exists() else {}
