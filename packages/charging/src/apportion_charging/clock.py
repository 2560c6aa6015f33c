"""The clock of the live controller; a simulation replaces `now`, so that a month passes in minutes."""

import time
from datetime import UTC, datetime


def now() -> float:
    """Return the time in seconds since 1970."""
    return time.time()


def now_utc() -> datetime:
    """Return the same as a date."""
    return datetime.fromtimestamp(now(), UTC)
