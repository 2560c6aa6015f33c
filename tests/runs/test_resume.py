"""A run is killed with SIGKILL at random moments, inside saves too, and must come out the same."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pandas as pd
import pytest

from apportion.domains.budget.settings import BudgetSettings
from apportion.runs.folder import load_run

SETTINGS = BudgetSettings(
    universe=12, held_out=4, periods=24, tasks=6, task_size=3, steps=120, batch=8, hidden=4, chunk=5
)
FAULTS = ("before sync", "half written", "before rename", "torn by the disk")

# Children are forked from a server that has imported everything and started nothing.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["apportion.runs.runner", "apportion.domains.budget.domain"])


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _break_save(fault: str, after: int) -> None:
    """Die inside the save that follows `after` others."""
    sync, rename, saves = os.fsync, os.replace, 0

    def broken_sync(handle):
        nonlocal saves
        size = os.fstat(handle).st_size
        is_file = os.path.isfile(f"/proc/self/fd/{handle}")
        saves += is_file
        if is_file and saves > after and fault == "before sync":
            _die()
        if is_file and saves > after and fault == "half written":
            os.ftruncate(handle, size // 2)
            _die()
        sync(handle)

    def broken_rename(source, target):
        if saves > after and fault == "before rename":
            _die()
        if saves > after and fault == "torn by the disk" and "checkpoints" in str(target):
            os.truncate(source, os.path.getsize(source) * 2 // 3)
            rename(source, target)
            _die()
        rename(source, target)

    os.fsync, os.replace = broken_sync, broken_rename


def _train(folder: Path, cache: Path, fault: str | None = None, after: int = 0) -> None:
    """Begin the run, or continue it: what `apportion train` and `apportion resume` do."""
    import jax

    from apportion.domains.budget.domain import DOMAIN
    from apportion.runs.progress import Quiet
    from apportion.runs.runner import resume_run, start_run

    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if fault is not None:
        _break_save(fault, after)
    if (folder / "settings.toml").exists():
        resume_run(folder, DOMAIN.prepare(SETTINGS), Quiet())
    else:
        start_run(folder, "budget", SETTINGS, DOMAIN.prepare(SETTINGS), Quiet())


def _live_and_die(folder: Path, cache: Path, rng: random.Random) -> None:
    """One life of the run, ended by SIGKILL inside a save or at any moment (or by being done)."""
    fault = rng.choice([*FAULTS, None])
    after = rng.randrange(1, 20)
    child = _CONTEXT.Process(target=_train, args=(folder, cache, fault, after))
    child.start()
    if fault is None:
        begun = set(folder.rglob("step-*"))
        while child.is_alive() and set(folder.rglob("step-*")) == begun:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.5))
        child.kill()  # it may just have finished
    child.join()


def _undisturbed(folder: Path, cache: Path) -> None:
    child = _CONTEXT.Process(target=_train, args=(folder, cache))
    child.start()
    child.join()
    assert child.exitcode == 0


def _assert_same(one: Path, other: Path) -> None:
    first, second = load_run(one), load_run(other)
    assert list(first.metrics["step"]) == list(range(1, SETTINGS.steps + 1))
    for table in ("metrics", "probabilities"):
        pd.testing.assert_frame_equal(first.table(table), second.table(table), check_exact=True)
    last = f"checkpoints/step-{SETTINGS.steps:09d}.safetensors"
    for file in ("policy.safetensors", "policy.json", "results.json", "settings.toml", last):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    assert not list(other.rglob(".*.part"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    _undisturbed(folder / "whole", folder / "cache")
    return folder


def _kill_and_compare(undisturbed: Path, name: str, kills: int, seed: int) -> int:
    rng = random.Random(seed)
    folder, cache = undisturbed / name, undisturbed / "cache"
    died = 0
    while died < kills and not (folder / "results.json").exists():
        _live_and_die(folder, cache, rng)
        died += not (folder / "results.json").exists()
    if not (folder / "results.json").exists():
        _undisturbed(folder, cache)
    _assert_same(undisturbed / "whole", folder)
    return died


@pytest.mark.filterwarnings("ignore:skipped a damaged checkpoint")
def test_a_run_killed_twice_ends_bit_identical(undisturbed):
    assert _kill_and_compare(undisturbed, "killed", 2, seed=7) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:skipped a damaged checkpoint")
def test_runs_killed_at_50_random_moments_end_bit_identical(undisturbed):
    died, run = 0, 0
    while died < 50:
        died += _kill_and_compare(undisturbed, f"slow-{run}", min(50 - died, 8), seed=100 + run)
        run += 1
