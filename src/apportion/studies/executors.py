"""Executors of studies: this process, several processes on this machine, or a Ray cluster.

`execute` takes programs and yields the rows of each cell when it is finished; the caller saves them. The
rows of a cell do not depend on the executor. A program whose worker dies is retried a few times.
"""

import logging
import math
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import jax

from apportion.errors import InputError, optional_import
from apportion.runs.files import pack_rows
from apportion.studies.engine import (
    Cell,
    CellResult,
    Executor,
    OnEvent,
    Plan,
    Program,
)

_POLL_SECONDS = 0.5
"""Interval of polling, which limits the delay of a requested stop."""
_ATTEMPTS = 4
"""Largest number of attempts at a program."""
_SILENT_SECONDS = 60.0
"""Seconds without a message from a busy worker before progress reports it."""


class Serial(Executor):
    """Compute programs in the calling process, one after the other."""

    def execute(self, programs: Sequence[Program], on_event: OnEvent) -> Generator[CellResult]:
        """Compute programs in their order."""
        for program in programs:
            yield from _compute(program, on_event)


def _compute(program: Program, on_event: OnEvent, number: int = 0) -> Generator[CellResult]:
    """Compute a program in this process, on the device of this worker if there are several."""
    plan, yielded = program.plan, 0

    def report(what: str, fraction: float) -> None:
        on_event(f"{plan.study}: {what}", max(fraction * len(program.cells) - yielded, 0.0))

    devices = jax.local_devices(backend="cpu" if program.on_processor else None)
    device = devices[number % len(devices)]
    before = time.monotonic()
    with jax.default_device(device):
        for cell, rows in plan.compute(program.cells, report):
            content = pack_rows(rows.assign(cell=cell.name))
            seconds = time.monotonic() - before
            name = f"{device.platform}: {device.device_kind}"
            yielded += 1
            yield CellResult(plan.study, cell, content, seconds, name)
            before = time.monotonic()
            on_event("", 0.0)
    assert yielded == len(program.cells), "a plan computes every cell that it is given"


@dataclass(frozen=True)
class Processes(Executor):
    """Compute programs in several processes on this machine.

    A single process seldom fills a GPU or several CPU cores. If there are several GPUs, each process uses
    one of them. A process that runs out of GPU memory is replaced by a new one, which holds no memory of
    earlier programs; if the new one runs out of memory too, it ends and the others continue.
    """

    count: int

    def __post_init__(self) -> None:
        # By default JAX reserves three quarters of the GPU memory for the first process.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def execute(self, programs: Sequence[Program], on_event: OnEvent) -> Generator[CellResult]:
        """Compute programs in `count` processes, which are started once."""
        finished: SimpleQueue[CellResult | None] = SimpleQueue()
        workers: list[_Worker] = []
        closing = threading.Event()
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
            # Every worker needs all plans, whose data can be large, so they are passed as a file.
            plans = Path(folder) / "plans"
            plans.write_bytes(pickle.dumps({one.plan.study: one.plan for one in programs}))
            # A thread assigns programs, so that no worker waits while the caller saves or concludes.
            handing_out = thread.submit(self._hand_out, programs, plans, finished, workers, closing)
            handing_out.add_done_callback(lambda _: finished.put(None))
            try:
                while True:
                    # Only after all finished cells are saved, because `on_event` may raise to stop.
                    if finished.empty():
                        on_event(_describe_silence(workers), 0.0)
                    try:
                        done = finished.get(timeout=_POLL_SECONDS)
                    except Empty:
                        continue
                    if done is None:
                        break
                    yield done
            finally:
                closing.set()
            handing_out.result()

    def _hand_out(
        self,
        programs: Sequence[Program],
        plans: Path,
        finished: SimpleQueue[CellResult | None],
        workers: "list[_Worker]",
        closing: threading.Event,
    ) -> None:
        """Give every free worker the next program, until all are computed or the caller has stopped."""
        waiting = [(program, 1) for program in programs]
        try:
            for number in range(min(self.count, len(programs))):
                workers.append(_Worker(number, plans))
            while not closing.is_set() and (waiting or any(worker.left for worker in workers)):
                for place, worker in enumerate(workers):
                    if not worker.left:
                        taken = _take(waiting, place, beside=worker.number % 3 == 2)
                        if taken is None:
                            continue
                        if worker.keeps_much and taken[0].plan.at_once is None:
                            # A process does not release its GPU memory, which other workers need.
                            worker.process.kill()
                            worker = workers[place] = _Worker(worker.number, plans)
                        worker.begin(*taken)
                busy: dict[Any, _Worker] = {
                    worker.connection: worker for worker in workers if worker.left
                }
                for worker in [busy[one] for one in wait(list(busy), _POLL_SECONDS)]:
                    answer = worker.receive()
                    if isinstance(answer, CellResult):
                        finished.put(answer)
                    if isinstance(answer, CellResult | str):
                        continue
                    program = Program(worker.plan, worker.left)
                    worker.left = ()
                    if _is_full(answer) and (worker.programs > 1 or len(workers) > 1):
                        # Replace or remove the process, because it does not release its GPU memory.
                        worker.process.kill()
                        again = [] if worker.programs == 1 else [_Worker(worker.number, plans)]
                        place = workers.index(worker)
                        workers[place : place + 1] = again
                        waiting.insert(0, (program, worker.attempt))
                        continue
                    died = isinstance(answer, _Died)
                    if worker.attempt == _ATTEMPTS or (not died and isinstance(answer, InputError)):
                        raise answer
                    waiting.append((program, worker.attempt + 1))
                    if died:
                        workers[workers.index(worker)] = _Worker(worker.number, plans)
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.join()


