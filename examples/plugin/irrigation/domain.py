"""The domain `irrigation` and the entry of its study; importing them starts no JAX."""

from dataclasses import dataclass

from apportion.domains.domain import Domain
from apportion.domains.settings import ProblemOptions, ProblemSettings
from apportion.studies.registry import StudyEntry

STUDY = StudyEntry("irrigation.study:irrigation", "whether one policy serves fields it never saw")


@dataclass(frozen=True)
class IrrigationSettings(ProblemSettings):
    """Share a day's water among fields."""

    steps: int = 300
    """Updates of the policy."""


class IrrigationDomain(Domain):
    name = "irrigation"
    settings = IrrigationSettings
    backtest_options = ProblemOptions
    examples = ("train irrigation --out runs/fields", "backtest runs/fields --json")

    def problem(self):
        from irrigation.fields import Fields

        return Fields.draw(seed=0)


DOMAIN = IrrigationDomain()
