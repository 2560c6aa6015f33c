"""The studies by name, and the one way to perform them: compute the missing cells, then conclude.

A study is a module `studies/ROOM/NAME.py` with `plan(*, scale, seed, ...) -> Plan`; which data it
reads is seen from its other arguments: `prices`, `digits`, or `file` and `gamma`.
"""

import inspect
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from apportion.errors import InputError
from apportion.runs.settings_file import suggest

if TYPE_CHECKING:
    from apportion.studies.cells import Place, Plan, Progress
    from apportion.studies.folder import Performed

Scale = Literal["quick", "paper"]


class Entry(NamedTuple):
    """A study's room, and its purpose in a line."""

    room: str
    purpose: str


STUDIES = {
    "fig1": Entry("theory", "LSPI on the synthetic problem: real against permuted examples"),
    "fig2": Entry("portfolio", "what a task's score says about its gradient and its progress"),
    "fig3": Entry("portfolio", "multi-task policies on held-out instruments, by number of tasks"),
    "fig4": Entry(
        "portfolio", "learning curves of single-task, multi-task and prioritised learning"
    ),
    "fig5": Entry("portfolio", "allocations and wealth over the last year"),
    "charging": Entry(
        "charging", "one policy for every garage beside every scheduler, on real charging sessions"
    ),
    "fig6": Entry("federated", "learned aggregation in a federation"),
    "federations": Entry(
        "federated", "one policy in every kind of federation, beside every other way to aggregate"
    ),
    "bound": Entry("theory", "both theorems against measured suboptimality"),
    "crossover": Entry("theory", "when multi-task learning stops paying as tasks drift apart"),
    "corollary1": Entry(
        "theory", "how fast more tasks help, and the floor that their distance sets"
    ),
    "approximation": Entry(
        "theory",
        "Theorem 1 with few features, on paths, on separate paths and on independent draws",
    ),
    "corollary2": Entry("theory", "what all orderings and all subsets of the entities are worth"),
    "equivariance": Entry(
        "theory", "a network shared by all entities against a plain one of as many parameters"
    ),
    "should-pool": Entry("theory", "a test of whether to pool tasks, before any training"),
    "recipe": Entry(
        "portfolio", "a practical policy, walked forward over years beside lazy Equal CRP"
    ),
    "prioritisation": Entry(
        "portfolio", "where drawing tasks by priority pays, and where it does not"
    ),
    "conflict": Entry("portfolio", "whom priorities serve where tasks pull apart"),
    "acting": Entry("portfolio", "what acting in the loop adds where prices do not answer"),
}

LONGEST = (
    *("charging", "fig6", "fig3", "fig2", "recipe", "fig5", "conflict", "acting"),
    *("corollary2", "corollary1", "fig1"),
)
"""Studies whose programs take half a minute or more at paper size, the longest first: those of a GPU,
and those of the processor."""


@dataclass(frozen=True)
class Request:
    """What decides a study's numbers: its size, its seed and its data."""

    scale: Scale = "quick"
    seed: int = 0
    prices: Path | None = None
    mnist: Path | None = None
    transitions: Path | None = None
    gamma: float | None = None
    allow_jumps: bool = False


def find_plan(name: str) -> "Callable[..., Plan]":
    """A study's `plan`.

    Examples
    --------
    >>> find_plan("fig1").__module__
    'apportion.studies.theory.fig1'
    """
    if name not in STUDIES:
        near = suggest(name, STUDIES)
        raise InputError(f"there is no study {name!r}; choose {', '.join(STUDIES)} or all{near}")
    room = STUDIES[name].room
    return import_module(f"apportion.studies.{room}.{name.replace('-', '_')}").plan


def make_plan(
    name: str, *, scale: Scale = "quick", seed: int = 0, data: dict[str, Any] | None = None
) -> "Plan":
    """A study's plan, with scale and seed among its settings."""
    plan = find_plan(name)(scale=scale, seed=seed, **(data or {}))
    settings = plan.settings | {"scale": scale, "seed": seed}
    return replace(plan, settings=settings, on_processor=on_processor(name))


def on_processor(name: str) -> bool:
    """Whether a study is computed beside a GPU: finite problems are no work for one."""
    return STUDIES[name].room == "theory"


@dataclass(frozen=True)
class Asked:
    """A study that is to be performed: its plan, its folder, and the command that computes it alone."""

    plan: "Plan"
    folder: Path
    command: str


def asked_for(name: str, out: Path, request: Request) -> dict[str, Asked]:
    """The study of this name, or all.

    Every plan is made first: what is wrong with the data is said before hours of computing.
    """
    everything = name == "all"
    data = read_data(request)
    found = {}
    for study in STUDIES if everything else [name]:
        own = accepted_data(study, data, strict=not everything)
        plan = make_plan(study, scale=request.scale, seed=request.seed, data=own)
        folder = Path(out) / study if everything else Path(out)
        found[study] = Asked(plan, folder, command_of(study, folder, request))
    return found