def _take(
    waiting: list[tuple[Program, int]], place: int, *, beside: bool
) -> tuple[Program, int] | None:
    """Remove and return the next program for the worker at a place, with the number of the attempt.

    None if all remaining programs need much memory and are reserved for the first workers (`at_once`). One
    worker in three prefers programs for the CPU, so that CPU and GPU are both used from the start.
    """
    fitting = [one for one in waiting if one[0].plan.at_once is None or place < one[0].plan.at_once]
    liked = [one for one in fitting if one[0].on_processor == beside]
    if not fitting:
        return None
    taken = (liked or fitting)[0]
    waiting.remove(taken)
    return taken


def _is_full(answer: Exception) -> bool:
    """Whether the GPU ran out of memory."""
    return isinstance(answer, MemoryError) or "RESOURCE_EXHAUSTED" in str(answer)


class _Died(InputError):
    """A worker process died."""


class _Worker:
    """A worker process and its current program."""

    def __init__(self, number: int, plans: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, number, plans), daemon=True)
        self.process.start()
        theirs.close()
        self.number, self.left, self.attempt, self.programs = number, (), 1, 0
        self.keeps_much = False

    def begin(self, program: Program, attempt: int) -> None:
        """Start a program."""
        self.plan, self.left, self.attempt = program.plan, program.cells, attempt
        self.programs += 1
        self.keeps_much = program.plan.at_once is not None
        self.heard = time.monotonic()
        # If the process has died, `receive` reports it.
        with suppress(OSError):
            self.connection.send((self.plan.study, self.left))

    def receive(self) -> CellResult | str | Exception:
        """Receive a finished cell, a description of the current work, or an error."""
        self.heard = time.monotonic()
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            return _Died(
                f"{self.plan.study}: the process that computed cell {self.left[0].name} died "
                f"{self.attempt} times, possibly because it ran out of memory; run the same command with "
                "fewer --processes to continue"
            )
        if isinstance(answer, CellResult):
            self.left = tuple(cell for cell in self.left if cell != answer.cell)
        return answer


