"""Settings as TOML files; the same frozen dataclass defines Python arguments, options and files.

Every field that is not None becomes a line with the description of the field above it. Reading checks
names and types, and suggests a similar name for an unknown one.
"""

import json
import math
import textwrap
import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from apportion.errors import InputError
from apportion.runs.files import read_bytes

Settings = TypeVar("Settings")


def to_toml(settings: Any, job: str) -> str:
    """Return settings as the content of a TOML file that runs the job again.

    Examples
    --------
    >>> from apportion.domains.budget.settings import BudgetSettings
    >>> print(to_toml(BudgetSettings(seed=7), "budget").splitlines()[0])
    # Run this again with: apportion train budget --config THIS_FILE --out NEW_FOLDER
    """
    descriptions = _describe_fields(type(settings))
    lines = [
        f"# Run this again with: apportion train {job} --config THIS_FILE --out NEW_FOLDER",
        f"job = {json.dumps(job)}",
    ]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is None:
            continue
        comment = textwrap.wrap(descriptions.get(field.name, ""), 90)
        lines += ["", *(f"# {line}" for line in comment), f"{field.name} = {_literal(value)}"]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    # Basic strings of TOML are JSON strings, except for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def read_toml(path: Path | str) -> dict[str, Any]:
    """Return the content of a TOML file; raise an `InputError` if it is not valid."""
    raw = read_bytes(path, "pass a TOML file of settings")
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid TOML ({error}); fix it") from None


def read_settings(path: Path | str, job: str, kind: type) -> dict[str, Any]:
    """Return the settings of a job in a TOML file, after checking each value."""
    content = read_toml(path)
    meant = content.pop("job", job)
    if meant != job:
        raise InputError(f"{path}: contains settings of {meant!r}, not of {job!r}")
    return _check(content, kind, str(path))


def from_mapping(content: Mapping[str, Any], kind: type[Settings], source: str) -> Settings:
    """Return settings from plain values, after checking each against the type of its field."""
    return kind(**_check(content, kind, source))


def _check(content: Mapping[str, Any], kind: type, source: str) -> dict[str, Any]:
    hints = get_type_hints(kind)
    values = {}
    for given, value in content.items():
        name = given.replace("-", "_")
        if name not in hints:
            raise InputError(f"{source}: there is no setting {given!r}{suggest(name, hints)}")
        values[name] = check_value(value, hints[name], f"{source}: {given}")
    return values


def check_value(value: Any, hint: Any, where: str) -> Any:
    """Convert the value of a setting to the type of its field; raise an `InputError` if it is invalid."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in options:
            known = ", ".join(map(str, options))
            near = suggest(str(value), options)
            raise InputError(f"{where} is {value!r}; choose one of {known}{near}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return check_value(value, next(o for o in options if o is not type(None)), where)
    if origin is tuple and isinstance(value, list | tuple) and options[-1] is Ellipsis:
        return tuple(check_value(v, options[0], where) for v in value)
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(options):
        return tuple(check_value(v, o, where) for v, o in zip(value, options, strict=True))
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            raise InputError(f"{where} is too large; it must be a number below 1e308") from None
        if not math.isfinite(number):
            raise InputError(f"{where} is {number}; it must be a finite number")
        return number
    # In Python a bool is an int, and NumPy integers are not.
    expected = Integral if hint is int else hint if origin is None else ()
    if not isinstance(value, expected) or (isinstance(value, bool) and hint is not bool):
        kind = hint.__name__ if origin is None else str(hint)
        raise InputError(f"{where} is {value!r}; it must be of type {kind}")
    return value


def suggest(name: str, known: Any) -> str:
    """Return `; did you mean X?`, or an empty string if no name is similar.

    >>> suggest("portfolo", ["portfolio", "budget"])
    '; did you mean portfolio?'
    """
    near = get_close_matches(name, [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _describe_fields(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, including base classes."""
    from docstring_parser import parse_from_object

    return {
        field.arg_name: " ".join((field.description or "").split())
        for cls in reversed(kind.__mro__[:-1])
        for field in parse_from_object(cls).params
    }
