"""Any rank but rank 0: it loads its part of the model, and runs the steps that rank 0 plans.

    python -m inference.parallel.worker TASKS NEWS      (file descriptors of its connections)

It ends when rank 0 does, whose connections close then.

torchrun starts all ranks itself, a process each, with the same command:

    torchrun --nproc-per-node 2 -m ptq predict CHECKPOINT --prompt TEXT --tensor-parallel 2

Rank 0 goes on with the command. The others, where they would load the engine, call `run_rank`: they
get the connections that every rank has with rank 0, and end with it.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NoReturn

import torch
from torch.distributed.rendezvous import rendezvous

from inference.cpu.batch import Batch
from inference.models.adapters import CachedTokens
from inference.parallel.communication import (
    LOADING,
    Failed,
    Heartbeat,
    MakeCache,
    Progress,
    RankSpec,
    Replay,
    RunPlan,
    Task,
    TellFree,
    WarmUp,
)
from inference.parallel.part import RankLoader, join
from inference.parallel.ranks import IDLE, reason_of
from inference.scheduling.blocks import BlockChanges

EVERY = 0.25  # seconds between two heartbeats
WHERE = "ptq/ranks"  # key under which the first rank tells where it listens
STARTED = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")  # what torchrun tells a process it starts


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


def torchrun_place(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Which rank this process is and how many there are; None where torchrun has not started it."""
    if not all(name in environment for name in STARTED):
        return None
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def _store() -> Any:
    store, _, _ = next(iter(rendezvous("env://")))
    return store


class TorchrunStart:
    """Connects ranks that come by themselves; see `inference.parallel.ranks.Start`."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ptq-torchrun-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(self._folder) / "ranks"))
        self._listener.listen()
        self._store = _store()  # held: where the first rank hosts it, it ends with this
        self._store.set(WHERE, self._listener.getsockname())
        self._come: dict[int, tuple[socket.socket, int]] = {}

    def __call__(self, rank: int, tasks: Connection, news: Connection) -> TorchrunRank:
        """Wait for a rank, and give it its ends of the connections."""
        while rank not in self._come:
            end, _ = self._listener.accept()
            number, pid = end.recv(64).split()
            self._come[int(number)] = end, int(pid)
        end, pid = self._come.pop(rank)
        with end:
            socket.send_fds(end, [b"ends"], [tasks.fileno(), news.fileno()])
        tasks.close()
        news.close()
        if not self._come:
            shutil.rmtree(self._folder, ignore_errors=True)
        return TorchrunRank(rank, pid)


class TorchrunRank:
    """A rank that torchrun has started; see `inference.parallel.ranks.Member`.

    Args:
        pid: Of its process.
    """

    def __init__(self, rank: int, pid: int) -> None:
        self.name, self.pid = f"rank {rank} (process {pid})", pid

    def kill(self) -> None:
        """End it now."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def ended(self, seconds: float) -> str | None:
        """How it ended, if it does within so many seconds; torchrun knows the exit code."""
        end = time.monotonic() + seconds
        while True:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return "died"
            if time.monotonic() > end:
                return None
            time.sleep(0.02)


def run_rank(rank: int) -> NoReturn:
    """Be any rank but rank 0 until that closes the connection; ends the process."""
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(_store().get(WHERE).decode())
        end.sendall(f"{rank} {os.getpid()}".encode())
        _, ends, _, _ = socket.recv_fds(end, 64, 2)
    code = Rank(*map(Connection, ends), lost=lambda: os._exit(1)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a library's thread may keep an orderly end from coming


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
