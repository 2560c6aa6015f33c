"""Files written atomically, in folders that are free, writable and one process's alone.

A file is written under a temporary name, synced, then renamed, so that a crash leaves the old file
or the new one. Files of arrays and of rows carry the SHA-256 of the whole file in their header, others
have it in the `SHA256SUMS` beside them, so that a truncated or changed file is detected when it is read.
They are ordinary safetensors and Parquet; nothing in them is ever executed.
"""

import hashlib
import io
import json
import math
import os
import re
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.numpy import load, save

from apportion.errors import InputError, reading

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SUMS = "SHA256SUMS"
"""The file of checksums beside others; `sha256sum -c SHA256SUMS` reads it too."""
LOCK = ".lock"
"""The file that says who writes in a folder."""
_OWNS = ("settings.toml", "cells.json", "study.json")
"""What the folder of a run or a study has."""
_BLANK = b"0" * 64
# The description is JSON inside the header's JSON, hence the backslashes.
_DIGEST = rb"{\"sha256\": \""
_OF_ROWS = re.compile(rb"apportion-sha256:(.{64})", re.DOTALL)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file atomically: a crash at any moment leaves the old content or the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # The rename is on disk once the folder is. Windows has no such call: it cannot open a folder.
    if sys.platform != "win32":
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(unfinished: Iterable[Path]) -> None:
    """Remove what processes left that died in a save."""
    for path in unfinished:
        path.unlink(missing_ok=True)


@contextmanager
def checksummed(folder: Path, *names: str) -> Iterator[None]:
    """Files of these names that are there at the block's end are from then on held against their sum.

    While they are written they have none: whoever dies in between leaves no sum of another content. What
    a process left unfinished that died in an earlier save of them is removed.
    """
    for name in (*names, SUMS):
        _remove(folder.glob(f".{name}.[0-9]*.part"))
    others = {name: digest for name, digest in _sums(folder).items() if name not in names}
    if _sums(folder) != others:
        _write_sums(folder, others)
    yield
    own = {
        name: _sha256((folder / name).read_bytes()) for name in names if (folder / name).exists()
    }
    _write_sums(folder, others | own)


def _sums(folder: Path) -> dict[str, str]:
    """Names and checksums, as far as the folder has them."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("  ") for line in lines)
    return {name: digest for digest, _, name in pairs if name}


def _write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    write_atomic(folder / SUMS, "".join(lines).encode())


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def write_figure(path: Path, figure: "Figure", **options: Any) -> None:
    """Write a figure as PNG, atomically; options as for `savefig`."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", **options)
    write_atomic(path, picture.getvalue())


