"""What every study concludes: its table, its figure, and a verdict on each claim it checks."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from apportion.certify.statistics import (
    CONFIDENCE,
    Estimate,
    Outcome,
    holm,
    in_words,
    judge,
    outcome,
    p_value,
)
from apportion.errors import InputError
from apportion.runs.files import checksummed, write_atomic, write_figure, write_json


@dataclass(frozen=True)
class Verdict:
    """One claim checked against the data: whether it holds, by how much, how surely."""

    claim: str
    holds: bool
    estimate: float
    interval: tuple[float, float]
    n: int
    paper: bool = True
    """Whether the paper makes the claim, or we do. Each kind is one family of a figure (Holm)."""
    refuted: bool | None = None
    """Whether it is shown not to hold; where nobody says, it is when the interval lies below 0."""
    p: float | None = None
    """The level from which on the interval decides; none for an exact statement."""
    adjusted: Outcome | None = None
    """The outcome after Holm's adjustment for all claims of the same kind in its figure."""
    exact: bool = False
    """Decided by a statement about every case looked at, and by no interval."""
    levels: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The level of each arm that is compared, by its name, in the unit of the claim."""

    @property
    def decision(self) -> Outcome:
        """The outcome after Holm's adjustment; an exact statement needs none."""
        return self.adjusted or self.outcome

    @property
    def outcome(self) -> Outcome:
        """Whether the claim holds, does not, or cannot be told."""
        if self.refuted is None:
            return outcome(self.holds, self.interval)
        return "holds" if self.holds else "does-not-hold" if self.refuted else "not-established"

    @classmethod
    def of(cls, claim: str, estimate: Estimate, **options: Any) -> "Verdict":
        """A verdict by the interval of one estimate; options as in `of_all`."""
        return cls.of_all(claim, [estimate], **options)

    @classmethod
    def of_all(
        cls,
        claim: str,
        estimates: Sequence[Estimate],
        *,
        above: float | None = None,
        below: float | None = None,
        paper: bool = True,
        levels: Mapping[str, float] | None = None,
    ) -> "Verdict":
        """A verdict on a claim that every one of several numbers lies within bounds; above 0 unless said.

        It holds where each interval does by itself, which no number of them makes easier; that one fails
        must show after allowing for their number (Bonferroni). The one nearest to failing is shown.
        """
        if not estimates:
            raise InputError(f"{claim}: there is no number to judge it by; compute at least one")
        if above is None:
            above = 0.0 if below is None else float("-inf")
        bounds = {"above": above, "below": float("inf") if below is None else below}
        judged = [judge(estimate, **bounds) for estimate in estimates]
        found = [p_value(estimate, **bounds) for estimate in estimates]
        known = [p for p in found if p is not None]
        holds, refuted, p = all(one == "holds" for one in judged), "does-not-hold" in judged, None
        if len(known) == len(estimates):
            inside = [bounds["above"] < e.value < bounds["below"] for e in estimates]
            outside = [len(known) * p for p, kept in zip(known, inside, strict=True) if not kept]
            p = max(known) if all(inside) else min(1.0, *outside)
            refuted = not all(inside) and p < 1 - CONFIDENCE
        shown = min(estimates, key=lambda e: min(e.low - bounds["above"], bounds["below"] - e.high))
        ends = (shown.low, shown.high)
        compared = dict(levels or {})
        return cls(claim, holds, shown.value, ends, shown.n, paper, refuted, p, levels=compared)

    def scaled(self, scale: Callable[[float], float]) -> "Verdict":
        """The same, with its numbers on another scale, such as `math.exp` for a claim about logs."""
        low, high = (scale(end) for end in self.interval)
        return replace(self, estimate=scale(self.estimate), interval=(low, high))

    def to_dict(self) -> dict[str, Any]:
        """The contract's fields; an end that is not finite is null in JSON."""
        finite = [end if abs(end) < float("inf") else None for end in self.interval]
        return {
            "claim": self.claim,
            "outcome": self.outcome,
            "adjusted": self.adjusted,
            "holds": self.holds,
            "estimate": self.estimate,
            "interval": finite,
            "levels": dict(self.levels),
            "n": self.n,
            "p": self.p,
            "paper": self.paper,
            "exact": self.exact,
        }


