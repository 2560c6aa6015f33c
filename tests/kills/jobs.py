"""Small jobs of every kind that writes; a command can be given again after it was killed."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from apportion.cli import main
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.runs.files import read_arrays, read_json, read_rows

BUDGET = "--universe 12 --held-out 4 --periods 24 --tasks 6 --task-size 3 --batch 8 --hidden 4"
MARKET = (
    "--until 2002-01-05 --validation 1 --tasks 3 --task-size 3 --steps 12 --members 2 --window 6"
)
MARKET += " --batch 12 --hidden 4 --chunk 3"
CLIENTS = (
    "--kinds equal,paper --samples 20 --width 4 --pooling 4 --rounds 2 --epochs 1 --evaluation 40"
)
CLIENTS += " --test 60 --steps 8 --chunk 2 --unseen 1 --hidden 4"


@dataclass(frozen=True)
class Job:
    """A command on a folder of data, the files it writes, and its stages."""

    run: Callable[[Path, Path], None]
    """Given the folder of data and the folder to write to; begins, or continues."""
    same: tuple[str, ...]
    """Files that must be to the bit those of an undisturbed run."""
    done: str
    """The file that marks the end."""
    kills: int
    """Kills of 200: slow jobs get fewer."""
    marks: tuple[tuple[str, str], ...] = ()
    """Stages, the latest first, each with a pattern of files that it has written."""

    def stage(self, out: Path) -> str:
        """The stage of a job whose folder looks like this."""
        found = (name for name, pattern in self.marks if any(out.glob(pattern)))
        return next(found, "beginning")


def command(*words: str) -> None:
    """A command line in this process; only its end is of interest."""
    with contextlib.suppress(SystemExit):
        main(words)


def _train(domain: str, options: str) -> Callable[[Path, Path], None]:
    def run(data: Path, out: Path) -> None:
        if (out / "settings.toml").exists():
            command("resume", str(out), "--quiet")
        else:
            command(
                "train", domain, "--out", str(out), "--quiet", *options.format(data=data).split()
            )

    return run


def _study(data: Path, out: Path) -> None:
    from apportion.studies.engine import CellStore, perform_plans
    from apportion.studies.executors import Serial
    from studies.toys import toy

    list(perform_plans([CellStore(toy(cells=40), out)], Serial()))


def _backtest(data: Path, out: Path) -> None:
    run = ["backtest", str(data / "market"), "--prices", str(data / "prices.csv"), "--quiet"]
    command(*run, "--baselines", "olmar", "momentum", "--out", str(out))


RUN = ("policy.safetensors", "policy.json", "results.json", "settings.toml")
STAGES = (
    ("after the end", "results.json"),
    ("writing the outcome", "policy.safetensors"),
    ("training or testing", "checkpoints/*.safetensors"),
    ("before the first save", "settings.toml"),
)
CHOSEN = (*STAGES[:3], ("after choosing", "choice.json"), ("choosing", "settings.toml"))
JOBS = {
    "train budget": Job(
        _train("budget", f"{BUDGET} --steps 60 --chunk 5"), RUN, RUN[2], 40, STAGES
    ),
    "train portfolio": Job(
        _train("portfolio", f"--prices {{data}}/prices.csv {MARKET}"),
        (*RUN, "choice.json", "values.csv"),
        RUN[2],
        20,
        CHOSEN,
    ),
    "train federated": Job(_train("federated", CLIENTS), RUN, RUN[2], 15, STAGES),
    "study": Job(
        _study,
        ("table.csv", "verdict.json", "rows.parquet", "figure.png"),
        "verdict.json",
        40,
        (
            ("after the end", "verdict.json"),
            ("concluding", "rows.parquet"),
            ("computing cells", "cells/*.parquet"),
            ("before the first cell", "cells.json"),
        ),
    ),
    "backtest --out": Job(
        _backtest,
        ("results.json", "table.csv", "figure.png"),
        "results.json",
        15,
        (("after the end", "results.json"), ("writing", "table.csv")),
    ),
}


def make_data(folder: Path) -> None:
    """Write the prices."""
    market = SimulatedMarket.draw(universe=6, days=760, seed=3).prices
    market.to_frame().to_csv(folder / "prices.csv")


def what_is_damaged(folder: Path) -> list[str]:
    """Files that cannot be read, or do not match their checksums."""
    readers = {
        ".json": read_json,
        ".parquet": lambda path: read_rows(path, ""),
        ".safetensors": read_arrays,
    }
    damaged = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".") and path.suffix in readers:
            try:
                readers[path.suffix](path)
            except Exception as error:
                damaged.append(f"{path.relative_to(folder)} ({error})")
    return damaged
