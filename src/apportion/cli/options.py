"""Options that several commands share, and options that a command takes from domains.

The options of a domain are the fields of its dataclasses. A command on a run has only the options of the
run's domain, so the run is found among the arguments before they are parsed.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import App, Group, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.exceptions import CoercionError

from apportion.domains.domain import Domain, domain_names, find_domain
from apportion.errors import InputError
from apportion.runs.folder import load_run

Folder = Annotated[Path, Parameter(name="DIR")]
"""The folder of a command, a positional argument."""
RunFolder = Annotated[Path, Parameter(name="DIR", help="Folder of a finished run.")]
Out = Annotated[Path, Parameter(metavar="DIR")]
File = Annotated[Path | None, Parameter(metavar="FILE")]
Json = Annotated[bool, Parameter(help="Print one JSON object.")]
Quiet = Annotated[bool, Parameter(help="Show no progress.")]
Seed = Annotated[int, Parameter(help="Random seed.")]


def all_domains() -> list[Domain]:
    """Return all installed domains, in the order of the help."""
    return [find_domain(name) for name in domain_names()]


def domain_of(arguments: Sequence[str]) -> Domain | None:
    """Return the domain of the run in the arguments; None without one."""
    for path in (Path(word) for word in arguments if not word.startswith("-")):
        if (path / "settings.toml").is_file():
            return find_domain(load_run(path).job)
    return None


def finished_run(folder: Path, domain: Domain | None) -> Any:
    """Return the finished run in the folder; `domain` is the one found in the arguments."""
    run = load_run(folder)
    if domain is None or run.job != domain.name:
        raise InputError(f"{folder}: put this folder first, and options after it")
    if not run.finished:
        raise InputError(f"{folder}: is not finished; continue it with `apportion resume {folder}`")
    return run


def option_kinds(command: str, domains: Iterable[Domain]) -> dict[str, type]:
    """Return the options of each domain for a command, by the name of the domain."""
    found = {domain.name: getattr(domain, f"{command}_options") for domain in domains}
    return {name: kind for name, kind in found.items() if kind is not None}


def with_options(
    function: Callable[..., Any], kinds: dict[str, type], shown: str, **words: str
) -> Callable[..., Any]:
    """Replace `**options` of a function by one dataclass of options per domain.

    In its help, SHOWN is replaced by `shown`, and other keywords by the text in `words`.
    """
    for word, text in {"SHOWN": shown, **words}.items():
        function.__doc__ = inspect.cleandoc(function.__doc__ or "").replace(word, text)
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, kind in kinds.items():
        group = Group(name.capitalize(), help=inspect.cleandoc(kind.__doc__ or ""))
        hint = Annotated[kind, Parameter(name="*", group=group)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        own.append(inspect.Parameter(name, keyword, annotation=hint, default=kind()))

    @wraps(function)
    def command(*given: Any, **options: Any) -> Any:
        return function(*given, **{name: kind() for name, kind in kinds.items()} | options)

    command.__signature__ = signature.replace(parameters=own)  # pyright: ignore[reportAttributeAccessIssue]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    return command


def examples(command: str, domains: Iterable[Domain], *own: str) -> str:
    """Return the examples in the help of a command."""
    given = [line for domain in domains for line in domain.examples if line.split()[0] == command]
    return "\n\n".join(f"Example: `apportion {line}`" for line in (given or own))


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Return the value of an option in arguments that are not parsed yet.

    >>> value_of("--config", ["--out", "x", "--config=a.toml"])
    'a.toml'
    """
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following
    return None


def refuse_fractions(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise if an integer option has a fraction, which the parser would silently round."""
    for argument in arguments:
        if int in (argument.resolved_hint, *get_args(argument.resolved_hint)):
            for token in argument.tokens:
                if "." in token.value:
                    raise CoercionError(argument=argument, token=token, target_type=int)
