"""Who computes the programs of studies: this process, several processes of this machine, or Ray.

`execute` takes programs and yields each cell's rows as soon as they are finished; whoever calls it
saves them. A cell's rows are the same whoever computed them. A program whose worker died is computed
again, a few times.
"""

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import jax

from apportion.errors import InputError, needing
from apportion.studies.engine import Cell, CellResult, Plan, Program

POLL_SECONDS = 0.5
"""Seconds between two looks at the workers, so that a request to stop is soon heard."""
_ATTEMPTS = 4
"""How often a program is begun before it is given up."""

OnEvent = Callable[[str, float], None]
"""Called now and then with what is being done, and how many cells' worth of unfinished work is done
beyond what has been yielded; it may raise to stop."""


class Executor(ABC):
    """Who computes programs."""

    @abstractmethod
    def execute(
        self, programs: Sequence[Program], on_event: OnEvent = lambda what, done: None
    ) -> Generator[CellResult]:
        """Compute programs, the first ones first; each cell as it is finished, in any order."""


class Serial(Executor):
    """The calling process, one program after the other."""

    def execute(
        self, programs: Sequence[Program], on_event: OnEvent = lambda what, done: None
    ) -> Generator[CellResult]:
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
            now = time.monotonic()
            name = f"{device.platform}: {device.device_kind}"
            yielded += 1
            yield CellResult(plan.study, cell, rows, now - before, name)
            before = time.monotonic()
            on_event("", 0.0)


@dataclass(frozen=True)
class Processes(Executor):
    """Several processes of this machine: whoever is free takes the next program.

    One process seldom fills a GPU, and does not fill several processors. Where there are several GPUs,
    each process uses one of them.
    """

    count: int

    def __post_init__(self) -> None:
        # Before JAX starts, which would keep three quarters of a GPU's memory for the first process.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def execute(
        self, programs: Sequence[Program], on_event: OnEvent = lambda what, done: None
    ) -> Generator[CellResult]:
        """Compute programs in so many processes at once; they are started once."""
        pool = _Pool(programs)
        try:
            for number in range(min(self.count, len(programs))):
                threading.Thread(target=pool.serve, args=(number,), daemon=True).start()
            left = sum(len(program.cells) for program in programs)
            while left:
                # Not before everything that is finished has been saved: it may raise to stop.
                if pool.results.empty():
                    on_event("", 0.0)
                with suppress(queue.Empty):
                    done = pool.results.get(timeout=POLL_SECONDS)
                    if isinstance(done, BaseException):
                        raise done
                    left -= 1
                    yield done
        finally:
            pool.close()


