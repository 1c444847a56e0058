"""A runtime of others that runs loads, as our engine does in `inference.bench.engine_process`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from formats.errors import EngineError
from inference.bench.load import Load, Run
from inference.bench.peers.process import PeerProcess
from inference.bench.peers.runtimes import RuntimeChoice

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
