"""The studies by name, and the one way to perform them: compute the missing cells, then conclude.

A study is a function of its own name, `studies/ROOM/NAME.py: NAME(*, scale, seed, ...) -> Plan`; which
data it reads is seen from its other arguments: `prices` or `digits`.
"""

import inspect
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from apportion.errors import InputError
from apportion.runs.settings import suggest

if TYPE_CHECKING:
    from apportion.studies.engine import Executor, Plan, Progress, StudyResult

Scale = Literal["quick", "paper"]


class Entry(NamedTuple):
    """A study's room, its purpose in a line, and its figures where it has several."""

    room: str
    purpose: str
    figures: tuple[str, ...] = ()


STUDIES = {
    "fig1": Entry("theory", "LSPI on the synthetic problem: real against permuted examples"),
    "fig2": Entry("portfolio", "what a task's score says about its gradient and its progress"),
    "fig3-4": Entry(
        "portfolio",
        "single-task, multi-task and prioritised learning: curves, and held-out instruments",
        ("fig3", "fig4"),
    ),
    "literal": Entry(
        "portfolio",
        "the paper as printed, each departure from it, and each value that it leaves open",
        ("literal", "omitted"),
    ),
    "fig5": Entry("portfolio", "allocations and wealth over the last year"),
    "mechanisms": Entry(
        "portfolio",
        "gains in the days learned from and after them, and what priorities do to the spread over seeds",
        ("generalisation", "stability"),
    ),
    "charging": Entry(
        "charging",
        "one policy for every garage beside every scheduler, on real charging sessions",
        ("garages", "objectives"),
    ),
    "fig6": Entry("federated", "learned aggregation in a federation"),
    "federations": Entry(
        "federated", "one policy in every kind of federation, beside every other way to aggregate"
    ),
    "bound": Entry(
        "theory",
        "both theorems against measured suboptimality, with all features and with few",
        ("bound", "approximation"),
    ),
    "crossover": Entry(
        "theory",
        "when multi-task learning stops paying as tasks drift apart, and how fast more tasks help",
        ("crossover", "corollary1"),
    ),
    "corollary2": Entry("theory", "what all orderings and all subsets of the entities are worth"),
    "equivariance": Entry(
        "theory", "a network shared by all entities against a plain one of as many parameters"
    ),
    "recipe": Entry(
        "portfolio", "a practical policy, walked forward over years beside lazy Equal CRP"
    ),
    "prioritisation": Entry(
        "portfolio",
        "where drawing tasks by priority pays, whom it serves where tasks conflict, and acting",
        ("prioritisation", "conflict", "acting"),
    ),
}

LONGEST = (
    *("fig6", "federations", "charging", "fig3-4", "mechanisms", "literal", "fig2", "recipe"),
    *("fig5", "prioritisation"),
    *("corollary2", "crossover", "fig1"),
)
"""Studies whose programs take half a minute or more at paper size, the longest first: those of a GPU,
and those of the processor."""


@dataclass(frozen=True)
class Request:
    """What decides a study's numbers: its size, its seed and its data."""

    scale: Scale = "quick"
    seed: int = 0
    prices: Path | None = None
    images: Path | None = None
    allow_jumps: tuple[str, ...] | None = None
    """Moves of prices to take as they are, each TICKER:DAY, or `all`."""


def study_names() -> dict[str, str]:
    """The study of every name that is accepted: its own, and those of its figures."""
    figures = {figure: study for study, entry in STUDIES.items() for figure in entry.figures}
    return {study: study for study in STUDIES} | figures


def find_study(name: str) -> str:
    """The study of this name, or the one that has the figure of this name."""
    known = study_names()
    if name not in known:
        near = suggest(name, known)
        raise InputError(f"there is no study {name!r}; choose {', '.join(STUDIES)} or all{near}")
    return known[name]


