"""What every study concludes: its table, its figure, and a verdict on each claim it checks."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from apportion.runs.atomic import write_atomic, write_json
from apportion.statistics import Estimate, Outcome, outcome


@dataclass(frozen=True)
class Verdict:
    """One claim checked against the data: whether it holds, by how much, how surely."""

    claim: str
    holds: bool
    estimate: float
    interval: tuple[float, float]
    n: int
    paper: bool = True
    """Whether the paper makes the claim; the others are ours."""

    @property
    def outcome(self) -> Outcome:
        """Whether the claim holds, does not, or cannot be told."""
        return outcome(self.holds, self.interval)

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
            "outcome": self.outcome,
            "holds": self.holds,
            "estimate": self.estimate,
            "interval": finite,
            "n": self.n,
            "paper": self.paper,
        }


@dataclass(frozen=True)
class Study:
    """One figure or claim of the paper as data, figure and verdicts."""

    name: str
    title: str
    table: pd.DataFrame
    verdicts: tuple[Verdict, ...]
    plot: Callable[[], Figure]
    """Draws the figure."""
    notes: tuple[str, ...] = ()
    """What a reader should take away, in plain sentences with their numbers."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Everything needed to run it again."""

    def summary(self) -> str:
        """Title, verdicts and notes as text."""
        lines = [self.title, ""]
        for verdict in self.verdicts:
            low, high = verdict.interval
            lines.append(
                f"  {verdict.outcome:16}{verdict.claim}: {verdict.estimate:.4g} [{low:.4g}, {high:.4g}], "
                f"n = {verdict.n}"
            )
        return "\n".join([*lines, "", *(f"  - {note}" for note in self.notes)])

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.table

    def save(self, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write `table.csv`, `figure.png`, `study.json` and, last, `verdict.json`.

        Parameters
        ----------
        folder
            Made where it is not there; earlier files are replaced.
        facts
            What `study.json` says beside name, title, notes and settings: how it was computed.
        """
        folder = Path(folder)
        write_atomic(folder / "table.csv", self.table.to_csv(index=False).encode())
        picture = io.BytesIO()
        with matplotlib.rc_context({"savefig.dpi": 144}):
            self.plot().savefig(picture, bbox_inches="tight", format="png")
        write_atomic(folder / "figure.png", picture.getvalue())
        about = {
            "name": self.name,
            "title": self.title,
            "notes": self.notes,
            "settings": self.settings,
            **(facts or {}),
        }
        write_json(folder / "study.json", plain(about))
        write_json(folder / "verdict.json", [verdict.to_dict() for verdict in self.verdicts])


def plain(content: Any) -> Any:
    """As JSON reads it: settings may hold paths and tuples."""
    return json.loads(json.dumps(content, default=str))
