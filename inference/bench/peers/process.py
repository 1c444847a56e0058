"""A peer at work in a process of its own, under its own interpreter: the parent's side.

The other side, and what goes over the pipes, is `inference.bench.peers.child`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from formats.errors import EngineError
from inference.bench.peers.spec import clean_environment

CHILD = Path(__file__).resolve().parent / "child.py"


class PeerProcess:
    """Does a job in a peer's interpreter, and gives its answers; a context manager.

    Entering starts the process and sends the job; leaving ends it, and whatever it has started.

    Args:
        python: The interpreter.
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
        self,
        python: str,
        kind: Path,
        job: Mapping[str, Any],
        log: Path,
        *,
        settings: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
    ) -> None:
        self._command = [python, str(CHILD), str(kind.resolve())]
        self._job, self._log, self._cwd, self._timeout = job, log, cwd, timeout
        shared = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self._settings = shared | dict(settings or {})
        self._late = False

    def __enter__(self) -> PeerProcess:
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env=clean_environment(self._settings),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._cwd,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"{self._command[0]} cannot be started ({error.strerror})") from error
        self._timer = threading.Timer(self._timeout or 0.0, self._stop)
        self._timer.daemon = True
        if self._timeout is not None:
            self._timer.start()
        self.tell(self._job)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait()
        for pipe in self._pipes():
            with suppress(BrokenPipeError):  # what was not read there is of no use any more
                pipe.close()

    def tell(self, question: Mapping[str, Any]) -> None:
        """Send a line; that nobody reads it any more is told when the answer is asked for."""
        stdin, _ = self._pipes()
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line, and wait for its answer."""
        self.tell(question)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer that is JSON."""
        return json.loads(self.frame())

    def frame(self) -> bytes:
        """Wait for the next answer as bytes."""
        _, stdout = self._pipes()
        length = int.from_bytes(header := stdout.read(8), "little")
        frame = stdout.read(length)
        if len(header) < 8 or len(frame) < length:
            raise EngineError(self._why_it_ended())
        if frame.startswith(b'{"error"'):
            raise EngineError(json.loads(frame)["error"])
        return frame

    def _pipes(self) -> tuple[BinaryIO, BinaryIO]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout  # pyright: ignore[reportReturnType]

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
