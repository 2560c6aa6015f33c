"""The tables of the documentation, written into its pages from what the studies and benchmarks wrote.

    python docs/tables.py            writes what is stale
    python docs/tables.py --check    names what is stale, and exits with 1

Pages are Markdown that reads wherever the repository is shown. What stands between
`<!-- table: NAME -->` and `<!-- end -->` is written by the function or benchmark of that name, what stands
behind `<!-- file: PATH -->` is that file. The pages of docs/studies, and their lines in mkdocs.yml, are
made from docs/results.
"""

import ast
import json
import math
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

from apportion.certify.statistics import compare
from apportion.domains.federated.data import ATTACKED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS, PAGES = DOCS / "results", DOCS / "studies"
SPEED = ROOT / "benchmarks" / "results"
GENERATED = re.compile(r"<!-- (table|file): (.+?) -->(\n*).*?<!-- end -->", re.DOTALL)
NAVIGATION = re.compile(r"(?<=- studies/index\.md\n)(      - .+: studies/.+\.md\n)*")

sys.path.insert(0, str(ROOT / "benchmarks"))
from table import as_markdown, markdown_table  # noqa: E402


class Headline(NamedTuple):
    """How a study is introduced: its name, its question, and the claim whose number answers it first."""

    label: str
    question: str
    claim: str
    """Parts of the claim in their order, with ` ... ` between them; without a match, the study's first
    claim is shown."""
    unit: str
    factor: float = 1

    def names(self, claim: str) -> bool:
        """Whether this is the claim.

        >>> Headline("", "", "P-MTL beats STL ... over", "").names("P-MTL beats STL, over 2013 to 2019")
        True
        """
        return bool(re.search(".*".join(map(re.escape, self.claim.split(" ... "))), claim))


STUDIES = {
    "fig1": Headline(
        "Figure 1",
        "Do random permutations of 20 examples replace real examples?",
        "eps = 0: permuting 20 examples up to 2000 lowers their regret",
        "of regret saved with identical entities",
    ),
    "fig2": Headline(
        "Figure 2",
        "Does a task's score predict its gradient and its progress?",
        "a minibatch's score and gradient norm are correlated",
        "rank correlation of score and gradient norm",
    ),
    "fig3-4": Headline(
        "Figures 3 and 4",
        "Does multi-task learning beat single-task learning and equal shares on stocks?",
        "P-MTL with 30 tasks beats STL on own tasks stopped early ... over",
        "points a year, P-MTL against STL, each stopped early, 2013–19",
    ),
    "literal": Headline(
        "Departures put back",
        "Does Algorithm 1 learn with five departures put back, and do the values left open matter?",
        "p ... : P-MTL beats STL at equal epochs",
        "points in 2019, P-MTL against STL with all five put back",
    ),
    "fig5": Headline(
        "Figure 5",
        "Does a multi-task policy leave equal shares, and does it pay?",
        "the multi-task policy strays further from equal shares than stl, few epochs",
        "of mean deviation from equal shares, against STL",
    ),
    "fig6": Headline(
        "Figure 6",
        "Does learned aggregation of federated models beat FedAvg?",
        "MTL beats FedAvg in final test accuracy (unseen clients",
        "points of accuracy on MNIST",
        100,
    ),
    "mechanisms": Headline(
        "Mechanisms",
        "Why does multi-task learning help: generalisation or stability?",
        "MTL gains more than STL in the test year ... stopped early",
        "points in the test year, MTL against STL, each stopped early",
    ),
    "bound": Headline(
        "The bound",
        "Does Theorem 1 hold once its constants are corrected?",
        "suboptimality exceeds Theorem 1, constants corrected, in no run",
        "of all runs exceed the bound",
    ),
    "corollary2": Headline(
        "Orderings and subsets",
        "Do all subsets of the entities give a gain that is exponential in their size?",
        "subsets: the gain is exponential in m",
        "in the log of the gain per entity",
    ),
    "equivariance": Headline(
        "Shared or plain networks",
        "Does a network shared by all entities need less data than a plain one?",
        "entities alike: the equivariant network regrets less, at every size",
        "of regret saved, least over all sizes",
    ),
    "crossover": Headline(
        "When to pool",
        "When does learning from all tasks together beat learning from one?",
        "equal tasks, N = 144: pooling beats learning alone",
        "of suboptimality saved with equal tasks and few samples",
    ),
    "recipe": Headline(
        "A practical policy",
        "Does a policy made for practice beat equal shares that trade rarely?",
        "the practical policy beats lazy Equal CRP on held-out tasks",
        "points a year on stocks never seen",
    ),
    "recipe-sp500": Headline(
        "The same on 20 stocks",
        "Does it on 20 stocks over 22 years?",
        "the practical policy beats lazy Equal CRP on held-out tasks",
        "points a year on stocks never seen",
    ),
    "prioritisation": Headline(
        "Where priorities pay",
        "When does drawing tasks by priority beat drawing them uniformly?",
        "paper's score, alpha 0.5, beta 1 beats uniform MTL with 8 of 32",
        "points a year if 8 of 32 tasks are informative",
    ),
    "federations": Headline(
        "Other federations",
        "Does one policy serve every kind of federation?",
        "perceptron, 200 samples: ahead of fine-tuned, mean of kinds",
        "points of accuracy against the strongest rival, fine-tuning on 200 samples, mean of kinds",
        100,
    ),
    "charging": Headline(
        "Charging",
        "Does one learned policy deliver more energy to cars than the best of eight rules?",
        "MTL serves more than ... best ... (JPL, 2019, new stations, feeder 15%)",
        "points of demand, JPL's new stations",
    ),
}
"""The studies in the order of the pages."""
MARKS = {"holds": "+", "not-established": "=", "does-not-hold": "−"}
LONGEST_CELL = 25
"""Words in a cell of a table."""


