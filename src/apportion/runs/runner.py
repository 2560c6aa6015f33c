"""Run a job in a folder: save after chunks, stop on request, resume exactly.

At the end of a chunk its rows are written and, if a save is due, the state. A save is due if the time since
the last save is twenty times its duration, so that saving takes at most a twentieth of the time. Choices
that a job makes before training are saved once they are complete.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
import pandas as pd

from apportion.algorithm import RunState
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.runs.checkpoint import from_arrays, to_arrays
from apportion.runs.environment import environment, versions
from apportion.runs.files import (
    LOCK,
    checksummed,
    encode_json,
    only_writer,
    require_free,
    write_checked,
    write_json,
)
from apportion.runs.folder import UNFINISHED, Run, load_run
from apportion.runs.policy_file import save_policy
from apportion.runs.progress import Progress, TrainingStatus
from apportion.runs.signals import listening
from apportion.training import Chunk, OnChunk

_SAVE_INTERVAL_RATIO = 20.0
"""Time between two saves, as a multiple of the duration of the last save."""
_REPORT_SECONDS = 1.0
_MAX_PLOTTED_TASKS = 1000
"""Probabilities over time are saved for at most this many tasks."""


@dataclass(frozen=True)
class JobResult:
    """A trained policy, its measured results, and the tables of its report."""

    policy: Policy
    results: dict[str, Any]
    """Plain numbers, for `results.json` and `--json`."""
    summary: str
    """The results as text."""
    about: dict[str, Any] = field(default_factory=dict)
    """Values to save with the policy."""
    headline: dict[str, Any] = field(default_factory=dict)
    """The first lines of the report: title, subtitle, cards, text."""
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    """Tables for the report, by name."""


@dataclass(frozen=True)
class PreparedJob:
    """A job with its data read and checked, ready to train."""

    data: dict[str, Any]
    """Description of the data, with its fingerprint."""
    train: Callable[..., JobResult]
    """Called as `train(on_chunk, resume)`, or as `train(on_chunk, resume, choice)` if `choose` is given.
    `on_chunk` is the callback of `Chunks`; `resume` maps the initial state to the one to continue from."""
    choose: Callable[[OnChunk], dict[str, Any]] | None = None
    """Makes choices before training, by training of its own. They are plain values, saved in the run's
    folder, so that a resumed run does not repeat them."""
    notes: Sequence[str] = ()
    """Messages about the data to show before training."""


class Stopped(InputError):
    """Training was interrupted and saved; it can be resumed."""


@dataclass
class _StopRequest:
    """Whether a stop was requested."""

    requested: bool = False


@contextmanager
def interrupts() -> Iterator[_StopRequest]:
    """Let Ctrl-C and SIGTERM request a stop at the end of the chunk; a second one stops at once."""
    stop = _StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, _: Any) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    with listening(request):
        yield stop


def start_run(
    folder: Path, job: str, settings: Any, prepared: PreparedJob, progress: Progress
) -> JobResult:
    """Train in a new folder, and save the name of the job and the settings there.

    Raises
    ------
    Stopped
        If the user requested a stop; the state is saved.
    """
    folder = Path(folder)
    require_free(folder, unfinished=UNFINISHED)
    facts = environment(seed=settings.seed, data=prepared.data)
    was_there = folder.exists()
    ours = False
    try:
        with only_writer(folder):
            require_free(folder, unfinished=UNFINISHED)
            ours = True
            run = Run.create(folder, job, settings, facts)
            return _train(run, prepared, progress)
    except Stopped:
        raise
    except (InputError, OSError) as error:
        # The run failed before its first checkpoint or settings were saved, so it cannot be resumed.
        begun = isinstance(error, OSError) and (folder / "settings.toml").exists()
        if ours and not begun and not any(folder.glob("checkpoints/*")):
            # Keep hidden files of a folder that existed before.
            found = [e for e in folder.iterdir() if e.name == LOCK or not e.name.startswith(".")]
            for entry in found if was_there else [folder]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise


def resume_run(folder: Path, prepared: PreparedJob, progress: Progress) -> JobResult | None:
    """Continue a run exactly where it stopped; None if it is already finished.

    Parameters
    ----------
    prepared
        The job of the run, prepared with the settings in its folder.
    """
    run = load_run(folder)
    before = run.environment
    if before["data"] != prepared.data:
        raise InputError(
            f"{run.folder}: the data has changed since the run started ({before['data']} then, "
            f"{prepared.data} now); restore it, or train in another folder"
        )
    changed = {k: v for k, v in versions().items() if before["versions"].get(k) != v}
    if changed:
        progress.note(f"warning: versions have changed since the run started, to {changed}")
    with only_writer(run.folder):
        # Another process may have finished the run before the lock was acquired.
        return None if run.finished else _train(run, prepared, progress)


def finish(run: Run, outcome: JobResult) -> None:
    """Write the outcome; `results.json` is last, after all checksums: it marks the run as finished."""
    tables = {f"{name}.csv": table for name, table in outcome.tables.items()}
    save_policy(outcome.policy, run.folder, outcome.about)
    with checksummed(
        run.folder, *("settings.toml", "environment.json", "headline.json", "results.json"), *tables
    ):
        for name, table in tables.items():
            table.to_csv(run.folder / name, index=False)
        write_json(run.folder / "headline.json", outcome.headline)
    write_checked(run.folder, "results.json", encode_json(outcome.results))


def _train(run: Run, prepared: PreparedJob, progress: Progress) -> JobResult:
    with interrupts() as stop:
        saved = run.newest_checkpoint()
        done = 0 if saved is None else saved[0]
        run.truncate_after(done)
        if done:
            progress.note(f"continuing after step {done}")
        for note in prepared.notes:
            progress.note(note)
        progress.stage("compiling")

        def resume(first: RunState) -> RunState:
            if saved is None:
                return first
            # The settings, data and versions of the folder are already checked.
            kept = from_arrays(first, *saved[1:], str(run.folder))
            return eqx.tree_at(lambda state: state.fingerprint, kept, first.fingerprint)

        choose = prepared.choose
        chosen = () if choose is None else (_load_or_choose(run, choose, progress, stop),)
        recorder = _Recorder(run, progress, stop)
        with _reporting_tests(recorder):
            outcome = prepared.train(recorder, resume, *chosen)
        progress.stage("saving")
        finish(run, outcome)
    return outcome


@dataclass
class _Recorder:
    """Callback of a run: write the rows of a chunk, save the state if due, report progress, stop."""

    run: Run
    progress: Progress
    stop: _StopRequest
    save_due: float = 0.0
    trained: float | None = None
    """Time at which the last step ended."""

    def __call__(self, chunk: Chunk) -> bool:
        self.run.write_rows("metrics", chunk.step, chunk.metrics)
        if len(chunk.algorithm.tasks) <= _MAX_PLOTTED_TASKS:
            chances = np.asarray(chunk.algorithm.probabilities(chunk.state))
            # One row of the sampling probabilities of the tasks, averaged over runs.
            means = enumerate(chances.reshape(-1, chances.shape[-1]).mean(0))
            row = {"step": [chunk.step]} | {f"task {t}": [p] for t, p in means}
            self.run.write_rows("probabilities", chunk.step, pd.DataFrame(row))
        start = time.monotonic()
        if self.stop.requested or chunk.step >= chunk.steps or start >= self.save_due:
            self.run.write_checkpoint(chunk.step, *to_arrays(chunk.state))
            now = time.monotonic()
            self.save_due = now + _SAVE_INTERVAL_RATIO * (now - start)
        self.progress.training(TrainingStatus.of(chunk))
        if chunk.step >= chunk.steps:
            self.trained = time.monotonic()
        # After the last step as well, because a backtest after it can take longer than training.
        if self.stop.requested:
            raise Stopped(
                f"stopped after step {chunk.step} of {chunk.steps}; all is saved, continue with "
                f"`apportion resume {self.run.folder}`"
            )
        return False


@contextmanager
def _reporting_tests(recorder: _Recorder) -> Iterator[None]:
    """Report the duration of the tests after training, which can take a minute."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_REPORT_SECONDS):
            if recorder.trained is not None:
                seconds = time.monotonic() - recorder.trained
                recorder.progress.stage(f"testing the policy for {seconds:.0f} s")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _load_or_choose(
    run: Run, choose: Callable[[OnChunk], dict[str, Any]], progress: Progress, stop: _StopRequest
) -> dict[str, Any]:
    """Return the saved choice, or make it and save it once it is complete."""
    saved = run.choice
    if saved is not None:
        return saved

    def on_chunk(chunk: Chunk) -> bool:
        progress.training(TrainingStatus.of(chunk), "choosing")
        if stop.requested:
            raise Stopped(
                f"stopped while choosing, after step {chunk.step} of {chunk.steps}; nothing is "
                f"saved, repeat the choice with `apportion resume {run.folder}`"
            )
        return False

    choice = choose(on_chunk)
    run.write_choice(choice)
    progress.stage("compiling")
    # Return the values as JSON gives them, so that a resumed run gets the same.
    return json.loads(json.dumps(choice))
