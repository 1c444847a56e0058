"""A task while it runs: `ptq run` in a process of its own, on what it was given."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from formats.namespace import ROOT
from ptq.output import is_taken
from ptq.sweep.tasks import Outcome, State, Task

PTQ = [sys.executable, "-m", "ptq.sweep.local_pool"]
HIDDEN = "-1"  # CUDA_VISIBLE_DEVICES where a task has no GPU
ENDING = 20.0  # seconds in which a run that is told to stop has to end


class Running:
    """A task's process; it works as soon as this is made.

    Args:
        task: What it runs; one that was stopped goes on.
        gpus: Numbers of its GPUs; None leaves those that this process sees.
        where: The node, for the record; default: this host.

    Attributes:
        task: As given.
        gpus: As given.
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
