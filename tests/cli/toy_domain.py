"""A domain from outside the package, in one file: all that the command line and the page ask of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd

from apportion.certify.certificate import Gains
from apportion.domains.domain import Domain
from apportion.domains.settings import TrainingSettings
from apportion.errors import InputError


@dataclass(frozen=True)
class ToySettings(TrainingSettings):
    """Share a toy out among those who want it."""

    steps: int = 6
    """Updates of the policy."""
    tasks: int = 3
    """Number of tasks T."""
    toys: Path | None = None
    """CSV file of toys; without it, embedded ones."""
    learner: Literal["direct", "careful"] = "direct"
    """How it is learned."""
    chunk: int = 3
    """Steps between two saves."""


@dataclass(frozen=True)
class CarefulSettings(ToySettings):
    """Share a toy out, carefully."""

    learner: Literal["direct", "careful"] = "careful"
    """How it is learned."""
    care: float = 0.5
    """How carefully."""


@dataclass(frozen=True)
class PlayOptions:
    """Whom to play with."""

    friends: tuple[str, ...] | None = None
    """Their names; by default all."""
    toys: Path | None = None
    """CSV file of toys; without it, what the run was trained on."""


@dataclass(frozen=True)
class GainOptions:
    """How long to look."""

    weeks: int = 40
    """Weeks of play."""


@dataclass(frozen=True)
class Played:
    """Shares by friend."""

    shares: dict[str, float]

    def summary(self) -> str:
        return f"{len(self.shares)} friends played"

    def to_json(self) -> dict[str, Any]:
        return {"shares": self.shares}

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"friend": list(self.shares), "share": list(self.shares.values())})

    def plot(self) -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2, 2))
        figure.subplots().bar(list(self.shares), list(self.shares.values()))
        return figure


def read_toys(path: Path | None) -> str:
    if path is not None and not path.is_file():
        raise InputError(f"{path}: no such file; give a CSV file of toys")
    return "embedded" if path is None else path.read_text()


class ToyDomain(Domain):
    name = "toy"
    settings = ToySettings
    variants: ClassVar = {"direct": ToySettings, "careful": CarefulSettings}
    backtest_options = PlayOptions
    allocate_options = PlayOptions
    certify_options = GainOptions
    check_options = PlayOptions
    examples = ("train toy --out runs/toy --steps 4", "backtest runs/toy --friends Ann Bob")
    glossary: ClassVar = {"friend": "Somebody to share with."}

    def prepare(self, settings):
        data = {"source": read_toys(settings.toys)}
        import jax

        from apportion.domains.probes import ShownBest
        from apportion.domains.training import averaged, train_members
        from apportion.learners.direct import Direct
        from apportion.memory import Replay
        from apportion.policy import Recurrent
        from apportion.runs.runner import JobResult, PreparedJob
        from apportion.tasks import draw_tasks
        from apportion.training import Chunks

        def train(on_chunk, resume):
            done = train_members(
                ShownBest(universe=4),
                draw_tasks(4, 3, settings.tasks),
                lambda key: Recurrent(1, 4, key=key),
                Direct(8, 0.01),
                settings,
                replay=Replay(warm_up=8),
                chunks=Chunks(settings.chunk, on_chunk=on_chunk),
                state=resume,
            )
            policy = averaged(done.policy, settings.members)
            size = sum(map(np.size, jax.tree.leaves(policy)))
            table = pd.DataFrame({"friend": ["Ann", "Bob"], "smiles": [3, 4]})
            results = {"size": size, "learner": settings.learner}
            return JobResult(policy, results, "shared", {"job": "toy"}, {}, {"smiles": table})

        return PreparedJob(data, train)

    def _play(self, run, options) -> Played:
        read_toys(options.toys)
        assert run.policy is not None
        return Played(dict.fromkeys(options.friends or ("Ann", "Bob"), 0.5))

    def backtest(self, run, options, progress) -> Played:
        played = self._play(run, options)
        progress.stage("backtest: toys", 0.5)
        return played

    def allocate(self, run, options) -> Played:
        return self._play(run, options)

    def gains(self, source, against, options) -> Gains:
        if against != "chance":
            raise InputError(f"there is no baseline {against!r}; choose chance")
        return Gains(np.full(options.weeks, 0.5), -1.0, 1.0, baseline=against, period="week")

    def check(self, options) -> Played:
        read_toys(options.toys)
        return Played({"Ann": 1.0})

    def sections(self, folder):
        from apportion.report.page import Section, Table
        from apportion.report.plots import read_table

        smiles = read_table(folder, "smiles")
        return [] if smiles is None else [Section("Smiles", [Table("Who smiled", smiles)])]

    def demo(self):
        return ToySettings()


DOMAIN = ToyDomain()
