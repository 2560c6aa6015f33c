"""What is saved with a charging policy, checked before anything relies on it: a file can be changed."""

from collections.abc import Mapping
from typing import Any

from apportion.domains.calendar import as_day
from apportion.domains.charging.problem import CHANNELS, CHANNELS_BEFORE, FirstChannels
from apportion.errors import InputError
from apportion.policy import Policy


def check_facts(saved: Mapping[str, Any]) -> None:
    """Refuse a policy for something else, and facts that no training can have saved with one.

    Examples
    --------
    >>> check_facts({"job": "charging", "task_size": 10, "until": {"north": "2019-12-31"}})
    """
    if saved.get("job") != "charging":
        raise InputError(
            f"the policy was trained for {saved.get('job', 'something else')!r}, not for charging; "
            "give the folder of a charging run"
        )
    until, seen, size = (
        saved.get("until", {}),
        saved.get("trained_on", {}),
        saved.get("task_size", 1),
    )
    if not isinstance(until, Mapping) or not all(isinstance(day, str) for day in until.values()):
        raise _wrong("until")
    for day in until.values():
        as_day(day)
    if not isinstance(seen, Mapping) or not all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for names in seen.values()
    ):
        raise _wrong("trained_on")
    if type(size) is not int or size < 1:
        raise _wrong(f"task_size {size!r}")
    if type(saved.get("recall", False)) is not bool:
        raise _wrong(f"recall {saved['recall']!r}")
    channels = saved.get("channels", CHANNELS_BEFORE)
    if type(channels) is not int or not 1 <= channels <= CHANNELS:
        raise _wrong(f"channels {channels!r}")


def as_trained(policy: Policy, saved: Mapping[str, Any]) -> Policy:
    """The policy, shown no more of a station than when it was trained."""
    channels = saved.get("channels", CHANNELS_BEFORE)
    return policy if channels == CHANNELS else FirstChannels(policy, channels)


def _wrong(what: str) -> InputError:
    return InputError(f"the policy's own facts are wrong ({what}); train it again")
