"""A page for every study in docs/results: what it asks, its verdicts, its figure and its table."""

import ast
import json
from html import escape
from pathlib import Path

import pandas as pd
from mkdocs.structure.files import File

from apportion.statistics import outcome

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
_MOST_ROWS = 120
_WIDE = ' style="min-width: 15rem"'
_LABELS = {
    "charging": "Charging",
    **{f"fig{n}": f"Figure {n}" for n in range(1, 7)},
    "bound": "The bound",
    "approximation": "The bound with few features",
    "corollary1": "How fast tasks help",
    "corollary2": "Orderings and subsets",
    "equivariance": "Shared or plain networks",
    "crossover": "When to pool",
    "should-pool": "Whether to pool",
    "recipe": "A practical policy",
    "recipe-sp500": "The same on 20 stocks",
    "prioritisation": "Where priorities pay",
    "conflict": "Tasks that conflict",
    "acting": "Acting in the loop",
    "federations": "Other federations",
}
_ORDER = list(_LABELS)
_HEAD = ["claim", "whose", "verdict", "after Holm", "estimate", "95 % interval", "n"]


def on_config(config):
    for entry in config.nav:
        if "Studies" in entry:
            pages = [{study.label: f"studies/{study.name}.md"} for study in studies()]
            entry["Studies"] = [*entry["Studies"], *pages]
    return config


def on_files(files, config):
    for study in studies():
        page = File.generated(config, f"studies/{study.name}.md", content=study.page())
        files.append(page)
    return files


def on_page_markdown(markdown, **_):
    return markdown.replace("<!-- studies -->", summary()).replace("<!-- coverage -->", coverage())


def studies():
    found = [StudyPage(path.parent) for path in RESULTS.glob("*/verdict.json")]
    return sorted(found, key=lambda study: (_ORDER.index(study.name), "") if study.name in _ORDER
                  else (len(_ORDER), study.name))  # fmt: skip


def summary():
    """One row for each claim of each study."""
    rows = []
    for study in studies():
        for verdict in study.verdicts:
            link = f'<a href="{study.name}/">{escape(study.label)}</a>'
            rows.append([link, *_verdict(verdict)])
    return _html(["study", *_HEAD], rows)


def coverage():
    """How often the intervals hold the truth, in per cent, in the layout of every study."""
    table = pd.read_csv(RESULTS / "coverage" / "table.csv")
    shown = table[["coverage", "percentile bootstrap"]].map(
        lambda x: f"{100 * x:.1f}" if x == x else ""
    )
    rows = pd.concat([table[["study", "units"]], shown], axis=1).to_numpy().tolist()
    return _html(["study", "units", "these intervals", "percentile bootstrap"], rows)


class StudyPage:
    def __init__(self, folder):
        self.folder, self.name = folder, folder.name
        self.verdicts = json.loads((folder / "verdict.json").read_text())
        about = folder / "study.json"
        self.about = json.loads(about.read_text()) if about.exists() else {}

    @property
    def label(self):
        return _LABELS.get(self.name, self.name.replace("-", " ").replace("_", " ").capitalize())

    def docstring(self):
        name = self.about.get("name", self.name).replace("-", "_")
        for module in (ROOT / "src" / "apportion" / "studies").glob(f"*/{name}.py"):
            return ast.get_docstring(ast.parse(module.read_text())) or ""
        return ""

    def page(self):
        title, _, rest = self.docstring().partition("\n")
        lines = [
            f"# {self.about.get('title') or title.rstrip('.') or self.label}",
            "",
            rest,
            "",
            *self._command(),
        ]
        if self.about.get("notes"):
            lines += ["## What to take away", ""]
            lines += [f"- {_plain(note)}" for note in self.about["notes"]]
        lines += [
            "",
            "## Verdicts",
            "",
            _html(_HEAD, [_verdict(v) for v in self.verdicts]),
            "",
        ]
        if (self.folder / "figure.png").exists():
            held = "; ".join(f"{v['claim']}: {_held(v)}" for v in self.verdicts)
            words = escape(held).replace("[", "(").replace("]", ")")
            path = f"../results/{self.name}/figure.png"
            lines += ["## Figure", "", f"[![{words}]({path})]({path})", ""]
        lines += self._table()
        if self.about.get("settings"):
            settings = escape(json.dumps(self.about["settings"], indent=1))
            lines += ["## Settings", "", f"<pre><code>{settings}</code></pre>"]
        return "\n".join(lines)

    def _command(self):
        """What its README says it was made by, and on."""
        readme = self.folder / "README.md"
        if not readme.exists():
            return []
        lines = readme.read_text().splitlines()
        commands = [line.strip() for line in lines if line.startswith("    ")]
        rest = " ".join(line for line in lines if line.strip() and not line.startswith("    "))
        on = _plain(rest.removeprefix("Made by").partition("`table.csv`")[0].strip())
        return ["Made by", "", "```bash", *commands, "```", "", on, ""] if commands else []

    def _table(self):
        path = self.folder / "table.csv"
        if not path.exists():
            return []
        table = pd.read_csv(path)
        shown = table.head(_MOST_ROWS)
        rows = [[escape(_number(x)) for x in row] for row in shown.itertuples(index=False)]
        cut = f", the first {len(shown)}" if len(shown) < len(table) else ""
        body = _html([escape(str(c)) for c in shown.columns], rows)
        fold = f"<details><summary>{len(table)} rows{cut}</summary>{body}</details>"
        link = f"[table.csv](../results/{self.name}/table.csv)"
        return ["## Table", "", f"All numbers: {link}.", "", fold, ""]


def _held(verdict):
    # Results computed before there were three outcomes have none.
    found = verdict.get("outcome") or outcome(verdict["holds"], verdict["interval"])
    return found.replace("-", " ")


def _verdict(verdict):
    low, high = (_number(end) for end in verdict["interval"])
    mark = f"<strong>{_held(verdict)}</strong>" if verdict["holds"] else _held(verdict)
    whose = "the paper's" if verdict.get("paper", True) else "ours"
    claim = escape(verdict["claim"])
    # Exact statements and results of before have no adjusted outcome.
    adjusted = (verdict.get("adjusted") or "–").replace("-", " ")
    numbers = [_number(verdict["estimate"]), f"[{low}, {high}]", verdict["n"]]
    return [claim, whose, mark, adjusted, *numbers]


def _number(value):
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(text):
    return "".join(f"\\{c}" if c in "*_`[]<>|\\" else c for c in str(text))


def _html(head, rows):
    top = "".join(f"<th{_WIDE if cell == 'claim' else ''}>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