def to_json(content: Any, indent: int | None = None) -> str:
    """Strict JSON: a number that is not finite, which JSON cannot express, becomes null.

    >>> to_json({"low": float("-inf"), "n": 1})
    '{"low": null, "n": 1}'
    """
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def read_bytes(path: Path | str, missing: str = "put it back from a copy") -> bytes:
    """What a file holds; one sentence says why it cannot be read, and what to do where it is missing.

    One that has a checksum beside it and does not match it is refused.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
            raise InputError(
                f"{path}: is a pipe or a device, which cannot be read twice; save what it holds to a file"
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; {missing}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if _sums(path.parent).get(path.name, digest := _sha256(raw)) != digest:
        raise InputError(
            f"{path}: the checksum in {SUMS} does not match, the file was cut short or changed; "
            "put it back from a copy"
        )
    return raw


def read_json(path: Path, *, missing: str = "put it back from a copy") -> Any:
    """What a file of strict JSON holds, or one sentence on what is wrong with it.

    NaN and Infinity, of which JSON knows nothing, and numbers too large are refused.
    """
    raw = read_bytes(path, missing)
    try:
        return json.loads(raw.decode(), parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not valid JSON ({error}); it is damaged, so put it back from a copy"
        ) from None


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text if len(text) < 20 else text[:16] + '...'} is no number")
    return value


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_atomic(path, (to_json(content, indent=1) + "\n").encode())


def pack(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> bytes:
    """Arrays and their JSON description as safetensors bytes that carry their own checksum."""
    # One entry only: the order of several would differ from one save to the next.
    metadata = {"apportion": json.dumps({"sha256": _BLANK.decode(), "about": about})}
    # Safetensors writes what lies in memory, so every array must be in C order.
    raw = save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata)
    assert _DIGEST + _BLANK in raw, "the header has room for the checksum"
    return raw.replace(_DIGEST + _BLANK, _DIGEST + _sha256(raw).encode(), 1)


def unpack(raw: bytes, source: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and description from the bytes of `pack`.

    Raises
    ------
    InputError
        The bytes are incomplete, changed, or were made by something else.
    """
    size = int.from_bytes(raw[:8], "little")
    try:
        note = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["apportion"])
        digest, about = note["sha256"].encode(), dict(note["about"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(
            f"{source}: not a file that apportion wrote, or its header is damaged; "
            "give one made by apportion"
        ) from None
    blank = raw.replace(_DIGEST + digest, _DIGEST + _BLANK, 1)
    if _sha256(blank).encode() != digest:
        raise InputError(
            f"{source}: the checksum does not match, the file was cut short or changed; "
            "use another copy"
        )
    try:
        return load(raw), about
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{source}: unreadable arrays ({error}); use another copy") from None


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Save named arrays with a description, atomically.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "numbers.safetensors"
    >>> write_arrays(path, {"x": np.arange(3)}, {"kind": "numbers"})
    >>> arrays, about = read_arrays(path)
    >>> arrays["x"].tolist(), about
    ([0, 1, 2], {'kind': 'numbers'})
    """
    write_atomic(path, pack(arrays, about))


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read what `write_arrays` wrote; any other content is refused."""
    return unpack(read_bytes(path), str(path))


def pack_rows(frame: "pd.DataFrame") -> bytes:
    """A table as Parquet bytes that carry their own checksum."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    mark = {b"checksum": b"apportion-sha256:" + _BLANK}
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        table.replace_schema_metadata({**(table.schema.metadata or {}), **mark}),
        sink,
        compression="zstd",
    )
    raw = sink.getvalue().to_pybytes()
    return raw.replace(mark[b"checksum"], b"apportion-sha256:" + _sha256(raw).encode())


def read_rows(path: Path, way_out: str) -> "pd.DataFrame":
    """The table of a file that `pack_rows` made; one that was changed since is refused.

    A file without a checksum, which earlier versions wrote, is read as it is.
    """
    import pandas as pd

    raw = read_bytes(path, way_out)
    marked = _OF_ROWS.search(raw)
    if marked is not None:
        blank = raw.replace(marked[1], _BLANK)
        if _sha256(blank).encode() != marked[1]:
            raise InputError(
                f"{path}: the checksum does not match, the file was cut short or changed; {way_out}"
            )
    with reading(path, way_out):
        return pd.read_parquet(io.BytesIO(raw))


def require_new(file: Path, *, force: bool = False) -> None:
    """Refuse to write over a file; with `force` only one of a run or a study is refused."""
    if not os.path.lexists(file):
        return
    owner = next(
        (p for p in file.resolve().parents if any((p / name).exists() for name in _OWNS)), None
    )
    if owner is not None:
        raise InputError(f"{file}: is a file of {owner} and never replaced; choose another place")
    if not force:
        raise InputError(
            f"{file}: is there already; choose another place, or --force to replace it"
        )


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make the folder and lock it: a second process that wants to write there is refused.

    The operating system releases the lock when its holder ends, however it ends. The file stays, and
    says that whatever is unfinished beside it is ours. What a killed save left is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(
            f"{folder}: another process is writing in it; wait for it or stop it"
        ) from None
    try:
        _remove(folder.rglob(".*.[0-9]*.part"))
        yield
    finally:
        lock.release()


def require_free(folder: Path, *, unfinished: Collection[str] = ()) -> None:
    """Refuse a folder in which nothing new can be written: others' files are never overwritten.

    Files called as in `unfinished` may be there where our lock is too: a process that was killed left
    them.
    """
    if (folder / "settings.toml").exists():
        raise InputError(
            f"{folder}: already holds a run; continue it with `apportion resume {folder}`, or "
            "choose another folder"
        )
    require_writable(folder)
    ours = unfinished if (folder / LOCK).exists() else ()
    names = [entry.name for entry in folder.glob("*") if not entry.name.startswith(".")]
    files = sorted(name for name in names if name not in ours)
    if files:
        raise InputError(
            f"{folder}: holds other files, such as {files[0]}; choose a new or an empty folder"
        )


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, before any work is done for it."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; choose a folder")
    parent = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    if not parent.is_dir():
        raise InputError(f"{folder}: {parent} is a file; choose a folder that can be made")
    try:
        # Tried, for what the system says of rights is not always so; nothing is left behind.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError:
        raise InputError(
            f"{folder}: {parent} cannot be written to; choose another folder"
        ) from None
