"""Progress of long-running work: steps per second, time left, reward, deviation from equal shares.

Progress is printed to standard error. A terminal shows one line that is updated in place; a log or a pipe
gets one line per update.
"""

import shutil
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.training import Chunk

_ERASE_LINE = "\r\x1b[K"
"""Moves the cursor to the start of the line and clears it."""


@dataclass(frozen=True)
class TrainingStatus:
    """Progress of training, as displayed."""

    step: int
    steps: int
    reward: float
    deviation: float
    """Mean deviation from equal shares."""

    @classmethod
    def of(cls, chunk: "Chunk") -> "TrainingStatus":
        """Return the status of a chunk: means over its steps."""
        reward, deviation = (chunk.metrics[name].to_numpy() for name in ("reward", "deviation"))
        return cls(chunk.step, chunk.steps, float(reward.mean()), float(deviation.mean()))


class Progress(ABC):
    """Abstract display of the progress of long-running work."""

    @abstractmethod
    def training(self, status: TrainingStatus, title: str = "training") -> None:
        """Report the end of a chunk of training."""

    @abstractmethod
    def stage(self, text: str, done: float | None = None) -> None:
        """Report work other than training, and the fraction done if it is known."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a message once."""

    def close(self) -> None:  # noqa: B027
        """End the display."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Quiet(Progress):
    """Display nothing."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    training = stage = note = _nothing


def _describe(status: TrainingStatus, speed: float | None) -> str:
    """Return the progress of training as one line.

    >>> _describe(TrainingStatus(50, 100, 0.1, 0.02), 25.0)
    'step 50 of 100, 25 steps/s, 0:00:02 left, reward 0.1, from equal 0.02'
    """
    parts = [f"step {status.step} of {status.steps}"]
    if speed:
        left = (status.steps - status.step) / speed
        parts += [f"{speed:.3g} steps/s", f"{timedelta(seconds=round(left))} left"]
    parts += [f"reward {status.reward:.4g}", f"from equal {status.deviation:.3g}"]
    return ", ".join(parts)


@dataclass
class _Lines(Progress):
    """Print lines, at most one every `seconds`; on a terminal a line replaces the previous one."""

    seconds: float = 5.0
    in_place: bool = False
    _first: tuple[float, int] | None = None
    _title: str = ""
    _step: int = 0
    _printed: float = -1e9

    def training(self, status: TrainingStatus, title: str = "training") -> None:
        now = time.monotonic()
        # Measure from the end of the first chunk, which includes compilation.
        if self._first is None or title != self._title or status.step < self._step:
            self._first = (now, status.step)
        begun, first = self._first
        speed = (status.step - first) / max(now - begun, 1e-9) or None
        self._title, self._step = title, status.step
        self._print(f"{title}: {_describe(status, speed)}", keep=status.step == status.steps)

    def stage(self, text: str, done: float | None = None) -> None:
        # Without a known fraction this is the only report, so it is not skipped.
        self._print(text if done is None else f"{text} ({done:.0%})", now=done is None)

    def note(self, text: str) -> None:
        self._print(text, keep=True)

    def close(self) -> None:
        if self.in_place:
            print(_ERASE_LINE, end="", file=sys.stderr, flush=True)

    def _print(self, line: str, *, keep: bool = False, now: bool = False) -> None:
        """Print a line to keep, or one that a terminal overwrites and, unless `now`, may be skipped."""
        time_now = time.monotonic()
        if not (keep or now) and time_now - self._printed < self.seconds:
            return
        self._printed = time_now
        if not self.in_place:
            print(line, file=sys.stderr, flush=True)
            return
        # A line that wraps cannot be erased.
        shown = line if keep else line[: shutil.get_terminal_size().columns - 1]
        print(f"{_ERASE_LINE}{shown}", end="\n" if keep else "", file=sys.stderr, flush=True)


def open_progress(*, quiet: bool = False) -> Progress:
    """Return a display for standard error: updated in place on a terminal, plain lines elsewhere."""
    if quiet:
        return Quiet()
    return _Lines(0.1, in_place=True) if sys.stderr.isatty() else _Lines()
