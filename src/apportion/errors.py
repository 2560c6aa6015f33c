"""`InputError`, the one exception for what the user can fix. Not of the paper; used everywhere."""

from collections.abc import Generator
from contextlib import contextmanager


class InputError(ValueError):
    """Something the user gave is wrong; the message names the thing, the place and the way out."""


def first_line(error: BaseException) -> str:
    r"""The first line of an error's message, or the error's name if it has no message.

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
    """Convert a failed import in the block into an `InputError` that says which extra to install.

    Parameters
    ----------
    what
        Which feature needs which package.
    extra
        Name of the extra.
    otherwise
        What can be done without it.
    package
        The distribution that has the extra.
    """
    try:
        yield
    except ImportError:
        install = f"run pip install '{package}[{extra}]'{otherwise}"
        raise InputError(f"{what}, which is not installed; {install}") from None
