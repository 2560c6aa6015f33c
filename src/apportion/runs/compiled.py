"""Compiled programs, kept on disk for the next start.

A program of a run takes seconds to compile. The command line keeps what is compiled in the user's
cache folder, where the next command of the same sizes finds it. Importing the library changes nothing.
"""

import os
import time
import zlib
from pathlib import Path

_CACHE_VARIABLE = "APPORTION_CACHE"
"""Environment variable: `off` keeps nothing, a folder keeps it there."""
_MAX_CACHE_BYTES = 2**30
_WRITE_SECONDS = 60.0


def keep_compiled() -> Path | None:
    """Let JAX, before it starts, keep compiled programs; return the folder, or None.

    A folder that the user set (`JAX_COMPILATION_CACHE_DIR`) is not changed.
    """
    wish = os.environ.get(_CACHE_VARIABLE, "")
    if wish.lower() in ("off", "0", "false", "no"):
        return None
    user_folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if user_folder is not None:
        return Path(user_folder)
    # Programs are compiled for one kind of processor, and machines may share a home folder.
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (Path(wish) if wish else base / "apportion" / "compiled") / f"{_processor():08x}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_incomplete(folder)
    except OSError:
        return None
    # Small programs too: a run has many of them, and together they take as long as the large one.
    wishes = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(_MAX_CACHE_BYTES),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for name, value in wishes.items():
        os.environ.setdefault(name, value)
    return folder


def _remove_incomplete(folder: Path) -> None:
    """Remove programs without a time of use: a killed process left them, and JAX would complain."""
    times = {path.name for path in folder.glob("*-atime")}
    for path in folder.glob("*-cache"):
        half = path.name.removesuffix("-cache") + "-atime" not in times
        # Another process may still be writing a younger one.
        if half and time.time() - path.stat().st_mtime > _WRITE_SECONDS:
            path.unlink(missing_ok=True)


def _processor() -> int:
    """A number that differs between processors of different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return zlib.crc32("".join(line for line in lines[:40] if line.startswith("flags")).encode())
