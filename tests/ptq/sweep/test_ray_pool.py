"""Sweeps on a Ray cluster of two nodes on this host, one of which is killed."""

import os
import time
from pathlib import Path

import pytest

from formats.errors import RequestError
from ptq.sweep.pools import RayPool
from ptq.sweep.tasks import Outcome, Task
from tests.ptq.sweep.sweeping import task
from tests.refusals import refused_request

pytestmark = pytest.mark.ci  # starts a cluster, and waits until it misses a node

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")


@pytest.fixture(scope="module")
def cluster():
    """A node of one core, to which tests add others."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray tells its makers otherwise
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def work(task: Task, sick: str) -> Outcome:
    """Note the start; a task on the sick node then hangs."""
    import ray

    where = ray.get_runtime_context().get_node_id()
    with task.output.with_suffix(".starts").open("a") as starts:
        starts.write(where + "\n")
    time.sleep(300.0 if where == sick else 0.3)
    return Outcome(state="passed", settings=task.settings, seconds=1.0, where=where)


def starts(folder: Path) -> dict[str, list[str]]:
    return {path.stem: path.read_text().splitlines() for path in folder.glob("*.starts")}


def test_tasks_of_a_node_that_is_killed_run_on_the_others(cluster, tmp_path):
    """Of six tasks, the one that hangs on a node until that is killed starts again on the other."""
    second = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()
    sick = second.node_id
    pool = RayPool(cluster.address, run=lambda one: work(one, sick))
    tasks = [task(tmp_path, f"t{i}") for i in range(6)]
    with pytest.raises(RequestError, match="large needs 2 cores and 0 GPUs of one node, and the"):
        pool.check([task(tmp_path, "large", cpus=2)])
    pool.check(tasks)
    found, victim = {}, None
    for one, outcome in pool.run(tasks):
        found[one.recipe] = outcome
        if victim is None:
            victim = wait_for_a_start(tmp_path, sick)
            cluster.remove_node(second, allow_graceful=False)
    assert sorted(found) == [one.recipe for one in tasks]
    assert all(outcome.state == "passed" for outcome in found.values())
    assert starts(tmp_path)[victim] == [sick, cluster.head_node.node_id]
    assert found[victim].where == cluster.head_node.node_id


def wait_for_a_start(folder: Path, node: str) -> str:
    """The name of a task that has begun on a node."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        for name, nodes in starts(folder).items():
            if nodes == [node]:
                return name
        time.sleep(0.02)
    raise AssertionError("no task began on the second node")


def test_where_no_cluster_answers_it_says_how_to_start_one():
    refused_request("no cluster answers .*`ray start --head` starts one", RayPool, "127.0.0.1:1")
    refused_request("give auto or HOST:PORT", RayPool, "ray://somewhere")
