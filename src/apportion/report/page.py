"""HTML pages: sections of text, tables, pictures and interactive plots as one string.

All text is escaped here. Plotly draws the plots; its script is next to the page or inside it. A content
security policy forbids all network requests.
"""

import base64
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Literal

import numpy as np
import pandas as pd

from apportion.certify.statistics import Outcome, in_words
from apportion.runs.files import write_atomic

PLOTLY_FILE = "plotly.min.js"
"""Name of Plotly's script next to a page."""
PAGE_MARK = b'<meta name="generator" content="apportion">'
"""Line of `page.html` that every page contains; files without it are not replaced."""
# Pages opened from disk need `file:`, because 'self' matches nothing there in some browsers.
_POLICY = (
    "default-src 'none'; script-src 'self' file: 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
_MAX_ROWS = 200
_PLOTLY_TAG = f'<script src="{PLOTLY_FILE}"></script>'


def number(value: Any) -> str:
    """Format a number with four significant digits, a missing value as a dash, other values with `str`.

    >>> number(0.123456), number(1234567.0), number(float("nan")), number("x")
    ('0.1235', '1,234,567', '–', 'x')
    """
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return str(int(value))
    if not isinstance(value, float | np.floating):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    text = f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return text.replace("-", "−") if text.startswith("-") else text


class Part(ABC):
    """An element of a section."""

    @abstractmethod
    def html(self, name: str) -> str:
        """Return the part as HTML; `name` is its identifier, unique on the page."""


@dataclass(frozen=True)
class Words(Part):
    """Paragraphs of plain text."""

    paragraphs: Sequence[str]

    def html(self, name: str) -> str:
        return "".join(f"<p>{escape(text)}</p>" for text in self.paragraphs)


@dataclass(frozen=True)
class Headline:
    """A label with its value, interval and note; `outcome` sets the colour."""

    label: str
    value: str
    interval: str = ""
    note: str = ""
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Headlines(Part):
    """Cards in a row, the most important first."""

    cards: Sequence[Headline]

    def html(self, name: str) -> str:
        return f'<ul class="cards">{"".join(map(self._card, self.cards))}</ul>'

    @staticmethod
    def _card(card: Headline) -> str:
        kinds = {None: "plain", "holds": "holds", "does-not-hold": "fails"}
        kind = kinds.get(card.outcome, "open")
        word = "" if card.outcome is None else escape(in_words(card.outcome))
        mark = f'<span class="mark">{word}</span>' if word else ""
        interval = f'<span class="interval">{escape(card.interval)}</span>' if card.interval else ""
        note = f'<p class="note">{escape(card.note)}</p>' if card.note else ""
        return (
            f'<li class="card {kind}"><h3>{escape(card.label[:1].upper() + card.label[1:])}</h3>'
            f'<p class="value"><strong>{escape(card.value)}</strong> {interval}</p>{mark}{note}</li>'
        )


@dataclass(frozen=True)
class Facts(Part):
    """Names and values, such as settings, or words and their meanings in a `glossary`.

    Nested mappings are flattened with dots.
    """

    title: str
    facts: Mapping[str, Any]
    folded: bool = True
    kind: Literal["facts", "glossary"] = "facts"

    def html(self, name: str) -> str:
        rows = "".join(
            f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
            for key, value in _flatten(self.facts)
        )
        opened = "" if self.folded else " open"
        return (
            f"<details{opened}><summary>{escape(self.title)}</summary>"
            f'<dl class="{self.kind}">{rows}</dl></details>'
        )


@dataclass(frozen=True)
class Table(Part):
    """A data frame, truncated after 200 rows with a note. The index is shown if it has a name."""

    title: str
    frame: pd.DataFrame
    note: str = ""
    folded: bool = False

    def html(self, name: str) -> str:
        frame = self.frame.reset_index() if self.frame.index.name else self.frame
        shown = frame.head(_MAX_ROWS)
        numeric = [pd.api.types.is_numeric_dtype(kind) for kind in shown.dtypes]
        sides = [' class="number"' if yes else "" for yes in numeric]
        head = "".join(
            f'<th scope="col"{side}>{escape(str(column))}</th>'
            for column, side in zip(shown.columns, sides, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f"<td{side}>{escape(number(value))}</td>"
                for value, side in zip(row, sides, strict=True)
            )
            + "</tr>"
            for row in shown.itertuples(index=False, name=None)
        )
        cut = f" The first {len(shown)} of {len(frame)} rows." if len(shown) < len(frame) else ""
        note = f'<p class="note">{escape((self.note + cut).strip())}</p>' if self.note + cut else ""
        table = (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.title)}">'
            f"<table><caption>{escape(self.title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
        )
        if not self.folded:
            return table
        return f"<details><summary>{escape(self.title)}</summary>{table}</details>"


