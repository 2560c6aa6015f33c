"""A price file as it was written: CSV or Parquet, one row of names or yfinance's two levels.

Names are text and stay what they are: nothing is renamed, numbered or read as a number. Each row knows
its place in the file, so that whoever finds something wrong can say where.
"""

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from apportion.domains.portfolio.trading_days import looks_like_day
from apportion.domains.tables import read_parquet
from apportion.errors import InputError, reading

FIELDS = frozenset(
    ("open", "high", "low", "close", "adj close", "volume", "dividends", "stock splits")
) | {"capital gains", "repaired?"}
"""What a file may say of an instrument on a day, as `field_name` spells it."""
_WORDS = ("date", "ticker")
"""Columns of a long file that hold no numbers."""
_CORNER = {"", "price", "ticker", "date", "datetime", "attributes", "symbols"}
"""What stands above the days where the names have two levels: the levels' names, or nothing."""
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "#N/A", "<NA>", "NaT")
_UNNAMED = re.compile(r"(Unnamed: \d+|__index_level_\d+__|)")
# 1,234 is a thousand and more to some and little more than one to others.
_EITHER = r"-?[1-9]\d{0,2},\d{3}"


@dataclass(frozen=True)
class Table:
    """The columns of a file, by place, under the names it gives them."""

    source: str
    names: tuple[str, ...]
    """Each column's name, without space around it; with two levels the instrument's."""
    written: tuple[str, ...]
    """Each column's name as it stands in the file."""
    fields: tuple[str, ...] | None
    """With two levels, what each column holds of its instrument."""
    frame: Any
    """Columns by place; rows keep their number in the file."""
    unit: str
    first: int

    def place(self, row: int) -> str:
        """Where a reader finds the row of this number: a CSV has lines."""
        return f"{self.unit} {row + self.first}"


def field_name(name: str) -> str:
    """A field as `FIELDS` spells it.

    >>> field_name(" Adj_Close ")
    'adj close'
    """
    plain = re.sub(r"[\s_.-]+", " ", name).strip().lower()
    return "adj close" if plain in ("adjclose", "adjusted close") else plain


def read_table(path: Path) -> Table:
    """Read a file; what it holds is checked by whoever needs it."""
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; give the path of a CSV or Parquet file of daily prices"
        )
    with reading(path, "save it as a plain CSV or Parquet table"):
        if path.suffix.lower() in (".parquet", ".pq"):
            return table_of(_without_index(read_parquet(path)), str(path))
        return _read_csv(path)


def table_of(frame: pd.DataFrame, source: str) -> Table:
    """A data frame as a file would hold it: days in a column, names one or two levels deep."""
    labels = [_label(column) for column in frame.columns]
    by_place = frame.set_axis(range(frame.shape[1]), axis=1).reset_index(drop=True)
    if all(len(label) == 1 for label in labels):
        return _table(source, [name for (name,) in labels], None, by_place, "row", 1)
    # A column of one name, or of one and nothing, holds the days; it comes first, as in a CSV.
    days = [k for k, label in enumerate(labels) if len(set(label) - {""}) < 2]
    order = [*days, *(k for k in range(len(labels)) if k not in days)]
    above, below = ([labels[k][level] for k in order[1:]] for level in (0, -1))
    found = _two_levels(["", *above], ["", *below])
    if len(days) != 1 or found is None or any(len(label) > 2 for label in labels):
        raise InputError(
            f"{source}: the columns' names have several levels, but not one of days and for each "
            "other column a field, such as Close, and a ticker; keep a column of closes for each "
            "ticker"
        )
    by_place = by_place[order].set_axis(range(len(order)), axis=1)
    fields, names = found
    return _table(source, ["".join(labels[days[0]]), *names[1:]], fields, by_place, "row", 1)


def _label(column: object) -> tuple[str, ...]:
    """A column's name by levels; other writers than pandas save a tuple as its text."""
    if isinstance(column, str) and re.fullmatch(r"\(\s*['\"].*,.*\)", column):
        try:
            column = ast.literal_eval(column)
        except (ValueError, SyntaxError):
            return (str(column),)
    return tuple(map(str, column)) if isinstance(column, tuple) else (str(column),)


def _without_index(frame: pd.DataFrame) -> pd.DataFrame:
    """The index as columns, unless it only counts rows."""
    index = frame.index
    if isinstance(index, pd.RangeIndex):
        return frame
    counts = index.name is None and pd.api.types.is_integer_dtype(index.dtype)
    if counts and any("date" in map(str.lower, _label(column)) for column in frame.columns):
        return frame
    if index.nlevels == 1:
        return with_days(frame)
    return frame.reset_index()


def with_days(frame: pd.DataFrame) -> pd.DataFrame:
    """The index as the first column, under its name or none; no other column is renamed for it."""
    # As text, lest the one name becomes two levels beside those that have them.
    name = frame.index.name
    days = frame.index.to_series().reset_index(drop=True)
    rest = frame.reset_index(drop=True)
    columns = [("" if name is None else str(name)), *frame.columns]
    return pd.concat([days, rest], axis=1, ignore_index=True).set_axis(
        pd.Index(columns, dtype=object, tupleize_cols=False), axis=1
    )


