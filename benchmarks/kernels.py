"""What a graphics card did, kernel by kernel, from JAX's own trace: how often, for how long, and how idle.

A trace lists every kernel with its beginning and its length, those of a recorded graph too. On a processor
there are no kernels, and everything here is zero.
"""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Launch:
    """One kernel, as it ran: microseconds since the trace began, and microseconds it took."""

    name: str
    begun: float
    took: float


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel, on average over the pieces of work that were traced."""

    name: str
    launches: float
    microseconds: float


class Trace:
    """What is launched between `start` and `stop`."""

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._folder.name, create_perfetto_trace=True)

    def stop(self) -> list[Launch]:
        """Wait for what was asked of the card before: a trace ends where it is stopped."""
        jax.profiler.stop_trace()
        with self._folder as folder:
            (path,) = Path(folder).rglob("perfetto_trace.json.gz")
            return launches(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def launches(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """The kernels among a trace's events: what ran on the card's streams."""
    events = list(events)
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and "Stream" in event["args"]["name"]
    }
    return [
        Launch(event["name"], event["ts"], event["dur"])
        for event in events
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams
    ]


def by_kernel(ran: Iterable[Launch], pieces: int) -> list[Kernel]:
    """Each kernel's part in a piece of work, a step or an episode, the longest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for launch in ran:
        times[launch.name].append(launch.took)
    found = [Kernel(name, len(took) / pieces, sum(took) / pieces) for name, took in times.items()]
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def busy(ran: Sequence[Launch]) -> float:
    """Microseconds in which some kernel ran: those of kernels side by side count once."""
    total, end = 0.0, float("-inf")
    for launch in sorted(ran, key=lambda launch: launch.begun):
        after = launch.begun + launch.took
        total += max(after - max(launch.begun, end), 0.0)
        end = max(end, after)
    return total
