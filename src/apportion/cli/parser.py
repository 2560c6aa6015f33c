"""Parse arguments with cyclopts and call the command; errors are reported in one sentence."""

from typing import Any, TextIO

from cyclopts import App, CycloptsError, Parameter
from cyclopts.argument import Argument
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from rich.console import Console

from apportion.cli import commands
from apportion.cli.options import refuse_fractions
from apportion.errors import InputError
from apportion.runs.compiled import keep_compiled
from apportion.runs.settings import suggest

_TYPES = {int: "a whole number", float: "a number", bool: "true or false"}


def run_command(name: str, arguments: list[str], out: TextIO) -> Any:
    """Parse the arguments and return the result of the command; write help to `out`."""
    keep_compiled()
    app = App(
        name="apportion",
        config=(refuse_fractions,),
        default_parameter=Parameter(negative=(), consume_multiple=True),
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    word = name.replace("-", "_")
    make = getattr(commands, f"make_{word}", None)
    command = make(arguments) if make is not None else getattr(commands, f"{word}_command")
    app.command(command, name=name)
    given = [name, *arguments]
    try:
        return app(given, console=Console(file=out), print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise InputError(_describe(error)) from None


def _describe(error: CycloptsError) -> str:
    """Return what is wrong, where, and what to do."""
    command = " ".join(error.command_chain or ())
    problem = _problem(error)
    if "did you mean" not in problem:
        problem += f"; see {f'apportion {command}'.strip()} --help"
    return f"{command}: {problem}" if command else problem


def _problem(error: CycloptsError) -> str:
    match error:
        case UnknownOptionError(token=token, argument_collection=known):
            name = token.keyword or token.value
            options = [option for argument in known for option in argument.names]
            return f"there is no option {name}{suggest(name, options)}"
        case MissingArgumentError(argument=Argument() as argument):
            return _missing(error, argument)
        case CoercionError(argument=Argument() as argument) if error.token is not None:
            name, value = error.token.keyword or argument.name, error.token.value
            if choices := argument.get_choices(force=True):
                near = suggest(value, choices)
                return f"{name} is {value!r}; choose {', '.join(choices)}{near}"
            expected = _TYPES.get(error.target_type, f"of type {error.target_type}")
            return f"{name} is {value!r}; it must be {expected}"
        case UnusedCliTokensError(unused_tokens=[extra, *_]):
            return f"unexpected argument {extra!r}"
        case RepeatArgumentError(token=token):
            return f"{token.keyword} is given twice; use it once"
    return " ".join(str(error).split())


def _missing(error: MissingArgumentError, argument: Argument) -> str:
    if error.keyword is not None:
        count, _ = argument.token_count()
        return f"{error.keyword} needs {'a value' if count == 1 else f'{count} values'}"
    for token in error.unused_tokens or ():
        name = token.partition("=")[0]
        if name.startswith("--") and suggest(name, argument.names):
            return f"there is no option {name}; did you mean {argument.name}?"
    name = f"{argument.name} {argument.parameter.metavar or ''}".strip()
    choices = argument.get_choices(force=True)
    return f"{name} is missing" + (f"; choose {', '.join(choices)}" if choices else "")
