"""From a folder to its page: what a run or a study left on disk becomes `report.html` beside it.

A section is written for what is there and for nothing else, so that a young run, a study and a demo
all have an honest page.
"""

from pathlib import Path
from typing import Any

from apportion.errors import InputError, first_line
from apportion.report.files import read_json, read_table, table_path
from apportion.report.page import Headline, Headlines, Picture, Section, Table, Words, number, page
from apportion.report.run import only_beyond_zero, provenance, run_page
from apportion.runs.files import write_atomic
from apportion.statistics import Outcome, outcome

_COMPUTED = ("command", "commit", "device", "seconds", "seed", "versions")
"""What a study's page says of how it was computed."""
_FOUND = "a study holds verdict.json and table.csv, a run holds metrics.csv or metrics.parquet"


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run or a study, and say where it is.

    A study's folder holds `verdict.json`, `table.csv` and `figure.png`. A run's holds `metrics`
    (a row for each recorded step) and may hold tables that add a section each: `headline.json`,
    `choice` (a row for each variant), `values` (a column for each strategy), `strategies` (a row for
    each), `power`, `cars` and `schedules` (of a garage), `accuracy` (a column for each way to
    aggregate), `allocations` (a column for each entity), `probabilities` (a column for each task),
    `next` (a row for each entity), with `certificate.json`, `results.json`, `policy.json`,
    `settings.toml` and `environment.json`. Tables are CSV or Parquet; the first column of those
    over time is the date, the round or the step.

    Raises
    ------
    InputError
        The folder is neither, or a file in it cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the folder of a run or a study")
    try:
        content = _page(folder).encode()
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Which file it is cannot be told from here: a page reads a dozen.
        raise InputError(
            f"{folder}: what it holds makes no page ({type(error).__name__}: {first_line(error)}); put "
            "back what the run or the study wrote, and if this is it, please report a bug"
        ) from error
    path = folder / "report.html"
    write_atomic(path, content)
    return path


def _page(folder: Path) -> str:
    if (folder / "verdict.json").exists():
        return _study(folder)
    if table_path(folder, "metrics") is not None:
        return run_page(folder)
    raise InputError(f"{folder}: neither a run nor a study; {_FOUND}")


def _study(folder: Path) -> str:
    verdicts = read_json(folder / "verdict.json")
    about = read_json(folder / "study.json")
    title = about.get("title", folder.name)
    cards = [_verdict_card(verdict) for verdict in verdicts]
    holding = sum(bool(verdict["holds"]) for verdict in verdicts)
    sections = [
        Section(
            "Verdicts",
            [Headlines(cards)],
            f"{holding} of {len(verdicts)} claims hold. Each is given with its estimate, its 95 % "
            "interval and the number of independent experiments.",
        )
    ]
    if about.get("notes"):
        sections.append(Section("Notes", [Words(about["notes"])]))
    if (folder / "figure.png").exists():
        said = (
            f"{verdict['claim']}: {_outcome(verdict).replace('-', ' ')}" for verdict in verdicts
        )
        words = f"{title}: {'; '.join(said)}"
        picture = Picture(title, (folder / "figure.png").read_bytes(), words)
        sections.append(Section("Figure", [picture]))
    table = read_table(folder, "table")
    if table is not None:
        sections.append(Section("Table", [Table(f"All numbers, {len(table)} rows", table)]))
    facts = {name: about[name] for name in _COMPUTED if about.get(name) is not None}
    sections += provenance(about.get("settings", {}), facts)
    return page(title, sections, subtitle=f"Study {about.get('name', folder.name)}")


def _verdict_card(verdict: dict[str, Any]) -> Headline:
    low, high = verdict["interval"]
    whose = "A claim of the paper" if verdict.get("paper", True) else "Our own check"
    return Headline(
        verdict["claim"],
        number(verdict["estimate"]),
        f"[{number(low)}, {number(high)}]",
        f"{whose}; n = {verdict['n']}{_after_all(verdict)}",
        _outcome(verdict),
    )


def _after_all(verdict: dict[str, Any]) -> str:
    """What is left when all comparisons of the study are allowed for; results of before do not say."""
    adjusted = verdict.get("adjusted")
    return f"; {adjusted.replace('-', ' ')} after Holm's adjustment" if adjusted else ""


def _outcome(verdict: dict[str, Any]) -> Outcome:
    """As the study says, or from the interval where it was written before there were three."""
    said = verdict.get("outcome") or outcome(bool(verdict["holds"]), verdict["interval"])
    return only_beyond_zero(said, verdict["interval"])
