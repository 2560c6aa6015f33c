"""The example plug-in with all that a domain can define: learners, files, gains, sections, a demo."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
from irrigation.domain import IrrigationDomain, IrrigationSettings

from apportion.certify.certificate import Gains
from apportion.domains.tables import TableResult
from apportion.errors import InputError


@dataclass(frozen=True)
class ToySettings(IrrigationSettings):
    """Divide a toy among friends."""

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
    """Divide a toy among friends, carefully."""

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


def read_toys(path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise InputError(f"{path}: no such file; give a CSV file of toys")


class ToyDomain(IrrigationDomain):
    name = "toy"
    settings = ToySettings
    variants: ClassVar = {"direct": ToySettings, "careful": CarefulSettings}
    backtest_options = allocate_options = check_options = PlayOptions
    certify_options = GainOptions
    examples = ("train toy --out runs/toy --steps 4", "backtest runs/toy --friends Ann Bob")
    glossary: ClassVar = {"friend": "Somebody to share with."}

    def prepare(self, settings):
        read_toys(settings.toys)
        return super().prepare(settings)

    def backtest(self, run, options, progress):
        played = self.allocate(run, options)
        progress.stage("backtest: toys", 0.5)
        return played

    def allocate(self, run, options):
        read_toys(options.toys)
        assert run.policy is not None
        friends = options.friends or ("Ann", "Bob")
        return TableResult(pd.DataFrame({name: [0.5] for name in friends}), "share")

    def gains(self, source, against, options):
        if against != "chance":
            raise InputError(f"there is no baseline {against!r}; choose chance")
        return Gains(
            np.full(options.weeks, 0.5), -1.0, 1.0, baseline=against, period="week", block=1
        )

    def check(self, options):
        read_toys(options.toys)
        return TableResult(pd.DataFrame({"toys": [1.0]}))

    def sections(self, folder):
        from apportion.report.page import Section, Table

        return [Section("Smiles", [Table("Who smiled", pd.DataFrame({"friend": ["Ann"]}))])]

    def demo(self):
        return ToySettings()


DOMAIN = ToyDomain()
