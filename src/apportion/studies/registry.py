"""The installed studies by name, and how they run: compute the missing cells, then conclude.

A study is a function `NAME(*, scale, seed, ...) -> Plan`. Its other parameters are the data that it reads,
`prices` or `digits`. A package registers it with a `StudyEntry` in the entry-point group
`apportion.studies`.
"""

import inspect
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apportion.errors import InputError
from apportion.runs.plugins import STUDIES, find_plugins, load_plugin
from apportion.runs.settings import suggest

if TYPE_CHECKING:
    from apportion.studies.engine import Executor, OnProgress, Plan, StudyResult

Scale = Literal["quick", "paper"]


@dataclass(frozen=True)
class StudyEntry:
    """A study as its package registers it in the entry-point group `apportion.studies`.

    Loading an entry imports no JAX; the plan is imported when the study runs.
    """

    plan: str
    """Import path of the function that returns the plan, `module:function`."""
    purpose: str
    """One line for the help text."""
    figures: tuple[str, ...] = ()
    """Names of its figures, if it has several; each is accepted as a name of the study."""
    cost: int = 0
    """Rank by computing time at paper scale; `study all` starts the study with the highest first."""
    on_processor: bool = False
    """Compute on the CPU, because the programs are too small for a GPU."""


@dataclass(frozen=True)
class Request:
    """Scale, seed and data of a study, which determine its results."""

    scale: Scale = "quick"
    seed: int = 0
    prices: Path | None = None
    images: Path | None = None
    allow_jumps: tuple[str, ...] | None = None
    """Price jumps to accept, each as TICKER:DAY, or `all`."""


def installed_studies() -> dict[str, StudyEntry]:
    """Return the installed studies by name."""
    return {name: load_plugin(STUDIES, name) for name in find_plugins(STUDIES)}


def study_names() -> dict[str, str]:
    """Map every accepted name, of a study or a figure, to its study."""
    studies = installed_studies()
    figures = {figure: study for study, entry in studies.items() for figure in entry.figures}
    return {study: study for study in studies} | figures


def _find_study(name: str) -> str:
    """Return the study of this name, or the one that has the figure of this name.

    Raises
    ------
    InputError
        If no installed package registers this study.
    """
    known = study_names()
    if not known:
        raise InputError(
            "no studies are installed; run pip install apportion-studies for those of the paper"
        )
    if name not in known:
        choices, near = ", ".join(find_plugins(STUDIES)), suggest(name, known)
        raise InputError(f"there is no study {name!r}; choose {choices} or all{near}")
    return known[name]


def _find_plan(name: str) -> "Callable[..., Plan]":
    """Return the function that creates the plan of a study."""
    module, _, function = installed_studies()[_find_study(name)].plan.partition(":")
    return getattr(import_module(module), function)


def make_plan(
    name: str, *, scale: Scale = "quick", seed: int = 0, data: dict[str, Any] | None = None
) -> "Plan":
    """Return the plan of a study, with scale and seed in its settings."""
    plan = _find_plan(name)(scale=scale, seed=seed, **(data or {}))
    settings = plan.settings | {"scale": scale, "seed": seed}
    entry = installed_studies()[_find_study(name)]
    return replace(plan, settings=settings, on_processor=entry.on_processor)


def perform(
    name: str,
    out: Path,
    request: Request,
    *,
    executor: "Executor | None" = None,
    draw: bool = False,
    progress: "OnProgress" = lambda what, fraction: None,
) -> "Iterator[StudyResult]":
    """Compute the missing cells of one study or all, and yield each study when it is concluded.

    All plans are created first, so that errors in the data are reported before any computation.

    Parameters
    ----------
    name
        A study, a figure of a study, or `all`.
    out
        Folder of the study; for `all`, the parent folder of all studies.
    request
        Scale, seed and data.
    executor
        Computes the cells; by default this process.
    draw, progress
        See `perform_plans`.

    Raises
    ------
    InputError, Stopped
        See `perform_plans`.
    """
    from apportion.studies.engine import CellStore, perform_plans
    from apportion.studies.executors import Serial

    everything = name == "all"
    studies = installed_studies()
    # The most expensive study starts first, which shortens the total time.
    ordered = sorted(studies, key=lambda study: studies[study].cost, reverse=True)
    data = _read_data(request)
    stores, run = [], _command_of(name, Path(out), request)
    for study in ordered if everything and ordered else [_find_study(name)]:
        known = inspect.signature(_find_plan(study)).parameters
        for kind in data:
            if kind not in known and not everything:
                raise InputError(f"study {study} reads no {kind}; omit {_OPTIONS[kind]}")
        own = {kind: value for kind, value in data.items() if kind in known}
        plan = make_plan(study, scale=request.scale, seed=request.seed, data=own)
        folder = Path(out) / study if everything else Path(out)
        stores.append(CellStore(plan, folder, _command_of(study, folder, request), run))
    yield from perform_plans(stores, executor or Serial(), draw=draw, progress=progress)


_OPTIONS = {"prices": "--prices", "digits": "--images"}
"""Option of each kind of data."""


def _read_data(request: Request) -> dict[str, Any]:
    """Read the files of a request, by the name of the studies' parameters."""
    data: dict[str, Any] = {}
    if request.prices is not None:
        from apportion.domains.portfolio.prices import load_prices

        data["prices"] = load_prices(request.prices, allow_jumps=request.allow_jumps)
    if request.images is not None:
        from apportion.domains.federated.data import load_images

        data["digits"] = load_images(request.images)
    return data


def _command_of(name: str, folder: Path, request: Request) -> str:
    """Return the command that computes a study, or all.

    Examples
    --------
    >>> _command_of("all", Path("studies"), Request(seed=3))
    'apportion study all --scale quick --seed 3 --out studies'
    """
    known = _OPTIONS if name == "all" else inspect.signature(_find_plan(name)).parameters
    words = ["apportion", "study", name, "--scale", request.scale, "--seed", str(request.seed)]
    if request.prices is not None and "prices" in known:
        words += ["--prices", str(request.prices)]
    if request.images is not None and "digits" in known:
        words += ["--images", str(request.images)]
    words += ["--out", str(folder)]
    if request.allow_jumps and "prices" in known:
        words += ["--allow-jumps", *(one for one in request.allow_jumps if one != "all")]
    return shlex.join(words)
