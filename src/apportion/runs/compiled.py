"""Compiled programs, kept on disk for the next start.

A program of a run takes seconds to compile. The command line keeps what is compiled in the user's
cache folder, where the next command of the same sizes finds it. Importing the library changes nothing.
"""

import os
import time
import zlib
from pathlib import Path

SWITCH = "APPORTION_CACHE"
"""Environment variable: `off` keeps nothing, a folder keeps it there."""
_LARGEST = 2**30
_SETTLED = 60.0


def keep_compiled() -> Path | None:
    """Have JAX, before it starts, keep compiled programs; where, or None if it does not.

    What the user has told JAX itself (`JAX_COMPILATION_CACHE_DIR`) is left as it is.
    """
    wish = os.environ.get(SWITCH, "")
    if wish.lower() in ("off", "0", "false", "no"):
        return None
    told = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if told is not None:
        return Path(told)
    # Programs are made for one kind of processor, and a home folder may be seen by several.
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (Path(wish) if wish else base / "apportion" / "compiled") / f"{_processor():08x}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _drop_halves(folder)
    except OSError:
        return None
    # Small programs too: a run has many of them, and together they take as long as the large one.
    wishes = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(_LARGEST),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for name, value in wishes.items():
        os.environ.setdefault(name, value)
    return folder


def _drop_halves(folder: Path) -> None:
    """Remove programs whose time of use is missing: a killed process left them, and JAX would complain."""
    times = {path.name for path in folder.glob("*-atime")}
    for path in folder.glob("*-cache"):
        half = path.name.removesuffix("-cache") + "-atime" not in times
        # What is younger may be half written by another process just now.
        if half and time.time() - path.stat().st_mtime > _SETTLED:
            path.unlink(missing_ok=True)


def _processor() -> int:
    """A number that differs between processors of different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return zlib.crc32("".join(line for line in lines[:40] if line.startswith("flags")).encode())
