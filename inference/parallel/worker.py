"""Any rank but rank 0: it loads its part of the model, and runs the steps that rank 0 plans.

    python -m inference.parallel.worker TASKS NEWS      (file descriptors of its connections)

It ends when rank 0 does, whose connections close then.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any

import torch

from inference.cpu.batch import Batch
from inference.models.adapters import CachedTokens
from inference.parallel.group import Progress
from inference.parallel.loader import RankLoader, join
from inference.parallel.messages import (
    LOADING,
    Failed,
    Heartbeat,
    MakeCache,
    RankSpec,
    Replay,
    RunPlan,
    Task,
    TellFree,
    WarmUp,
)
from inference.parallel.ranks import IDLE, reason_of
from inference.scheduling.blocks import BlockChanges

EVERY = 0.25  # seconds between two heartbeats


class News:
    """What a rank tells rank 0 of itself: a thread sends heartbeats with its progress.

    Args:
        connection: To the first rank.
        lost: Called where the first rank is gone.
    """

    def __init__(self, connection: Connection, lost: Callable[[], None]) -> None:
        self._connection, self._lost, self._lock = connection, lost, Lock()
        self.progress, self._over = Progress(), False
        Thread(target=self._beat, name="news", daemon=True).start()

    def fail(self, error: Exception) -> None:
        """Tell why the rank cannot go on."""
        self._tell(Failed(self.progress.doing, reason_of(error)))

    def end(self) -> None:
        """Tell no more."""
        self._over = True

    def _beat(self) -> None:
        try:
            while not self._over:
                self._tell(Heartbeat(self.progress.count, self.progress.doing))
                if self._connection.poll(EVERY):
                    self._connection.recv()  # raises: rank 0 sends nothing, it is gone
        except (EOFError, OSError):
            if not self._over:
                self._lost()

    def _tell(self, news: Heartbeat | Failed) -> None:
        with self._lock:
            self._connection.send(news)


class Rank:
    """A rank, from its start to its end.

    Args:
        tasks: Gives its tasks.
        news: Takes its heartbeats and its failure.
        lost: Called where the first rank is gone.
    """

    def __init__(self, tasks: Connection, news: Connection, lost: Callable[[], None]) -> None:
        self._tasks, self._news, self._steps = tasks, News(news, lost), 0

    def run(self) -> int:
        """Do what rank 0 says until it closes the connection; gives the exit code."""
        try:
            self._news.progress.doing = LOADING
            self._load(self._tasks.recv())
            gc.collect()
            gc.freeze()  # what is loaded stays: a collection that looks at it takes 200 ms
            while True:
                self._news.progress.doing = IDLE
                self._do(self._tasks.recv())
        except (EOFError, ConnectionError):
            return 0
        except Exception as error:  # the rank's boundary: the first rank tells it
            self._news.fail(error)
            return 1
        finally:
            self._news.end()

    def _load(self, spec: RankSpec) -> None:
        torch.set_num_threads(spec.threads)
        host = join(spec, self._news.progress)
        inner = spec.backend(spec.rank)
        checkpoint = spec.open()
        self._loader: RankLoader = spec.loader(inner)(spec, checkpoint, inner, host)
        self._pools: list[Any] = []
        self._loader.load()

    def _do(self, task: Task) -> None:
        progress, loader = self._news.progress, self._loader
        if isinstance(task, BlockChanges):
            loader.inner.change_blocks(self._pools, task)
        elif isinstance(task, CachedTokens):
            loader.inner.write_kv(self._pools, loader.cut_tokens(task))
        elif isinstance(task, TellFree):
            loader.free_bytes()
        elif isinstance(task, MakeCache):
            progress.doing = f"allocating a cache of {task.blocks} blocks"
            shape = loader.cache_shape(blocks=task.blocks, quantized=task.quantized)
            self._pools = loader.inner.cache(shape)
            self._run = loader.executor(self._pools)
        else:
            self._steps += isinstance(task, Batch | RunPlan)
            kind = {WarmUp: "warming up", Replay: "replaying a step"}
            progress.doing = kind.get(type(task), f"running step {self._steps}")
            self._run(task)


def main() -> None:
    """Run the rank of the connections whose file descriptors the command line gives."""
    logging.getLogger("ptq").setLevel(logging.ERROR)  # the first rank says the same
    tasks, news = (Connection(int(text)) for text in sys.argv[1:3])
    code = Rank(tasks, news, lambda: os._exit(1)).run()
    sys.stderr.flush()
    os._exit(code)  # a library's thread may keep an orderly end from coming


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
