"""Results of a study: tables, figures, and a verdict on each claim."""

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
    """Verdict on one claim, with its estimate and interval."""

    claim: str
    holds: bool
    estimate: float
    interval: tuple[float, float]
    n: int
    paper: bool = True
    """Whether the claim is the paper's or ours. In a figure each kind is one family for Holm."""
    refuted: bool | None = None
    """Whether the claim is shown not to hold; by default, whether the interval is below 0."""
    p: float | None = None
    """Smallest significance level at which the interval decides; None for an exact statement."""
    adjusted: Outcome | None = None
    """Outcome after Holm's adjustment for all claims of the same kind in the figure."""
    exact: bool = False
    """Whether the claim is decided by checking every case instead of by an interval."""
    levels: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Level of each compared arm, in the unit of the claim."""

    @property
    def decision(self) -> Outcome:
        """Outcome after Holm's adjustment; an exact statement is not adjusted."""
        return self.adjusted or self.outcome

    @property
    def outcome(self) -> Outcome:
        """Outcome before Holm's adjustment: holds, does not hold, or not established."""
        if self.refuted is None:
            return outcome(self.holds, self.interval)
        return "holds" if self.holds else "does-not-hold" if self.refuted else "not-established"

    @classmethod
    def of(cls, claim: str, estimate: Estimate, **options: Any) -> "Verdict":
        """Return a verdict based on the interval of one estimate; options as in `of_all`."""
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
        """Return a verdict on the claim that all numbers are within bounds, by default above 0.

        The claim holds if every interval is within the bounds, which needs no adjustment. It does not hold
        if a number is outside after a Bonferroni adjustment. The number closest to failing is reported.
        """
        if not estimates:
            raise InputError(f"{claim}: there is no estimate; compute at least one")
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
        """Return the verdict with its numbers on another scale, such as `math.exp` for logarithms."""
        low, high = (scale(end) for end in self.interval)
        return replace(self, estimate=scale(self.estimate), interval=(low, high))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of `verdict.json`; an interval end that is not finite is None."""
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
    """Return the verdicts with their outcomes after Holm's adjustment.

    The paper's claims in a figure are one family and ours another, so that ours do not affect the
    adjustment of the paper's. The families are declared with the claims, before any number is computed.
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
    """Figure of a study: table, plot, verdicts and notes."""

    name: str
    """Name of the figure; that of the study if it has one figure."""
    title: str
    table: pd.DataFrame
    verdicts: Iterable[Verdict]
    """Verdicts, converted to a tuple with Holm's adjustment for all claims of the same kind."""
    plot: Callable[[], Figure]
    """Function that plots the figure."""
    notes: Iterable[str] = ()
    """Conclusions in full sentences, with their numbers; converted to a tuple."""

    def __post_init__(self) -> None:
        # Adjusting here guarantees that no study omits a claim from its family.
        object.__setattr__(self, "verdicts", _adjusted_for_all(tuple(self.verdicts)))
        object.__setattr__(self, "notes", tuple(self.notes))

    def summary(self) -> str:
        """Return title, verdicts and notes as text."""
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
    """Result of a study: one or more figures computed from the same cells."""

    name: str
    figures: tuple[FigureResult, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that reproduce the study."""

    def figure(self, name: str = "") -> FigureResult:
        """Return a figure by name; without a name, the only figure."""
        [found] = [one for one in self.figures if name in ("", one.name)]
        return found

    def summary(self) -> str:
        """Return titles, verdicts and notes of all figures as text."""
        return "\n\n".join(figure.summary() for figure in self.figures)

    def verdicts(self) -> list[dict[str, Any]]:
        """Return the verdicts of all figures, in the format of `verdict.json`.

        If there are several figures, the field `figure` names the figure of each verdict.
        """
        return [
            verdict.to_dict() | ({"figure": figure.name} if len(self.figures) > 1 else {})
            for figure in self.figures
            for verdict in figure.verdicts
        ]

    def save(self, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write tables, pictures, `study.json` and, last, `verdict.json`.

        The files are `table.csv` and `figure.png`, or NAME.csv and NAME.png if there are several figures.

        Parameters
        ----------
        folder : Path
            Output folder, created if necessary; existing files are replaced.
        facts : mapping, optional
            Further entries of `study.json` on how the study was computed.
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
    """Return the rows of a table with these values.

    >>> select(pd.DataFrame({"arm": ["a", "b", "a"], "regret": [3, 4, 5]}), arm="a").regret.tolist()
    [3, 5]
    """
    for name, value in values.items():
        rows = rows[rows[name] == value]
    return rows


def plain(content: Any) -> Any:
    """Convert to JSON values; settings may contain paths and tuples."""
    return json.loads(json.dumps(content, default=str))
