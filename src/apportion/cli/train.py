"""`apportion train` and `apportion resume`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from apportion.cli.parsing import parse
from apportion.errors import InputError
from apportion.runs.progress import open_progress
from apportion.runs.registry import JOBS, settings_of
from apportion.runs.settings_file import from_toml, suggest

Settings = TypeVar("Settings")

_HELP = """usage: apportion train JOB --out DIR [OPTIONS]

Train a policy and keep everything about it in a folder: settings, metrics, checkpoints, policy.

jobs:
  portfolio  share wealth out among instruments, from a file of daily prices
  federated  share aggregation weight out among the clients of a federation
  budget     share an advertising budget out among campaigns (simulated)

examples:
  apportion train budget --out runs/budget
  apportion train portfolio --prices prices.csv --out runs/first --method mtl --steps 3000
  apportion train portfolio --config runs/first/settings.toml --out runs/again

All settings of a job: apportion train JOB --help
"""


@dataclass(frozen=True, kw_only=True)
class Train(Generic[Settings]):
    """Train a policy and keep everything about it in a folder.

    What --config leaves out has the default shown; what the command line gives goes before both.
    Ctrl-C saves, and `apportion resume DIR` continues exactly there.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder of the run, made by it."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """TOML file of settings; any run's settings.toml is one."""
    json: bool = False
    """Print one JSON object."""
    quiet: bool = False
    """Show no progress."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    settings: Annotated[Settings, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Resume:
    """Continue a run exactly where it stopped: every number comes out as if it never had."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of the run."""
    json: bool = False
    """Print one JSON object."""
    quiet: bool = False
    """Show no progress."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""


def train(arguments: Sequence[str]) -> Any:
    """Run `apportion train`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return _HELP
    job = arguments[0]
    if job not in JOBS:
        raise InputError(
            f"train: there is no job {job!r}; choose {', '.join(JOBS)}{suggest(job, JOBS)}"
        )
    kind = settings_of(job)
    rest = list(arguments[1:])
    config = _value_of("--config", rest)
    settings = kind() if config is None else from_toml(config, job, kind)
    default = Train(out=tyro.MISSING, settings=settings)
    given: Any = parse(Train[kind], rest, f"train {job}", default)

    from apportion.runs.runner import train_in

    with open_progress(quiet=given.quiet) as progress:
        outcome = train_in(
            given.out, job, _absolute(given.settings), progress, tensorboard=given.tensorboard
        )
    return _told(given.out, outcome, given.json)


def resume(arguments: Sequence[str]) -> Any:
    """Run `apportion resume`."""
    given = parse(Resume, arguments, "resume")

    from apportion.runs.runner import resume_in

    with open_progress(quiet=given.quiet) as progress:
        outcome = resume_in(given.folder, progress, tensorboard=given.tensorboard)
    return _told(given.folder, outcome, given.json)


def _told(folder: Path, outcome: Any, as_json: bool) -> Any:
    """The result, which a run that was finished before has on disk."""
    from apportion.runs.folder import load_run

    if as_json:
        return {"folder": str(folder), "results": load_run(folder).results}
    if outcome is None:
        return f"the run in {folder} is finished; nothing was left to do"
    return f"{outcome.summary}\nwrote {folder}"


def _absolute(settings: Any) -> Any:
    """Files by their full path, so that the run's settings serve from any folder."""
    paths = {
        field.name: value.resolve()
        for field in fields(settings)
        if isinstance(value := getattr(settings, field.name), Path)
    }
    return replace(settings, **paths)


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """An option's value, read ahead of the rest because it decides their defaults."""
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
        if argument == option and place + 1 < len(arguments):
            return arguments[place + 1]
    return None
