"""What a job hands to whoever runs it: data to vouch for, a way to train, and what came out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from apportion.policy import Policy
    from apportion.training import OnChunk


@dataclass(frozen=True)
class Outcome:
    """A trained policy, what it is worth, and the tables its report shows."""

    policy: "Policy"
    results: dict[str, Any]
    """Plain numbers, for `results.json` and `--json`."""
    summary: str
    """The same for reading."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts to keep with the policy."""
    headline: dict[str, Any] = field(default_factory=dict)
    """The report's first lines: title, subtitle, cards, words."""
    tables: "dict[str, pd.DataFrame]" = field(default_factory=dict)
    """Tables for the report, by name."""


@dataclass(frozen=True)
class Work:
    """A job with its data read and checked, ready to train."""

    data: dict[str, Any]
    """What the data is, fingerprint included."""
    train: "Callable[..., Outcome]"
    """Train with a visitor of chunks, from what a function makes of the first state, and with what was
    chosen where there is a choice: train(on_chunk, resume) or train(on_chunk, resume, choice)."""
    choose: "Callable[[OnChunk], dict[str, Any]] | None" = None
    """What has to be chosen before training, by training of its own that a visitor may watch: plain
    values, kept in the run's folder, so that a run chooses once."""
