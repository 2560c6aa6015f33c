"""The one exception for what the user can fix, and how the reason of another is told in it."""


class InputError(ValueError):
    """Something the user gave is wrong; the message names the thing, the place and the way out."""


def first_line(error: BaseException) -> str:
    r"""An error's reason in one line; some have none but their name.

    >>> first_line(MemoryError()), first_line(ValueError("no number.\nsee below"))
    ('MemoryError', 'no number')
    """
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
