"""The jobs `apportion train` knows, by name; each is imported when it is asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from apportion.errors import InputError
from apportion.jobs.work import Work
from apportion.settings_file import suggest

_JOBS = {
    "portfolio": ("apportion.jobs.settings", "PortfolioJob", "apportion.jobs.portfolio"),
    "federated": (
        "apportion.jobs.federated_settings",
        "FederatedSettings",
        "apportion.jobs.federated",
    ),
    "budget": ("apportion.jobs.settings", "BudgetSettings", "apportion.jobs.budget"),
}
JOBS = tuple(_JOBS)


def _entry(job: str) -> tuple[str, str, str]:
    if job not in _JOBS:
        raise InputError(
            f"there is no job called {job!r}; choose {', '.join(JOBS)}{suggest(job, JOBS)}"
        )
    return _JOBS[job]


def settings_of(job: str) -> type:
    """The dataclass of a job's settings; imports no JAX."""
    module, name, _ = _entry(job)
    return getattr(import_module(module), name)


def prepare(job: str, settings: Any) -> Work:
    """Read and check a job's data; from here on there is JAX."""
    preparer: Callable[[Any], Work] = import_module(_entry(job)[2]).prepare
    return preparer(settings)
