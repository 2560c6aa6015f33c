"""Report of a run: results, the sections of its domain, and learning curves.

A run's folder contains `metrics` (one row per recorded step) and optionally `headline.json`,
`certificate.json`, `allocations` (one column per entity), `probabilities` (one column per task),
`settings.toml`, `environment.json`, and the files that its domain reads. A table is one CSV file, or
Parquet in parts. The first column of a time series is the date, the round or the step.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from apportion.certify.statistics import Outcome
from apportion.errors import InputError
from apportion.report import plots
from apportion.report.page import (
    Facts,
    Headline,
    Headlines,
    Part,
    Picture,
    Section,
    Words,
    page,
)
from apportion.report.plots import read_if_there, read_table
from apportion.runs.settings import read_toml

_CURVES = {
    "reward": "Reward of the batch",
    "deviation": "Deviation from equal shares",
    "score": "Score of the sampled task",
    "loss": "Weighted loss",
}
_VERDICTS: dict[str, Outcome] = {
    "certified": "holds",
    "harmful": "does-not-hold",
    "not yet": "not-established",
}
_BETS = (
    "One sequence of bets is on the policy being better than the baseline, another on it being worse. The "
    "first one to reach the required wealth decides the verdict. The probability of a wrong verdict is at "
    "most alpha, however often the test is repeated."
)
_GLOSSARY = {
    "allocation": "The shares of all entities in a period; they sum to 1.",
    "deviation from equal shares": (
        "A share minus 1 divided by the number of entities. A policy whose shares stay nearly equal has "
        "learned little, or trades little on it."
    ),
    "task": "A subset of all entities; the policy is trained on many tasks.",
    "score and probability": (
        "The score of a task estimates its difficulty; the probability of sampling the task increases "
        "with the score."
    ),
    "STL, MTL, P-MTL": "Training on one task, on many sampled uniformly, on many sampled by priority.",
    "interval": "95 %: over repeated data, 19 of 20 such intervals contain the true value.",
    "holds, does not hold, not established": (
        "The interval is on the claim's side of 0; on the other side; or contains 0."
    ),
    "certificate": "An anytime-valid test of the policy against a baseline, by bets on its gains.",
}
"""Glossary of every run's page."""


class RunDomain(Protocol):
    """The part of a domain that the report of its runs uses."""

    glossary: ClassVar[Mapping[str, str]]

    def sections(self, folder: Path) -> list[Section]: ...


def run_page(folder: Path, domain: RunDomain | None = None, *, inline: bool = False) -> str:
    """Return the report of a run, with the sections and the glossary of its domain."""
    metrics = read_table(folder, "metrics")
    if metrics is None or metrics.empty:
        raise InputError(f"{folder}: the metrics have no rows yet; wait until steps are recorded")
    settings = read_toml(folder / "settings.toml")
    about, environment = (read_if_there(folder / f"{x}.json") for x in ("headline", "environment"))
    sections = [*_headline(about), *_certificate(folder)]
    if domain is not None:
        sections += domain.sections(folder)
    shares = read_table(folder, "allocations", indexed=True)
    if shares is not None:
        lead = "Shares of each entity over time."
        sections.append(Section("Allocations", [plots.allocations(shares)], lead))
    curves = [
        plots.learning_curve(metrics, c, title) for c, title in _CURVES.items() if c in metrics
    ]
    lead = "Medians with interquartile bands, over runs or over neighbouring steps of one run."
    sections.append(Section("Learning", curves, lead))
    chances = read_table(folder, "probabilities", indexed=True)
    if chances is not None:
        heat = plots.task_probabilities(chances, "Probability of each task over training")
        lead = "The tasks that the algorithm trains on."
        sections.append(Section("Tasks", [heat], lead))
    sections.append(provenance(settings, environment))
    words = {**_GLOSSARY, **(domain.glossary if domain is not None else {})}
    glossary = Facts("Terms on this page", words, kind="glossary")
    sections.append(Section("Glossary", [glossary]))
    title = about.get("title", f"Run {folder.resolve().name}")
    return page(title, sections, subtitle=about.get("subtitle", ""), inline=inline)


def _headline(about: dict[str, Any]) -> list[Section]:
    """Return the cards and the text of `headline.json`, if there are any."""
    parts: list[Part] = []
    if about.get("cards"):
        parts.append(Headlines([Headline(**card) for card in about["cards"]]))
    if about.get("words"):
        parts.append(Words(about["words"]))
    return [Section("Headline", parts, about.get("lead", ""))] if parts else []


def _certificate(folder: Path) -> list[Section]:
    """Return the last result of `apportion certify`: verdict, facts and plot."""
    made: dict[str, Any] = read_if_there(folder / "certificate.json")
    if not made:
        return []
    points = [100 * made[name] for name in ("mean", "lower", "upper") if made[name] is not None]
    mean = f"{points[0]:+.3f} points" if len(points) == 3 else "no bet yet"
    card = Headline(
        f"{made['policy']} against {made['against']}: {made['verdict']}",
        mean,
        f"[{points[-2]:+.3f}, {points[-1]:+.3f}]",
        f"mean gain per {made['period']}; {made['bets']} bets, {made['start']} to {made['end']}",
        _VERDICTS.get(made["verdict"]),
    )
    facts = {
        "decided on": made["decided"],
        "alpha": made["alpha"],
        "wealth of the bets": made["wealth"],
        "trust": made["trust"],
        "gains beyond the bound": made["clipped"],
    }
    parts: list[Part] = [Headlines([card]), Facts("Evidence", facts)]
    plot = folder / "certificate.png"
    if plot.is_file():
        words = f"Wealth of both bets and bounds on the mean gain: {made['verdict']}."
        parts.append(Picture("The bets", plot.read_bytes(), words))
    return [Section("Certificate", parts, _BETS)]


def provenance(settings: dict[str, Any], facts: dict[str, Any]) -> Section:
    """Return the folded section of settings, versions, device, seed and data."""
    parts = [Facts("Settings", settings), Facts("Versions, device, seed and data", facts)]
    return Section("Settings and provenance", [part for part in parts if part.facts])
