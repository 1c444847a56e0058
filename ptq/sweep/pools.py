"""Where tasks run: on this machine, or on the nodes of a Ray cluster, and again where one is lost.

A task is `ptq run` in a process of its own: `python -m ptq.sweep.pools PARENT ARGUMENT...`. It ends
with the process PARENT, so that a sweep or a node that is killed leaves nothing that works in an
output folder.

All nodes need the same environment with ptq, and see the output, models and data at the same paths.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from formats.command import end_with
from formats.errors import EngineError, RequestError
from formats.namespace import ROOT, later
from ptq.output import is_taken
from ptq.sweep.tasks import Outcome, State, Task

with later():
    import ray
    from ray import exceptions

PTQ = [sys.executable, "-m", "ptq.sweep.pools"]
HIDDEN = "-1"  # CUDA_VISIBLE_DEVICES where a task has no GPU
ENDING = 20.0  # seconds in which a run has to end after it is asked to stop
PAUSE = 0.1  # seconds between two looks at the processes
PATIENCE = 10.0  # seconds in which a cluster has to answer
RETRIES = 5  # times that a task is started again because its node or worker was lost


class Running:
    """A task's process; it works as soon as this is made.

    Args:
        task: What it runs; one that was stopped goes on.
        gpus: Numbers of its GPUs; None leaves those that this process sees.
        where: The node, for the record; default: this host.
    """

    def __init__(
        self, task: Task, gpus: Sequence[str] | None = None, where: str | None = None
    ) -> None:
        self.task, self.gpus = task, gpus
        self._where, self._start = where or socket.gethostname(), time.monotonic()
        task.log.parent.mkdir(parents=True, exist_ok=True)
        task.write(self._outcome("started"))
        words = [*task.words, "--quiet", *(["--force"] if is_taken(task.output) else [])]
        with task.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*PTQ, str(os.getpid()), "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(task, gpus),
            )

    def poll(self) -> Outcome | None:
        """How it ended, which is noted beside its folder; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        error = None if code in (0, 1) and self.task.has_report else _why(self.task.log, code)
        state = "failed" if error is not None else ("missed" if code else "passed")
        outcome = self._outcome(state, error)
        self.task.write(outcome)
        return outcome

    def wait(self) -> Outcome:
        """Wait for its end."""
        self._process.wait()
        outcome = self.poll()
        assert outcome is not None
        return outcome

    def _outcome(self, state: State, error: str | None = None) -> Outcome:
        return Outcome(
            state=state,
            settings=self.task.settings,
            seconds=round(time.monotonic() - self._start, 1),
            where=self._where,
            error=error,
        )

    def stop(self) -> None:
        """Have it end; the next sweep goes on where it was."""
        self._process.terminate()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment(task: Task, gpus: Sequence[str] | None) -> dict[str, str]:
    """That of a task: as many threads as cores, and no GPU but its own."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    changed = {
        "OMP_NUM_THREADS": str(task.resources.cpus),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
    }
    if task.resources.gpus == 0:
        changed["CUDA_VISIBLE_DEVICES"] = HIDDEN
    elif gpus is not None:
        changed["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return os.environ | changed


def _why(log: Path, code: int) -> str:
    """Why a run failed: its own word, or how its process ended."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if line.startswith("error:")]
    if errors:
        return "\n".join(lines[errors[0] :]).removeprefix("error: ")
    if code < 0:
        memory = ", as where memory ran out" if code == -9 else ""
        return f"its process was ended by signal {-code}{memory}"
    return lines[-1] if lines else f"it ended with exit code {code} and printed nothing"


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
    """Check that a server listens there; Ray would wait for it for minutes.

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
        text = " ".join(str(error).split())[:300]
        outcome = Outcome(
            state="failed", settings=task.settings, seconds=0.0, where="?", error=f"Ray: {text}"
        )
        task.write(outcome)
        return outcome


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv[:2] = ["ptq"]
    runpy.run_module("ptq", run_name="__main__")
