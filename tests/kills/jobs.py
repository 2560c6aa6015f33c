"""Small jobs of every kind that writes, each a command that can be given again after it was killed."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from apportion.cli import main
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.runs.files import read_arrays, read_json

BUDGET = "--universe 12 --held-out 4 --periods 24 --tasks 6 --task-size 3 --batch 8 --hidden 4"
MARKET = (
    "--until 2002-01-05 --validation 1 --tasks 3 --task-size 3 --steps 12 --members 2 --window 6"
)
MARKET += " --batch 12 --hidden 4 --chunk 3"
GARAGE = "--tasks 4 --task-size 3 --steps 12 --days 4 --hidden 4 --chunk 2"
CLIENTS = (
    "--kinds equal,paper --samples 20 --width 4 --pooling 4 --rounds 2 --epochs 1 --evaluation 40"
)
CLIENTS += " --test 60 --steps 8 --chunk 2 --unseen 1 --hidden 4"


@dataclass(frozen=True)
class Job:
    """A command on a folder of data, what it leaves, and how far it is by what it has left."""

    run: Callable[[Path, Path], None]
    """Given the folder of data and the folder to write to; begins, or goes on."""
    same: tuple[str, ...]
    """Files that must be to the bit those of an undisturbed run."""
    done: str
    """The file that says it is done."""
    kills: int
    """How many of 200 it gets: those that take long get fewer."""
    marks: tuple[tuple[str, str], ...] = ()
    """Stages, the latest first, each with a pattern of files that says it was reached."""

    def stage(self, out: Path) -> str:
        """What the job was at when its folder looked like this."""
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


def _certify(data: Path, out: Path) -> None:
    run = ["certify", str(data / "market"), "--data", str(data / "prices.csv")]
    command(*run, "--against", "lazy-crp", "--out", str(out), "--force")


def _export(data: Path, out: Path) -> None:
    from apportion.runs.export import export_policy
    from apportion.runs.folder import load_run

    export_policy(load_run(data / "market").policy, out, window=6, channels=1)


def _demo(data: Path, out: Path) -> None:
    command("demo", "charging", "--out", str(out), "--quiet", "--steps", "4")


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
    "train charging": Job(
        _train("charging", f"--sessions {{data}}/sessions.csv {GARAGE}"), RUN, RUN[2], 20, STAGES
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
    "certify --out": Job(
        _certify,
        ("certificate.json", "certificate.csv", "certificate.png"),
        "certificate.png",
        15,
        (("after the end", "certificate.png"), ("writing", "certificate.json")),
    ),
    "export": Job(
        _export,
        ("policy.stablehlo",),
        "policy.stablehlo",
        25,
        (("after the end", "policy.stablehlo"),),
    ),
    "demo": Job(
        _demo,
        ("policy.safetensors", "results.json", "settings.toml"),
        "report.html",
        10,
        (("after the end", "report.html"), ("writing the report", "results.json"), *STAGES),
    ),
}


def make_data(folder: Path) -> None:
    """Prices, sessions, and a finished run of the market."""
    market = SimulatedMarket.draw(universe=6, days=760, seed=3).prices
    market.to_frame().to_csv(folder / "prices.csv")
    rng = np.random.default_rng(0)
    days = pd.bdate_range("2021-01-04", periods=60)
    rows = [
        {
            "site": "north", "station": f"S{station}",
            "arrival": day + pd.Timedelta(hours=7 + 2 * rng.random()),
            "departure": day + pd.Timedelta(hours=14 + 4 * rng.random()),
            "delivered_kwh": round(4 + 8 * rng.random(), 2),
        }
        for day in days for station in range(8)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    for name in ("arrival", "departure"):
        frame[name] = frame[name].dt.floor("s")
    frame.to_csv(folder / "sessions.csv", index=False)


def what_is_damaged(folder: Path) -> list[str]:
    """Files under their own name that cannot be read: each is written whole, or not at all."""
    readers = {".json": read_json, ".parquet": pd.read_parquet, ".safetensors": read_arrays}
    damaged = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".") and path.suffix in readers:
            try:
                readers[path.suffix](path)
            except Exception as error:
                damaged.append(f"{path.relative_to(folder)} ({error})")
    return damaged