def find_plan(name: str) -> "Callable[..., Plan]":
    """The function that makes a study's plan: `apportion.studies.ROOM.NAME:NAME`.

    Examples
    --------
    >>> find_plan("fig1").__module__
    'apportion.studies.theory.fig1'
    """
    study = find_study(name)
    function = study.replace("-", "_")
    module = import_module(f"apportion.studies.{STUDIES[study].room}.{function}")
    return getattr(module, function)


def make_plan(
    name: str, *, scale: Scale = "quick", seed: int = 0, data: dict[str, Any] | None = None
) -> "Plan":
    """A study's plan, with scale and seed among its settings; finite problems are no work for a GPU."""
    plan = find_plan(name)(scale=scale, seed=seed, **(data or {}))
    settings = plan.settings | {"scale": scale, "seed": seed}
    beside = STUDIES[find_study(name)].room == "theory"
    return replace(plan, settings=settings, on_processor=beside)


def perform(
    name: str,
    out: Path,
    request: Request,
    *,
    executor: "Executor | None" = None,
    draw: bool = False,
    progress: "Progress" = lambda what, fraction: None,
) -> "Iterator[StudyResult]":
    """Compute what is missing of a study, or of all, and conclude; each study as it is done.

    Every plan is made first: what is wrong with the data is said before hours of computing.

    Parameters
    ----------
    name
        A study, a figure of one, or `all`.
    out
        The study's folder; with `all`, the folder of their folders.
    request
        Size, seed and data.
    executor
        Who computes; this process unless given.
    draw, progress
        As for `perform_plans`.

    Raises
    ------
    InputError, Stopped
        As `perform_plans` does.
    """
    from apportion.studies.engine import CellStore, perform_plans
    from apportion.studies.executors import Serial

    everything = name == "all"
    # The longest first, so that none is begun when all others are at their end.
    others = [study for study in STUDIES if study not in LONGEST]
    data = read_data(request)
    stores, run = [], command_of(name, Path(out), request)
    for study in [*LONGEST, *others] if everything else [find_study(name)]:
        known = inspect.signature(find_plan(study)).parameters
        for kind in data:
            if kind not in known and not everything:
                raise InputError(f"study {study} reads no {kind}; leave {_OPTIONS[kind]} out")
        own = {kind: value for kind, value in data.items() if kind in known}
        plan = make_plan(study, scale=request.scale, seed=request.seed, data=own)
        folder = Path(out) / study if everything else Path(out)
        stores.append(CellStore(plan, folder, command_of(study, folder, request), run))
    yield from perform_plans(stores, executor or Serial(), draw=draw, progress=progress)


_OPTIONS = {"prices": "--prices", "digits": "--images"}
"""The option that gives each kind of data."""


def read_data(request: Request) -> dict[str, Any]:
    """The data the user gave, under the names studies know it by; prices and digits are read here."""
    data: dict[str, Any] = {}
    if request.prices is not None:
        from apportion.domains.portfolio.prices import read_prices

        data["prices"] = read_prices(request.prices, allow_jumps=request.allow_jumps)
    if request.images is not None:
        from apportion.domains.federated.data import load_images

        data["digits"] = load_images(request.images)
    return data


def command_of(name: str, folder: Path, request: Request) -> str:
    """The command that computes a study, or all.

    Examples
    --------
    >>> command_of("fig1", Path("studies/fig1"), Request(seed=3))
    'apportion study fig1 --scale quick --seed 3 --out studies/fig1'
    """
    known = _OPTIONS if name == "all" else inspect.signature(find_plan(name)).parameters
    words = ["apportion", "study", name, "--scale", request.scale, "--seed", str(request.seed)]
    if request.prices is not None and "prices" in known:
        words += ["--prices", str(request.prices)]
    if request.images is not None and "digits" in known:
        words += ["--images", str(request.images)]
    words += ["--out", str(folder)]
    if request.allow_jumps and "prices" in known:
        words += ["--allow-jumps", *(one for one in request.allow_jumps if one != "all")]
    return shlex.join(words)
