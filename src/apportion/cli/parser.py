"""Parse arguments with cyclopts and call the command; errors are reported in one sentence."""

from typing import Any, TextIO

from cyclopts import App, CycloptsError, Parameter
from cyclopts.exceptions import UnknownOptionError, UnusedCliTokensError
from rich.console import Console

from apportion.cli import commands
from apportion.cli.options import refuse_fractions
from apportion.errors import InputError
from apportion.runs.compiled import keep_compiled
from apportion.runs.settings import suggest


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
    match error:
        case UnknownOptionError(token=token, argument_collection=known):
            name = token.keyword or token.value
            options = [option for argument in known for option in argument.names]
            problem = f"there is no option {name}{suggest(name, options)}"
        case UnusedCliTokensError(unused_tokens=[extra, *_]):
            problem = f"unexpected argument {extra!r}"
        case _:
            problem = " ".join(str(error).split()).removeprefix(f'Command "{command}" ').rstrip(".")
    if "id you mean" not in problem:
        problem += f"; see {f'apportion {command}'.strip()} --help"
    return f"{command}: {problem}" if command else problem
