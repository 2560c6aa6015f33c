"""The page: sections of words, tables, pictures and interactive plots in one HTML string.

Everything that comes from data is escaped here; the page's script (`page.js`) draws the plots and writes
names as text alone. A content policy inside the page forbids it to ask the network for anything.
"""

import base64
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any, Literal

import numpy as np
import pandas as pd

from apportion.certify.statistics import Outcome, in_words

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
_MOST_ROWS = 200


def number(value: Any) -> str:
    """A number to four significant digits, a missing one as a dash, anything else as it is.

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
    """Something that stands in a section."""

    @abstractmethod
    def html(self, name: str) -> str:
        """The part as HTML; `name` is an identifier no other part of the page has."""


@dataclass(frozen=True)
class Words(Part):
    """Paragraphs of plain text."""

    paragraphs: Sequence[str]

    def html(self, name: str) -> str:
        return "".join(f"<p>{escape(text)}</p>" for text in self.paragraphs)


@dataclass(frozen=True)
class Headline:
    """One thing to know first: what, how much, how surely; its outcome colours it, none leaves it plain.

    One at its edge says so.
    """

    label: str
    value: str
    interval: str = ""
    note: str = ""
    outcome: Outcome | None = None
    barely: bool = False


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
        word = "" if card.outcome is None else escape(in_words(card.outcome, card.barely))
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
    """A data frame; a long one is cut, and says so. The index is shown where it has a name."""

    title: str
    frame: pd.DataFrame
    note: str = ""
    folded: bool = False

    def html(self, name: str) -> str:
        frame = self.frame.reset_index() if self.frame.index.name else self.frame
        shown = frame.head(_MOST_ROWS)
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
    """A PNG with its alternative text, inside the page."""

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
    """An interactive plot, a title, and the sentence that says it in words.

    `data` has a mapping for each series: a `line` (y, name, color, width, dash, and low and high of a
    band around it), a stacked `area`, or a single `heat` (names, z, middle).
    `layout` has `xaxis` and `yaxis`, each with its title, unit included, and kind (number, percent, log,
    date), and perhaps `x` for all series and `trained`, the last day that is shaded. Colours are numbers
    of the page's palette, so that they follow the reader's light or dark setting; what is `hidden` waits
    in the legend.
    """

    title: str
    description: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    wide: bool = False

    def html(self, name: str) -> str:
        spec = _for_script({"data": list(self.data), "layout": dict(self.layout)})
        return (
            f'<figure class="plot{" wide" * self.wide}" aria-labelledby="{name}-title">'
            f'<h3 id="{name}-title">{escape(self.title)}</h3>'
            f'<div class="canvas" id="{name}" role="img" aria-label="{escape(self.title)}" '
            f'aria-describedby="{name}-words"><svg></svg><div class="tip" hidden></div></div>'
            f'<div class="legend"></div>'
            f'<script type="application/json" data-plot="{name}">{spec}</script>'
            f'<figcaption id="{name}-words">{escape(self.description)}</figcaption></figure>'
        )


@dataclass(frozen=True)
class Section:
    """A heading, a sentence on how to read what follows, and the parts."""

    title: str
    parts: Sequence[Part]
    lead: str = ""


def page(title: str, sections: Sequence[Section], *, subtitle: str = "", live: str = "") -> str:
    """The whole page as one string.

    With `live`, a script, it may ask the server it came from, and nobody else.

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
    policy = f"{_POLICY}; connect-src 'self'" if live else _POLICY
    script = f"<script>{live}</script>" if live else ""
    below = f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="generator" content="apportion">'
        f"<title>{escape(title)}</title>"
        f"<style>{_asset('page.css')}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{below}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f"<noscript><p>The plots need JavaScript; every plot is also said in words.</p></noscript>"
        f"<main>{body}</main><script>{_asset('page.js')}</script>{script}</body></html>\n"
    )


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
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files("apportion.report").joinpath(name).read_text(encoding="utf-8")
