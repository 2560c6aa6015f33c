"""`apportion study` and `apportion report`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from apportion.cli.parsing import parse
from apportion.runs.progress import open_progress
from apportion.studies.registry import STUDIES, Scale, fitting, perform, read_data

_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]

_HELP = """usage: apportion study NAME --out DIR [OPTIONS]

Run one figure or claim of the paper: data, table, picture, and a verdict on each claim. NAME is
one of these, or all:

{studies}

examples:
  apportion study fig1 --out studies/fig1
  apportion study fig3 --prices prices.csv --out studies/fig3
  apportion study should-pool --transitions tasks.csv --gamma 0.9 --out studies/should-pool
  apportion study all --out studies

All options: apportion study NAME --help
"""


@dataclass(frozen=True)
class StudyOptions:
    """Run one figure or claim of the paper: data, table, picture, and a verdict on each claim.

    The folder holds table.csv, figure.png, verdict.json and report.html.

    Example: apportion study fig1 --out studies/fig1
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Which study, or all; apportion study --help lists them."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder to write to; with all, one folder for each study inside it."""
    scale: Scale = "quick"
    """quick takes minutes on 2 cores; paper is the paper's size, for a GPU."""
    prices: _File = None
    """Daily prices for the studies of the market; none takes the 20 embedded stocks."""
    mnist: _File = None
    """The usual mnist.npz for the study of the federation; none takes 5,000 embedded digits."""
    transitions: _File = None
    """Your tasks for should-pool: a CSV of task, state, action, reward, next_state."""
    gamma: float | None = None
    """Discount of those tasks; none takes 0.7."""
    on: Literal["local", "ray"] = "local"
    """Where to compute: in this process, or as one task for each study on a Ray cluster."""
    seed: int = 0
    """Decides everything random."""
    json: bool = False
    """Print one JSON object."""
    quiet: bool = False
    """Show no progress."""


@dataclass(frozen=True)
class Report:
    """Write report.html into the folder of a run or a study: one page, opened from disk.

    Example: apportion report runs/first
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of a run or a study."""
    json: bool = False
    """Print one JSON object."""


def study(arguments: Sequence[str]) -> Any:
    """Run `apportion study`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:15} {words}" for name, words in STUDIES.items()]
        return _HELP.format(studies="\n".join(lines))
    given = parse(StudyOptions, arguments, "study")
    everything = given.name == "all"
    names = list(STUDIES) if everything else [given.name]
    data = read_data(given.prices, given.mnist, given.transitions, given.gamma)
    calls = {name: fitting(name, data, strict=not everything) for name in names}
    folders = {name: given.out / name if everything else given.out for name in names}
    options = {"scale": given.scale, "seed": given.seed}

    from apportion.report import write_report

    with open_progress(quiet=given.quiet) as progress:
        if given.on == "ray":
            from apportion.bridges.ray import perform_on_ray

            perform_on_ray(calls, folders, options, progress.stage)
        else:
            for name, own in calls.items():
                perform(name, folders[name], data=own, progress=progress.stage, **options)
        for folder in folders.values():
            write_report(folder)
    verdicts = {
        name: json.loads((folder / "verdict.json").read_text()) for name, folder in folders.items()
    }
    if given.json:
        return {"folder": str(given.out), "studies": verdicts}
    told = [line for name in names for line in (name, *map(_line, verdicts[name]))]
    return "\n".join([*told, *(f"wrote {folder / 'report.html'}" for folder in folders.values())])


def _line(verdict: dict[str, Any]) -> str:
    low, high = ("?" if end is None else f"{end:.4g}" for end in verdict["interval"])
    mark = "holds" if verdict["holds"] else "does not hold"
    return (
        f"  {mark}: {verdict['claim']}: {verdict['estimate']:.4g} [{low}, {high}], "
        f"n = {verdict['n']}"
    )


def report(arguments: Sequence[str]) -> Any:
    """Run `apportion report`."""
    given = parse(Report, arguments, "report")

    from apportion.report import write_report

    path = write_report(given.folder)
    return {"report": str(path)} if given.json else f"wrote {path}"
