"""The clock of the live controller. Tests replace `now` to simulate a month in minutes."""

import time
from datetime import UTC, datetime


def now() -> float:
    """Return the present time in seconds since 1970."""
    return time.time()


def now_utc() -> datetime:
    """Return the present time as a datetime in UTC."""
    return datetime.fromtimestamp(now(), UTC)
