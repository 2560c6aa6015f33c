"""Who computes the programs of studies: this process, several processes of this machine, or Ray.

`execute` takes programs and yields each cell's rows as soon as they are finished; whoever calls it
saves them. A cell's rows are the same whoever computed them. A program whose worker died is computed
again, a few times.
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
"""Seconds between two looks at the workers, so that a request to stop is soon heard."""
_ATTEMPTS = 4
"""How often a program is begun before it is given up."""
_SILENT_SECONDS = 60.0
"""Seconds without news from a busy worker until progress names it."""


class Serial(Executor):
    """The calling process, one program after the other."""

    def execute(self, programs: Sequence[Program], on_event: OnEvent) -> Generator[CellResult]:
        """Compute programs in their order."""
        for program in programs:
            yield from _compute(program, on_event)


def _compute(program: Program, on_event: OnEvent, number: int = 0) -> Generator[CellResult]:
    """Compute a program here, on this worker's device where there are several."""
    plan, yielded = program.plan, 0

    def report(what: str, fraction: float) -> None:
        on_event(f"{plan.study}: {what}", max(fraction * len(program.cells) - yielded, 0.0))

    devices = jax.local_devices(backend="cpu" if plan.on_processor else None)
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
    assert yielded == len(program.cells), "a plan computes every cell that it is handed"


@dataclass(frozen=True)
class Processes(Executor):
    """Several processes of this machine: whoever is free takes the next program.

    One process seldom fills a GPU, and does not fill several processors. Where there are several GPUs,
    each process uses one of them. A process that finds no room on its GPU makes place for a new one, which
    keeps nothing of earlier programs; where that finds none either, it ends, and the others go on.
    """

    count: int

    def __post_init__(self) -> None:
        # Before JAX starts, which would keep three quarters of a GPU's memory for the first process.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def execute(self, programs: Sequence[Program], on_event: OnEvent) -> Generator[CellResult]:
        """Compute programs in so many processes at once; they are started once."""
        finished: SimpleQueue[CellResult | None] = SimpleQueue()
        workers: list[_Worker] = []
        closing = threading.Event()
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
            # Every worker needs all plans, whose data may be large: written once, read by each.
            plans = Path(folder) / "plans"
            plans.write_bytes(pickle.dumps({one.plan.study: one.plan for one in programs}))
            # Handed out in a thread: no worker waits while the caller saves a cell or concludes a study.
            handing_out = thread.submit(self._hand_out, programs, plans, finished, workers, closing)
            handing_out.add_done_callback(lambda _: finished.put(None))
            try:
                while True:
                    # Not before everything that is finished has been saved: it may raise to stop.
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
        """Give every free worker the next program, until all are computed or nobody waits for them."""
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
                            # The others need the room that it would keep for nothing.
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
                        # A process keeps the memory it took: a new one has room, or those who are left.
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
    """The next program for the worker at a place, and which attempt at it this is; none where all that are
    left take much memory, and are the first workers' alone: a process keeps what memory it took.

    One worker of three prefers what is computed beside the GPU, to use the processor from the start.
    """
    fitting = [one for one in waiting if one[0].plan.at_once is None or place < one[0].plan.at_once]
    liked = [one for one in fitting if one[0].plan.on_processor == beside]
    if not fitting:
        return None
    taken = (liked or fitting)[0]
    waiting.remove(taken)
    return taken


def _is_full(answer: Exception) -> bool:
    """Whether there was no room in a GPU's memory."""
    return isinstance(answer, MemoryError) or "RESOURCE_EXHAUSTED" in str(answer)


class _Died(InputError):
    """A worker is gone."""