def _describe_silence(workers: Sequence[_Worker]) -> str:
    """Report a busy worker that has sent nothing for a minute, or return an empty string."""
    text = ""
    for worker in tuple(workers):
        if worker.left and time.monotonic() - worker.heard > _SILENT_SECONDS:
            pid = worker.process.pid
            with suppress(OSError):
                if "State:\tT" in Path(f"/proc/{pid}/status").read_text():
                    return f"process {pid} is stopped; continue it with `kill -CONT {pid}`"
            text = f"no message from process {pid} for a minute"
    return text


def _work(connection: Connection, number: int, plans: Path) -> None:
    """Run a worker: receive cells, compute them, and send back their rows."""
    # Ctrl-C reaches every process of a terminal; only the main process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    known: dict[str, Plan] = pickle.loads(plans.read_bytes())
    # The pipe is closed when the main process ends.
    with suppress(EOFError, OSError):
        while True:
            study, cells = connection.recv()
            try:
                program = Program(known[study], cells)
                for done in _compute(program, lambda what, done: connection.send(what), number):
                    connection.send(done)
            except Exception as error:
                error.add_note(traceback.format_exc())
                connection.send(error)


def _end_with_the_first() -> None:
    """End this process when the main process has ended, even if it was killed."""
    first = multiprocessing.parent_process()
    if first is not None:
        first.join()
        os._exit(1)


@dataclass(frozen=True)
class Ray(Executor):
    """Compute programs on a Ray cluster, whose workers need the same versions of apportion.

    The cells of a program are distributed over the GPUs of the cluster, or over its CPUs if it has no GPU.
    No shared folder is needed, because workers return the rows.
    """

    address: str | None = None
    """Address of a running cluster, such as `10.0.0.1:6379`; by default RAY_ADDRESS, or a new cluster on
    this machine."""

    def execute(self, programs: Sequence[Program], on_event: OnEvent) -> Generator[CellResult]:
        """Compute programs on the cluster; a task is restarted if its worker dies."""
        with _connected(self.address) as ray:
            resources = ray.cluster_resources()
            gpus = int(resources.get("GPU", 0))
            slots = gpus or int(resources.get("CPU", 0))
            needs = {"num_cpus": 1, "num_gpus": 1} if gpus else {"num_cpus": 1}
            task = ray.remote(max_retries=_ATTEMPTS - 1, **needs)(_compute_task)
            plans = {program.plan.study: ray.put(program.plan) for program in programs}
            waiting = {}
            for program in programs:
                # As many parts of nearly equal size as there are slots or cells.
                size = math.ceil(len(program.cells) / max(slots, 1))
                for first in range(0, len(program.cells), size):
                    part = program.cells[first : first + size]
                    waiting[task.remote(plans[program.plan.study], part)] = part
            try:
                while waiting:
                    ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_SECONDS)
                    on_event("", 0.0)
                    for reference in ready:
                        yield from _ray_result(ray, reference, waiting.pop(reference))
            finally:
                for reference in waiting:
                    ray.cancel(reference, force=True)


def _compute_task(plan: Plan, cells: tuple[Cell, ...]) -> list[CellResult]:
    """Compute cells in a Ray worker."""
    return list(_compute(Program(plan, cells), lambda what, done: None))


def _ray_result(ray: Any, reference: Any, cells: Sequence[Cell]) -> list[CellResult]:
    """Return the result of a task, or raise its exception."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise InputError(
            f"Ray: cell {cells[0].name} was lost with its worker {_ATTEMPTS} times "
            f"({type(error).__name__}); check the workers, then run the same command to continue"
        ) from error


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Connect to Ray for the block; an existing connection of the caller is reused and kept."""
    with optional_import("computing on Ray needs Ray", "cluster"):
        import ray
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    # Ray replaces the handler of SIGTERM, which stops a study; it is restored below.
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    try:
        if colon and port.isdecimal():
            # Without a server at the address, Ray retries for minutes.
            socket.create_connection((host, int(port)), timeout=10).close()
        with warnings.catch_warnings():
            # Announcements about future versions of Ray do not concern the user.
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except OSError as error:
        raise InputError(
            f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`"
        ) from None
    if on_main_thread:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()
