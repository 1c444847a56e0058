"""A peer at work in a process of its own, under its own interpreter: the parent's side.

The other side, and what goes over the pipes, is `inference.bench.peers.child`. A `RuntimeProcess`
is a runtime of others that runs loads, as our engine does in `inference.bench.engine_process`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from formats.errors import EngineError
from inference.bench.load import Load, Run
from inference.bench.peers.runtimes import RuntimeChoice
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
        """Send a line; where the process reads no more, asking for the answer raises."""
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


KIND = Path(__file__).resolve().parent / "run_loads.py"


class RuntimeProcess:
    """Runs loads on a runtime; a context manager, like `EngineProcess`.

    Entering writes the model's files, where `work` lacks them, and loads them.

    Args:
        choice: The runtime.
        config: config.json of the shape.
        shape: Name of the shape.
        work: Folder for the model's files and for what the runtime prints.

    Attributes:
        name: Name and format of the runtime.
        note: What it is, in a few words.

    Raises:
        EngineError: from all methods, where it could not be started, failed or died; the message is
            the reason.
    """

    def __init__(
        self, choice: RuntimeChoice, config: Mapping[str, Any], shape: str, work: Path
    ) -> None:
        key = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        self.name = self.note = choice.text
        self._choice, self._work, self._stack = choice, work, ExitStack()
        self._log = work / f"{choice.name}.log"
        self._job = {
            "adapter": str(choice.spec.adapter),
            "config": dict(config),
            "name": f"{shape}-{key}",
            "work": str(work.resolve()),
            "format": choice.format,
            "cache": choice.cache,
            "threads": torch.get_num_threads(),
        }

    def __enter__(self) -> RuntimeProcess:
        version = self._choice.check_installed()
        self._work.mkdir(parents=True, exist_ok=True)
        with self._named():
            if self._choice.spec.has_files:
                with self._process(prepare=True) as preparing:
                    preparing.answer()
            with ExitStack() as stack:  # ended where it fails to load
                self._peer = stack.enter_context(self._process(prepare=False))
                note = self._peer.answer()["note"]
                self._stack = stack.pop_all()
        self.note = f"{self.name}: {self._choice.spec.package} {version}, {note}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, load: Load) -> Run:
        """Run a load once."""
        with self._named():
            return Run(**self._peer.ask(load.model_dump()))

    def _process(self, *, prepare: bool) -> PeerProcess:
        job = self._job | {"prepare": prepare}
        return PeerProcess(self._choice.python, KIND, job, self._log)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors inside tell whose they are."""
        try:
            yield
        except EngineError as error:
            raise EngineError(
                f"{self.name}: {error}. All that it printed is in {self._log}"
            ) from error
