"""Persistent cache of compiled programs for the command line.

Compiling a run takes seconds. The command line caches compiled programs in the user's cache folder, so
that the next command with the same sizes reuses them. Importing the library does not set up the cache.
"""

import os
import time
from pathlib import Path

_MAX_CACHE_BYTES = 2**30
_WRITE_SECONDS = 60.0


def keep_compiled() -> None:
    """Configure JAX's compilation cache before JAX starts.

    A folder set by the user (`JAX_COMPILATION_CACHE_DIR`) takes precedence;
    `JAX_ENABLE_COMPILATION_CACHE=0` disables the cache.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    # JAX's keys contain the processor's features, so machines can share a home folder.
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "apportion" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_incomplete(folder)
    except OSError:
        return
    # Cache small programs as well: the many small ones of a run take as long as the large one.
    wishes = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(_MAX_CACHE_BYTES),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for name, value in wishes.items():
        os.environ.setdefault(name, value)


def _remove_incomplete(folder: Path) -> None:
    """Remove programs without a time of use, which killed processes leave and JAX warns about."""
    times = {path.name for path in folder.glob("*-atime")}
    for path in folder.glob("*-cache"):
        half = path.name.removesuffix("-cache") + "-atime" not in times
        # Another process may still be writing a recent one.
        if half and time.time() - path.stat().st_mtime > _WRITE_SECONDS:
            path.unlink(missing_ok=True)
