"""Cells of a study on a Ray cluster: tasks that are retried when their worker dies, rows brought home.

Workers need apportion installed, in the same versions. Rows come back as they are, so no folder has
to be shared; they are saved on this machine as they arrive.
"""

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import pandas as pd

from apportion.errors import InputError, optional_import
from apportion.studies.cells import Cell, Place, Plan, Progress, Save, batches, describe

_PATIENCE = 1.0
"""Seconds between two looks at the tasks, so that a request to stop is soon heard."""


@dataclass
class RayCluster(Place):
    """A Ray cluster as a place where cells are computed.

    Every program's cells are shared out over the cluster's GPUs, or its processors where it has none:
    one cell a task where there are enough of them.
    """

    address: str | None = None
    """Of a running cluster, such as `10.0.0.1:6379`; without it the environment's RAY_ADDRESS, and
    without that a cluster is started on this machine."""
    retries: int = 3
    """How often a task is started again after its worker died."""
    workers: dict[str, str] = field(default_factory=dict)
    """The devices of every node that has brought rows."""

    def device(self, plan: Plan) -> str:
        """The nodes' devices, in words."""
        kinds = ", ".join(dict.fromkeys(self.workers.values())) or "none yet"
        nodes = "1 node" if len(self.workers) == 1 else f"{len(self.workers)} nodes"
        return f"Ray, {nodes}, {kinds}"

    def compute(self, plan: Plan, cells: Sequence[Cell], save: Save, progress: Progress) -> None:
        """Compute cells on the cluster, and save each one's rows when they arrive."""
        with _connected(self.address) as ray:
            slots, needs = _slots(ray.cluster_resources())
            task = ray.remote(max_retries=self.retries, **needs)(compute_batch)
            shared = ray.put(plan)
            waiting = {task.remote(shared, batch): batch for batch in batches(cells, max(slots, 1))}
            done = 0
            try:
                while waiting:
                    progress(f"{done} of {len(cells)} cells from Ray", done / len(cells))
                    ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_PATIENCE)
                    for reference in ready:
                        node, device, rows = self._result(ray, reference, waiting[reference])
                        del waiting[reference]
                        self.workers[node] = device
                        for cell, own in rows:
                            save(cell, own)
                            done += 1
            finally:
                for reference in waiting:
                    ray.cancel(reference, force=True)

    def _result(self, ray: Any, reference: Any, batch: Sequence[Cell]) -> Any:
        """What a task returned; what it raised is raised here."""
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise InputError(
                f"Ray: cell {batch[0].name} was lost with its worker {self.retries + 1} times "
                f"({type(error).__name__}); look after the workers, then the same command goes on"
            ) from error


def compute_batch(
    plan: Plan, cells: Sequence[Cell]
) -> tuple[str, str, list[tuple[Cell, pd.DataFrame]]]:
    """What a worker does: its node, its devices and the rows of the cells."""
    import ray

    devices = plan.devices()
    with jax.default_device(devices[0]):
        rows = list(plan.compute(cells, lambda what, fraction: None))
    return ray.get_runtime_context().get_node_id(), describe(devices), rows


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
    with optional_import("computing on Ray needs Ray", "cluster"):
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