class _Pool:
    """Programs that wait for a worker, and the workers, each looked after by a thread of this process."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.results: queue.Queue[CellResult | BaseException] = queue.Queue()
        # Once for all workers, each of which needs them all.
        self._plans = pickle.dumps({program.plan.study: program.plan for program in programs})
        self._waiting = [(program, 1) for program in programs]
        self._workers: dict[int, multiprocessing.process.BaseProcess] = {}
        self._changed = threading.Condition()
        self._busy = 0
        self._closed = False

    def serve(self, number: int) -> None:
        """Give a worker one program after the other; a new worker takes the place of one that died."""
        connection: Connection | None = None
        while (taken := self._take(number)) is not None:
            program, attempt = taken
            finished: set[str] = set()
            error: BaseException
            try:
                connection = connection or self._start(number)
                connection.send((program.plan.study, program.cells))
                while (answer := connection.recv()) is not None:
                    if isinstance(answer, BaseException):
                        raise answer
                    finished.add(answer.cell.name)
                    self.results.put(answer)
                self._give_back(None)
                continue
            except (EOFError, OSError):
                connection = None
                error = InputError(
                    f"{program.plan.study}: the process that computed cell {program.cells[0].name} died "
                    f"{_ATTEMPTS} times, as one does that needs more memory than there is; give fewer "
                    "--processes, and the same command goes on"
                )
            except Exception as raised:
                error = raised
            left = tuple(cell for cell in program.cells if cell.name not in finished)
            # What a GPU's memory has no room for now, it may have later.
            if attempt == _ATTEMPTS or (connection and isinstance(error, InputError)):
                self.results.put(error)
                left = ()
            self._give_back((Program(program.plan, left), attempt + 1) if left else None)

    def _take(self, number: int) -> tuple[Program, int] | None:
        """The next program for the worker of this number; None once there will be none.

        One worker of three prefers what is computed on the processor, to use it beside the GPU from the
        start.
        """
        with self._changed:
            while not self._waiting and self._busy and not self._closed:
                self._changed.wait()
            if self._closed or not self._waiting:
                return None
            beside = number % 3 == 2
            liked = [one for one in self._waiting if one[0].plan.on_processor == beside]
            taken = (liked or self._waiting)[0]
            self._waiting.remove(taken)
            self._busy += 1
            return taken

    def _give_back(self, again: tuple[Program, int] | None) -> None:
        """A worker is done with a program, of which something is perhaps to be computed again."""
        with self._changed:
            self._busy -= 1
            if again is not None:
                self._waiting.append(again)
            self._changed.notify_all()

    def _start(self, number: int) -> Connection:
        """Start the worker of this number, and send it all plans."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, number), daemon=True)
        with self._changed:
            if self._closed:
                raise EOFError
            process.start()
            self._workers[number] = process
        theirs.close()
        ours.send_bytes(self._plans)
        return ours

    def close(self) -> None:
        """End the workers; what they have finished has been handed over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for process in self._workers.values():
                process.kill()
            for process in self._workers.values():
                process.join()


def _work(connection: Connection, number: int) -> None:
    """What a worker is: a process that answers, and that ends when the first one does."""
    # Ctrl-C reaches every process of a terminal; the first one hears it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    _answer(connection, number)


def _answer(connection: Connection, number: int) -> None:
    """Take the plans, then compute whatever cells are sent, until there are no more."""
    with suppress(EOFError):
        plans: dict[str, Plan] = pickle.loads(connection.recv_bytes())
        while True:
            study, cells = connection.recv()
            try:
                for done in _compute(Program(plans[study], cells), lambda what, done: None, number):
                    connection.send(done)
                connection.send(None)
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

    def execute(
        self, programs: Sequence[Program], on_event: OnEvent = lambda what, done: None
    ) -> Generator[CellResult]:
        """Compute programs on the cluster; a task is started again when its worker dies."""
        with _connected(self.address) as ray:
            slots, needs = _slots(ray.cluster_resources())
            task = ray.remote(max_retries=_ATTEMPTS - 1, **needs)(_compute_task)
            plans = {program.plan.study: ray.put(program.plan) for program in programs}
            waiting = {
                task.remote(plans[program.plan.study], part): part
                for program in programs
                for part in _parts(program.cells, max(slots, 1))
            }
            try:
                while waiting:
                    ready, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_SECONDS)
                    on_event("", 0.0)
                    for reference in ready:
                        yield from _ray_result(ray, reference, waiting.pop(reference))
            finally:
                for reference in waiting:
                    ray.cancel(reference, force=True)


def _compute_task(plan: Plan, cells: Sequence[Cell]) -> list[CellResult]:
    """What a worker of Ray's does: the rows of these cells."""
    return list(_compute(Program(plan, tuple(cells)), lambda what, done: None))


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


def _parts(cells: Sequence[Cell], most: int) -> list[Sequence[Cell]]:
    """Cells in at most so many parts of nearly equal size, in order."""
    count = min(most, len(cells))
    return [
        cells[len(cells) * part // count : len(cells) * (part + 1) // count]
        for part in range(count)
    ]


def _slots(resources: dict[str, float]) -> tuple[int, dict[str, int]]:
    """How many tasks run at once, and what each one needs.

    >>> _slots({"CPU": 16.0, "GPU": 2.0})
    (2, {'num_cpus': 1, 'num_gpus': 1})
    """
    gpus = int(resources.get("GPU", 0))
    if gpus:
        return gpus, {"num_cpus": 1, "num_gpus": 1}
    return int(resources.get("CPU", 0)), {"num_cpus": 1}


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected for as long as it is needed; a connection of the caller's is left as it is."""
    with needing("computing on Ray needs Ray", "cluster"):
        import ray
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _require_answer(address)
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    # Ray takes the signal that asks a study to stop for itself.
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            # What Ray means to do in future versions is no concern of the user's.
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except ConnectionError as error:
        raise _no_answer(address, error) from None
    if on_main_thread:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Refuse at once an address where nothing listens; Ray would try for minutes."""
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise _no_answer(address, error) from None


def _no_answer(address: str, error: OSError) -> InputError:
    return InputError(
        f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`"
    )
