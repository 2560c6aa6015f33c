"""From arguments to a frozen dataclass by tyro, with every mistake told in one sentence."""

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from apportion.cli.asked import HelpAsked
from apportion.errors import InputError

Settings = TypeVar("Settings")

_STYLE = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.HelptextFromCommentsOff,
)


def parse(
    kind: type[Settings], arguments: Sequence[str], name: str, default: Any = None
) -> Settings:
    """Parse a command's arguments; `--help` prints and leaves, a mistake becomes an InputError."""
    # Tyro draws its boxes to suit the stream's encoding; the sentence is found by its borders.
    boxed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    helped = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding, write_through=True)
    start = {} if default is None else {"default": default}
    prog = f"apportion {name}"
    try:
        with contextlib.redirect_stderr(boxed), contextlib.redirect_stdout(helped):
            return tyro.cli(kind, prog=prog, args=list(arguments), config=_STYLE, **start)
    except SystemExit as leaving:
        if leaving.code:
            raise InputError(_sentence(_text(boxed), prog)) from None
        raise HelpAsked(_text(helped)) from None


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def _sentence(boxed: str, prog: str) -> str:
    """The first part of tyro's boxed message as a sentence, with its first suggestion."""
    lines = [line.strip("│ ") for line in boxed.splitlines() if line.startswith("│")]
    if not lines:
        return " ".join(boxed.split())
    rule = next((i for i, line in enumerate(lines) if line.startswith("─")), len(lines))
    first = " ".join(lines[:rule]).rstrip(".")
    first = first.replace(f"Missing from {prog}:", "missing:")
    meant = [line.split()[0] for line in lines[rule:] if line.startswith("--")]
    near = any("Perhaps you meant" in line for line in lines)
    way = f"did you mean {meant[0]}?" if near and meant else f"see {prog} --help"
    return f"{prog.removeprefix('apportion ')}: {first[:1].lower()}{first[1:]}; {way}"
