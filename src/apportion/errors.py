"""`InputError`, the exception for errors that the user can fix, and checks that raise it."""

from collections.abc import Generator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any


class InputError(ValueError):
    """Invalid input; the message says what is wrong, where, and how to fix it."""


def check_counts(least: int = 1, most: int = 2**20, **counts: Any) -> None:
    """Raise if an argument is not an integer between `least` and `most`."""
    for name, count in counts.items():
        whole = isinstance(count, Integral) and not isinstance(count, bool)
        if not whole or not least <= int(count) <= most:
            raise InputError(
                f"{name} is {count!r}; it must be a whole number from {least} to {most}"
            )


def check_positive(**numbers: Any) -> None:
    """Raise if an argument is not a finite positive number."""
    for name, number in numbers.items():
        if not isinstance(number, Real) or not 0 < float(number) < float("inf"):
            raise InputError(f"{name} is {number!r}; it must be a finite number above 0")


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, or the error's name if it has no message.

    >>> first_line(MemoryError()), first_line(ValueError("no number.\nsee below"))
    ('MemoryError', 'no number')
    """
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def reading(path: object, way_out: str) -> Generator[None]:
    """Convert any exception in the block into a one-line `InputError` about the file."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)}); {way_out}") from None


@contextmanager
def optional_import(
    what: str, extra: str, otherwise: str = "", *, package: str = "apportion"
) -> Generator[None]:
    """Convert a failed import in the block into an `InputError` that names the extra to install.

    Parameters
    ----------
    what
        Which feature needs which package.
    extra
        Name of the extra.
    otherwise
        What to do without it.
    package
        The distribution that has the extra.
    """
    try:
        yield
    except ImportError:
        install = f"run pip install '{package}[{extra}]'{otherwise}"
        raise InputError(f"{what}, which is not installed; {install}") from None
