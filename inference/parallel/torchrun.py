"""Ranks that torchrun has started, a process each, all with the same command.

    torchrun --nproc-per-node 2 -m ptq predict CHECKPOINT --prompt TEXT --tensor-parallel 2

Rank 0 goes on with the command. The others, where they would load the engine, call `run_rank`: they
get the connections that every rank has with rank 0, and end with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.rendezvous import rendezvous

from inference.parallel.worker import Rank

WHERE = "ptq/ranks"  # key under which the first rank tells where it listens
STARTED = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")  # what torchrun tells a process it starts


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
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
