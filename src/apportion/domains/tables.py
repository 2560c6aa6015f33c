"""Validated reading of tables, and results that are tables. Importing this module does not import JAX."""

import stat
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from apportion.errors import InputError, reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_day(day: str | np.datetime64) -> np.datetime64:
    """Convert text to a calendar day."""
    try:
        return np.datetime64(date.fromisoformat(str(day)), "D")
    except ValueError:
        raise InputError(f"date {str(day)!r} is not a day; write it as 2019-01-02") from None


def require_file(path: Path | str, what: str) -> Path:
    """Raise InputError unless `path` is a regular file; `what` names the expected file."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the path of {what}") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"{path}: cannot be read ({reason}); give the path of {what}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder; give the path of {what}")
    if not stat.S_ISREG(mode):
        raise InputError(
            f"{path}: is a pipe or a device, which cannot be read twice; save its content to a file, "
            f"and give the path of {what}"
        )
    return path


def require_finite(numbers: ArrayLike, what: str) -> np.ndarray:
    """Return the numbers as an array; raise InputError if one is not finite."""
    values = np.asarray(numbers)
    if not np.isfinite(values).all():
        raise InputError(
            f"{what} has numbers that are not finite; use another copy or train it again"
        )
    return values


def read_parquet(path: Path) -> pd.DataFrame:
    """Read a Parquet file after validating its text columns, which pandas does not check."""
    import pyarrow.parquet

    pyarrow.parquet.read_table(path).validate(full=True)
    return pd.read_parquet(path)


def load_table(path: Path, what: str) -> pd.DataFrame:
    """Read a Parquet file with its types, or a CSV file as text; the index is the row in the file.

    CSV values such as 000001 or NA stay text and are not parsed as numbers or missing values.
    """
    require_file(path, f"a CSV or Parquet file of {what}")
    with reading(path, "save it as a plain CSV or Parquet table"):
        if path.suffix.lower() in (".parquet", ".pq"):
            return read_parquet(path).reset_index(drop=True)
        with path.open(encoding="utf-8", errors="replace") as file:
            names = file.readline(10_000)
        if ";" in names and "," not in names:
            raise InputError(
                f'{path}: its fields are separated by ";"; write commas, and points in numbers: '
                f'pd.read_csv("{path.name}", sep=";", decimal=",").to_csv("plain.csv", index=False)'
            )
        text = pd.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False)
    if not isinstance(text.index, pd.RangeIndex):
        raise InputError(f"{path}: rows have more fields than there are names; name every column")
    text = text.fillna("")
    return text.loc[(text != "").any(axis=1)]


@dataclass(frozen=True)
class TableResult:
    """Result that is a table of numbers."""

    table: pd.DataFrame
    """One row per unit, such as a task; one column per compared quantity."""
    label: str = ""
    """The measured quantity."""

    def summary(self) -> str:
        """Return the column means as text."""
        means = (f"{name} {value:.4g}" for name, value in self.to_json().items())
        return f"{self.label or 'mean'}: {', '.join(means)}"

    def to_json(self) -> dict[str, Any]:
        """Return the column means."""
        return {str(name): float(value) for name, value in self.table.mean().items()}

    def to_frame(self) -> pd.DataFrame:
        """Return the table."""
        return self.table

    def plot(self) -> "Figure":
        """Plot a group of bars for each row."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        self.table.plot.bar(ax=figure.subplots(), ylabel=self.label)
        return figure
