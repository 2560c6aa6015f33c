"""`apportion study` and `apportion report`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from apportion.cli.options import AllowJumps, File, Folder, Json, Out, Quiet
from apportion.domains.settings import check_seed
from apportion.errors import InputError
from apportion.runs.progress import open_progress
from apportion.studies.registry import STUDIES, Request, Scale, perform, study_names

_LIST = "\n".join(f"- `{name}`: {study.purpose}" for name, study in STUDIES.items())
_HELP = f"""Run a figure or claim of the paper: data, table, picture, and a verdict on each claim.

{_LIST}

For example:

- `apportion study fig1 --out studies/fig1`
- `apportion study fig3 --prices prices.csv --out studies/fig3`
- `apportion study all --out studies`"""


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Request):
    """What decides a study's numbers, and where it is computed."""

    out: Out
    """Folder to write to; with all, one folder for each study inside it."""
    scale: Scale = "quick"
    """quick takes minutes on 2 cores; paper is the paper's size, for a GPU."""
    seed: int = 0
    """Decides everything random."""
    prices: File = None
    """Daily prices for the studies of the market; without it, the 20 embedded stocks."""
    allow_jumps: AllowJumps = False
    mnist: File = None
    """The usual mnist.npz for the studies of federations; without it, 5,000 embedded digits."""
    draw: bool = False
    """Compute nothing: table, picture and verdicts from the cells in the folder."""
    processes: Annotated[int, Parameter(metavar="N")] = 1
    """So many processes of this machine compute at once, each the next program: one alone seldom fills a
    GPU."""
    on: Literal["local", "ray"] = "local"
    """Where to compute: on this machine, or on a Ray cluster."""
    address: Annotated[str | None, Parameter(metavar="A")] = None
    """Address of the Ray cluster; without it that of RAY_ADDRESS, or a new cluster on this machine."""

    def __post_init__(self):
        check_seed(self.seed)
        if self.address is not None and self.on != "ray":
            raise InputError(f"--address {self.address} needs --on ray; add it, or leave it out")
        if self.processes < 1:
            raise InputError(f"processes is {self.processes}; give at least 1")
        if self.processes > 1 and (self.on == "ray" or self.draw):
            other = "--on ray" if self.on == "ray" else "--draw"
            raise InputError(
                f"--processes {self.processes} computes on this machine; leave {other} out, or "
                "--processes"
            )


study = App(name="study", help=_HELP)


@study.default
def _study(
    name: Annotated[
        str, Parameter(name="NAME", choices=(*study_names(), "all"), show_choices=False)
    ],
    /,
    *,
    options: Annotated[StudyOptions, Parameter(name="*")],
    json: Json = False,
    quiet: Quiet = False,
) -> Any:
    """Run `apportion study`.

    Parameters
    ----------
    name
        Which study, or all.
    """
    begun = time.monotonic()
    _check_folders(name, options.out)

    from apportion.report import write_report

    verdicts, seconds, lines = {}, {}, []
    with open_progress(quiet=quiet) as progress:
        for done in perform(
            name,
            options.out,
            options,
            executor=_executor(options),
            draw=options.draw,
            progress=progress.stage,
        ):
            verdicts[done.name] = done.study.verdicts()
            seconds[done.name] = done.seconds
            lines += [done.name, *(_describe(verdict) for verdict in verdicts[done.name])]
            lines.append(f"wrote {write_report(done.folder)}")
    whole = round(time.monotonic() - begun, 1)
    if json:
        content = {"folder": str(options.out), "studies": verdicts}
        return content | {"seconds": seconds, "seconds_in_all": whole}
    return "\n".join([*lines, f"took {whole:g} s"])


def _check_folders(name: str, out: Path) -> None:
    """Refuse folders that cannot be written, or hold anything but the study that goes there."""
    from apportion.runs.files import read_json, require_writable

    for folder in [out / study for study in STUDIES] if name == "all" else [out]:
        require_writable(folder)
        found = sorted(entry.name for entry in folder.glob("*") if not entry.name.startswith("."))
        if found and not {"cells.json", "study.json", "verdict.json"} & set(found):
            raise InputError(
                f"{folder}: holds other files, such as {found[0]}; choose a new or an empty folder"
            )
        if "cells.json" in found and not isinstance(read_json(folder / "cells.json"), dict):
            raise InputError(f"{folder / 'cells.json'}: is damaged; put it back from a copy")
        rows = folder / "rows.parquet"
        if rows.is_file() and not _whole(rows):
            raise InputError(f"{rows}: was cut short or changed; put it back, or remove it")


def _whole(rows: Path) -> bool:
    """Whether a Parquet file begins and ends as one does."""
    content = rows.read_bytes()
    return len(content) > 8 and content[:4] == content[-4:] == b"PAR1"


def _executor(options: StudyOptions) -> Any:
    """Who computes."""
    from apportion.studies.executors import Processes, Ray, Serial

    if options.on == "ray":
        return Ray(options.address)
    return Processes(options.processes) if options.processes > 1 else Serial()


def _describe(verdict: dict[str, Any]) -> str:
    from apportion.studies.study import after_all

    low, high = ("?" if end is None else f"{end:.4g}" for end in verdict["interval"])
    mark = verdict["outcome"].replace("-", " ")
    after = after_all(verdict["outcome"], verdict["adjusted"]).replace("-", " ")
    return (
        f"  {mark}: {verdict['claim']}: {verdict['estimate']:.4g} [{low}, {high}], "
        f"n = {verdict['n']}{after}"
    )


def report(folder: Folder, /, *, json: Json = False) -> Any:
    """Write one HTML page of a run or a study.

    The page is report.html in the folder, and opens from disk.

    Example: `apportion report runs/first`

    Parameters
    ----------
    folder
        Folder of a run or a study.
    """
    from apportion.report import write_report

    path = write_report(folder)
    return {"report": str(path)} if json else f"wrote {path}"
