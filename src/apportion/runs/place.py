"""A place to write: free for what is to be written, writable, and one process's alone."""

import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from apportion.errors import InputError

LOCK = ".lock"


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make the folder and lock it: a second process that wants to write there is refused.

    The operating system releases the lock when its holder ends, however it ends. The file stays, and
    says that whatever is unfinished beside it is ours.
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


def require_place(file: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if file.is_dir():
        raise InputError(f"{file}: is a folder; choose a file")
    require_writable(file.absolute().parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
