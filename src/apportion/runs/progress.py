"""How long work shows that it is alive: steps a second, time left, reward, distance from equal shares.

On a terminal it is a live display, elsewhere plain lines now and then; both on standard error.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.training import Chunk

EQUAL_BELOW = 1e-3
"""Closer than this to equal shares, a policy has learnt to do nothing."""
ONE_ABOVE = 0.98
"""Nearer than this to all in one entity, a policy has stopped sharing."""


@dataclass(frozen=True)
class Standing:
    """Where training stands, in the numbers a display shows."""

    step: int
    steps: int
    reward: float
    deviation: float
    most_drawn: tuple[str, ...]
    warning: str

    @classmethod
    def of(cls, chunk: "Chunk") -> "Standing":
        """Read a chunk: means over its steps, and the tasks drawn most often in it."""
        metrics = chunk.metrics
        share: Any = metrics["task"].value_counts(normalize=True).head(3)
        drawn = tuple(f"{int(task)} ({part:.0%})" for task, part in share.items())
        deviation = float(metrics["deviation"].to_numpy().mean())
        width = chunk.algorithm.tasks.width
        warning = collapse(deviation, width, chunk.step / chunk.steps)
        reward = float(metrics["reward"].to_numpy().mean())
        return cls(chunk.step, chunk.steps, reward, deviation, drawn, warning)


def collapse(deviation: float, width: int, done: float) -> str:
    """What to warn of, from the mean deviation from equal shares over `width` entities.

    >>> collapse(0.89, 10, 0.5)
    'the policy puts nearly everything on one entity'
    >>> collapse(0.1, 10, 0.5)
    ''
    """
    if width < 2:
        return ""
    # An untrained policy is at equal shares by design; only one that stays there is worth a word.
    if deviation < EQUAL_BELOW and done > 0.2:
        return "the policy is at equal shares and has learnt nothing else"
    if deviation > ONE_ABOVE * (1 - 1 / width):
        return "the policy puts nearly everything on one entity"
    return ""


class Progress(ABC):
    """What long work reports to."""

    @abstractmethod
    def training(self, standing: Standing, title: str = "training") -> None:
        """A chunk of training is done."""

    @abstractmethod
    def stage(self, words: str, done: float | None = None) -> None:
        """Work other than training: what is going on, and which fraction is done if that is known."""

    @abstractmethod
    def note(self, words: str) -> None:
        """Something to know."""

    @abstractmethod
    def close(self) -> None:
        """No more is to come."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Quiet(Progress):
    """Says nothing."""

    def training(self, standing: Standing, title: str = "training") -> None:
        pass

    def stage(self, words: str, done: float | None = None) -> None:
        pass

    def note(self, words: str) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Clock:
    """Speed and time left, from the steps seen so far."""

    first: tuple[float, int] | None = None
    last: tuple[float, int] | None = None

    def tick(self, step: int) -> None:
        now = (time.monotonic(), step)
        if self.first is None or (self.last is not None and step < self.last[1]):
            self.first = now
        self.last = now

    def speed(self) -> float | None:
        """Steps a second; the first chunk, which compiles, is left out."""
        if self.first is None or self.last is None or self.last[1] == self.first[1]:
            return None
        return (self.last[1] - self.first[1]) / max(self.last[0] - self.first[0], 1e-9)


def describe(standing: Standing, speed: float | None) -> str:
    """One line of where training stands.

    >>> describe(Standing(50, 100, 0.1, 0.02, ("3 (40%)",), ""), 25.0)
    'step 50 of 100, 25 steps/s, 2 s left, reward 0.1, from equal 0.02, most drawn tasks 3 (40%)'
    """
    parts = [f"step {standing.step} of {standing.steps}"]
    if speed:
        left = (standing.steps - standing.step) / speed
        parts += [f"{speed:.3g} steps/s", f"{_duration(left)} left"]
    parts += [f"reward {standing.reward:.4g}", f"from equal {standing.deviation:.3g}"]
    if standing.most_drawn:
        parts.append(f"most drawn tasks {', '.join(standing.most_drawn)}")
    if standing.warning:
        parts.append(f"warning: {standing.warning}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes / 60:.1f} h"


@dataclass
class Lines(Progress):
    """Plain lines, at most one every `seconds`, for logs and pipes."""

    seconds: float = 5.0
    _clock: _Clock = field(default_factory=_Clock)
    _said: float = -1e9
    _warned: str = ""

    def training(self, standing: Standing, title: str = "training") -> None:
        self._clock.tick(standing.step)
        fresh = standing.warning != self._warned
        self._warned = standing.warning
        line = f"{title}: {describe(standing, self._clock.speed())}"
        self._say(line, always=fresh or standing.step == standing.steps)

    def stage(self, words: str, done: float | None = None) -> None:
        self._say(words if done is None else f"{words} ({done:.0%})", always=False)

    def note(self, words: str) -> None:
        self._say(words, always=True)

    def close(self) -> None:
        pass

    def _say(self, line: str, *, always: bool) -> None:
        now = time.monotonic()
        if always or now - self._said >= self.seconds:
            self._said = now
            print(line, file=sys.stderr, flush=True)


class Live(Progress):
    """A live display: a bar with the numbers beside it, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console(stderr=True)
        self._live = RichLive(console=self._console, refresh_per_second=8, transient=True)
        self._live.start()
        self._clock = _Clock()
        self.stage("starting")

    def training(self, standing: Standing, title: str = "training") -> None:
        self._clock.tick(standing.step)
        rows = [
            ("reward", f"{standing.reward:.4g}"),
            ("from equal shares", f"{standing.deviation:.4g}"),
            ("most drawn tasks", ", ".join(standing.most_drawn)),
        ]
        if standing.warning:
            rows.append(("[yellow]warning[/yellow]", f"[yellow]{standing.warning}[/yellow]"))
        speed = self._clock.speed()
        ahead = f"step {standing.step} of {standing.steps}"
        if speed:
            left = (standing.steps - standing.step) / speed
            ahead += f"  {speed:.3g} steps/s  {_duration(left)} left"
        self._draw(title, standing.step / standing.steps, ahead, rows)

    def stage(self, words: str, done: float | None = None) -> None:
        self._draw(words, done, "" if done is None else f"{done:.0%}", [])

    def note(self, words: str) -> None:
        self._console.print(words, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _draw(
        self, title: str, done: float | None, ahead: str, rows: Sequence[tuple[str, str]]
    ) -> None:
        from rich.console import Group
        from rich.markup import escape
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table

        head = Table.grid(padding=(0, 1))
        # Without a known fraction the bar runs to and fro.
        bar = ProgressBar(
            total=None if done is None else 1.0, completed=min(max(done or 0.0, 0.0), 1.0), width=32
        )
        head.add_row(Spinner("dots"), f"[bold]{escape(title)}[/bold]", bar, ahead)
        body = Table.grid(padding=(0, 2))
        for name, value in rows:
            body.add_row("", f"[dim]{name}[/dim]", value)
        self._live.update(Group(head, body))


def open_progress(*, quiet: bool = False) -> Progress:
    """The display that suits where standard error goes."""
    if quiet:
        return Quiet()
    return Live() if sys.stderr.isatty() else Lines()
