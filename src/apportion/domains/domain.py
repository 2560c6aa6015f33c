"""The interface of a domain, which the command line, the page and the bridges call.

A domain is an object that a package registers as an entry point of the group `apportion.domains`. It
names its settings and options and implements the commands. Importing it starts no JAX: a method imports
what it needs when it is called, validates the user's files first, and computes after that.
"""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from apportion.errors import InputError
from apportion.runs.plugins import DOMAINS, find_plugins, load_plugin
from apportion.runs.settings import from_mapping, suggest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from apportion.certify.certificate import Gains
    from apportion.problem import Problem
    from apportion.report.page import Section
    from apportion.runs.folder import Run
    from apportion.runs.progress import Progress
    from apportion.runs.runner import PreparedJob


class Result(Protocol):
    """What a command found, and how it shows itself."""

    def summary(self) -> str:
        """The result as text, for a terminal."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        ...

    def to_frame(self) -> "pd.DataFrame":
        """The result as a table."""
        ...


class PlottedResult(Result, Protocol):
    """A result that can be looked at as a picture, too."""

    def plot(self) -> "Figure":
        """The result as a picture."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """A small experiment of a domain on embedded data, for the page of `apportion demo`."""

    title: str
    """What is shared among whom."""
    question: str
    """The question, in two or three sentences."""
    unit: str
    """What a level measures, unit included."""
    levels: "pd.DataFrame"
    """Columns method, level, low, high and n: a row for each method and for the usual rule."""
    shares: "pd.DataFrame"
    """Shares over time: a row for each period, a column for each entity."""
    notes: tuple[str, ...] = ()
    """Data, budget of updates, and what n counts."""


class Domain(ABC):
    """A kind of resource to share out: its settings, its data, and what can be asked of its runs.

    Settings and options are frozen dataclasses with a docstring under each field: the fields are the
    options of the command line, the docstrings its help. None of them imports JAX.
    """

    name: ClassVar[str]
    """As in `apportion train NAME`, and as a run's settings file says it."""
    settings: ClassVar[type]
    """Settings of `train`."""
    variants: ClassVar[Mapping[str, type]] = {}
    """Settings by the value of their field `learner`, where learners have settings of their own."""
    backtest_options: ClassVar[type | None] = None
    """Options of `backtest`; None if there is no backtest."""
    allocate_options: ClassVar[type | None] = None
    """Options of `allocate`; None if the domain has no such command."""
    certify_options: ClassVar[type | None] = None
    """Options of `certify` beyond the baseline, alpha and block; None if runs cannot be certified."""
    serve_options: ClassVar[type | None] = None
    """Options of `serve`; None if nothing is controlled live."""
    check_options: ClassVar[type | None] = None
    """Files that `check` validates for this domain; all fields None or False by default."""
    examples: ClassVar[tuple[str, ...]] = ()
    """Command lines that the help shows, each from its command on: `backtest runs/first --json`."""
    glossary: ClassVar[Mapping[str, str]] = {}
    """Words that the page of a run explains, beyond every run's."""
    live_file: ClassVar[str] = ""
    """What a live system keeps its gains in, such as "the file that a Flower server keeps"; `gains` then
    takes its path, too."""

    def settings_for(self, values: Mapping[str, Any]) -> type:
        """The class of settings that have these values: that of their `learner`, where learners differ."""
        if not self.variants or "learner" not in values:
            return self.settings
        learner = values["learner"]
        if learner not in self.variants:
            near = suggest(str(learner), self.variants)
            raise InputError(f"learner is {learner!r}; choose {', '.join(self.variants)}{near}")
        return self.variants[learner]

    def load_settings(self, run: "Run") -> Any:
        """A run's settings, each value checked."""
        values = run.settings
        return from_mapping(values, self.settings_for(values), str(run.folder / "settings.toml"))

    def prepare(self, settings: Any) -> "PreparedJob":
        """Read and check the data, and return how to train; refuse wrong data before JAX starts.

        By default a policy is trained on random tasks of `problem()`; the settings are then
        `ProblemSettings`.
        """
        from apportion.domains.training import prepare_problem

        problem = self.problem()
        assert problem is not None, f"{type(self).__name__} defines neither prepare nor problem"
        return prepare_problem(problem, settings)

    def backtest(self, run: "Run", options: Any, progress: "Progress") -> PlottedResult:
        """Test the policy of a finished run beside the usual rule.

        By default new tasks of `problem()`, if there is one, are tested beside equal shares; the options
        are then `ProblemOptions`.
        """
        from apportion.domains.training import compare_with_equal

        problem = self.problem()
        if problem is None or self.backtest_options is None:
            raise InputError(f"{run.folder}: a run of {self.name}, which has no backtest")
        return compare_with_equal(problem, run.policy, self.load_settings(run), seed=options.seed)

    def allocate(self, run: "Run", options: Any) -> Result:
        """The next period's allocation of a finished run's policy."""
        raise InputError(f"{run.folder}: a run of {self.name}, which allocates nothing by itself")

    def serve(self, run: "Run", options: Any) -> str:
        """Let a finished run's policy decide live until a signal comes; what to say then."""
        raise InputError(f"{run.folder}: a run of {self.name}, which controls nothing live")

    def gains(self, source: "Run | Path", against: str, options: Any) -> "Gains":
        """What a policy gained over a baseline, period by period: what `certify` bets on.

        `source` is a finished run, or a file in which a live system of this domain has kept its gains.
        """
        raise InputError(f"{source}: {self.name} has no gains to bet on")

    def check(self, options: Any) -> Result:
        """What a user's data file holds; what is wrong with it is refused, a sentence each."""
        raise InputError(f"{self.name} reads no files")

    def sections(self, folder: Path) -> "list[Section]":
        """What the page of a run in this folder shows beyond every run's."""
        return []

    def demo(self) -> Any:
        """Settings of a demonstration on embedded data, minutes on two cores; None where there is none."""
        return None

    def demonstrate(self, seed: int, progress: "Progress") -> Demonstration | None:
        """Compare methods and the usual rule on embedded data within a minute; None if there is nothing.

        Parameters
        ----------
        seed : int
            Decides everything random.
        progress : Progress
            Gets the part of the work that is done as `stage`.
        """
        return None

    def problem(self) -> "Problem | None":
        """A problem made of embedded data, which bridges offer by name; None where there is none."""
        return None


_PACKAGES = {"charging": "apportion-charging"}
"""Domains of our own that are separate packages, for the message when one is not installed."""


def domain_names() -> tuple[str, ...]:
    """Return the names of all installed domains."""
    return tuple(find_plugins(DOMAINS))


def find_domain(name: str) -> Domain:
    """Return the installed domain of this name; imports no JAX.

    Raises
    ------
    InputError
        No installed package registers this domain.
    """
    if name not in find_plugins(DOMAINS):
        if name in _PACKAGES:
            package = _PACKAGES[name]
            raise InputError(
                f"the domain {name!r} is in the package {package}, which is not installed; run pip "
                f"install {package}"
            )
        near = suggest(name, domain_names())
        raise InputError(f"there is no domain {name!r}; choose {', '.join(domain_names())}{near}")
    return load_plugin(DOMAINS, name)
