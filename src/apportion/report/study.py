"""Page of a study: a verdict on each claim, and the notes, picture and table of each figure."""

from pathlib import Path
from typing import Any

from apportion.certify.statistics import Outcome, in_words
from apportion.report.page import (
    Headline,
    Headlines,
    Part,
    Picture,
    Section,
    Table,
    Words,
    number,
    page,
)
from apportion.report.plots import read_if_there, read_table
from apportion.report.run import provenance
from apportion.runs.files import read_bytes
from apportion.runs.sources import changed_files

_COMPUTED = ("command", "run", "commit", "packages", "device", "seconds", "seed", "versions")
"""Facts of `study.json` that the page shows."""


def study_page(folder: Path) -> str:
    """Return the page of a study's folder."""
    verdicts, about = read_if_there(folder / "verdict.json"), read_if_there(folder / "study.json")
    figures = about.get("figures", [])
    holding = sum(_decision(verdict) == "holds" for verdict in verdicts)
    lead = (
        f"{holding} of {len(verdicts)} claims hold. Each card shows the estimate, its 95 % interval, the "
        "number of independent experiments and the levels of the compared arms."
    )
    sections = [Section("Verdicts", [Headlines([_card(verdict) for verdict in verdicts])], lead)]
    for figure in figures:
        own = [verdict for verdict in verdicts if verdict.get("figure") in (None, figure["name"])]
        parts = _figure(folder, figure, own)
        sections.append(Section(figure["title"] if len(figures) > 1 else "Figure", parts))
    facts = {name: about[name] for name in _COMPUTED if about.get(name) is not None}
    files = about.get("files")
    if isinstance(files, dict) and files:
        changed = len(changed_files(files))
        facts["changed since"] = f"{changed} of {len(files)} files of its packages"
    sections.append(provenance(about.get("settings", {}), facts))
    name = about.get("name", folder.name)
    title = figures[0]["title"] if len(figures) == 1 else name
    return page(title, sections, subtitle=f"Study {name}")


def _figure(folder: Path, figure: dict[str, Any], verdicts: list[dict[str, Any]]) -> list[Part]:
    """Return the notes, the picture with the verdicts as alternative text, and the table of a figure."""
    parts: list[Part] = [Words(figure["notes"])] if figure.get("notes") else []
    # Use only the file name, so that a path in study.json cannot leave the folder.
    picture = folder / Path(figure["picture"]).name
    if picture.exists():
        claims = (f"{one['claim']}: {in_words(_decision(one))}" for one in verdicts)
        words = f"{figure['title']}: {'; '.join(claims)}"
        parts.append(Picture(figure["title"], read_bytes(picture), words))
    table = read_table(folder, Path(figure["table"]).stem)
    if table is not None:
        parts.append(Table(f"All numbers, {len(table)} rows", table))
    return parts


def _decision(verdict: dict[str, Any]) -> Outcome:
    """Return the outcome after Holm's adjustment; an exact statement is not adjusted."""
    return verdict.get("adjusted") or verdict["outcome"]


def _card(verdict: dict[str, Any]) -> Headline:
    low, high = verdict["interval"]
    whose = "A claim of the paper" if verdict["paper"] else "Our own check"
    decision, alone = _decision(verdict), verdict["outcome"]
    before = f"; {in_words(alone)} before Holm's adjustment" if alone != decision else ""
    levels = "".join(f"; {name} {number(one)}" for name, one in verdict.get("levels", {}).items())
    return Headline(
        verdict["claim"],
        number(verdict["estimate"]),
        f"[{number(low)}, {number(high)}]",
        f"{whose}; n = {verdict['n']}{levels}{before}",
        decision,
    )
