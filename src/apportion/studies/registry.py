"""The studies by name, each imported when it is asked for.

A study is a module `studies/NAME.py` with `run(*, scale, seed, progress, ...) -> Study`; which data it
reads is seen from its other arguments: `prices`, `digits`, or `file` and `gamma`.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apportion.errors import InputError
from apportion.runs.settings_file import suggest

if TYPE_CHECKING:
    from apportion.studies.study import Study

Scale = Literal["quick", "paper"]

STUDIES = {
    "fig1": "LSPI on the synthetic problem: real against permuted examples",
    "fig2": "what a task's score says about its gradient and its progress",
    "fig3": "multi-task policies on held-out instruments, by number of tasks",
    "fig4": "learning curves of single-task, multi-task and prioritised learning",
    "fig5": "allocations and wealth over the last year",
    "fig6": "learned aggregation in a federation",
    "federations": "other federations: unequal tasks, other splits and sizes, clients that lie",
    "bound": "both theorems against measured suboptimality",
    "crossover": "when multi-task learning stops paying as tasks drift apart",
    "should-pool": "a test of whether to pool tasks, before any training",
    "recipe": "a policy worth having, walked forward over years beside lazy Equal CRP",
    "prioritisation": "where drawing tasks by priority pays, and where it does not",
}
_ROOMS = {
    **dict.fromkeys(("fig1", "bound", "crossover", "should-pool"), "theory"),
    **dict.fromkeys(("fig2", "fig3", "fig4", "fig5", "recipe", "prioritisation"), "portfolio"),
    **dict.fromkeys(("fig6", "federations"), "federated"),
}
_OPTIONS = {"prices": "--prices", "digits": "--mnist", "file": "--transitions", "gamma": "--gamma"}


def find_study(name: str) -> "Callable[..., Study]":
    """A study's `run`.

    Examples
    --------
    >>> find_study("fig1").__module__
    'apportion.studies.theory.fig1'
    """
    if name not in STUDIES:
        near = suggest(name, STUDIES)
        raise InputError(f"there is no study {name!r}; choose {', '.join(STUDIES)} or all{near}")
    return import_module(f"apportion.studies.{_ROOMS[name]}.{name.replace('-', '_')}").run


def read_data(
    prices: Path | None, mnist: Path | None, transitions: Path | None, gamma: float | None
) -> dict[str, Any]:
    """The data the user gave, under the names studies know it by; prices and digits are read here."""
    data: dict[str, Any] = {}
    if prices is not None:
        from apportion.domains.portfolio.prices import load_prices

        data["prices"] = load_prices(prices)
    if mnist is not None:
        from apportion.domains.federated.digits import load_mnist

        data["digits"] = load_mnist(mnist)
    if transitions is not None:
        data["file"] = transitions
    if gamma is not None:
        data["gamma"] = gamma
    return data


def fitting(name: str, data: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """The data a study reads; with `strict`, data it does not read is refused."""
    known = inspect.signature(find_study(name)).parameters
    for kind in data:
        if strict and kind not in known:
            raise InputError(f"study {name} reads no {kind}; leave {_OPTIONS[kind]} out")
    return {kind: value for kind, value in data.items() if kind in known}


def perform(
    name: str,
    folder: Path,
    *,
    scale: Scale = "quick",
    seed: int = 0,
    data: dict[str, Any] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> "Study":
    """Run a study and write its folder: table, picture, verdicts."""
    study = find_study(name)(scale=scale, seed=seed, progress=progress, **(data or {}))
    study.save(Path(folder))
    return study
