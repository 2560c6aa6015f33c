"""Counting kernels in a trace: only what ran on the card's streams, side by side counted once."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "kernels.py"


@pytest.fixture(scope="module")
def kernels():
    spec = importlib.util.spec_from_file_location("kernel_counts", FILE)
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def event(name, ts, dur, tid=1):
    return {"ph": "X", "pid": 0, "tid": tid, "name": name, "ts": ts, "dur": dur}


def test_only_what_ran_on_a_stream_is_a_launch(kernels):
    def named(tid, name):
        return {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}

    events = [named(1, "Stream #13(Compute)"), named(2, "XLA Ops"), event("a", 0, 2)]
    found = kernels.launches([*events, event("a", 0, 9, tid=2)])
    assert found == [kernels.Launch("a", 0, 2)]


def test_kernels_are_averaged_over_steps_and_the_longest_comes_first(kernels):
    ran = [kernels.Launch(*one) for one in [("a", 0, 2), ("b", 2, 8), ("a", 12, 4)]]
    expected = [kernels.Kernel("b", 0.5, 4), kernels.Kernel("a", 1, 3)]
    assert kernels.by_kernel(ran, 2) == expected


def test_kernels_side_by_side_count_once(kernels):
    ran = [kernels.Launch(*one) for one in [("c", 20, 1), ("a", 0, 10), ("b", 2, 3), ("b", 8, 4)]]
    assert kernels.busy(ran) == 13
    assert kernels.busy([]) == 0


def test_a_processor_launches_nothing(kernels):
    trace = kernels.Trace()
    trace.start()
    assert trace.stop() == []
