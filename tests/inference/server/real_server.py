"""`ptq serve` in processes of its own, on a port of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from tests.interrupts import take_interrupts

ROOT = Path(__file__).parents[3]
SECONDS = 60.0  # in which a server has to be ready, on a machine that has much else to do


class RealServer:
    """A server that starts; as a context manager it is ready within the block, and gone after it.

    Args:
        checkpoint: What it serves.
        options: Of `ptq serve`; the port is a free one unless they say which.
        full_log: Whether the disk is full that its standard error is written to.

    Attributes:
        address: `http://127.0.0.1:PORT`.
        greeting: What it printed when it was ready.
        process: The one that was started: it has HTTP.
    """

    def __init__(self, checkpoint: Path, *options: str, full_log: bool = False) -> None:
        port = () if "--port" in options else ("--port", "0")
        opened = Path("/dev/full").open if full_log else TemporaryFile
        self._errors = opened("w+", encoding="utf-8")  # closed in `__exit__`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ptq", "serve", str(checkpoint), *port, *options],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            preexec_fn=take_interrupts,
            start_new_session=True,  # a Ctrl-C goes to the group, the engine's process included
        )
        self.greeting = ""

    def wait(self) -> RealServer:
        """Wait until it is ready."""
        while "Ctrl-C" not in self.greeting:
            line = self.process.stdout.readline()
            assert line, f"it ended with {self.process.wait()}: {self.errors}"
            self.greeting += line
        found = re.search(r"listening on (http://\S+:\d+)/v1", self.greeting)
        assert found, self.greeting
        self.address = found[1]
        return self

    @property
    def errors(self) -> str:
        """What it wrote to standard error so far."""
        self._errors.seek(0)
        return self._errors.read()

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        (found,) = self.engines
        return found

    @property
    def engines(self) -> list[psutil.Process]:
        """The processes of its engines, in the order in which they were started."""
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        ]

    def interrupt(self) -> None:
        """Ctrl-C in its terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, seconds: float = SECONDS) -> int:
        """Wait for its end; gives the exit code."""
        return self.process.wait(seconds)

    def __enter__(self) -> RealServer:
        try:
            return self.wait()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()
        self._errors.close()


def gone(process: psutil.Process, seconds: float = 5.0) -> bool:
    """Whether a process ends within so many seconds; a zombie has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:  # its parent has waited for it
            return True
        time.sleep(0.01)
    return False
