"""From a folder to its page: what a run or a study left on disk becomes `report.html` beside it.

A section is written for what is there and for nothing else, so that a young run, a study and a demo
all have an honest page.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from apportion.errors import InputError, first_line
from apportion.report import garage, learning, outcomes
from apportion.report.page import (
    Facts,
    Headline,
    Headlines,
    Part,
    Picture,
    Section,
    Table,
    Words,
    number,
    page,
)
from apportion.runs.atomic import write_atomic
from apportion.statistics import Outcome, outcome

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
_INTERVALS = "In brackets: 95 % intervals from resampled blocks of days."
_CHOICE = (
    "Sharpe ratio less that of daily Equal CRP, on years at the end of the training period, each with "
    "policies trained before it; k = 0 is equal shares. A learned policy is taken only if it beats "
    "them on average and in most years."
)
_COMPUTED = ("command", "commit", "device", "seconds", "seed", "versions")
"""What a study's page says of how it was computed."""
_FOUND = "a study holds verdict.json and table.csv, a run holds metrics.csv or metrics.parquet"


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run or a study, and say where it is.

    A study's folder holds `verdict.json`, `table.csv` and `figure.png`. A run's holds `metrics`
    (a row for each recorded step) and may hold tables that add a section each: `headline.json`,
    `choice` (a row for each variant), `values` (a column for each strategy), `strategies` (a row for
    each), `power`, `cars` and `schedules` (of a garage), `accuracy` (a column for each way to
    aggregate), `allocations` (a column for each entity), `probabilities` (a column for each task),
    with `settings.toml` and `environment.json`. Tables are CSV or Parquet; the first column of those
    over time is the date, the round or the step.

    Raises
    ------
    InputError
        The folder is neither, a file in it cannot be read, or Plotly is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the folder of a run or a study")
    try:
        text = _page(folder)
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Which file it is cannot be told from here: a page reads a dozen.
        raise InputError(
            f"{folder}: what it holds makes no page ({type(error).__name__}: {first_line(error)}); put "
            "back what the run or the study wrote, and if this is it, please report a bug"
        ) from error
    path = folder / "report.html"
    write_atomic(path, text.encode())
    return path


def _page(folder: Path) -> str:
    if (folder / "verdict.json").exists():
        return _study(folder)
    if _table_path(folder, "metrics") is not None:
        return _run(folder)
    raise InputError(f"{folder}: neither a run nor a study; {_FOUND}")


def _study(folder: Path) -> str:
    verdicts = _json(folder / "verdict.json")
    about = _json(folder / "study.json") if (folder / "study.json").exists() else {}
    title = about.get("title", folder.name)
    cards = [_verdict_card(verdict) for verdict in verdicts]
    holding = sum(bool(verdict["holds"]) for verdict in verdicts)
    sections = [
        Section(
            "Verdicts",
            [Headlines(cards)],
            f"{holding} of {len(verdicts)} claims hold. Each is given with its estimate, its 95 % "
            "interval and the number of independent experiments.",
        )
    ]
    if about.get("notes"):
        sections.append(Section("Notes", [Words(about["notes"])]))
    if (folder / "figure.png").exists():
        words = f"{title}: {'; '.join(_verdict_words(verdict) for verdict in verdicts)}"
        picture = Picture(title, (folder / "figure.png").read_bytes(), words)
        sections.append(Section("Figure", [picture]))
    table = _table(folder, "table")
    if table is not None:
        sections.append(Section("Table", [Table(f"All numbers, {len(table)} rows", table)]))
    facts = {name: about[name] for name in _COMPUTED if about.get(name) is not None}
    sections += _provenance(about.get("settings", {}), facts)
    return page(title, sections, subtitle=f"Study {about.get('name', folder.name)}")


def _verdict_card(verdict: dict[str, Any]) -> Headline:
    low, high = verdict["interval"]
    whose = "A claim of the paper" if verdict.get("paper", True) else "Our own check"
    return Headline(
        verdict["claim"],
        number(verdict["estimate"]),
        f"[{number(low)}, {number(high)}]",
        f"{whose}; n = {verdict['n']}{_after_all(verdict)}",
        _outcome(verdict),
    )


def _after_all(verdict: dict[str, Any]) -> str:
    """What is left when all comparisons of the study are allowed for; results of before do not say."""
    adjusted = verdict.get("adjusted")
    return f"; {adjusted.replace('-', ' ')} after Holm's adjustment" if adjusted else ""


