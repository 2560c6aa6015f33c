"""The options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import App, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.exceptions import CoercionError

from apportion.errors import InputError

Folder = Annotated[Path, Parameter(name="DIR")]
"""The folder a command works on, given without an option's name."""
Out = Annotated[Path, Parameter(metavar="DIR")]
File = Annotated[Path | None, Parameter(metavar="FILE")]
Prices = Annotated[
    Path | None,
    Parameter(
        metavar="FILE",
        help="CSV or Parquet file of daily prices; without it, what the run was trained on.",
    ),
]
Sessions = Annotated[
    Path | None,
    Parameter(
        metavar="FILE",
        help="CSV or Parquet file of charging sessions; without it, what the run was trained on.",
    ),
]
AllowJumps = Annotated[
    bool,
    Parameter(
        help="Take prices that move too far in one day, as where a split is not adjusted for."
    ),
]
Json = Annotated[bool, Parameter(help="Print one JSON object.")]
Quiet = Annotated[bool, Parameter(help="Show no progress.")]
TensorBoard = Annotated[bool, Parameter(help="Also write TensorBoard event files.")]


@dataclass(frozen=True)
class GarageOptions:
    """The garages that a charging run is tested in."""

    timezone: str | None = None
    """Where the garage is, such as America/Los_Angeles, for files whose times carry a zone."""
    site: str | None = None
    """The site to test on; needed where the file has several."""
    stations: int | None = None
    """Stations behind one feeder; by default as in training."""
    capacity: float | None = None
    """What the feeder gives, as a share of its stations' full rate; 0.15 by default."""
    tasks: int | None = None
    """Garages to draw among the site's stations; 8 by default."""


def finished_run(folder: Path, *jobs: str) -> Any:
    """A finished run of one of these jobs; any other is refused before anything slow is started."""
    from apportion.runs.folder import load_run

    run = load_run(folder)
    if run.job not in jobs:
        kinds = " or ".join(job for job in jobs if "demo" not in job)
        raise InputError(f"{folder}: a run of {run.job!r}; give the folder of a {kinds} run")
    if not run.finished:
        raise InputError(f"{folder}: is not finished; continue it with `apportion resume {folder}`")
    return run


def own_data(run: Any, name: str, given: Path | None) -> Path | None:
    """The file the user gave, else the one the run was trained on; none where that was embedded."""
    own = run.settings.get(name)
    return Path(own) if given is None and own else given


def read_own_prices(run: Any, given: Path | None, allow_jumps: bool) -> Any:
    """The prices the user gave, or those the run was trained on.

    They may jump where the user says so now, or said so of these very prices when the run was trained.
    """
    from apportion.domains.portfolio.prices import read_prices

    allowed = allow_jumps or (given is None and bool(run.settings.get("allow_jumps")))
    return read_prices(own_data(run, "prices", given), allow_jumps=allowed)


def refuse_options(folder: Path, job: str, **given: Any) -> None:
    """Refuse options that a run of this job has no use for."""
    for name, value in given.items():
        if value is not None and value is not False:
            option = name.replace("_", "-")
            raise InputError(f"{folder}: a {job} run, which reads no --{option}; leave it out")


def refuse_fractions(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse a fraction where a whole number is asked for; the parser would silently round it."""
    for argument in arguments:
        if int in (argument.resolved_hint, *get_args(argument.resolved_hint)):
            for token in argument.tokens:
                if "." in token.value:
                    raise CoercionError(argument=argument, token=token, target_type=int)
