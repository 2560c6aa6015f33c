"""Environment of a run: versions, device, seed and data; versions are read without importing JAX."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import apportion

_CORE_PACKAGES = (
    "jax",
    "jaxlib",
    "equinox",
    "optax",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "safetensors",
)
EXTRAS = {
    "market": ("skfolio",),
    "federated": ("flwr", "mlxtend"),
    "cluster": ("ray",),
    "gym": ("gymnasium",),
}


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of Python, apportion and its numerical dependencies."""
    own = {"python": platform.python_version(), "apportion": apportion.__version__}
    return own | {name: installed(name) for name in _CORE_PACKAGES}


def devices() -> list[str]:
    """Return the processors and GPUs that the operating system reports."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [f"{cores} CPU cores ({platform.machine()})"]
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = [line for line in card.read_text().splitlines() if line.startswith("Model:")]
        found.append(model[0].partition(":")[2].strip() if model else "NVIDIA GPU")
    return found


def environment(*, seed: int, data: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a run's `environment.json`; this starts JAX."""
    import jax

    device = jax.devices()[0]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "device": f"{device.platform}: {device.device_kind}",
        "seed": seed,
        "data": data,
        "versions": versions(),
    }
