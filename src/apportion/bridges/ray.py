"""Studies on a Ray cluster: each is one task, computed where there is room, its files brought home.

Workers need apportion installed; the files come back as bytes, so no folder has to be shared.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from apportion.errors import InputError
from apportion.studies.registry import perform


def perform_on_ray(
    calls: Mapping[str, dict[str, Any]],
    folders: Mapping[str, Path],
    options: dict[str, Any],
    progress: Callable[[str, float], None],
) -> None:
    """Run studies on the cluster at hand, or on this machine where there is none.

    Parameters
    ----------
    calls
        For each study its data.
    folders
        Where each study's files go on this machine.
    options
        Scale and seed.
    """
    try:
        import ray
    except ImportError:
        raise InputError(
            "--on ray needs Ray, which is not installed; run pip install 'apportion[cluster]'"
        ) from None
    # A study's arrays may be large and its task long: one CPU each, never started twice.
    compute = ray.remote(num_cpus=1, max_retries=0)(files_of)
    begun_here = not ray.is_initialized()
    if begun_here:
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        waiting = {compute.remote(name, data, options): name for name, data in calls.items()}
        while waiting:
            progress(f"on Ray: {', '.join(waiting.values())}", 1 - len(waiting) / len(calls))
            ready, _ = ray.wait(list(waiting), num_returns=1)
            folder = folders[waiting.pop(ready[0])]
            folder.mkdir(parents=True, exist_ok=True)
            for file, content in ray.get(ready[0]).items():
                (folder / file).write_bytes(content)
    finally:
        if begun_here:
            ray.shutdown()


def files_of(name: str, data: dict[str, Any], options: dict[str, Any]) -> dict[str, bytes]:
    """Run a study and return the files of its folder: what a worker does."""
    with tempfile.TemporaryDirectory() as folder:
        perform(name, Path(folder), data=data, **options)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}
