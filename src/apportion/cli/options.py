"""The options that several commands share."""

from pathlib import Path
from typing import Annotated, get_args

from cyclopts import App, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.exceptions import CoercionError

Folder = Annotated[Path, Parameter(name="DIR")]
"""The folder a command works on, given without an option's name."""
Out = Annotated[Path, Parameter(metavar="DIR")]
File = Annotated[Path | None, Parameter(metavar="FILE")]
Prices = Annotated[
    Path | None,
    Parameter(
        metavar="FILE",
        help="CSV or Parquet file of daily prices; without it, the 20 embedded stocks.",
    ),
]
Json = Annotated[bool, Parameter(help="Print one JSON object.")]
Quiet = Annotated[bool, Parameter(help="Show no progress.")]
TensorBoard = Annotated[bool, Parameter(help="Also write TensorBoard event files.")]


def refuse_fractions(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse a fraction where a whole number is asked for; the parser would silently round it."""
    for argument in arguments:
        if int in (argument.resolved_hint, *get_args(argument.resolved_hint)):
            for token in argument.tokens:
                if "." in token.value:
                    raise CoercionError(argument=argument, token=token, target_type=int)
