"""The page of a run: what it is, what it found, what it would do next, and how it learned."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.errors import InputError
from apportion.report import garage, learning, outcomes
from apportion.report.certificate import certificate
from apportion.report.files import read_json, read_table, read_toml
from apportion.report.glossary import WORDS
from apportion.report.page import (
    Facts,
    Glossary,
    Headline,
    Headlines,
    Part,
    Section,
    Table,
    Words,
    number,
    page,
)
from apportion.statistics import Outcome

_CURVES = {
    "reward": "Reward of the batch",
    "deviation": "Deviation from equal shares",
    "score": "Score of the drawn task",
    "loss": "Weighted loss",
}
_METRICS = {
    "wealth": "{:.2f}",
    "annual_return": "{:.1%}",
    "volatility": "{:.1%}",
    "sharpe": "{:.2f}",
    "max_drawdown": "{:.1%}",
    "turnover": "{:.4f}",
}
_METHODS = {
    "pmtl": "P-MTL: many tasks, drawn by priority",
    "mtl": "MTL: many tasks, drawn evenly",
    "stl": "STL: one task",
}
_HINDSIGHT = frozenset({"best-crp"})
"""Strategies chosen when all is known; a run's results may name more."""
_INTERVALS = "In brackets: 95 % intervals from resampled blocks of days."
_CHOICE = (
    "Sharpe ratio less that of daily Equal CRP, on years at the end of the training period, each with "
    "policies trained before it; k = 0 is equal shares. A learned policy is taken only if it beats "
    "them on average and in most years."
)
_NEXT_ROWS = 20
_CHANCES = "Probability of each task over training"
_DATA = {"source": "data", "tickers": "instruments", "first": "first day", "last": "last day"}
_ELSEWHERE = ("fingerprint", "until")
"""Facts of the data that the page says elsewhere."""


def run_page(folder: Path) -> str:
    """The page of a run's folder."""
    metrics = read_table(folder, "metrics")
    assert metrics is not None, "the caller has seen the metrics"
    if metrics.empty:
        raise InputError(f"{folder}: its metrics have no rows yet; let the run record some steps")
    settings, about = read_toml(folder / "settings.toml"), read_json(folder / "headline.json")
    environment, results = (read_json(folder / f"{x}.json") for x in ("environment", "results"))
    # A demo has a backtest among its results; a run's results are one.
    results = results.get("backtest", results)
    facts = _identity(settings, environment, results, read_json(folder / "policy.json"))
    sections = [Section("This run", [Facts("What, when, on whom", facts, folded=False)])] * bool(
        facts
    )
    sections.append(_headline(metrics, about))
    sections += certificate(folder) + _next(read_table(folder, "next"))
    choice = read_table(folder, "choice")
    if choice is not None:
        sections.append(Section("Choice", [_looked_at(choice)], _CHOICE))
    sections += _values(folder, results)
    kw, cars = read_table(folder, "power", indexed=True), read_table(folder, "cars")
    sections += garage.sections(kw, cars, read_table(folder, "schedules"))
    tested = read_table(folder, "accuracy", indexed=True)
    if tested is not None:
        lead = "On images that are in no client's hands and in no evaluation set."
        sections.append(Section("Accuracy", [outcomes.accuracies(tested)], lead))
    shares = read_table(folder, "allocations", indexed=True)
    if shares is not None:
        lead = "What the policy gives to each entity, period after period."
        sections.append(Section("Allocations", [outcomes.allocations(shares)], lead))
    sections += [_learning(metrics), _tasks(folder, metrics)]
    sections += provenance(settings, environment)
    sections.append(Section("Glossary", [Glossary("The words of this page", WORDS)]))
    title = about.get("title", f"Run {folder.resolve().name}")
    return page(title, sections, subtitle=about.get("subtitle", ""))


def _identity(
    settings: dict[str, Any],
    environment: dict[str, Any],
    results: dict[str, Any],
    policy: dict[str, Any],
) -> dict[str, Any]:
    """Policy, method and domain; trained until and made at; entities and days. What is known of it."""
    data = environment.get("data", {})
    method = settings.get("method")
    until = results.get("trained_until") or data.get("until") or data.get("last")
    whom = {
        _DATA.get(name, name): _in_a_line(data[name]) for name in data if name not in _ELSEWHERE
    }
    found = {
        "policy": " of ".join(_classes(policy.get("policy"))),
        "method": _METHODS.get(str(method), method),
        "domain": settings.get("job"),
        "trained until": _in_a_line(until),
        "made at": str(environment.get("started", "")).replace("T", " ").replace("+00:00", " UTC"),
        "tested on": f"{results['start']} to {results['end']}, {results['periods']} periods"
        if {"start", "end", "periods"} <= results.keys()
        else None,
        **whom,
    }
    return {name: value for name, value in found.items() if value}


