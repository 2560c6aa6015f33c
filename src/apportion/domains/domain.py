"""Interface of a domain, used by the command line, the page of a run and the bridges.

A package registers a domain as an entry point of the group `apportion.domains`. The domain declares its
settings and options and implements the commands. Importing a domain does not import JAX: each method
validates the user's files first and imports JAX only to compute.
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
    """Result of a command."""

    def summary(self) -> str:
        """Return the result as text for a terminal."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serialisable values for `--json`."""
        ...

    def to_frame(self) -> "pd.DataFrame":
        """Return the result as a table."""
        ...


class PlottedResult(Result, Protocol):
    """Result with a plot."""

    def plot(self) -> "Figure":
        """Plot the result."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """Small experiment of a domain on embedded data, shown by `apportion demo`.

    Parameters
    ----------
    title : str
        The resource and the entities, such as "Wealth among instruments".
    question : str
        The question of the experiment, in two or three sentences.
    unit : str
        The measured quantity with its unit.
    levels : DataFrame
        Columns method, level, low, high and n; one row for each method and for the baseline rule.
    shares : DataFrame
        Shares over time; one row per period and one column per entity.
    notes : tuple of str
        Data, number of updates, and the independent unit that n counts.

    Examples
    --------
    >>> import pandas as pd
    >>> levels = pd.DataFrame({"method": ["rule"], "level": [1.0], "low": [0.9], "high": [1.1], "n": [8]})
    >>> shares = pd.DataFrame({"a": [0.5], "b": [0.5]})
    >>> Demonstration("A budget among campaigns", "Which shares sell most?", "sales", levels, shares).notes
    ()
    """

    title: str
    question: str
    unit: str
    levels: "pd.DataFrame"
    shares: "pd.DataFrame"
    notes: tuple[str, ...] = ()


class Domain(ABC):
    """A kind of resource: its settings, its data and its commands.

    Settings and options are frozen dataclasses with a docstring under each field. The fields become
    options of the command line, the docstrings their help. Their modules must not import JAX.

    A subclass sets `name` and `settings` and defines `problem` or `prepare`. A command is available if
    its options are set, such as `backtest_options`.

    Attributes
    ----------
    name : str
        Name of the domain, as in `apportion train NAME` and in a run's settings file.
    settings : type
        Settings of `train`.
    variants : mapping of str to type
        Settings for each value of their field `learner`, if learners have different settings.
    backtest_options, allocate_options, serve_options : type or None
        Options of the command; None if the domain does not have it.
    certify_options : type or None
        Options of `certify` in addition to the baseline, alpha and block; None if there is no `certify`.
    check_options : type or None
        Files that `check` validates; each field is None or False by default.
    examples : tuple of str
        Command lines for the help, without the program's name: `backtest runs/first --json`.
    glossary : mapping of str to str
        Terms that the page of a run explains in addition to the common ones.

    Examples
    --------
    >>> from apportion.domains.budget.problem import Budget
    >>> from apportion.domains.settings import ProblemOptions, ProblemSettings
    >>> class Campaigns(Domain):
    ...     name, settings, backtest_options = "campaigns", ProblemSettings, ProblemOptions
    ...
    ...     def problem(self):
    ...         return Budget.simulate(universe=20, periods=30)
    >>> Campaigns().problem().universe
    20
    """

    name: ClassVar[str]
    settings: ClassVar[type]
    variants: ClassVar[Mapping[str, type]] = {}
    backtest_options: ClassVar[type | None] = None
    allocate_options: ClassVar[type | None] = None
    certify_options: ClassVar[type | None] = None
    serve_options: ClassVar[type | None] = None
    check_options: ClassVar[type | None] = None
    examples: ClassVar[tuple[str, ...]] = ()
    glossary: ClassVar[Mapping[str, str]] = {}

    def settings_for(self, values: Mapping[str, Any]) -> type:
        """Return the settings class for these values, selected by `learner` if there are variants."""
        if not self.variants or "learner" not in values:
            return self.settings
        learner = values["learner"]
        if learner not in self.variants:
            near = suggest(str(learner), self.variants)
            raise InputError(f"learner is {learner!r}; choose {', '.join(self.variants)}{near}")
        return self.variants[learner]

    def load_settings(self, run: "Run") -> Any:
        """Read and validate the settings of a run."""
        values = run.settings
        return from_mapping(values, self.settings_for(values), str(run.folder / "settings.toml"))

    def prepare(self, settings: Any) -> "PreparedJob":
        """Read and validate the data before JAX starts, and return the training job.

        The default trains a policy on random tasks of `problem()` and requires `ProblemSettings`.
        """
        from apportion.domains.training import prepare_problem

        problem = self.problem()
        assert problem is not None, f"{type(self).__name__} defines neither prepare nor problem"
        return prepare_problem(problem, settings)

    def backtest(self, run: "Run", options: Any, progress: "Progress") -> PlottedResult:
        """Compare the policy of a finished run with the baseline rule.

        The default compares with equal shares on new tasks of `problem()` and requires `ProblemOptions`.
        """
        from apportion.domains.training import compare_with_equal

        problem = self.problem()
        if problem is None or self.backtest_options is None:
            raise InputError(f"{run.folder}: a run of {self.name}, which has no backtest")
        return compare_with_equal(problem, run.policy, self.load_settings(run), seed=options.seed)

    def allocate(self, run: "Run", options: Any) -> Result:
        """Return the next allocation of a finished run's policy."""
        raise InputError(f"{run.folder}: a run of {self.name}, which has no command allocate")

    def serve(self, run: "Run", options: Any) -> str:
        """Control a live system with a finished run's policy until a signal; return a final message."""
        raise InputError(f"{run.folder}: a run of {self.name}, which has no command serve")

    def gains(self, run: "Run", against: str, options: Any) -> "Gains":
        """Return the gain of a finished run over a baseline in each period, the input of `certify`."""
        raise InputError(f"{run.folder}: {self.name} has no gains, which certify needs")

    def check(self, options: Any) -> Result:
        """Validate the user's data files and describe their content."""
        raise InputError(f"{self.name} reads no files")

    def sections(self, folder: Path) -> "list[Section]":
        """Return sections for the page of a run, in addition to the common ones."""
        return []

    def demo(self) -> Any:
        """Return settings of a demonstration run of a few minutes on embedded data, or None."""
        return None

    def demonstrate(self, seed: int, progress: "Progress") -> Demonstration | None:
        """Compare methods and the baseline rule on embedded data within a minute, or return None.

        Parameters
        ----------
        seed : int
            Seed of all random numbers.
        progress : Progress
            Receives the completed fraction through `stage`.
        """
        return None

    def problem(self) -> "Problem | None":
        """Return a problem on embedded data, which bridges offer by name, or None."""
        return None


_PACKAGES = {"charging": "apportion-charging"}
"""Packages of domains that are installed separately, for the error message."""


def domain_names() -> tuple[str, ...]:
    """Return the names of all installed domains."""
    return tuple(find_plugins(DOMAINS))


def find_domain(name: str) -> Domain:
    """Return the installed domain of this name; imports no JAX.

    Raises
    ------
    InputError
        If no installed package registers this domain.
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
