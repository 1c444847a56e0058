"""An engine in a process of its own, so that its memory is its own too."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import TracebackType

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError, PTQError
from inference.backend import choose_backend
from inference.bench.load import Load, Run, run_once
from inference.bench.oracle import TOKEN, Oracle, chance_of
from inference.bench.random_model import RandomCheckpoint, random_tokenizer
from inference.config import EngineConfig
from inference.engine import Engine
from inference.parallel.backend import choose_ranks


@dataclass(frozen=True)
class EngineSource:
    """What engine a process runs.

    Attributes:
        path: Folder of its checkpoint, or what a random model is called.
        config: Its sizes.
        quantized_kv: Whether its cache is quantized as the checkpoint says.
        device: Where it runs.
        random: Shape, scheme and whether the head is quantized, of a model of random weights that
            is made on the device instead of read; or None.
        fake: Tokens a step and drafts of each request that are to give them (None: as many as
            pay); None: none are faked.
        adapters: Folders of adapters, by name; requests take turns with them.
    """

    path: str
    config: EngineConfig
    quantized_kv: bool = True
    device: str = "cpu"
    random: tuple[str, str, bool] | None = None
    fake: tuple[float, int | None] | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint, or make the random one."""
        if self.random is None:
            return Checkpoint.open(self.path)
        shape, scheme, head = self.random
        return RandomCheckpoint(shape, scheme, self.device, quantize_head=head)

    def load(self) -> Engine:
        """Load it, and its adapters."""
        engine = self._load()
        for name, folder in self.adapters.items():
            engine.load_adapter(name, folder)
        return engine

    def _load(self) -> Engine:
        config, device = self.config, self.device
        if self.random is None:
            return Engine.from_pretrained(
                self.path, config=config, device=device, quantized_kv=self.quantized_kv
            )
        checkpoint = self.checkpoint()
        tokenizer = random_tokenizer(checkpoint.config["vocab_size"])
        backend = choose_ranks(choose_backend(device, checkpoint), self.checkpoint, config)
        return Engine(checkpoint, tokenizer, config, backend, quantized_kv=self.quantized_kv)


class EngineProcess:
    """Runs loads on an engine in a process of its own; a context manager."""

    def __init__(self, source: EngineSource) -> None:
        """Start loading a checkpoint; the first run waits for it."""
        context = multiprocessing.get_context("spawn")  # forking a process with threads hangs
        self.path = source.path
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, source), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()

    def run(self, load: Load) -> Run:
        """`run_once` over there; errors as there, and of loading the checkpoint."""
        try:
            self._pipe.send(load)
            reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise EngineError(
                f"{self.path}: the process that ran it died with exit code "
                f"{self._process.exitcode}. If it was killed (-9), memory ran out: lower the batch"
            ) from error
        if isinstance(reply, PTQError):
            raise reply
        return reply


def end_with_parent() -> None:
    """End this process of `multiprocessing` when its parent ends, whatever it is at."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _serve(pipe: Connection, source: EngineSource) -> None:
    """Answer loads until the parent ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    end_with_parent()
    try:
        engine = source.load()
        if source.fake is not None:
            engine.speculate_by(Oracle(TOKEN, chance_of(*source.fake)), source.fake[1])
        while True:
            pipe.send(run_once(engine, pipe.recv()))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except PTQError as error:
        pipe.send(error)