class _Worker:
    """A process that computes one program after the other, and what it is at."""

    def __init__(self, number: int, plans: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, number, plans), daemon=True)
        self.process.start()
        theirs.close()
        self.number, self.left, self.attempt, self.programs = number, (), 1, 0
        self.keeps_much = False

    def begin(self, program: Program, attempt: int) -> None:
        """Have it compute a program."""
        self.plan, self.left, self.attempt = program.plan, program.cells, attempt
        self.programs += 1
        self.keeps_much = program.plan.at_once is not None
        self.heard = time.monotonic()
        # That it has died meanwhile is noticed by whoever receives.
        with suppress(OSError):
            self.connection.send((self.plan.study, self.left))

    def receive(self) -> CellResult | str | Exception:
        """What it sends: a finished cell, what it is doing, or why there are no more cells."""
        self.heard = time.monotonic()
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            return _Died(
                f"{self.plan.study}: the process that computed cell {self.left[0].name} died "
                f"{self.attempt} times, as one does that needs more memory than there is; give fewer "
                "--processes, and the same command goes on"
            )
        if isinstance(answer, CellResult):
            self.left = tuple(cell for cell in self.left if cell != answer.cell)
        return answer


def _describe_silence(workers: Sequence[_Worker]) -> str:
    """Name a busy worker that has sent nothing for a minute, or return an empty text."""
    text = ""
    for worker in tuple(workers):
        if worker.left and time.monotonic() - worker.heard > _SILENT_SECONDS:
            pid = worker.process.pid
            with suppress(OSError):
                if "State:\tT" in Path(f"/proc/{pid}/status").read_text():
                    return f"process {pid} is stopped; continue it with `kill -CONT {pid}`"
            text = f"no news from process {pid} for a minute"
    return text


def _work(connection: Connection, number: int, plans: Path) -> None:
    """What a worker does: compute the cells it is sent, and send back each one's rows."""
    # Ctrl-C reaches every process of a terminal; the first one hears it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    known: dict[str, Plan] = pickle.loads(plans.read_bytes())
    # The pipe is closed once the first process is gone.
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
    """End this process once the first one is gone, which may have been killed."""
    first = multiprocessing.parent_process()
    if first is not None:
        first.join()
        os._exit(1)


@dataclass(frozen=True)
class Ray(Executor):
    """A Ray cluster, whose workers need apportion installed, in the same versions.

    Every program's cells are shared out over the cluster's GPUs, or its processors where it has none:
    one cell a task where there are enough of them. No folder has to be shared: rows come back.
    """

    address: str | None = None
    """Of a running cluster, such as `10.0.0.1:6379`; without it the environment's RAY_ADDRESS, and
    without that a cluster is started on this machine."""

    def execute(self, programs: Sequence[Program], on_event: OnEvent) -> Generator[CellResult]:
        """Compute programs on the cluster; a task is started again when its worker dies."""
        with _connected(self.address) as ray:
            resources = ray.cluster_resources()
            gpus = int(resources.get("GPU", 0))
            slots = gpus or int(resources.get("CPU", 0))
            needs = {"num_cpus": 1, "num_gpus": 1} if gpus else {"num_cpus": 1}
            task = ray.remote(max_retries=_ATTEMPTS - 1, **needs)(_compute_task)
            plans = {program.plan.study: ray.put(program.plan) for program in programs}
            waiting = {}
            for program in programs:
                # So many parts of nearly equal size as there are slots, or cells.
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
    """What a worker of Ray's does: the rows of these cells."""
    return list(_compute(Program(plan, cells), lambda what, done: None))


def _ray_result(ray: Any, reference: Any, cells: Sequence[Cell]) -> list[CellResult]:
    """What a task returned; what it raised is raised here."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise InputError(
            f"Ray: cell {cells[0].name} was lost with its worker {_ATTEMPTS} times "
            f"({type(error).__name__}); look after the workers, then the same command goes on"
        ) from error


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected for as long as it is needed; a connection of the caller's is left as it is."""
    with optional_import("computing on Ray needs Ray", "cluster"):
        import ray
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    # Ray takes the signal that asks a study to stop for itself.
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    try:
        if colon and port.isdecimal():
            # Where nothing listens, Ray would try for minutes.
            socket.create_connection((host, int(port)), timeout=10).close()
        with warnings.catch_warnings():
            # What Ray means to do in future versions is no concern of the user's.
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