@dataclass(frozen=True)
class Picture(Part):
    """A PNG embedded in the page, with alternative text."""

    title: str
    png: bytes = field(repr=False)
    description: str

    def html(self, name: str) -> str:
        data = base64.b64encode(self.png).decode()
        return (
            f'<figure class="picture"><img src="data:image/png;base64,{data}" '
            f'alt="{escape(self.description)}"><figcaption>{escape(self.title)}</figcaption></figure>'
        )


@dataclass(frozen=True)
class Plot(Part):
    """An interactive plot.

    Parameters
    ----------
    title : str
        Heading of the plot.
    description : str
        Alternative text.
    data, layout
        Traces and layout as plain Plotly JSON. Plotly reads its text as HTML, so text from data must be
        escaped. The page adds fonts, margins and grid colours.
    wide : bool
        Whether the plot takes the full width of the page.
    """

    title: str
    description: str
    data: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False

    def html(self, name: str) -> str:
        spec = _for_script({"data": list(self.data), "layout": self.layout})
        return (
            f'<figure class="plot{" wide" * self.wide}" aria-labelledby="{name}-title">'
            f'<h3 id="{name}-title">{escape(self.title)}</h3>'
            f'<div class="canvas" id="{name}" role="img" aria-label="{escape(self.title)}" '
            f'aria-describedby="{name}-words"></div>'
            f'<script type="application/json" data-plot="{name}">{spec}</script>'
            f'<figcaption id="{name}-words">{escape(self.description)}</figcaption></figure>'
        )


@dataclass(frozen=True)
class Section:
    """A heading, an introductory sentence, and the parts."""

    title: str
    parts: Sequence[Part]
    lead: str = ""


def page(
    title: str,
    sections: Sequence[Section],
    *,
    subtitle: str = "",
    live: str = "",
    inline: bool = False,
) -> str:
    """Return the whole page as HTML.

    Parameters
    ----------
    title : str
        Title and first heading.
    sections : sequence of Section
        Content, in order.
    subtitle : str
        Line below the title.
    live : str
        Script of a live page, which may request data from its own server.
    inline : bool
        Whether the page contains Plotly's script, about 5 MB. By default a page with plots loads it from
        the file next to it, which `write_page` writes.

    Examples
    --------
    >>> text = page("A run", [Section("Words", [Words(["<all> is text"])])])
    >>> "&lt;all&gt; is text" in text and "http" not in text.split("</head>")[1]
    True
    """
    links = "".join(
        f'<li><a href="#part-{i}">{escape(section.title)}</a></li>'
        for i, section in enumerate(sections)
    )
    body = "".join(_section(section, i) for i, section in enumerate(sections))
    scripts = [f"<script>{script}</script>" for script in (_asset("page.js"), live) if script]
    if any(isinstance(part, Plot) for section in sections for part in section.parts):
        plotly = f"<script>{read_plotly_script()}</script>" if inline else _PLOTLY_TAG
        scripts.insert(0, plotly)
    return Template(_asset("page.html")).substitute(
        policy=f"{_POLICY}; connect-src 'self'" if live else _POLICY,
        title=escape(title),
        style=_asset("page.css"),
        subtitle=f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else "",
        plotly_file=PLOTLY_FILE,
        links=links,
        body=body,
        scripts="".join(scripts),
    )


def write_page(path: Path, text: str) -> None:
    """Write a page, and Plotly's script next to it if the page loads it from there.

    Parameters
    ----------
    path : Path
        File to write, such as `report.html`.
    text : str
        The result of `page`.
    """
    content = text.encode()
    if _PLOTLY_TAG in text:
        write_atomic(path.with_name(PLOTLY_FILE), read_plotly_script().encode())
    write_atomic(path, content)


def read_plotly_script() -> str:
    """Return Plotly's script from the installed package."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


def _section(section: Section, place: int) -> str:
    name = f"part-{place}"
    lead = f'<p class="lead">{escape(section.lead)}</p>' if section.lead else ""
    parts = "".join(part.html(f"{name}-{i}") for i, part in enumerate(section.parts))
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(section.title)}</h2>'
        f'{lead}<div class="parts">{parts}</div></section>'
    )


def _flatten(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in facts.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            rows += _flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            rows.append((name, ", ".join(map(number, value)) or "none"))
        else:
            rows.append((name, number(value)))
    return rows


def _for_script(value: Any) -> str:
    """Encode as JSON that cannot close the script element around it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files("apportion.report").joinpath(name).read_text(encoding="utf-8")
