"""A peer at work in a process of its own, under its own interpreter."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from formats.errors import EngineError
from inference.bench.peers.interpreter import kill_group, start, why_it_ended
from inference.bench.peers.specs import PeerSpec
from inference.bench.worker import Load, Run

WORKER = Path(__file__).resolve().parent / "worker.py"


class PeerWorker:
    """Runs loads on a peer; a context manager, like `inference.bench.worker.Worker`.

    Entering writes the model's files, where `work` lacks them, and loads them.

    Args:
        spec: The peer.
        config: config.json of the shape.
        shape: Name of the shape.
        work: Folder for the model's files and for what the peer prints.

    Attributes:
        name: Name and format of the peer.
        note: What it is, in a few words.

    Raises:
        EngineError: from all methods, where it could not be started, failed or died; the message is
            the reason.
    """

    def __init__(self, spec: PeerSpec, config: Mapping[str, Any], shape: str, work: Path) -> None:
        key = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        self.name = self.note = spec.text
        self._spec, self._work = spec, work
        self._log = work / f"{spec.name}.log"
        self._job = {
            "adapter": str(spec.peer.adapter),
            "config": dict(config),
            "name": f"{shape}-{key}",
            "work": str(work.resolve()),
            "format": spec.format,
            "cache": spec.cache,
            "threads": torch.get_num_threads(),
        }

    def __enter__(self) -> PeerWorker:
        version = self._spec.check_installed()
        if self._spec.peer.has_files:
            self._start("prepare")
            self._end()
        note = self._start("serve").get("note")
        self.note = f"{self.name}: {self._spec.peer.distributions[0]} {version}, {note}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def run(self, load: Load) -> Run:
        """Run a load once."""
        return Run(**self._ask(load.model_dump())["run"])

    def _start(self, what: str) -> dict[str, str]:
        """Start a process on the job, and wait until it is ready; gives what it then tells."""
        settings = {"OMP_NUM_THREADS": str(self._job["threads"]), "HF_HUB_OFFLINE": "1"}
        self._work.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = start(
                self._spec.python, WORKER, [what], settings, stdout=subprocess.PIPE, stderr=log
            )
        try:
            return self._ask(self._job)["ready"]
        except BaseException:
            self._end()
            raise

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            reason = why_it_ended(self._process.wait(), self._log)
            raise EngineError(f"{self.name}: {reason}. All that it printed is in {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}. Its trace is in {self._log}")
        return answer

    def _end(self) -> None:
        kill_group(self._process)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # what was not read there is of no use any more
                continue
