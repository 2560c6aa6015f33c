"""Atomic writes, checksums and locks for the folders of runs and studies.

A file is written under a temporary name, synced, then renamed, so that a crash leaves either the old file
or the new one. `SHA256SUMS` in the folder of a run, a study or a saved policy holds the checksum of each
file; reading a file that does not match its checksum raises an error. Arrays are stored as safetensors and
tables as Parquet; reading them executes no code.
"""

import hashlib
import io
import json
import math
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
"""The file of checksums in a folder, in the format of `sha256sum`."""
LOCK = ".lock"
"""The file that a process locks while it writes in a folder."""


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file atomically: a crash leaves either the old or the new content."""
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
    # Sync the folder, so that the rename is on disk. Windows cannot open a folder.
    if sys.platform != "win32":
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_unfinished(paths: Iterable[Path]) -> None:
    """Remove the temporary files of processes that died in a save."""
    for path in paths:
        path.unlink(missing_ok=True)


def write_checked(folder: Path, name: str, content: bytes) -> None:
    """Write a new file in the folder of a run or a study, and append its checksum.

    Parameters
    ----------
    folder
        Folder of the run or study, which has the `SHA256SUMS`. This process must be its only writer.
    name
        Path of the file in that folder, such as `cells/NAME.parquet`.
    content
        Content of the file.
    """
    # Write the checksum first: a process killed in between leaves a checksum without a file, never a file
    # without a checksum.
    _append_sum(Path(folder), name, _sha256(content))
    write_atomic(Path(folder) / name, content)


@contextmanager
def checksummed(folder: Path, *names: str) -> Iterator[None]:
    """Record the checksums of the files with these names when the block ends.

    The files may be new or replaced. They have no checksum while the block runs, so a process that dies
    in it leaves no outdated checksum. Temporary files of killed processes are removed.
    """
    for name in (*names, SUMS):
        _remove_unfinished(folder.glob(f".{name}.[0-9]*.part"))
    if any(_find_sum(folder, name) for name in names):
        _write_sums(folder, names, {})
    yield
    made = (name for name in names if (folder / name).exists())
    _write_sums(folder, names, {name: _sha256((folder / name).read_bytes()) for name in made})


def _append_sum(folder: Path, name: str, digest: str) -> None:
    """Append a line, at a cost that does not grow with the number of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / SUMS, "a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        # A process killed during an append leaves a line without a line break.
        new_line = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(new_line + f"{digest}  {name}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _write_sums(folder: Path, names: Sequence[str], sums: Mapping[str, str]) -> None:
    """Replace the lines of these names; remove those of deleted files in subfolders."""
    text = _read_sums(folder)
    lines = {line[66:] or line: line for line in text.splitlines()}
    kept = [
        line
        for name, line in lines.items()
        if name not in names and ("/" not in name or (folder / name).exists())
    ]
    lines = sorted([*kept, *(f"{sums[name]}  {name}" for name in sums)], key=lambda one: one[66:])
    write_atomic(folder / SUMS, "".join(f"{line}\n" for line in lines).encode())


def _read_sums(folder: Path) -> str:
    """Return the content of `SHA256SUMS`, or an empty string."""
    try:
        return (folder / SUMS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def require_recorded(folder: Path, *names: str) -> None:
    """Raise if a finished run has no checksums of these files; warn about missing files."""
    recorded = {line[66:] for line in _read_sums(folder).splitlines()}
    for name in sorted({*names} - recorded):
        raise InputError(
            f"{folder / SUMS}: is missing or does not list {name}, so the file may belong to another run; "
            "restore it from a copy, or train again"
        )
    gone = sorted(name for name in recorded if not (folder / name).exists())
    if gone:
        warnings.warn(
            f"{folder}: {len(gone)} of the run's files are missing, such as {gone[0]}", stacklevel=2
        )


def _find_sum(folder: Path, name: str) -> str | None:
    """Return the last recorded checksum of a name, or None."""
    text = _read_sums(folder)
    place = text.rfind(f"  {name}\n")
    return None if place < 0 else text[max(place - 64, 0) : place]


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def write_figure(path: Path, figure: "Figure", **options: Any) -> None:
    """Write a figure as PNG atomically, with the options of `savefig`."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", **options)
    write_atomic(path, picture.getvalue())


def to_json(content: Any, indent: int | None = None) -> str:
    """Return strict JSON, with null for numbers that are not finite.

    >>> to_json({"low": float("-inf"), "n": 1})
    '{"low": null, "n": 1}'
    """
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def read_bytes(
    path: Path | str,
    missing: str = "restore it from a copy",
    changed: str = "restore it from a copy",
) -> bytes:
    """Return the content of a file.

    Parameters
    ----------
    path
        The file.
    missing, changed
        Advice in the error if there is no such file, and if its content does not match the checksum in the
        `SHA256SUMS` of its folder or of the parent folder. A file without a checksum is not checked.

    Raises
    ------
    InputError
        If the file cannot be read, or does not match its checksum.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
            raise InputError(
                f"{path}: is a pipe or a device, which cannot be read twice; save its content to a file"
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; {missing}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    folder, name = path.parent, path.name
    recorded = _find_sum(folder, name) or _find_sum(folder.parent, f"{folder.name}/{name}")
    if recorded is not None and recorded != _sha256(raw):
        raise InputError(
            f"{path}: the checksum in {SUMS} does not match, the file was truncated or changed; {changed}"
        )
    return raw


def read_json(path: Path, *, missing: str = "restore it from a copy") -> Any:
    """Read a file of strict JSON; NaN, Infinity and numbers that overflow raise an `InputError`."""
    raw = read_bytes(path, missing)
    try:
        return json.loads(raw.decode(), parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not valid JSON ({error}); it is damaged, so restore it from a copy"
        ) from None


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text if len(text) < 20 else text[:16] + '...'} is not a finite number")
    return value


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_atomic(path, encode_json(content))


def encode_json(content: Any) -> bytes:
    """Return the bytes of a JSON file."""
    return (to_json(content, indent=1) + "\n").encode()


def pack(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> bytes:
    """Return arrays and their JSON description as safetensors bytes."""
    # A single entry, because the order of several differs between saves.
    metadata = {"apportion": json.dumps({"about": about})}
    # Safetensors writes the memory of an array, so every array must be in C order.
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata)


def _unpack(raw: bytes, source: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the description from the bytes of `pack`.

    Raises
    ------
    InputError
        If the bytes are incomplete, or `pack` did not write them.
    """
    size = int.from_bytes(raw[:8], "little")
    try:
        # Earlier versions stored a checksum next to `about`.
        note = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["apportion"])
        about = dict(note["about"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{source}: not a file that apportion wrote, or its header is damaged; "
            "pass a file written by apportion"
        ) from None
    try:
        return load(raw), about
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{source}: unreadable arrays ({error}); use another copy") from None


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Save named arrays with a description atomically, and their checksum in `SHA256SUMS`.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "numbers.safetensors"
    >>> write_arrays(path, {"x": np.arange(3)}, {"kind": "numbers"})
    >>> arrays, about = read_arrays(path)
    >>> arrays["x"].tolist(), about
    ([0, 1, 2], {'kind': 'numbers'})
    """
    with checksummed(path.parent, path.name):
        write_atomic(path, pack(arrays, about))


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file that `write_arrays` wrote; other content raises an `InputError`."""
    return _unpack(read_bytes(path), str(path))


def pack_rows(frame: "pd.DataFrame") -> bytes:
    """Return a table as Parquet bytes, without its index."""
    return frame.to_parquet(compression="zstd", index=False)


def read_rows(path: Path, way_out: str) -> "pd.DataFrame":
    """Read a table from a file with the content of `pack_rows`, and check its checksum."""
    import pandas as pd

    raw = read_bytes(path, way_out, way_out)
    with reading(path, way_out):
        return pd.read_parquet(io.BytesIO(raw))


def require_new(file: Path) -> None:
    """Raise if the file exists."""
    if os.path.lexists(file):
        raise InputError(f"{file}: already exists; choose another path, or remove it")


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Create the folder and lock it; raise if another process has the lock.

    The operating system releases the lock when the process ends. The lock file remains and marks the
    folder as ours. Temporary files of killed processes are removed.
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
        _remove_unfinished(folder.rglob(".*.[0-9]*.part"))
        yield
    finally:
        lock.release()


def require_free(folder: Path, *, unfinished: Collection[str] = ()) -> None:
    """Raise if a folder has files or cannot be written to; existing files are never overwritten.

    Files named in `unfinished` are allowed if the folder has our lock, since a killed process left them.
    """
    if (folder / "settings.toml").exists():
        raise InputError(
            f"{folder}: already contains a run; continue it with `apportion resume {folder}`, or "
            "choose another folder"
        )
    require_writable(folder)
    ours = unfinished if (folder / LOCK).exists() else ()
    names = [entry.name for entry in folder.glob("*") if not entry.name.startswith(".")]
    files = sorted(name for name in names if name not in ours)
    if files:
        raise InputError(
            f"{folder}: contains other files, such as {files[0]}; choose a new or an empty folder"
        )


def require_writable(folder: Path) -> None:
    """Raise if a folder cannot be created or written to."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; choose a folder")
    parent = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    if not parent.is_dir():
        raise InputError(f"{folder}: {parent} is a file; choose a folder that can be created")
    try:
        # Try it, because reported permissions are not always correct; the file is removed at once.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError:
        raise InputError(f"{folder}: {parent} is not writable; choose another folder") from None
