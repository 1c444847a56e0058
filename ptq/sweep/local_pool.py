"""Tasks on this machine: as many processes at once as its cores and GPUs carry."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from formats.errors import RequestError
from ptq.sweep.running import Running
from ptq.sweep.tasks import Outcome, Task

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
