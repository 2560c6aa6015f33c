"""Programs on a real Ray cluster: a head without processors of its own, and two workers."""

import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from apportion.errors import InputError
from apportion.studies.engine import _programs_of
from apportion.studies.executors import Ray
from studies.toys import computed, perform, same_files, toy

QUICK_DEATHS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        # Workers import the toys.
        tests = str(Path(__file__).parents[1])
        patch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK_DEATHS}
        )
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()


@pytest.mark.slow
def test_all_cells_arrive_though_a_worker_is_killed_midway(cluster, tmp_path):
    log = tmp_path / "log"
    plan = toy(log, trouble={f"cell-{n}": ("wait", 9) for n in range(6)})

    def kill_a_worker_at_work():
        deadline = time.monotonic() + 120
        while len(computed(log)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill_a_worker_at_work)
    killer.start()
    perform(plan, tmp_path / "ray", Ray(cluster.address))
    killer.join()
    perform(toy(), tmp_path / "here")
    assert same_files(tmp_path / "ray", tmp_path / "here")
    # What the lost worker was at began twice.
    assert len(computed(log)) > 6


@pytest.mark.slow
def test_a_cells_error_is_raised_here_and_a_stop_is_heard_while_the_workers_are_busy(
    cluster, tmp_path
):
    log = tmp_path / "log"

    def stop(what, done):
        if computed(log):
            raise InputError("stopped")

    with ray.init(cluster.address, log_to_driver=False):
        with pytest.raises(InputError, match="the data is wrong"):
            perform(toy(log, trouble={"cell-3": ("refuse", 9)}), tmp_path / "ray", Ray())
        log.unlink()
        plan = toy(log, trouble={f"cell-{n}": ("wait", 9) for n in range(6)})
        with pytest.raises(InputError, match="stopped"):
            list(Ray().execute(_programs_of(plan, plan.cells), stop))
        # A connection of the caller's is left as it is.
        assert ray.is_initialized()


def test_where_no_cluster_answers_the_address_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no Ray cluster answers at 127.0.0.1:9"):
        perform(toy(), tmp_path / "toy", Ray("127.0.0.1:9"))
    assert not (tmp_path / "toy").exists()
