"""The response to a bad input: exit code 2, one sentence with the reason and the place, no file changed."""

import hashlib
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import jax
import pytest

from apportion.cli import main
from apportion.composition import EqualShares
from apportion.domains.budget.settings import BudgetSettings
from apportion.domains.domain import find_domain
from apportion.domains.federated.policy import shipped_policy
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.domains.portfolio.training import compose, untrained_policies
from apportion.runs.files import SUMS, checksummed
from apportion.runs.folder import Run
from apportion.runs.runner import JobResult, finish
from apportion_charging.settings import ChargingSettings

Content = str | bytes | Callable[[Path], object]
MARKET = SimulatedMarket.draw(universe=3, days=40).prices
WIDE = MARKET.to_frame().rename(columns=dict(zip(MARKET.tickers, "ABC", strict=True))).to_csv()
"""A sound file of three tickers A, B and C on 40 days."""
LONG = "date,ticker,close\n" + "\n".join(
    f"{line.split(',')[0]},{ticker},{line.split(',')[place]}"
    for place, ticker in enumerate("ABC", 1)
    for line in WIDE.splitlines()[1:]
)


@dataclass(frozen=True)
class Case:
    """A command, what its one sentence must say, and the files and the run it finds."""

    name: str
    command: str
    words: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict)
    run: str = ""


def cases(*rows: tuple) -> pytest.MarkDecorator:
    """A table of rows (name, command, words, files, run) as tests; one word needs no tuple."""
    table = [
        Case(name, command, (words,) if isinstance(words, str) else words, *rest)
        for name, command, words, *rest in rows
    ]
    assert len({case.name for case in table}) == len(table), "two rows have one name"
    return pytest.mark.parametrize("case", table, ids=lambda case: case.name)


def of(run: str, *rows: tuple, files: Mapping[str, Content] | None = None) -> list[tuple]:
    """Rows (name, command, words[, files]) that find a run of this kind, and these files, too."""
    return [(*row[:3], {**(files or {}), **(row[3] if row[3:] else {})}, run) for row in rows]


def assert_refused(case: Case, folder: Path, monkeypatch, capfd) -> None:
    """Run a case in a folder of its own."""
    if case.run:
        shutil.copytree(finished(case.run), folder / "run")
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if (folder / "run" / SUMS).exists():
        # Otherwise the checksum would refuse a changed file before its content is read.
        changed = [path.name for path in (folder / "run").iterdir() if path.name != SUMS]
        with checksummed(folder / "run", *changed):
            pass
    before = digest(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as left:
        main(shlex.split(case.command))
    out, err = capfd.readouterr()
    assert left.value.code == 2, err
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("apportion: warning")]
    assert len(lines) == 1, err
    for word in case.words:
        assert word in lines[0], err
    assert digest(folder) == before


def digest(folder: Path) -> str:
    """A hash of every name and byte in a folder."""
    seen = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        seen.update(f"{path.relative_to(folder)}\0{path.is_dir()}\0".encode())
        seen.update(path.read_bytes() if path.is_file() else b"")
    return seen.hexdigest()


def cell(row: int, column: int, value: str, table: str = WIDE) -> str:
    """The table with one cell changed; row 0 holds the names."""
    lines = [line.split(",") for line in table.splitlines()]
    lines[row][column] = value
    return "\n".join(",".join(line) for line in lines) + "\n"


@cache
def finished(kind: str) -> Path:
    """A finished run of a job, its policy untrained: what is refused never gets to use it."""
    folder = Path(tempfile.mkdtemp()) / "run"
    facts = {"data": {}, "versions": {}, "seed": 0}
    if kind == "unfinished":
        Run.create(folder, "budget", BudgetSettings(), facts)
        return folder
    if kind == "begun":
        Run.create(folder, "portfolio", PortfolioJob(), facts)
        return folder
    if kind == "budget":
        settings, about, policy = BudgetSettings(), {"job": "budget"}, EqualShares()
    elif kind == "federated":
        settings, policy = find_domain("federated").settings(), shipped_policy()
        about = {"job": "federated", "window": 5, "state": "invariant", "kinds": ["equal"]}
    elif kind == "charging":
        settings, policy = ChargingSettings(), EqualShares()
        about = {"job": "charging", "until": {}, "task_size": 4, "trained_on": {}}
    else:
        settings = PortfolioJob(window=8, batch=16, hidden=4, members=1, task_size=2)
        keys = jax.random.split(jax.random.key(0), 1)
        policy = compose(untrained_policies(1, settings, keys), settings)
        about = {"job": "portfolio", "window": 8, "channels": 1, "cost": 0.0025}
        about |= {"last": str(MARKET.dates[20]), "trained_on": list("ABC")}
    run = Run.create(folder, kind, settings, facts)
    finish(run, JobResult(policy, {"done": True}, "", about, {"title": "t"}))
    return folder