def _verdict_words(verdict: dict[str, Any]) -> str:
    return f"{verdict['claim']}: {_outcome(verdict).replace('-', ' ')}"


def _outcome(verdict: dict[str, Any]) -> Outcome:
    """As the study says, or from the interval where it was written before there were three."""
    return verdict.get("outcome") or outcome(bool(verdict["holds"]), verdict["interval"])


def _run(folder: Path) -> str:
    metrics = _table(folder, "metrics")
    assert metrics is not None, "the caller has seen the metrics"
    if metrics.empty:
        raise InputError(f"{folder}: its metrics have no rows yet; let the run record some steps")
    settings = _toml(folder / "settings.toml")
    about = _json(folder / "headline.json") if (folder / "headline.json").exists() else {}
    sections = [_headline(metrics, about)]
    choice = _table(folder, "choice")
    if choice is not None:
        sections.append(Section("Choice", [_looked_at(choice)], _CHOICE))
    wealth = _table(folder, "values", indexed=True)
    if wealth is not None:
        parts: list[Part] = [outcomes.values(wealth)]
        if "equal-crp" in wealth and wealth.shape[1] > 1:
            parts.append(outcomes.ahead_of_equal(wealth))
        parts.append(outcomes.drawdowns(wealth))
        strategies = _table(folder, "strategies")
        if strategies is not None:
            parts.append(Table("Strategies side by side", side_by_side(strategies), _INTERVALS))
        lead = "After costs, from 1 at the close before the first day; every strategy on the same days."
        sections.append(Section("Value against baselines", parts, lead))
    kw, cars = _table(folder, "power", indexed=True), _table(folder, "cars")
    sections += garage.sections(kw, cars, _table(folder, "schedules"))
    tested = _table(folder, "accuracy", indexed=True)
    if tested is not None:
        lead = "On images that are in no client's hands and in no evaluation set."
        sections.append(Section("Accuracy", [outcomes.accuracies(tested)], lead))
    shares = _table(folder, "allocations", indexed=True)
    if shares is not None:
        lead = "What the policy gives to each entity, period after period."
        sections.append(Section("Allocations", [outcomes.allocations(shares)], lead))
    sections += [_learning(metrics), _tasks(folder, metrics)]
    environment = folder / "environment.json"
    sections += _provenance(settings, _json(environment) if environment.exists() else {})
    title = about.get("title", f"Run {folder.resolve().name}")
    return page(title, sections, subtitle=about.get("subtitle", ""))


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
    if "holds" not in card:
        return Headline(**card)
    rest = {name: value for name, value in card.items() if name != "holds"}
    return Headline(**rest, outcome="holds" if card["holds"] else "not-established")


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
    probabilities = _table(folder, "probabilities", indexed=True)
    if probabilities is None:
        one: Any = (
            metrics[metrics["method"] == metrics["method"].iloc[0]]
            if "method" in metrics
            else metrics
        )
        frequencies = learning.draw_frequencies(one)
        parts: list[Part] = [
            learning.task_probabilities(frequencies, title="How often each task was drawn")
        ]
    else:
        parts = [learning.task_probabilities(probabilities)]
    if {"score", "gradient_norm"} <= set(metrics.columns):
        parts.append(learning.score_against_gradient(metrics))
    lead = "Which tasks the algorithm chose to learn from, and whether its score tells how much."
    return Section("Tasks", parts, lead)


def _provenance(settings: dict[str, Any], facts: dict[str, Any]) -> list[Section]:
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


_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".parquet": pd.read_parquet,
    ".csv": pd.read_csv,
}


def _table_path(folder: Path, name: str) -> Path | None:
    return next((path for s in _READERS if (path := folder / (name + s)).exists()), None)


def _table(folder: Path, name: str, *, indexed: bool = False) -> pd.DataFrame | None:
    path = _table_path(folder, name)
    if path is None:
        return None
    try:
        frame = _READERS[path.suffix](path)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: cannot be read as a table ({error}); write it again") from error
    if indexed and isinstance(frame.index, pd.RangeIndex):
        frame = frame.set_index(frame.columns[0])
    return frame


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); write it again") from error


def _toml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid TOML ({error}); write it again") from error