def _in_a_line(value: Any) -> Any:
    """A mapping as text, `name: value; ...`; a value that begins with its name stands alone."""
    if not isinstance(value, dict):
        return value
    each = {str(name): str(inner) for name, inner in value.items()}
    return "; ".join(
        text if text.startswith(name) else f"{name}: {text}" for name, text in each.items()
    )


def _classes(policy: Any) -> list[str]:
    """A policy's class, and those it is wrapped around, as its description names them."""
    if not isinstance(policy, dict) or "class" not in policy:
        return []
    inner = policy.get("arguments", {})
    inside = next((inner[name] for name in ("policy", "members") if name in inner), None)
    return [str(policy["class"]).rpartition(".")[2], *_classes(inside)]


def _headline(metrics: pd.DataFrame, about: dict[str, Any]) -> Section:
    """The cards the run's maker wrote, or else what the metrics alone can say."""
    cards = [_card(card) for card in about.get("cards", [])]
    if not cards:
        last = metrics["step"].to_numpy().max()
        late: Any = metrics[metrics["step"] > 0.9 * last]
        cards = [
            Headline("Steps", number(int(last))),
            Headline(
                "Reward, last tenth", number(float(late["reward"].mean())), _iqr(late["reward"])
            ),
            Headline(
                "Deviation from equal shares, last tenth",
                number(float(late["deviation"].mean())),
                _iqr(late["deviation"]),
            ),
        ]
    parts: list[Part] = [Headlines(cards)]
    if about.get("words"):
        parts.append(Words(about["words"]))
    return Section("Headline", parts, about.get("lead", ""))


def _card(card: dict[str, Any]) -> Headline:
    """A run's card; those written before there were three outcomes say `holds`."""
    rest = {name: value for name, value in card.items() if name not in ("holds", "outcome")}
    said = card.get("outcome")
    if "holds" in card:
        said = "holds" if card["holds"] else "not-established"
    ends = [float(text.replace("−", "-")) for text in _NUMBER.findall(card.get("interval", ""))]
    return Headline(**rest, outcome=only_beyond_zero(said, ends))


_NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def only_beyond_zero(said: Outcome | None, interval: Sequence[float | None]) -> Any:
    """`does-not-hold` only where the interval excludes 0; around it nothing is established.

    >>> only_beyond_zero("does-not-hold", [-0.3, 0.1]), only_beyond_zero("does-not-hold", [-0.3, -0.1])
    ('not-established', 'does-not-hold')
    """
    low, high = interval if len(interval) == 2 else (None, None)
    beyond = (low is not None and low > 0) or (high is not None and high < 0)
    return "not-established" if said == "does-not-hold" and not beyond else said


def _next(shares: pd.DataFrame | None) -> list[Section]:
    """What `apportion allocate` would say, those furthest from equal shares first."""
    if shares is None:
        return []
    given = shares["share"].to_numpy(float)
    away = 100 * (given - 1 / max(np.count_nonzero(given), 1))
    order = np.argsort(-np.abs(away), kind="stable")
    shown = pd.DataFrame(
        {
            "entity": shares["entity"],
            "share": [f"{share:.3%}" for share in given],
            "from an equal share (percentage points)": [f"{points:+.3f}" for points in away],
        }
    ).iloc[order[:_NEXT_ROWS]]
    cut = f" The {_NEXT_ROWS} furthest of {len(shares)}." if len(shares) > _NEXT_ROWS else ""
    note = (
        f"Largest deviation from equal shares {np.abs(away).max():.3f} percentage points, mean "
        f"{np.abs(away).mean():.3f}.{cut} For orders from what is held: apportion allocate RUN --holdings "
        "FILE."
    )
    day = shares["after"].iloc[0]
    lead = f"For the period after {day}, from equal holdings: what apportion allocate prints."
    return [Section("Next allocation", [Table("Shares", shown, note)], lead)]


