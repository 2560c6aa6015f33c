"""What a job gives to the runner: a description of its data, a function that trains, its outcome."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from apportion.policy import Policy
    from apportion.training import OnChunk


@dataclass(frozen=True)
class Outcome:
    """A trained policy, its measured results, and the tables its report shows."""

    policy: "Policy"
    results: dict[str, Any]
    """Plain numbers, for `results.json` and `--json`."""
    summary: str
    """The same as text."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts to save with the policy."""
    headline: dict[str, Any] = field(default_factory=dict)
    """The first lines of the report: title, subtitle, cards, text."""
    tables: "dict[str, pd.DataFrame]" = field(default_factory=dict)
    """Tables for the report, by name."""


@dataclass(frozen=True)
class PreparedJob:
    """A job with its data read and checked, ready to train."""

    data: dict[str, Any]
    """What the data is, with its fingerprint."""
    train: "Callable[..., Outcome]"
    """Trains: `train(on_chunk, resume)`, or `train(on_chunk, resume, choice)` where there is a choice.
    `on_chunk` is called at every chunk's end; `resume` turns the first state into the one to start from."""
    choose: "Callable[[OnChunk], dict[str, Any]] | None" = None
    """Makes the choices that precede training, by training of its own: plain values, saved in the run's
    folder, so that a run chooses once."""
