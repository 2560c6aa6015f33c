"""Cells on a real Ray cluster: a head without processors of its own, and two workers."""

import threading
import time
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("ray")

from ray.cluster_utils import Cluster
from waiting_cells import plan as waiting_plan

from apportion.errors import InputError
from apportion.studies.engine import CellStore
from apportion.studies.executors import Ray, Serial
from apportion.studies.theory import bound, should_pool

QUICK_DEATHS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        # Workers import the plan above.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK_DEATHS}
        )
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()


def rows_from(place, plan, folder):
    store = CellStore(plan, folder).open()
    place.compute(plan, store.missing(), store.save, lambda what, fraction: None)
    return store.rows()


def kill_a_worker_at_work(cluster, folder):
    """Kill the node of the first cell to begin as soon as both nodes are at work; then let all go."""

    def nodes():
        return {file.suffix[1:] for file in folder.glob("cell-*")}

    deadline = time.monotonic() + 120
    while len(nodes()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    worker = next(node for node in cluster.worker_nodes if node.node_id in nodes())
    cluster.remove_node(worker, allow_graceful=False)
    (folder / "go").touch()


def test_rows_from_the_cluster_are_those_computed_here_to_the_last_digit(cluster, tmp_path):
    plan = bound.plan(families=5)
    place = Ray(cluster.address)
    there = rows_from(place, plan, tmp_path / "ray")
    here = rows_from(Serial(), plan, tmp_path / "here")
    pd.testing.assert_frame_equal(there, here, check_exact=True)
    assert place.device(plan) == "Ray, 2 nodes, cpu: cpu"


def test_what_a_cell_raises_is_raised_here(cluster, tmp_path):
    file = tmp_path / "one_task.csv"
    file.write_text("task,state,action,reward,next_state\na,0,0,1.0,1\na,1,0,0.0,0\n")
    plan = should_pool.plan(file=file)
    with pytest.raises(InputError, match=r"^transitions: all rows are of one task"):
        rows_from(Ray(cluster.address), plan, tmp_path / "ray")


def test_a_stop_is_heard_while_the_workers_are_busy(cluster, tmp_path):
    def progress(what, fraction):
        if list(tmp_path.glob("cell-*")):
            raise InputError("stopped")

    plan = waiting_plan(tmp_path, 3)
    with pytest.raises(InputError, match="stopped"):
        Ray(cluster.address).compute(plan, plan.cells, lambda *_: None, progress)


def test_all_cells_arrive_though_a_worker_is_killed_midway(cluster, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    plan = waiting_plan(begun, 5)
    killer = threading.Thread(target=kill_a_worker_at_work, args=(cluster, begun))
    killer.start()
    place = Ray(cluster.address)
    there = rows_from(place, plan, tmp_path / "ray")
    killer.join()
    here = rows_from(Serial(), plan, tmp_path / "here")
    pd.testing.assert_frame_equal(there, here, check_exact=True)
    assert there.square.tolist() == [n**2 for n in range(5)]
    # The cell that was lost began on both workers; all rows came from the one that was left.
    places = pd.Series([file.stem for file in begun.glob("cell-*")]).value_counts()
    assert sorted(places) == [1, 1, 1, 1, 2]
    assert len(place.workers) == 1


def test_where_no_cluster_answers_the_address_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no Ray cluster answers at 127.0.0.1:9"):
        rows_from(Ray("127.0.0.1:9"), bound.plan(families=5), tmp_path)