def studies(results: Path = RESULTS) -> list[str]:
    """Return the studies with results, in the order of the pages; unknown ones follow by name."""
    found = {path.parent.name for path in results.glob("*/verdict.json")}
    return [*(name for name in STUDIES if name in found), *sorted(found - STUDIES.keys())]


def headline(study: str) -> Headline:
    """Return the introduction of a study; an unknown study is introduced by its title."""
    if study in STUDIES:
        return STUDIES[study]
    title = about_study(study)["figures"][0]["title"]
    return Headline(study.replace("-", " ").capitalize(), title, "", "")


def label(study: str) -> str:
    return STUDIES[study].label if study in STUDIES else study.replace("-", " ").capitalize()


def verdicts_of(study: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    return json.loads((results / study / "verdict.json").read_text())


def about_study(study: str, results: Path = RESULTS) -> dict[str, Any]:
    return json.loads((results / study / "study.json").read_text())


def decision(verdict: dict[str, Any]) -> str:
    """Return the outcome after Holm's adjustment; an exact statement has none."""
    return verdict.get("adjusted") or verdict["outcome"]


def mark(verdict: dict[str, Any], again: dict[str, Any] | None = None) -> str:
    """Return the mark of a verdict, then what differs: the one before Holm's adjustment, that of seed 1."""
    after, before = MARKS[decision(verdict)], MARKS[verdict["outcome"]]
    second = MARKS[decision(again)] if again else after
    others = [f"{before} alone"] * (before != after) + [f"seed 1: {second}"] * (second != after)
    return f"{after} ({'; '.join(others)})" if others else after


def of_seed_1(study: str) -> dict[str, dict[str, Any]]:
    """Return the verdicts of the second seed by claim, if it was computed."""
    other = RESULTS / "seed-1"
    if study not in studies(other):
        return {}
    return {one["claim"]: one for one in verdicts_of(study, other)}


def estimate(verdict: dict[str, Any], factor: float = 1) -> str:
    """Format an estimate and its interval to three digits of the interval's width.

    >>> estimate({"estimate": 0.0095042, "interval": [0.0069525, 0.0120558]}, 100)
    '0.950 [0.695, 1.206]'
    >>> estimate({"estimate": -2.0, "interval": [None, 0.5]})
    '−2.00 [–, 0.50]'
    """
    numbers = [verdict["estimate"], *verdict["interval"]]
    scaled = [None if number is None else factor * number for number in numbers]
    known = [number for number in scaled if number is not None]
    width = max(known) - min(known) or max(map(abs, known)) or 1
    digits = min(max(2 - math.floor(math.log10(width)), 0), 6)
    shown = ["–" if number is None else f"{number:.{digits}f}" for number in scaled]
    value, low, high = (re.sub(r"^-?0\.?0*$", "0", text).replace("-", "−") for text in shown)
    return f"{value} [{low}, {high}]"


def claim_and_detail(claim: str) -> tuple[str, str]:
    """Split off a claim's last parenthesis, and further ones while the claim is too long for a cell.

    >>> claim_and_detail("regret falls (slope of log regret)")
    ('regret falls', 'slope of log regret')
    """
    details: list[str] = []
    while found := re.search(r" \(([^()]+)\)(?=[^()]*$)", claim):
        if found.end() < len(claim) and len(claim.split()) <= LONGEST_CELL:
            break
        details.insert(0, found[1])
        claim = claim[: found.start()] + claim[found.end() :]
        if len(claim.split()) <= LONGEST_CELL:
            break
    return claim, "; ".join(details)


def verdict_table(verdicts: Sequence[dict[str, Any]], again: dict[str, dict[str, Any]]) -> str:
    """Return a row for each claim: its mark and its estimate with the interval."""
    with_levels = any(one.get("levels") for one in verdicts)
    rows = []
    for one in verdicts:
        claim, detail = claim_and_detail(one["claim"])
        known = (one.get("levels") or {}).items()
        levels = (f"{name} {level:.4g}".replace(" -", " −") for name, level in known)
        whose = "paper" if one["paper"] else "ours"
        marked = mark(one, again.get(one["claim"]))
        row = [claim, marked, estimate(one), detail or "–", str(one["n"]), whose]
        rows.append([*row, ", ".join(levels) or "–"] if with_levels else row)
    heads = ["claim", "mark", "estimate, 95 % interval", "measure or setting", "n", "whose"]
    return markdown_table([*heads, "levels"] if with_levels else heads, rows)


def answer(study: str) -> tuple[dict[str, Any], str]:
    """Return the verdict that a study is introduced with, and its result in words."""
    about, verdicts = headline(study), verdicts_of(study)
    found = [one for one in verdicts if about.names(one["claim"])]
    verdict = (found or sorted(verdicts, key=lambda one: not one["paper"]))[0]
    # The unit describes the claim of the headline, no other one.
    if not found:
        return verdict, f"{estimate(verdict)}: {verdict['claim']}"
    return verdict, f"{estimate(verdict, about.factor)} {about.unit}".strip()


def count_of_marks(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return how many claims hold, are not established and do not hold."""
    found = [decision(one) for one in verdicts]
    counts = [f"{found.count(outcome)} {MARKS[outcome]}" for outcome in MARKS]
    return f"{len(found)} claims: {', '.join(counts)}."


def study_page(study: str) -> str:
    """Return a study's page: the question, a picture, the claims with marks, then the details."""
    folder, about = RESULTS / study, about_study(study)
    figures, verdicts = about["figures"], verdicts_of(study)
    alone = len(figures) == 1
    verdict, result = answer(study)
    lines = [
        f"# {figures[0]['title'] if alone else label(study)}",
        "",
        f"**{headline(study).question}**",
        "",
        f"**{MARKS[decision(verdict)]}** {result}.",
        "",
    ]
    for figure in figures:
        own = [one for one in verdicts if alone or one["figure"] == figure["name"]]
        place = f"../results/{study}/{figure['picture']}"
        lines += [] if alone else [f"## {figure['title']}", ""]
        lines += [f"[![{escaped(figure['title'])}]({place})]({place})", ""]
        if own:
            lines += [f"{count_of_marks(own)} [How to read it](index.md).", ""]
            lines += [verdict_table(own, of_seed_1(study)), ""]
        lines += [f"- {escaped(note)}" for note in figure["notes"]]
        lines += [""]
        if figure["name"] in SHOWN_TABLES:
            lines += [SHOWN_TABLES[figure["name"]](folder / figure["table"]), ""]
        lines += [f"All numbers: [{figure['table']}](../results/{study}/{figure['table']}).", ""]
    lines += ["## Details", "", description(about["name"]), ""]
    lines += ["```bash", about["command"], "```", ""]
    if (readme := folder / "README.md").exists():
        text = [line for line in readme.read_text().splitlines() if not line.startswith("    ")]
        lines += [" ".join(" ".join(text).removeprefix("Made by").split()), ""]
    lines += [f"Settings, versions and device: [study.json](../results/{study}/study.json)."]
    return "\n".join(lines) + "\n"


def omitted_values(path: Path) -> str:
    """Each value that the paper leaves open: ours and why, and how far another one moves results."""
    moved = {
        "own gain": "own tasks, points a year",
        "held-out gain": "held-out instruments, points a year",
        "in-sample gain": "in sample, points a year",
        "own deviation": "deviation from equal shares",
    }
    table = pd.read_csv(path)
    moved = {name: words for name, words in moved.items() if name in table}
    rows = [
        [
            row["changed"].replace("_", " "),
            f"{row['ours']}: {row['why']}",
            *(f"{row[k]:+.3g} [{row[f'{k} low']:.3g}, {row[f'{k} high']:.3g}]" for k in moved),
        ]
        for row in table.to_dict("records")
    ]
    return markdown_table(["changed", "ours, and why", *moved.values()], rows)


def protocols(path: Path) -> str:
    """Every arm and difference under three protocols: gain, Sharpe ratio, and variance due to years."""
    table = pd.read_csv(path)
    names = list(dict.fromkeys(table["protocol"]))
    rows = []
    for key, own in table.groupby(["tested", "arm", "against"], sort=False):
        found = {row["protocol"]: row for row in own.to_dict("records")}
        cells = []
        for row in (found[name] for name in names):
            level = f"{row['sharpe']:.2f}, " if row["against"] == "Equal CRP" else ""
            cells += [
                f"{row['value']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]",
                f"{level}{row['sharpe gain']:+.2f}",
                f"{row['share of years']:.0%}",
            ]
        rows.append([*map(str, key), *cells])
    heads = ("{}: points a year", "Sharpe ratio", "variance due to years")
    named = [head.format(name) for name in names for head in heads]
    return markdown_table(["tested", "arm", "against", *named], rows)


SHOWN_TABLES: dict[str, Callable[[Path], str]] = {
    "omitted": omitted_values,
    "protocols": protocols,
}
"""Figures whose page shows their table too, and how."""


def description(study: str) -> str:
    """What the study's module says of itself, below its first line."""
    (module,) = (ROOT / "packages/studies/src/apportion_studies").glob(
        f"*/{study.replace('-', '_')}.py"
    )
    return (ast.get_docstring(ast.parse(module.read_text())) or "").partition("\n")[2].strip()


def escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "*_`[]<>|\\" else c for c in text)


def all_studies() -> str:
    """Return one row for each study: its question, and the mark and number that answer it first."""
    rows = []
    for study in studies():
        verdict, result = answer(study)
        page = f"[{label(study)}]({study}.md)"
        rows.append([page, headline(study).question, MARKS[decision(verdict)], result])
    return markdown_table(["study", "question", "mark", "result"], rows)


def stability(results: Path = RESULTS) -> str | None:
    """The page that sets the verdicts of two seeds side by side; None without those of another seed."""
    other = results / "seed-1"
    names = [name for name in studies(results) if name in studies(other)]
    if not names:
        return None
    missing = [label(name) for name in studies(results) if name not in names]
    counts, turned, alone, within = [], [], [], list[bool]()
    for study in names:
        first, second = (
            {(one.get("figure"), one["claim"]): one for one in verdicts_of(study, folder)}
            for folder in (results, other)
        )
        both = [(one, second[key]) for key, one in first.items() if key in second]
        alone += [f"{label(study)}: {claim}" for _, claim in first.keys() - second.keys()]
        within += [
            one["interval"][0] <= two["estimate"] <= one["interval"][1]
            for one, two in both
            if None not in one["interval"] and not one["exact"]
        ]
        decided = [pair for pair in both if {"holds", "does-not-hold"} & set(map(decision, pair))]
        changed = [pair for pair in decided if decision(pair[0]) != decision(pair[1])]
        opposite = sum("not-established" not in map(decision, pair) for pair in changed)
        counts.append([label(study), len(both), len(decided), len(changed), opposite])
        turned += [
            [f"[{label(study)}]({study}.md)", before["claim"], *map(beside, (before, after))]
            for before, after in changed
        ]
    total = [sum(column) for column in list(zip(*counts, strict=True))[1:]]
    seeds = [about_study(names[0], folder).get("seed") for folder in (results, other)]
    lines = [
        "# Two seeds side by side",
        "",
        f"These studies were computed with seed {seeds[0]} and again with seed {seeds[1]}: other "
        "experiments, splits, first parameters and draws. A verdict is its outcome after Holm. It is "
        "decided if it holds or does not hold with at least one of the seeds, and it turned if the two "
        f"differ: {total[2]} of {total[1]} decided verdicts turned "
        f"({100 * total[2] / max(total[1], 1):.1f} %), {total[3]} of them to the opposite. The estimate of "
        f"the second seed lies in the interval of the first for {sum(within)} of {len(within)} claims "
        f"({np.mean(within):.0%}; 83 % are expected of two equally precise estimates of one value, and "
        "more if both share years or days).",
        "",
        markdown_table(
            ["study", "claims", "decided", "turned", "opposite"],
            [[str(cell) for cell in row] for row in (*counts, ["**all**", *total])],
        ),
        "",
        *([f"Not computed with seed {seeds[1]}: {', '.join(missing)}.", ""] if missing else []),
        "## What turned",
        "",
        markdown_table(["study", "claim", *(f"seed {seed}" for seed in seeds)], turned)
        if turned
        else "Nothing.",
        "",
    ]
    if alone:
        lines += ["Claims that seed 1 does not make, since they name what the numbers chose:", ""]
        lines += [*(f"- {escaped(one)}" for one in sorted(alone)), ""]
    return "\n".join(lines)


def beside(verdict: dict[str, Any]) -> str:
    """A verdict's outcome with its estimate and interval."""
    return f"{MARKS[decision(verdict)]} {estimate(verdict)}"


def stock_levels() -> str:
    """Levels of the arms of Figures 3 and 4 under three protocols, and a summary of Sharpe ratios."""
    table: Any = pd.read_csv(RESULTS / "fig3-4" / "protocols.csv")
    table = table[table.against == "Equal CRP"]
    names, rows = table.protocol.unique(), []
    for (arm, tested), own in table.groupby(["arm", "tested"], sort=False):
        cells = [
            f"{with_interval(row['value'], row['low'], row['high'], 1)}; {row['sharpe']:.2f}"
            for row in own.to_dict("records")
        ]
        where = {"own": "own tasks", "held-out": "never seen"}[str(tested)]
        rows.append([arm, where, *(cell.replace("-", "−") for cell in cells)])
    ratios = [one for one in verdicts_of("fig3-4") if "higher Sharpe ratio" in one["claim"]]
    gaps = sorted(one["estimate"] for one in ratios)
    least, most = (f"{gap:.2f}".replace("-", "−") for gap in (gaps[0], gaps[-1]))
    note = (
        f"The Sharpe ratios of MTL and P-MTL at equal epochs less Equal CRP's are {least} to {most}: "
        f"{sum(gap < 0 for gap in gaps)} of the {len(ratios)} cases are below 0, "
        f"{sum(one['interval'][1] < 0 for one in ratios)} with their whole interval, and "
        f"{sum(decision(one) == 'does-not-hold' for one in ratios)} after Holm's adjustment."
    )
    return f"{markdown_table(['arm', 'stocks', *names], rows)}\n\n{note}"


def coverage() -> str:
    """How often the intervals hold the truth, in per cent, in the layout of every study."""
    table = pd.read_csv(RESULTS / "coverage" / "table.csv")
    rows = [
        [row["study"], row["units"], f"{100 * row['coverage']:.1f}"]
        for row in table.to_dict("records")
    ]
    return markdown_table(["study", "units", "intervals that hold the truth, %"], rows)


def tickers() -> str:
    """The instruments of the portfolio studies."""
    names = runpy.run_path(str(DOCS / "stocks.py"))["TICKERS"]
    rows = [
        [f"{first + 1} to {min(first + 17, len(names))}", ", ".join(names[first : first + 17])]
        for first in range(0, len(names), 17)
    ]
    return markdown_table(["", "by median daily dollar volume, highest first"], rows)


def seconds_of_studies() -> str:
    """How long each study took at full size, and where."""
    rows = []
    for study in sorted(studies()):
        about = about_study(study)
        device = about["device"].partition(": ")[2]
        rows.append([f"[{study}](studies/{study}.md)", f"{about['seconds']:.0f}", device])
    return markdown_table(["study", "seconds", "on"], rows)


HOPED = {1: 8_000, 10: 60_000, 90: 120_000, 900: 150_000}
"""Steps a second on a graphics card, by learners at once."""


def benchmark(name: str) -> str:
    """What a benchmark measured."""
    return as_markdown(json.loads((SPEED / f"{name}.json").read_text()))


def steps_on_gpu() -> str:
    """What was hoped for, which numbers of learners stay below, and how long a step of all takes."""
    rows = json.loads((SPEED / "gradient_step_gpu.json").read_text())["rows"]
    rates = {int(row["learners"]): row["ours"]["median"] for row in rows}
    below = [learners for learners, rate in rates.items() if rate < HOPED[learners]]
    wanted = listed([HOPED[learners] / 1000 for learners in rates])
    outcome = f"{listed(below)} learners stay below" if below else "all were reached"
    times = listed([1e6 * learners / rate for learners, rate in rates.items()])
    return (
        f"{wanted} thousand steps a second were hoped for: {outcome}. "
        f"A step takes {times} µs for {listed(list(rates))} learners"
    )


def listed(numbers: Sequence[float]) -> str:
    """Numbers as a sentence lists them.

    >>> listed([1, 20.4, 3000])
    '1, 20 and 3,000'
    """
    shown = [f"{number:,.0f}" for number in numbers]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def certificates() -> str:
    """A row for each certificate: what was asked, what it said and when."""
    rows = []
    for row in pd.read_csv(RESULTS / "certificates" / "table.csv").to_dict("records"):
        blocks = f"{row['period']}s"
        if row["block"] > 1:
            blocks = f"blocks of {row['block']} {blocks}"
        after = f"{row['bets']} {blocks}"
        if not pd.isna(row["bet"]):
            after = f"{int(row['bet'])} of {after}"
        mean, low, high = (
            f"{round(100 * row[key], 3) + 0.0:.3f}" for key in ("mean", "lower", "upper")
        )
        asked = f"`{row['trained']}`, `certify {row['certified']}`"
        rows.append(
            [row["name"], asked, f"{row['verdict']} after {after}", mean, f"{low} to {high}"]
        )
    return markdown_table(["", "asked", "verdict", "mean gain, points", "at any time within"], rows)


def certificates_simulated() -> str:
    """How often gains of known mean are certified, or called harmful."""
    rows = []
    for row in pd.read_csv(RESULTS / "certificates" / "simulated.csv").to_dict("records"):
        shares = (f"{100 * row[name]:.1f} %" for name in ("certified", "harmful"))
        rows.append([row["gains"], str(row["block"]), str(row["periods"]), *shares])
    return markdown_table(["gains", "block", "periods", "certified", "harmful"], rows)


RIVALS = ("FedAvg", "FedAvgM", "gradient shares, momentum", "server as a client", "fine-tuned")
SHOWN = ("FedAvg", "FedAvgM", "nearest-neighbour mixing", "fine-tuned", "gradient shares, momentum")
OURS = "LearnedAggregation, 200 samples"


def federations() -> str:
    """The study's first circumstance, kind by kind."""
    table = pd.read_csv(RESULTS / "federations" / "table.csv")
    own = table[table["circumstance"] == table["circumstance"].iloc[0]]
    found = {(row["kind"], row["method"]): row for row in own.to_dict("records")}
    rows = []
    for kind in dict.fromkeys(own["kind"]):
        values = [share(found[kind, name]["final"]) for name in (*SHOWN, "learned")]
        shown = f"**{kind}**" if kind == "mean of kinds" else kind
        rows.append([shown, *values, gain_in(found[kind, "learned"])])
    return markdown_table(["", *SHOWN, "the policy", "over FedAvg"], rows)


def federations_elsewhere() -> str:
    """Means over kinds in every circumstance, the strongest rival, and the policy's worst kind there."""
    table = pd.read_csv(RESULTS / "federations" / "table.csv")
    verdicts = {one["claim"]: one for one in verdicts_of("federations")}
    rows = []
    for name in dict.fromkeys(table["circumstance"]):
        own = table[table["circumstance"] == name].set_index(["kind", "method"])
        mean = own.loc["mean of kinds"]
        ours = own.xs("learned", level="method")
        ours = ours[~ours.index.str.startswith("mean ")]
        worst = ours["gain"].idxmin()
        values = [share(mean.loc[method, "final"]) for method in (*RIVALS, "learned")]
        best = max(RIVALS, key=lambda rival: mean.loc[rival, "final"])
        lead = verdict_gain(verdicts[f"{name}: ahead of {best}, mean of kinds"])
        gains = [gain_in(mean.loc["learned"]), f"{best}: {lead}"]
        rows.append([name, *values, *gains, worst, gain_in(ours.loc[worst])])
    heads = ["", *RIVALS, "the policy", "over FedAvg", "over the strongest rival", "worst kind"]
    return markdown_table([*heads, "there, over FedAvg"], rows)


def aggregator_training() -> str:
    """Ways to train on validation: means over seeds with many and with few samples."""
    cells = json.loads((RESULTS / "aggregator_training" / "cells.json").read_text())
    circumstances = ("200 samples", "20 samples")
    rows: dict[str, list[str]] = {}
    for here in circumstances:
        tested: dict[str, list[np.ndarray]] = {}
        for cell in cells:
            if here in cell["finals"]:
                tested.setdefault(cell["variant"], []).append(np.array(cell["finals"][here]))
        (plain,), (rival,) = tested["FedAvg"], tested["gradient shares, momentum"]
        for name, seeds in tested.items():
            worst = np.mean([(own - plain).mean(1).min().round(4) for own in seeds])
            found = [f"{np.mean([own.mean().round(4) for own in seeds]):.4f}"]
            lead = np.mean([(own - rival).mean().round(4) for own in seeds])
            rows.setdefault(name, []).extend([*found, f"{lead:+.4f}", f"{worst:+.4f}"])
    heads = ("{}", "{}, over gradient shares", "{}, worst kind over FedAvg")
    named = [head.format(name) for name in circumstances for head in heads]
    whole = [[name, *values] for name, values in rows.items() if len(values) == len(named)]
    return markdown_table(["", *named], whole)


def flower() -> str:
    """Flower's own strategies beside ours: means over seeds, and the paired gain over FedAvg."""
    table = pd.read_csv(RESULTS / "flower" / "table.csv")
    here = table[table["how"] == "in process"]
    wide = here.pivot(index=["kind", "seed"], columns="strategy", values="accuracy")
    names = list(dict.fromkeys(here["strategy"]))
    means = wide.groupby("seed").mean()
    rows = []
    for kind in (*dict.fromkeys(here["kind"]), "**mean**"):
        own = means if kind == "**mean**" else wide.loc[kind]
        found = compare(own[OURS].to_numpy(), own["FedAvg"].to_numpy())
        gain = with_interval(found.value, found.low, found.high)
        rows.append([kind, *(share(own[name].mean()) for name in names), gain])
    heads = ["", *(name.replace("LearnedAggregation", "learned") for name in names)]
    about = json.loads((RESULTS / "flower" / "about.json").read_text())
    simulated = table[table["how"] == "simulation"]["seed"].nunique()
    note = (
        f"Means over {len(means)} federations of each kind, and what the policy with 200 samples gains "
        f"over FedAvg. Every run is Flower's own `Strategy.start` with the example's client app; "
        f"the first{'' if simulated == 1 else f' {simulated}'} of each kind also went through Flower's "
        f"simulation ({about['runs_in_both']} runs), and their accuracies differ by "
        f"{about['largest_difference']:.3f} at most. Flower {about['versions']['flwr']}, "
        f"made by `{about['command']}`."
    )
    return f"{markdown_table([*heads, '200 samples over FedAvg'], rows)}\n\n{note}"


NOISY = ("noisy-images", "noisy-labels", "symmetric-noise", "pairwise-noise", "noise-by-client")


def flower_circumstances() -> str:
    """Mean accuracy of every method by circumstance and group of kinds, in %, with intervals over seeds."""
    table = pd.read_csv(RESULTS / "flower" / "circumstances.csv")
    about = json.loads((RESULTS / "flower" / "circumstances.json").read_text())
    methods, rows = list(dict.fromkeys(table["method"])), []
    case = np.where(table["kind"].isin(ATTACKED), "attacks", "honest")
    table["case"] = np.where(table["kind"].isin(NOISY), "noise", case)
    for (clients, part, samples), own in table.groupby(
        ["clients", "participation", "samples"], sort=False
    ):
        crowd = f"{clients} clients" + (", a tenth a round" if part < 1 else "")
        parts = [(name, own[own["case"] == name]) for name in ("honest", "noise", "attacks")]
        for name, rest, measure in (
            *((name, rest, "accuracy") for name, rest in parts),
            ("all, balanced", own, "balanced"),
        ):
            seeds = 100 * rest.groupby(["method", "seed"])[measure].mean().unstack()
            wide = seeds.std(axis=1) * t.ppf(0.975, seeds.shape[1] - 1) / seeds.shape[1] ** 0.5
            means = seeds.mean(axis=1)
            shown = {one: f"{means[one]:.1f} ± {wide[one]:.1f}" for one in means.index}
            shown[means.idxmax()] = f"**{shown[means.idxmax()]}**"
            here = f"{crowd}, {samples} samples: {name}"
            rows.append([here, *(shown.get(method, "") for method in methods)])
    note = (
        f"Mean and 95 % interval over {table['seed'].nunique()} federations of each kind, made by "
        f"`{about['command']}`."
    )
    return f"{markdown_table(['', *methods], rows)}\n\n{note}"


def flower_trials() -> str:
    """Mean level of every strategy in each trial, with intervals over seeds."""
    table = pd.read_csv(RESULTS / "flower_trials" / "table.csv")
    about = json.loads((RESULTS / "flower_trials" / "about.json").read_text())
    strategies, rows = sorted(set(table["strategy"]), key=list(table["strategy"]).index), []
    for trial, own in table.groupby("trial", sort=False):
        wide = own.pivot(index="seed", columns="strategy", values="level")
        half = wide.std() * t.ppf(0.975, len(wide) - 1) / len(wide) ** 0.5
        digits = 2 if str(trial).startswith("regression") else 1
        shown = {name: f"{wide[name].mean():.{digits}f} ± {half[name]:.{digits}f}" for name in wide}
        rows.append([str(trial), *(shown.get(name, "") for name in strategies)])
    note = f"Mean and 95 % interval over {table['seed'].nunique()} seeds, made by `{about['command']}`."
    return f"{markdown_table(['', *strategies], rows)}\n\n{note}"


def retrained_policy() -> str:
    """Accuracy of the shipped policy and of the retrained one, in %, with intervals over seeds."""
    table = pd.read_csv(RESULTS / "aggregator_training" / "retrained.csv")
    policies, rows = ("shipped", "retrained"), []
    for case, own in table.groupby(["images", "clients", "samples"], sort=False):
        both = 100 * own.pivot(index="seed", columns=["method", "kind"], values="accuracy")
        means = {name: both[name].mean(axis=1).to_numpy() for name in ("FedAvg", *policies)}
        gain, worst = compare(means["retrained"], means["shipped"]), []
        for policy in policies:
            kind = (both[policy] - both["FedAvg"]).mean().idxmin()
            lead = compare(both[policy, kind].to_numpy(), both["FedAvg", kind].to_numpy())
            worst.append(
                f"{with_interval(lead.value, lead.low, lead.high, 1).replace('-', '−')} {kind}"
            )
        rows.append(
            [
                "{}, {} clients, {} samples".format(*case),
                *(f"{mean.mean():.1f}" for mean in means.values()),
                with_interval(gain.value, gain.low, gain.high, 2).replace("-", "−"),
                *worst,
            ]
        )
    heads = [f"{policy} over FedAvg, worst kind" for policy in policies]
    return markdown_table(
        ["", "FedAvg", *policies, "retrained over shipped", *heads],
        rows,
    )


def share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def with_interval(value: float, low: float, high: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def gain_in(row: Any, digits: int = 3) -> str:
    return with_interval(row["gain"], row["gain low"], row["gain high"], digits)


def verdict_gain(verdict: dict[str, Any]) -> str:
    return with_interval(verdict["estimate"], *verdict["interval"], digits=4)


GARAGES = {"Loop": "charge points (OCPP)", "HttpLoop": "back end (HTTP)"}
FAULTS = {
    "kills, restarts, lost states, changed sites": (
        "kill",
        "restart",
        "lost state",
        "site changes",
    ),
    "stations removed while a car charged": ("stations removed with a car",),
    "lost connections, rejecting, silent stations": ("disconnect", "Rejected", "silent"),
    "reconnections, stations left out of a statement": ("reconnect", "left out"),
    "wrong meter values": ("meter glitches",),
    "values of `capacity_kw`, live limits, lost heartbeats": (
        *("capacity_kw", "live limits", "heartbeats lost"),
    ),
}


def garage_loop() -> str:
    """Counts of the garage that is driven through faults, by interface."""
    folder = RESULTS / "garage_loop"
    every = json.loads((folder / "rows.json").read_text())
    signals = json.loads((folder / "signals.json").read_text())
    columns = {name: [row for row in every if row["garage"] == name] for name in GARAGES}

    def line(name: str, cell: Callable[[list[dict[str, Any]]], str]) -> list[str]:
        return [name, *(cell(rows) for rows in columns.values())]

    def total(rows: list[dict[str, Any]], *names: str) -> str:
        return ", ".join(f"{sum(row.get(name, 0) for row in rows):,}" for name in names)

    def gained(rows: list[dict[str, Any]]) -> str:
        points = np.array([100 * (row["served with faults"] - row["served"]) for row in rows])
        error = points.std(ddof=1) / np.sqrt(len(points))
        return f"{points.mean():+.2f} ± {error:.2f} ({points.min():+.2f} to {points.max():+.2f})"

    held = "minutes in which all limits held"
    longest = "longest without an answer, minutes"
    table = [
        line("simulated days", lambda rows: total(rows, "days")),
        line("minutes", lambda rows: total(rows, "minutes")),
        line("minutes in which every limit held", lambda rows: total(rows, held)),
        *(line(name, lambda rows, own=own: total(rows, *own)) for name, own in FAULTS.items()),
        line(
            "longest time without an answer, minutes",
            lambda rows: str(max(r[longest] for r in rows)),
        ),
        line(
            "SIGTERM; ended within 5 s", lambda rows: total(rows, "SIGTERM", "SIGTERM within 5 s")
        ),
        line("need met with faults less without, points", gained),
    ]
    hours = sum(row["seconds"] for row in every) / 3600
    seeds, days = ([row[name] for row in every] for name in ("seed", "days"))
    note = (
        f"Seeds {min(seeds)} to {max(seeds)}, {len(every)} runs of {min(days)} to {max(days)} days, "
        f"{hours:.1f} hours. The last line is a mean over runs with its standard error, and the least "
        "and the most. "
        f"SIGTERM at a random moment under traffic, in a run of its own: {signals['within 5 s']} of "
        f"{signals['SIGTERM']} ended within 5 s, the longest after {signals['longest, seconds']} s."
    )
    return f"{markdown_table(['', *GARAGES.values()], table)}\n\n{note}"


TABLES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        all_studies, stock_levels, coverage, tickers, seconds_of_studies, steps_on_gpu, certificates,
        certificates_simulated, federations, federations_elsewhere,
        aggregator_training, retrained_policy, flower, flower_circumstances,
        flower_trials, garage_loop,
    )
}  # fmt: skip


