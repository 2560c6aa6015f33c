"""The jobs of `apportion train` by name; each is imported when it is needed."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from apportion.errors import InputError
from apportion.runs.job import PreparedJob
from apportion.runs.settings_file import suggest

_JOBS = {
    "charging": ("apportion.domains.charging", "ChargingSettings"),
    "portfolio": ("apportion.domains.portfolio", "PortfolioJob"),
    "federated": ("apportion.domains.federated", "FederatedSettings"),
    "budget": ("apportion.domains.budget", "BudgetSettings"),
}
"""A domain's folder and the name of its settings: a new domain is one line here."""
JOBS = tuple(_JOBS)


def _entry(job: str) -> tuple[str, str]:
    if job not in _JOBS:
        raise InputError(
            f"there is no job called {job!r}; choose {', '.join(JOBS)}{suggest(job, JOBS)}"
        )
    return _JOBS[job]


def settings_of(job: str) -> type:
    """The dataclass of a job's settings; imports no JAX."""
    domain, name = _entry(job)
    return getattr(import_module(f"{domain}.settings"), name)


def prepare(job: str, settings: Any) -> PreparedJob:
    """Read and check a job's data; this imports JAX."""
    _entry(job)
    if job == "portfolio":
        return import_module("apportion.domains.portfolio.domain").DOMAIN.prepare(settings)
    preparer: Callable[[Any], PreparedJob] = import_module(f"{_entry(job)[0]}.job").prepare
    return preparer(settings)
