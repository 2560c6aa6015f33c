"""Running a job in a folder: chunk by chunk, saving as it goes, stopping when asked, resuming exactly.

At every chunk's end rows are written, then, when a save is due, the state. A save is due when the
time since the last one is twenty times what that one took, so that saving costs at most a twentieth.
What a job chooses before it trains is saved when it is whole.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from apportion.algorithm import RunState
from apportion.runs.checkpoint import from_arrays, to_arrays
from apportion.runs.environment import environment, versions
from apportion.errors import InputError
from apportion.runs.tensorboard import Events
from apportion.runs.registry import prepare, settings_of
from apportion.runs.job import Outcome, Work
from apportion.runs.progress import Progress, Standing
from apportion.runs.folder import Run, load_run
from apportion.runs.policy_file import save_policy
from apportion.runs.atomic import write_json
from apportion.runs.settings_file import from_mapping
from apportion.training import Chunk, OnChunk

Choose = Callable[[OnChunk], dict[str, Any]]
_REST = 20.0
_SHOWN_TASKS = 1000
"""Probabilities over time are kept for as many tasks as a picture can show."""


class Stopped(InputError):
    """Training was interrupted, saved, and can be continued."""


@dataclass
class Stop:
    """Whether someone asked to stop."""

    asked: bool = False


@contextmanager
def interrupts() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask to stop at the next chunk's end; a second Ctrl-C stops at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_in(
    folder: Path, job: str, settings: Any, progress: Progress, *, tensorboard: bool = False
) -> Outcome:
    """Train a job in a new folder.

    Raises
    ------
    Stopped
        Someone asked to stop; everything is saved.
    """
    work = prepare(job, settings)
    device = jax.devices()[0]
    made_on = f"{device.platform}: {device.device_kind}"
    facts = environment(seed=settings.seed, device=made_on, data=work.data)
    run = Run.create(folder, job, settings, facts)
    return _train(run, work, progress, tensorboard)


def resume_in(folder: Path, progress: Progress, *, tensorboard: bool = False) -> Outcome | None:
    """Continue a run exactly where it stopped; None where it is finished already."""
    run = load_run(folder)
    if run.finished:
        return None
    source = str(run.folder / "settings.toml")
    settings = from_mapping(run.settings, settings_of(run.job), source)
    work = prepare(run.job, settings)
    before = run.environment
    if before["data"] != work.data:
        raise InputError(
            f"{folder}: the data is not what the run started with ({before['data']} then, "
            f"{work.data} now); put it back, or train anew in another folder"
        )
    changed = {k: v for k, v in versions().items() if before["versions"].get(k) != v}
    if changed:
        progress.note(f"warning: versions have changed since the run started, to {changed}")
    return _train(run, work, progress, tensorboard)


def _train(run: Run, work: Work, progress: Progress, tensorboard: bool) -> Outcome:
    with run.alone(), interrupts() as stop:
        found = run.newest_checkpoint()
        begun = 0 if found is None else found[0]
        run.cut_back(begun)
        if begun:
            progress.note(f"continuing after step {begun}")
        progress.stage("compiling")
        events = Events(run.folder, begun) if tensorboard else None
        due = 0.0

        def resume(first: RunState) -> RunState:
            return first if found is None else from_arrays(first, *found[1:], str(run.folder))

        def on_chunk(chunk: Chunk) -> bool:
            nonlocal due
            run.write_rows("metrics", chunk.step, chunk.metrics)
            if len(chunk.algorithm.tasks) <= _SHOWN_TASKS:
                run.write_rows("probabilities", chunk.step, _probabilities(chunk))
            start = time.monotonic()
            if stop.asked or chunk.step >= chunk.steps or start >= due:
                run.write_checkpoint(chunk.step, *to_arrays(chunk.state))
                due = time.monotonic() + _REST * (time.monotonic() - start)
            if events is not None:
                events.write(chunk)
            progress.training(Standing.of(chunk))
            if stop.asked and chunk.step < chunk.steps:
                raise Stopped(
                    f"stopped after step {chunk.step} of {chunk.steps}, all saved; continue with "
                    f"`apportion resume {run.folder}`"
                )
            return False

        try:
            chosen = () if work.choose is None else (_chosen(run, work.choose, progress, stop),)
            outcome = work.train(on_chunk, resume, *chosen)
        finally:
            if events is not None:
                events.close()
        progress.stage("saving")
        finish(run, outcome)
    return outcome


def _chosen(run: Run, choose: Choose, progress: Progress, stop: Stop) -> dict[str, Any]:
    """What was chosen before, or is chosen now; only a finished choice is kept."""
    kept = run.choice
    if kept is not None:
        return kept

    def on_chunk(chunk: Chunk) -> bool:
        # Too few of its steps are recorded to say which tasks were drawn.
        progress.training(replace(Standing.of(chunk), most_drawn=()), "choosing")
        if stop.asked:
            raise Stopped(
                f"stopped while choosing, after step {chunk.step} of {chunk.steps}, of which nothing "
                f"is saved; begin the choice again with `apportion resume {run.folder}`"
            )
        return False

    choice = choose(on_chunk)
    run.write_choice(choice)
    progress.stage("compiling")
    # As it reads when it is taken from the folder: a resumed run has the very same.
    return json.loads(json.dumps(choice))


def finish(run: Run, outcome: Outcome) -> None:
    """Write what came out; `results.json` last, for it says that all the rest is there."""
    save_policy(outcome.policy, run.folder, outcome.about)
    for name, table in outcome.tables.items():
        table.to_csv(run.folder / f"{name}.csv", index=False)
    write_json(run.folder / "headline.json", outcome.headline)
    write_json(run.folder / "results.json", outcome.results)


def _probabilities(chunk: Chunk) -> pd.DataFrame:
    """A row: the step and each task's chance to be drawn next, the mean over runs."""

    def look(state: RunState) -> jax.Array:
        return chunk.algorithm.selection.probabilities(state.selection)

    several = chunk.state.step.ndim > 0
    chances = np.asarray(jax.vmap(look)(chunk.state) if several else look(chunk.state))
    means = chances.reshape(-1, chances.shape[-1]).mean(0)
    return pd.DataFrame({"step": [chunk.step]} | {f"task {t}": [p] for t, p in enumerate(means)})