def _adjusted_for_all(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The verdicts with their outcomes after Holm's adjustment.

    The paper's claims of a figure are one family, and ours are another. Both are declared with the
    claims, before any number is known; our claims make none of the paper's harder to establish.
    """
    families = {
        paper: [v.p for v in verdicts if v.paper == paper and v.p is not None]
        for paper in (True, False)
    }
    sure = {
        paper: iter([p < 1 - CONFIDENCE for p in holm(found)]) for paper, found in families.items()
    }
    return tuple(
        replace(v, adjusted=v.outcome if next(sure[v.paper]) else "not-established")
        if v.p is not None
        else v
        for v in verdicts
    )


@dataclass(frozen=True)
class FigureResult:
    """One figure or claim of the paper: its table, its plot, a verdict on each claim, and notes."""

    name: str
    """Where a study has one figure alone, the study's name."""
    title: str
    table: pd.DataFrame
    verdicts: Iterable[Verdict]
    """Kept as a tuple, each adjusted for all claims of its kind in this figure (Holm)."""
    plot: Callable[[], Figure]
    """Draws the figure."""
    notes: Iterable[str] = ()
    """What a reader should take away, in plain sentences with their numbers; kept as a tuple."""

    def __post_init__(self) -> None:
        # Here and not in each study, so that none can leave a claim out of the count.
        object.__setattr__(self, "verdicts", _adjusted_for_all(tuple(self.verdicts)))
        object.__setattr__(self, "notes", tuple(self.notes))

    def summary(self) -> str:
        """Title, verdicts and notes as text."""
        lines = [self.title, ""]
        for verdict in self.verdicts:
            low, high = verdict.interval
            levels = "".join(f"; {name} {value:.4g}" for name, value in verdict.levels.items())
            changed = verdict.decision != verdict.outcome
            before = f"; {in_words(verdict.outcome)} before Holm's adjustment" if changed else ""
            lines.append(
                f"  {in_words(verdict.decision):18}{verdict.claim}: {verdict.estimate:.4g} "
                f"[{low:.4g}, {high:.4g}], n = {verdict.n}{levels}{before}"
            )
        return "\n".join([*lines, "", *(f"  - {note}" for note in self.notes)])


@dataclass(frozen=True)
class Study:
    """What is concluded from the same cells: one figure, or several."""

    name: str
    figures: tuple[FigureResult, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    """Everything needed to run it again."""

    def figure(self, name: str = "") -> FigureResult:
        """The figure of this name; without a name, the only one."""
        [found] = [one for one in self.figures if name in ("", one.name)]
        return found

    def summary(self) -> str:
        """Every figure's title, verdicts and notes as text."""
        return "\n\n".join(figure.summary() for figure in self.figures)

    def verdicts(self) -> list[dict[str, Any]]:
        """The verdicts of all figures as `verdict.json` has them.

        Where there are several figures, each verdict says under `figure` which one it is of.
        """
        return [
            verdict.to_dict() | ({"figure": figure.name} if len(self.figures) > 1 else {})
            for figure in self.figures
            for verdict in figure.verdicts
        ]

    def save(self, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write each figure's table and picture, `study.json` and, last, `verdict.json`.

        They are `table.csv` and `figure.png`, or where there are several figures NAME.csv and NAME.png.

        Parameters
        ----------
        folder
            Made where it is not there; earlier files are replaced.
        facts
            What `study.json` says beside the figures and settings: how it was computed.
        """
        folder = Path(folder)
        several = len(self.figures) > 1
        about = [
            {
                "name": figure.name,
                "title": figure.title,
                "notes": figure.notes,
                "table": f"{figure.name}.csv" if several else "table.csv",
                "picture": f"{figure.name}.png" if several else "figure.png",
            }
            for figure in self.figures
        ]
        whole = {"name": self.name, "figures": about, "settings": self.settings, **(facts or {})}
        drawn = [str(one[kind]) for one in about for kind in ("table", "picture")]
        with checksummed(folder, *drawn, "study.json", "verdict.json"):
            for figure, one in zip(self.figures, about, strict=True):
                content = figure.table.to_csv(index=False).encode()
                write_atomic(folder / str(one["table"]), content)
                picture = folder / str(one["picture"])
                write_figure(picture, figure.plot(), dpi=144, bbox_inches="tight")
            write_json(folder / "study.json", plain(whole))
            write_json(folder / "verdict.json", self.verdicts())


def select(rows: Any, **values: Any) -> Any:
    """The rows of a table that have these values.

    >>> select(pd.DataFrame({"arm": ["a", "b", "a"], "regret": [3, 4, 5]}), arm="a").regret.tolist()
    [3, 5]
    """
    for name, value in values.items():
        rows = rows[rows[name] == value]
    return rows


def plain(content: Any) -> Any:
    """As JSON reads it: settings may hold paths and tuples."""
    return json.loads(json.dumps(content, default=str))