def _values(folder: Path, results: dict[str, Any]) -> list[Section]:
    wealth = read_table(folder, "values", indexed=True)
    if wealth is None:
        return []
    later = {
        str(name): f"{name} (hindsight)" for name in _HINDSIGHT | {*results.get("hindsight", [])}
    }
    seen = results.get("in_sample_periods", 0)
    until = results.get("trained_until") if seen else None
    wealth = wealth.rename(columns=later)
    parts: list[Part] = [outcomes.values(wealth, trained=until)]
    if "equal-crp" in wealth and wealth.shape[1] > 1:
        parts.append(outcomes.ahead_of_equal(wealth, trained=until))
    parts.append(outcomes.drawdowns(wealth, trained=until))
    strategies = read_table(folder, "strategies")
    if strategies is not None:
        strategies["strategy"] = strategies["strategy"].replace(later)
        parts.append(Table("Strategies side by side", side_by_side(strategies), _INTERVALS))
    lead = "After costs, from 1 at the close before the first day; every strategy on the same days."
    if set(later.values()) & set(wealth.columns):
        lead += " What is marked as hindsight was chosen when all was known, and is no rival."
    if seen:
        lead += (
            f" In-sample: {seen} of {len(wealth)} periods, shaded, are days up to {until} that the "
            "policy was trained on; they say nothing about days to come."
        )
    return [Section("Value against baselines", parts, lead)]


def _looked_at(choice: pd.DataFrame) -> Table:
    """The variants a choice was made from, the best first."""
    best_first = choice.sort_values("sharpe_gain", ascending=False)
    names = {"steps": "updates", "sharpe_gain": "mean"}
    return Table(f"All {len(choice)} variants", best_first.rename(columns=names), folded=True)


def _iqr(series: pd.Series) -> str:
    low, high = series.quantile([0.25, 0.75])
    return f"middle half {number(float(low))} to {number(float(high))}"


def _learning(metrics: pd.DataFrame) -> Section:
    plots: list[Part] = [
        learning.learning_curve(metrics, column, title)
        for column, title in _CURVES.items()
        if column in metrics
    ]
    lead = "Lines are medians, bands the middle half: over runs, or over neighbouring steps of one run."
    return Section("Learning", plots, lead)


def _tasks(folder: Path, metrics: pd.DataFrame) -> Section:
    chances, title = read_table(folder, "probabilities", indexed=True), _CHANCES
    if chances is None:
        one: Any = metrics
        if "method" in metrics:
            one = metrics[metrics["method"] == metrics["method"].iloc[0]]
        chances, title = learning.draw_frequencies(one), "How often each task was drawn"
    parts: list[Part] = [learning.task_probabilities(chances, title)]
    if {"score", "gradient_norm"} <= set(metrics.columns):
        parts.append(learning.score_against_gradient(metrics))
    lead = "Which tasks the algorithm chose to learn from, and whether its score tells how much."
    return Section("Tasks", parts, lead)


def provenance(settings: dict[str, Any], facts: dict[str, Any]) -> list[Section]:
    """Settings and how it was computed, folded; nothing where nothing is known."""
    parts: list[Part] = []
    if settings:
        parts.append(Facts("Settings", settings))
    if facts:
        parts.append(Facts("Versions, device, seed and data", facts))
    return [Section("Settings and provenance", parts)] if parts else []


def side_by_side(strategies: pd.DataFrame) -> pd.DataFrame:
    """Each strategy's main metrics as text, `x [low, high]` where it has an interval.

    Examples
    --------
    >>> frame = pd.DataFrame({"strategy": ["a"], "wealth": [1.5], "wealth_low": [1], "wealth_high": [2]})
    >>> side_by_side(frame)["wealth"].tolist()
    ['1.50 [1.00, 2.00]']
    """
    rows = strategies.to_dict("records")
    shown = {"strategy": [row["strategy"] for row in rows]}
    for name, form in _METRICS.items():
        if name in strategies:
            shown[name.replace("_", " ")] = [_with_interval(row, name, form) for row in rows]
    return pd.DataFrame(shown)


def _with_interval(row: dict[Any, Any], name: str, form: str) -> str:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None:
        return form.format(row[name])
    return f"{form} [{form}, {form}]".format(row[name], low, high)
