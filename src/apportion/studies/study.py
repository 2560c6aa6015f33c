"""What every study returns: its table, its picture, and a verdict on each claim it checks."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from apportion.statistics import Estimate


@dataclass(frozen=True)
class Verdict:
    """One claim held against the data: whether it holds, by how much, how surely."""

    claim: str
    holds: bool
    estimate: float
    interval: tuple[float, float]
    n: int
    paper: bool = True
    """Whether the paper makes the claim; the others are ours."""

    @classmethod
    def of(cls, claim: str, estimate: Estimate, *, holds: bool, paper: bool = True) -> "Verdict":
        """A verdict from an estimate with its interval."""
        interval = (estimate.low, estimate.high)
        return cls(claim, bool(holds), estimate.value, interval, estimate.n, paper)

    def to_dict(self) -> dict[str, Any]:
        """The contract's fields; an end that is not finite is null in JSON."""
        finite = [end if abs(end) < float("inf") else None for end in self.interval]
        return {
            "claim": self.claim,
            "holds": self.holds,
            "estimate": self.estimate,
            "interval": finite,
            "n": self.n,
            "paper": self.paper,
        }


@dataclass(frozen=True)
class Study:
    """One figure or claim of the paper as data, picture and verdicts.

    `readings` are the plain sentences a reader should take away, numbers included; `settings` is
    everything needed to run it again.
    """

    name: str
    title: str
    table: pd.DataFrame
    verdicts: tuple[Verdict, ...]
    draw: Callable[[], Figure]
    readings: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Title, verdicts and readings as text."""
        lines = [self.title, ""]
        for verdict in self.verdicts:
            low, high = verdict.interval
            mark = "holds   " if verdict.holds else "does not"
            lines.append(
                f"  {mark}  {verdict.claim}: {verdict.estimate:.4g} [{low:.4g}, {high:.4g}], "
                f"n = {verdict.n}"
            )
        return "\n".join([*lines, "", *(f"  - {reading}" for reading in self.readings)])

    def plot(self) -> Figure:
        """The figure."""
        return self.draw()

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.table

    def save(self, folder: Path) -> None:
        """Write `table.csv`, `figure.png`, `verdict.json`, and `study.json` with title, readings and
        settings (the report is the caller's to add).
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.table.to_csv(folder / "table.csv", index=False)
        with matplotlib.rc_context({"savefig.dpi": 144}):
            self.plot().savefig(folder / "figure.png", bbox_inches="tight")
        verdicts = [verdict.to_dict() for verdict in self.verdicts]
        (folder / "verdict.json").write_text(json.dumps(verdicts, indent=1) + "\n")
        about = {
            "name": self.name,
            "title": self.title,
            "readings": self.readings,
            "settings": self.settings,
        }
        (folder / "study.json").write_text(json.dumps(about, indent=1, default=str) + "\n")