def _read_csv(path: Path) -> Table:
    text: dict[str, Any] = {
        "header": None,
        "dtype": str,
        "keep_default_na": False,
        "encoding": "utf-8-sig",
    }
    line, *others = pd.read_csv(path, nrows=1, **text).to_numpy().tolist()[0]
    separator = next((mark for mark in ";\t" if not others and mark in line), ",")
    top = pd.read_csv(path, nrows=20, sep=separator, skip_blank_lines=False, **text)
    rows = top.fillna("").to_numpy().tolist()
    names, fields, headers = _header(rows)
    # The first row tells pandas how many columns there are, so it must not be blank.
    blank = next((k for k, row in enumerate(rows[headers:]) if any(row)), 0)
    # Prices are read as numbers at once, all else as text; where a comma may be decimal, everything is.
    words = {k for k, name in enumerate(names) if k == 0 or field_name(name) in _WORDS}
    if separator != ",":
        words = set(range(len(names)))
    try:
        frame = pd.read_csv(
            path,
            header=None,
            skiprows=headers + blank,
            sep=separator,
            dtype=dict.fromkeys(words, str),
            na_values={k: MISSING for k in range(len(names)) if k not in words},
            keep_default_na=False,
            skip_blank_lines=False,
            low_memory=False,
            encoding="utf-8-sig",
        )
    except pd.errors.EmptyDataError:
        raise InputError(f"{path}: has names but no rows; give a row for each day") from None
    frame = frame.reindex(columns=range(len(names)))
    frame = frame[~(frame.isna() | (frame == "")).all(axis=1)]
    table = _table(str(path), names, fields, frame, "line", headers + blank + 1)
    return table if separator == "," else _with_decimal_points(table)


def _header(rows: list[list[str]]) -> tuple[list[str], list[str] | None, int]:
    """Names, fields where there are any, and how many rows they take."""
    corner = {row[0].strip().lower() for row in rows[:2]}
    found = _two_levels(*rows[:2]) if len(rows) > 1 and corner <= _CORNER else None
    if found is None:
        return rows[0], None, 1
    fields, names = found
    # pandas writes the name of the index in a row of its own.
    labelled = len(rows) > 2 and not any(rows[2][1:]) and not looks_like_day(rows[2][0])
    return [rows[2][0] if labelled else "", *names[1:]], fields, 3 if labelled else 2


def _two_levels(above: list[str], below: list[str]) -> tuple[list[str], list[str]] | None:
    """Fields and instruments, whichever stand above; None where no level holds fields."""
    for fields, names in ((above, below), (below, above)):
        found = {field_name(field) for field in fields[1:]}
        if found <= FIELDS and found & {"close", "adj close"} and all(n.strip() for n in names[1:]):
            return ["", *map(field_name, fields[1:])], names
    return None


def _table(
    source: str,
    names: list[str],
    fields: list[str] | None,
    frame: Any,
    unit: str,
    first: int,
) -> Table:
    """A table without columns that have neither a name nor a value, as a trailing comma makes them."""
    kept = [
        k
        for k, name in enumerate(names)
        if k == 0 or name.strip() or not (frame[k].isna() | (frame[k].astype(str) == "")).all()
    ]
    return Table(
        source,
        tuple(names[k].strip() for k in kept),
        tuple(names[k] for k in kept),
        None if fields is None else tuple(fields[k] for k in kept),
        frame[kept].set_axis(range(len(kept)), axis=1),
        unit,
        first,
    )


def is_unnamed(name: str) -> bool:
    """Whether pandas, and not a person, gave the name."""
    return _UNNAMED.fullmatch(name) is not None


def _with_decimal_points(table: Table) -> Table:
    """Numbers written with a decimal comma, where nothing else can be meant."""
    words = [k for k, name in enumerate(table.names) if k == 0 or field_name(name) in _WORDS]
    numbers = table.frame.drop(columns=words)
    cells = numbers.stack().astype(str).str.strip()
    commas = cells[cells.str.contains(",", regex=False)]
    if not len(commas):
        return table
    points = cells[cells.str.contains(".", regex=False)]
    row, column = commas.index[0]
    where = (
        f'{table.source}: column "{table.names[column]}": "{commas.iloc[0]}" at {table.place(row)}'
    )
    if len(points):
        raise InputError(
            f'{where} has a comma and "{points.iloc[0]}" at {table.place(points.index[0][0])} a '
            "point; write all numbers as 1234.5"
        )
    if commas.str.fullmatch(_EITHER).all():
        raise InputError(
            f"{where} may have a decimal comma or one of thousands, and no other number tells; "
            "write numbers as 1234.5"
        )
    plain = numbers.apply(lambda column: column.str.replace(",", ".", regex=False))
    return replace(table, frame=pd.concat([table.frame[words], plain], axis=1).sort_index(axis=1))
