"""Calendar days as users write them."""

from datetime import date

import numpy as np

from apportion.errors import InputError


def as_day(day: str | np.datetime64) -> np.datetime64:
    """A calendar day from its text."""
    try:
        return np.datetime64(date.fromisoformat(str(day)), "D")
    except ValueError:
        raise InputError(f"date {str(day)!r} is not a day; write it as 2019-01-02") from None
