"""Ranks in threads of the test's process: they do all that processes do but start and end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

from formats.checkpoint.read import Checkpoint
from formats.tokenizer import load_tokenizer
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.parallel.backend import FirstBackend
from inference.parallel.worker import Rank


class RankThread:
    """A rank in a thread; see `inference.parallel.ranks.Member`."""

    def __init__(self, rank, tasks, news):
        self.name, self._ends = f"rank {rank} (a thread)", (tasks, news)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        Rank(*self._ends, lost=lambda: None).run()
        for end in self._ends:
            end.close()

    def kill(self):
        """Threads cannot be killed; what they wait for ends when the connections do."""

    def ended(self, seconds):
        self._thread.join(seconds)
        return None if self._thread.is_alive() else "ended"


def cpu_backend(rank) -> CpuBackend:
    """Of any rank."""
    return CpuBackend()


def thread_engine(path, ranks: int, **sizes) -> Engine:
    """An engine on so many ranks, all in this process."""
    checkpoint = Checkpoint.open(path)
    config = EngineConfig.model_validate({"tensor_parallel": ranks, "max_model_len": 128} | sizes)
    backend = CpuBackend()
    if ranks > 1:
        backend = FirstBackend(
            backend, partial(Checkpoint.open, path), config, cpu_backend, start=RankThread
        )
    return Engine(checkpoint, load_tokenizer(checkpoint.path), config, backend)


@contextmanager
def engine_on(
    path, ranks: int, adapters: Mapping[str, Path] | None = None, **sizes
) -> Iterator[Engine]:
    """The same with adapters, until the end of the block."""
    engine = thread_engine(path, ranks, **sizes)
    try:
        for name, folder in (adapters or {}).items():
            engine.load_adapter(name, folder)
        yield engine
    finally:
        engine.close()