def filled(text: str) -> str:
    """Return a page with the content between its marks rewritten; a mark within a line stays there."""

    def written(found: re.Match[str]) -> str:
        kind, name, space = found[1], found[2], found[3]
        if kind == "file":
            made = f"```python\n{(ROOT / name).read_text().strip()}\n```"
        else:
            made = TABLES[name]() if name in TABLES else benchmark(name)
        return f"<!-- {kind}: {name} -->{space}{made}{space}<!-- end -->"

    return GENERATED.sub(written, text)


def longest_cell(text: str) -> int:
    """Return the number of words in the longest cell of a page's tables."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return max((len(cell.split()) for row in rows for cell in row.split("|")), default=0)


def words_by_hand(page: Path) -> int:
    """Count the words of a page without what is generated."""
    text = GENERATED.sub("", page.read_text())
    if page.parent == PAGES:
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return len(text.split())


def pages() -> Iterable[tuple[Path, str | None]]:
    """Every file that has something generated, and what should be in it; None where it should not be."""
    for page in sorted(DOCS.rglob("*.md")):
        if page.parent != PAGES or page.name == "index.md":
            yield page, filled(page.read_text())
    for page in PAGES.glob("*.md"):
        if page.stem not in {*studies(), "index", "stability"}:
            yield page, None
    yield PAGES / "stability.md", stability()
    for study in studies():
        yield PAGES / f"{study}.md", study_page(study)
    names = {study: label(study) for study in studies()}
    if stability() is not None:
        names["stability"] = "Two seeds side by side"
    lines = "".join(f"      - {name}: studies/{page}.md\n" for page, name in names.items())
    navigation = ROOT / "mkdocs.yml"
    yield navigation, NAVIGATION.sub(lines, navigation.read_text(), count=1)


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    stale = 0
    for page, text in pages():
        if (page.read_text() if page.exists() else None) == text:
            continue
        stale += 1
        print(f"{page.relative_to(ROOT)}: {'stale' if check else 'written'}")
        if not check and text is None:
            page.unlink()
        elif not check:
            page.write_text(text or "")
    if check and stale:
        sys.exit("some tables are older than their results: run python docs/tables.py")


if __name__ == "__main__":
    main()