def perform(
    name: str,
    out: Path,
    request: Request,
    *,
    place: "Place | None" = None,
    processes: int = 1,
    cells: str = "",
    draw: bool = False,
    progress: "Progress" = lambda what, fraction: None,
) -> "Iterator[Performed]":
    """Compute what is missing of a study, or of all, and conclude; each study as it is done.

    Parameters
    ----------
    name
        A study, or `all`.
    out
        The study's folder; with `all`, the folder of their folders.
    request
        Size, seed and data.
    processes
        So many processes of this machine compute at once.
    place, cells, draw, progress
        As for `complete`, of every study.

    Raises
    ------
    InputError
        The folder holds cells of other settings, or with `draw` some are missing.
    Stopped
        The user asked to stop; finished cells are saved.
    """
    from apportion.studies.folder import complete
    from apportion.studies.processes import Workers, workers
    from apportion.studies.store import CellStore

    asked = asked_for(name, out, request)
    stores = {study: CellStore(one.plan, one.folder) for study, one in asked.items()}
    for store in stores.values():
        store.check()
    groups = by_cells(asked)
    alone = nullcontext(Workers())
    work = partial(_compute_unclaimed, name, out, request)
    finish = partial(complete, place=place, cells=cells, draw=draw)
    with workers(processes, work) if processes > 1 else alone as others:
        computed = {study: stores[study] for study in groups}
        for first in others.completed(computed, partial(_report, progress, name)):
            for study in groups[first]:
                one, report = asked[study], partial(_report, progress, study)
                yield finish(one.plan, one.folder, progress=report, command=one.command)


def _report(progress: "Progress", study: str, what: str, done: float) -> None:
    progress(f"{study}: {what}", done)


def _compute_unclaimed(name: str, out: Path, request: Request, number: int) -> None:
    """What one of several processes does: whatever is nobody's of a study, or of all."""
    from apportion.studies.cells import batches
    from apportion.studies.processes import compute_in_turn
    from apportion.studies.store import CellStore

    asked = asked_for(name, out, request)
    turns = [asked[study] for study in turns_of(by_cells(asked), number)]
    compute_in_turn(
        [
            (CellStore(one.plan, one.folder), program, one.command)
            for one in turns
            for program in batches(one.plan.cells)
        ]
    )


def by_cells(asked: dict[str, Asked]) -> dict[str, list[str]]:
    """The studies that compute cells, each with all that have the same: itself, and who adopts them."""
    groups: dict[str, list[str]] = {}
    for study, one in asked.items():
        groups.setdefault(one.plan.digest, []).append(study)
    return {studies[0]: studies for studies in groups.values()}


def turns_of(studies: Iterable[str], number: int) -> list[str]:
    """The studies in the order in which the process of this number takes their programs.

    The longest come first, so that none is begun when all others are at their end. One process of
    three begins with what is computed on the processor, to use it beside the GPU from the start.

    Examples
    --------
    >>> turns_of(("fig1", "acting", "charging"), 0)
    ['charging', 'acting', 'fig1']
    >>> turns_of(("fig1", "acting", "charging"), 2)
    ['fig1', 'charging', 'acting']
    """
    beside = number % 3 == 2

    def turn(study: str) -> tuple[bool, int]:
        length = LONGEST.index(study) if study in LONGEST else len(LONGEST)
        return on_processor(study) != beside, length

    return sorted(studies, key=turn)


_OPTIONS = {"prices": "--prices", "digits": "--mnist", "file": "--transitions", "gamma": "--gamma"}


def read_data(request: Request) -> dict[str, Any]:
    """The data the user gave, under the names studies know it by; prices and digits are read here."""
    data: dict[str, Any] = {}
    if request.prices is not None:
        from apportion.domains.portfolio.prices import read_prices

        data["prices"] = read_prices(request.prices, allow_jumps=request.allow_jumps)
    if request.mnist is not None:
        from apportion.domains.federated.digits import load_mnist

        data["digits"] = load_mnist(request.mnist)
    if request.transitions is not None:
        data["file"] = request.transitions
    if request.gamma is not None:
        data["gamma"] = request.gamma
    return data


def accepted_data(name: str, data: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """The data a study reads; with `strict`, data it does not read is refused."""
    known = inspect.signature(find_plan(name)).parameters
    for kind in data:
        if strict and kind not in known:
            raise InputError(f"study {name} reads no {kind}; leave {_OPTIONS[kind]} out")
    return {kind: value for kind, value in data.items() if kind in known}


def command_of(name: str, folder: Path, request: Request) -> str:
    """The command that computes a study, or all.

    Examples
    --------
    >>> command_of("fig1", Path("studies/fig1"), Request(seed=3))
    'apportion study fig1 --scale quick --seed 3 --out studies/fig1'
    """
    known = _OPTIONS if name == "all" else inspect.signature(find_plan(name)).parameters
    given = {"scale": request.scale, "seed": request.seed}
    for kind, option in _OPTIONS.items():
        if kind in known:
            given[option.removeprefix("--")] = getattr(request, option.removeprefix("--"))
    words = [
        word
        for option, value in (given | {"out": folder}).items()
        if value is not None
        for word in (f"--{option}", str(value))
    ]
    if "prices" in known and request.allow_jumps:
        words.append("--allow-jumps")
    return shlex.join(["apportion", "study", name, *words])
