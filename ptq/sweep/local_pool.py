"""Tasks on this machine: as many processes at once as its cores and GPUs carry.

`python -m ptq.sweep.local_pool PARENT ARGUMENT...`: `ptq` as a task of a sweep.

It ends with the process PARENT, so that a sweep or a node that is killed leaves nothing that works
in an output folder.

Tasks on a Ray cluster: on whichever nodes have room, and again elsewhere where a node is lost.

All nodes need the same environment with ptq, and see the output, models and data at the same paths.
"""

from __future__ import annotations

import logging
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from formats.errors import EngineError, RequestError
from formats.files import end_with
from formats.namespace import later
from ptq.sweep.running import Running
from ptq.sweep.tasks import Outcome, Task

if TYPE_CHECKING:
    import ray
    from ray import exceptions
else:
    ray = later("ray")
    exceptions = later("ray.exceptions")


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv[:2] = ["ptq"]
    runpy.run_module("ptq", run_name="__main__")


PAUSE = 0.1  # seconds between two looks at the processes


class LocalPool:
    """Processes of this machine.

    Args:
        cpus: Cores that tasks may occupy together.
        gpus: Numbers of the GPUs, as CUDA_VISIBLE_DEVICES has them.
    """

    def __init__(self, cpus: int, gpus: Sequence[str] = ()) -> None:
        self._cpus, self._gpus = cpus, gpus

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that each task can run here.

        Raises:
            RequestError: one needs more than there is.
        """
        for task in tasks:
            needed = task.resources
            if needed.cpus > self._cpus or needed.gpus > len(self._gpus):
                raise RequestError(
                    f"{task.name} needs {needed.cpus} cores and {needed.gpus} GPUs, and this "
                    f"machine has {self._cpus} and {len(self._gpus)}; lower its `resources`, raise "
                    "--cpus, or use --ray"
                )

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[Task, Outcome], None, None]:
        """Run tasks, the first ones first; gives each as it ends.

        Whatever ends this early, such as an interrupt, stops those that run.
        """
        left, running = list(tasks), list[Running]()
        cpus, gpus = self._cpus, list(self._gpus)
        try:
            while left or running:
                for task in list(left):
                    if task.resources.cpus <= cpus and task.resources.gpus <= len(gpus):
                        left.remove(task)
                        taken, gpus = gpus[: task.resources.gpus], gpus[task.resources.gpus :]
                        cpus -= task.resources.cpus
                        running.append(Running(task, taken))
                time.sleep(PAUSE)
                for one in list(running):
                    if (outcome := one.poll()) is not None:
                        running.remove(one)
                        cpus += one.task.resources.cpus
                        gpus += one.gpus or ()
                        yield one.task, outcome
        finally:
            for one in running:
                one.stop()


PATIENCE = 10.0  # seconds in which a cluster has to answer
RETRIES = 5  # times that a task is started again because its node or worker was lost


class RayPool:
    """A Ray cluster that runs.

    Args:
        address: Of it: `auto` for the one that this machine belongs to, or `HOST:PORT`.
        run: What a node does with a task; default: runs it to its end.

    Raises:
        RequestError: ray is not installed, or no cluster answers there.
    """

    def __init__(self, address: str = "auto", run: Callable[[Task], Outcome] | None = None) -> None:
        self._run = run or run_on_node
        if find_spec("ray") is None:
            raise RequestError("--ray: ray is not installed; `pip install 'ptq[ray]'`")
        try:
            _answers(address)
            before = signal.getsignal(signal.SIGTERM)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            signal.signal(signal.SIGTERM, before)  # Ray's own would end us without tidying up
        except (OSError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"--ray {address}: no cluster answers ({str(error).splitlines()[0]}). "
                "`ray start --head` starts one, `ray start --address HOST:PORT` adds a node"
            ) from error

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that each task can run on a node.

        Raises:
            RequestError: one needs more than any node has.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for task in tasks:
            needed = {"CPU": task.resources.cpus, "GPU": task.resources.gpus}
            if not any(all(n.get(k, 0) >= v for k, v in needed.items()) for n in nodes):
                has = ", ".join(f"{n.get('CPU', 0):g} and {n.get('GPU', 0):g}" for n in nodes)
                raise RequestError(
                    f"{task.name} needs {task.resources.cpus} cores and {task.resources.gpus} GPUs "
                    f"of one node, and the nodes have {has}; lower its `resources`, or add a node"
                )

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[Task, Outcome], None, None]:
        """Run tasks; gives each as it ends.

        Raises:
            EngineError: the cluster is gone; the same sweep goes on when there is one.
        """
        remote = ray.remote(self._run)
        refs: dict[Any, Task] = {}
        for task in tasks:
            needed = {"num_cpus": task.resources.cpus, "num_gpus": task.resources.gpus}
            refs[remote.options(**needed, max_retries=RETRIES, name=task.name).remote(task)] = task
        try:
            while refs:
                for done in ray.wait(list(refs), num_returns=1)[0]:
                    task = refs.pop(done)
                    yield task, _outcome(done, task)
        except exceptions.RaySystemError as error:
            raise EngineError(
                f"the Ray cluster is gone ({str(error).splitlines()[0]}); when there is one again, "
                "the same command goes on"
            ) from error
        finally:
            for ref in refs:
                ray.cancel(ref, force=True)
            ray.shutdown()


def _answers(address: str) -> None:
    """Check that somebody listens there, for whom Ray would wait for minutes.

    Raises:
        RequestError: it is no address.
        OSError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise RequestError(f"--ray {address}: found no address; give auto or HOST:PORT")
    socket.create_connection((host, int(port)), PATIENCE).close()


def run_on_node(task: Task) -> Outcome:
    """On a node: run a task to its end."""
    return Running(task, where=ray.get_runtime_context().get_node_id()[:8]).wait()


def _outcome(ref: Any, task: Task) -> Outcome:
    """How a task ended; one whose nodes were lost too often has failed."""
    try:
        return ray.get(ref)
    except exceptions.RaySystemError:
        raise
    except exceptions.RayError as error:
        told = " ".join(str(error).split())[:300]
        outcome = Outcome(
            state="failed", settings=task.settings, seconds=0.0, where="?", error=f"Ray: {told}"
        )
        task.write(outcome)
        return outcome
