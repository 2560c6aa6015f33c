"""What `apportion certify` left in a run's folder: the verdict, what it rests on, and its picture."""

from pathlib import Path
from typing import Any

from apportion.report.files import read_json
from apportion.report.page import Facts, Headline, Headlines, Part, Picture, Section
from apportion.statistics import Outcome

_OUTCOMES: dict[str, Outcome] = {
    "certified": "holds",
    "harmful": "does-not-hold",
    "not yet": "not-established",
}
_LEAD = (
    "Two gamblers bet on the policy's gains over what decides today, one that it is better, one that it is "
    "worse; who has what is needed has won. A wrong verdict has probability alpha at most, however often "
    "one asks."
)


def certificate(folder: Path) -> list[Section]:
    """A section on the newest certificate; none where there is none."""
    made: dict[str, Any] = read_json(folder / "certificate.json")
    if not made:
        return []
    points = [100 * made[name] for name in ("mean", "lower", "upper") if made[name] is not None]
    mean = f"{points[0]:+.3f} points" if len(points) == 3 else "no bet yet"
    card = Headline(
        f"{made['policy']} against {made['against']}: {made['verdict']}",
        mean,
        f"[{points[-2]:+.3f}, {points[-1]:+.3f}]",
        f"mean gain of a {made['period']}; {made['bets']} bets, {made['start']} to {made['end']}",
        _OUTCOMES.get(made["verdict"]),
    )
    facts = {
        "verdict": made["verdict"],
        "decided on": made["decided"],
        "alpha": made["alpha"],
        "wealth of the bets": made["wealth"],
        "trust of a gate": made["trust"],
        "gains beyond the bound": made["clipped"],
        "made at": made.get("made"),
    }
    parts: list[Part] = [Headlines([card]), Facts("What it rests on", facts)]
    plot = folder / "certificate.png"
    if made.get("plot") == plot.name and plot.is_file():
        words = f"The wealth of both bets and the bounds on the mean gain: {made['verdict']}."
        parts.append(Picture("The bets", plot.read_bytes(), words))
    return [Section("Certificate", parts, _LEAD)]
