"""Persistent cache of compiled programs for the command line.

Compiling a run takes seconds. The command line caches compiled programs in the user's cache folder, so
that the next command with the same sizes reuses them. Importing the library does not set up the cache.
"""

import os
import time
import zlib
from pathlib import Path

_CACHE_VARIABLE = "APPORTION_CACHE"
"""Environment variable: a folder for the cache, or `off`."""
_MAX_CACHE_BYTES = 2**30
_WRITE_SECONDS = 60.0


def keep_compiled() -> Path | None:
    """Configure JAX's compilation cache before JAX starts; return the folder, or None.

    A folder set by the user (`JAX_COMPILATION_CACHE_DIR`) takes precedence.
    """
    wish = os.environ.get(_CACHE_VARIABLE, "")
    if wish.lower() in ("off", "0", "false", "no"):
        return None
    user_folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if user_folder is not None:
        return Path(user_folder)
    # Programs depend on the processor, and machines can share a home folder.
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (Path(wish) if wish else base / "apportion" / "compiled") / f"{_processor():08x}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_incomplete(folder)
    except OSError:
        return None
    # Cache small programs as well: the many small ones of a run take as long as the large one.
    wishes = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(_MAX_CACHE_BYTES),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for name, value in wishes.items():
        os.environ.setdefault(name, value)
    return folder


def _remove_incomplete(folder: Path) -> None:
    """Remove programs without a time of use, which killed processes leave and JAX warns about."""
    times = {path.name for path in folder.glob("*-atime")}
    for path in folder.glob("*-cache"):
        half = path.name.removesuffix("-cache") + "-atime" not in times
        # Another process may still be writing a recent one.
        if half and time.time() - path.stat().st_mtime > _WRITE_SECONDS:
            path.unlink(missing_ok=True)


def _processor() -> int:
    """Return a hash of the processor's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return zlib.crc32("".join(line for line in lines[:40] if line.startswith("flags")).encode())
