"""The page of `apportion demo`: a demonstration of the method in every installed domain."""

import io
from collections.abc import Mapping

import pandas as pd

from apportion.domains.domain import Demonstration, Domain
from apportion.errors import InputError
from apportion.report.page import Facts, Part, Picture, Section, Table, Words, page
from apportion.runs.progress import Progress, Quiet

_TITLE = "One policy, every subset is a task"
_IDEA = (
    "In each period, a policy divides a resource among the entities of a task. One network scores every "
    "entity, and a softmax turns the scores into shares. The network does not depend on the identity of an "
    "entity, so one policy can be trained on many tasks, each a subset of all entities, and used on "
    "entities that it was not trained on. Each domain below compares single-task, multi-task and "
    "prioritised learning on such entities, after equally many updates, with the usual rule. A domain that "
    "takes longer to train shows the policy in its package instead.",
    "This is a demonstration with small networks and few updates, in minutes on two cores. Its numbers "
    "are not findings; the studies test claims.",
)
_GLOSSARY = {
    "task": "A subset of the entities, which share one resource.",
    "single-task learning": "A policy is trained on one task.",
    "multi-task learning": "A policy is trained on many tasks, sampled uniformly.",
    "prioritised learning": (
        "Multi-task learning that samples tasks more often if the policy's shares on them are far from "
        "equal (the paper's Algorithm 1)."
    ),
    "the usual rule": "A common rule without learning; the last row of each table.",
    "update": "One training step; every policy gets the same number.",
    "interval": (
        "A 95 % interval of the level over independent units, such as weeks, or repetitions with other "
        "tasks and initial parameters; n counts the units. Methods share tasks and days, so intervals "
        "of levels can overlap although their difference is significant."
    ),
}
_MOST_ENTITIES = 10
"""Largest number of entities with distinct colours in the plot of shares."""


class _Part(Quiet):
    """Progress of one domain as a part of the total."""

    def __init__(self, whole: Progress, name: str, place: int, count: int):
        self._whole, self._name, self._place, self._count = whole, name, place, count

    def stage(self, text: str, done: float | None = None) -> None:
        self._whole.stage(f"{self._name}: {text}", (self._place + (done or 0.0)) / self._count)


def demonstrate_all(
    domains: list[Domain], seed: int, progress: Progress
) -> dict[str, Demonstration | str]:
    """Return the demonstration of each domain, or the message of its error."""
    found: dict[str, Demonstration | str] = {}
    for place, domain in enumerate(domains):
        own = _Part(progress, domain.name, place, len(domains))
        own.stage("starting")
        try:
            result = domain.demonstrate(seed, own)
        except InputError as error:
            result = str(error)
        if result is not None:
            found[domain.name] = result
    return found


def demo_page(found: Mapping[str, Demonstration | str]) -> str:
    """Return the page as one HTML string."""
    sections = [Section("The idea", [Words(_IDEA)])]
    for name, result in found.items():
        if isinstance(result, str):
            sections.append(Section(name.capitalize(), [Words([f"Not shown: {result}."])]))
        else:
            sections.append(Section(result.title, _parts(result), result.question))
    words = Facts("Terms on this page", _GLOSSARY, folded=False, kind="glossary")
    sections.append(Section("Glossary", [words]))
    return page(_TITLE, sections, subtitle="apportion demo: a demonstration, not a finding")


def _parts(shown: Demonstration) -> list[Part]:
    shares = shown.shares
    table = shown.levels.rename(columns={"level": shown.unit, "low": "from", "high": "to"})
    note = (
        "On entities not used in training. From, to: the 95 % interval; n: the independent units."
    )
    return [
        Table("Levels", table, note),
        Picture(
            "Shares over time on a task of entities not used in training",
            _plot_shares(shares),
            f"Shares of {', '.join(map(str, shares.columns[:_MOST_ENTITIES]))} over time.",
        ),
        Words(shown.notes),
    ]


def _plot_shares(shares: pd.DataFrame) -> bytes:
    """Return a plot of stacked shares over time as a PNG."""
    from matplotlib.figure import Figure

    figure, picture = Figure(figsize=(7, 3.2), layout="constrained"), io.BytesIO()
    axes = figure.subplots()
    colours = ["0.85" if name == "unused" else f"C{place}" for place, name in enumerate(shares)]
    axes.stackplot(range(len(shares)), shares.to_numpy().T, labels=list(shares), colors=colours)
    places = range(0, len(shares), max(len(shares) // 6, 1))
    labels = [str(shares.index[place])[:16].removesuffix(" 00:00") for place in places]
    axes.set_xticks(list(places), labels)
    axes.tick_params(axis="x", rotation=20 if shares.index.dtype.kind not in "iu" else 0)
    axes.set(xlabel=str(shares.index.name or "period"), xlim=(0, max(len(shares) - 1, 1)))
    axes.set(ylabel="share", ylim=(0, 1))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
    figure.savefig(picture, format="png", dpi=144)
    return picture.getvalue()
