"""Packages of others that are measured beside ours, each in an interpreter of an environment of its
own: what is known of one, and a process of it, the parent's side.

The other side, and what goes over the pipes, is `inference.bench.peers.child`. An adapter, a file
that imports nothing of this project, runs the package. `ptq bench --peer` measures runtimes
(`inference.bench.peers.runtimes`), a recipe's report tools that quantize (`ptq.peers`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from formats.errors import EngineError

CHILD = Path(__file__).resolve().parent / "child.py"
PROBE_SECONDS = 60.0
PROBE = """
import sys
sys.path.pop(0)  # where we were started: no packages of that interpreter
import json
from importlib.metadata import distributions

found = {name: next(iter(distributions(name=name)), None) for name in sys.argv[1:]}
print(json.dumps({name: one and one.version for name, one in found.items()}))
"""


@dataclass(frozen=True)
class PeerSpec:
    """A package that is measured beside ours.

    Attributes:
        package: The distribution whose version is reported.
        needs: Further distributions that its interpreter must have.
        adapter: File that runs it.
    """

    package: str
    needs: tuple[str, ...]
    adapter: Path

    @property
    def distributions(self) -> Iterable[str]:
        """All that its interpreter must have."""
        return (*self.needs, self.package)

    def missing(self, python: str) -> list[str]:
        """Distributions that an interpreter lacks; errors as of `installed`."""
        versions = installed(python, self.distributions)
        return [name for name, version in versions.items() if version is None]


def installed(python: str, distributions: Iterable[str]) -> dict[str, str | None]:
    """Versions of distributions as an interpreter sees them, None for those that it lacks.

    Raises:
        EngineError: it cannot be started, or is no Python.
    """
    command = [python, "-c", PROBE, *distributions]
    options = {"capture_output": True, "text": True, "timeout": PROBE_SECONDS, "check": True}
    try:
        done = subprocess.run(command, env=clean_environment({}), **options)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineError(f"{python} cannot be used as a Python interpreter ({error})") from error


def clean_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Ours without what would lead another interpreter to our modules, and settings of its own."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | dict(settings)


def threads() -> int:
    """Threads that a peer may use: as many as ours."""
    import torch  # heavy, and not needed to read what a command or a recipe asks for

    return torch.get_num_threads()


class PeerProcess:
    """Does a job in a peer's interpreter, and gives its answers; a context manager.

    Entering starts the process and sends the job; leaving ends it, and whatever it has started.

    Args:
        kind: File with `do`; see `inference.bench.peers.child`.
        job: What it is given; `adapter` is the path of the adapter.
        log: File that receives what the process prints.
        settings: Its environment, beside ours.
        cwd: Where it starts; some packages leave files there.
        timeout: Seconds after which it is stopped, whatever it is at; None for never.

    Raises:
        EngineError: from all methods, where it could not be started, failed, died, or was stopped
            as its time was over; the message is the reason.
    """

    def __init__(
        self, python: str, kind: Path, job: Mapping[str, Any], log: Path, *,
        settings: Mapping[str, str] | None = None, cwd: Path | None = None,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self._command = [python, str(CHILD), str(kind.resolve())]
        self._job, self._log, self._cwd, self._timeout = job, log, cwd, timeout
        shared = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads())}
        self._environment = clean_environment(shared | dict(settings or {}))
        self._late = False

    def __enter__(self) -> PeerProcess:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        try:
            with self._log.open("wb") as log:
                self._process: Any = subprocess.Popen(
                    self._command, env=self._environment, stderr=log, cwd=self._cwd, **pipes
                )
        except OSError as error:
            raise EngineError(f"{self._command[0]} cannot be started ({error.strerror})") from error
        self._in: BinaryIO = self._process.stdin
        self._out: BinaryIO = self._process.stdout
        self._timer = threading.Timer(self._timeout or 0.0, self._stop)
        self._timer.daemon = True
        if self._timeout is not None:
            self._timer.start()
        self.tell(self._job)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait()
        for pipe in (self._in, self._out):
            with suppress(BrokenPipeError):  # what was not read there is of no use any more
                pipe.close()

    def tell(self, question: Mapping[str, Any]) -> None:
        """Send a line; where the process reads no more, asking for the answer raises."""
        with suppress(BrokenPipeError):
            self._in.write(json.dumps(question).encode() + b"\n")
            self._in.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer that is JSON."""
        return json.loads(self.frame())

    def frame(self) -> bytes:
        """Wait for the next answer as bytes."""
        length = int.from_bytes(header := self._out.read(8), "little")
        frame = self._out.read(length)
        if len(header) < 8 or len(frame) < length:
            raise EngineError(self._why_it_ended())
        if frame.startswith(b'{"error"'):
            raise EngineError(json.loads(frame)["error"])
        return frame

    def _why_it_ended(self) -> str:
        """Its exit code, and the last line of what it printed."""
        code = self._process.wait()
        if self._late:
            return f"stopped after its {self._timeout:g} s; a larger `timeout` gives it longer"
        lines = self._log.read_text(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        killed = " (killed: memory may have run out)" if code == -signal.SIGKILL else ""
        return f"its process ended with exit code {code}{killed}; the last that it printed: {last}"

    def _stop(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        """End the process, in a session of its own, and whatever it started."""
        with suppress(ProcessLookupError):  # all of them ended by themselves
            os.killpg(self._process.pid, signal.SIGKILL)
