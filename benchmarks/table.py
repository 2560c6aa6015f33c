"""What the benchmarks share: their options, sides that take turns, other environments, and tables.

A benchmark of speed writes benchmarks/results/NAME.json, one of how policies do a folder of docs/results.
Sides are timed by turns in one run, so that what else the machine does meets all of them; a cell is the
median over turns with the least and the most, and a ratio is taken turn by turn. A row is a dictionary from
the table's headings to cells; what starts with an underscore is in the file alone.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def alternate(sides: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """What each side measures in each turn."""
    found = [{name: side() for name, side in sides.items()} for _ in range(turns)]
    return {name: [turn[name] for turn in found] for name in sides}


def per_second(amount: float, work: Callable[[], object]) -> Callable[[], float]:
    """A side: how much is done a second by a call; the first, which compiles, is made here."""
    work()
    return lambda: amount / median_seconds(work)


def median_seconds(call: Callable[[], object], times: int = 1) -> float:
    """How long a call takes."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratio(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Ours over the peer's, turn by turn."""
    return spread([one / other for one, other in zip(ours, peer, strict=True)])


def best(rates: Mapping[str, Sequence[float]]) -> list[float]:
    """The fastest of several peers in each turn."""
    return [max(turn) for turn in zip(*rates.values(), strict=True)]


def options(doc: str | None, *, peer: str = "", out: Path = RESULTS) -> argparse.ArgumentParser:
    """A benchmark's options: where results go, and another environment's Python."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=out)
    if peer:
        parser.add_argument("--peer", help=f"python of an environment with {peer}")
    return parser


def facts(*packages: str, **others: str) -> dict[str, str]:
    """The machine, its load now, and the versions of these packages: call it before measuring."""
    import jax

    cores = len(os.sched_getaffinity(0))
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", *packages)}
    return {
        "machine": f"{cores} cores, {platform.machine()}, {device.platform} ({device.device_kind})",
        "load when begun": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        **versions,
        **others,
        "python": platform.python_version(),
    }


def printed_by(python: str, *words: object) -> str:
    """What the Python of another environment prints when it is called with these words."""
    command = [python, *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def version_in(python: str, package: str) -> str:
    """The version of a package in another environment."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return printed_by(python, "-c", ask)


def cell(value: Any) -> str:
    """A spread as median (least-most), a number by three digits, anything else as it is."""
    if isinstance(value, Mapping):
        low, high = number(value["least"]), number(value["most"])
        return f"{number(value['median'])} ({low}-{high})"
    return number(value) if isinstance(value, float) else "" if value is None else str(value)


def number(value: float) -> str:
    size = abs(value)
    if size >= 1:
        return f"{value:,.0f}" if size >= 100 else f"{value:.1f}"
    return f"{value:.2g}" if size >= 0.01 else f"{value:.3g}"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; what would end a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def as_markdown(found: Mapping[str, Any]) -> str:
    """What a benchmark wrote, as a table with the machine it was measured on."""
    rows = found["rows"]
    heads = [head for head in rows[0] if not head.startswith("_")]
    table = markdown_table(heads, [[cell(row.get(head)) for head in heads] for row in rows])
    facts = [f"- {k}: {v}" for k, v in found.items() if k not in ("title", "about", "rows")]
    return "\n".join([found["about"], "", table, "", *facts])


def write(
    name: str,
    title: str,
    about: str,
    rows: Iterable[Mapping[str, Any]],
    facts: Mapping[str, str],
    out: Path = RESULTS,
) -> None:
    """Write what is measured, after each row, so that a run cut short leaves what it had, and print its
    table; docs/tables.py puts it into the page on speed.
    """
    found: dict[str, Any] = {"title": title, "about": about, "rows": [], **facts}
    out.mkdir(parents=True, exist_ok=True)
    for row in rows:
        found["rows"].append(row)
        (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"# {title}\n\n{as_markdown(found)}\n")


def write_rows(
    folder: Path, rows: "pd.DataFrame", about: Mapping[str, Any], packages: Sequence[str] = ()
) -> None:
    """Write table.csv, and about.json with the versions that it was made with, these packages' too."""
    from apportion.runs.environment import installed, versions

    folder.mkdir(parents=True, exist_ok=True)
    rows.to_csv(folder / "table.csv", index=False)
    found = {**about, "versions": versions() | {name: installed(name) for name in packages}}
    (folder / "about.json").write_text(json.dumps(found, indent=1) + "\n")
