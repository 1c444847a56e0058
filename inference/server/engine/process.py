"""The process that owns the engine: the HTTP process's child, and where it runs.

It imports nothing of HTTP, leaves the terminal's signals to its parent, and ends with it.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from formats.command import end_with
from formats.errors import PTQError, RequestError
from formats.namespace import later
from inference.config import EngineConfig
from inference.server.engine_client import EngineClient
from inference.server.messages import Channel, Dead, HttpGone, ToEngine, Unframer, frame

with later():
    import torch

    from inference import engine as engines
    from inference.server.engine import loop as loops

BUFFER = 2**20  # bytes that the socket holds for a reader, where the system allows so many
LAST_WORDS = 2.0  # seconds in which the parent has to take why the engine died


@dataclass(frozen=True)
class Place:
    """Where an engine runs.

    Attributes:
        device: `cpu` or `cuda:N`; `cuda` where there is one engine, which takes the first.
        cores: Numbers of the cores that it may use; None for all.
        gpus: The GPUs that it sees, as CUDA_VISIBLE_DEVICES has them; None for all.
    """

    device: str
    cores: tuple[int, ...] | None = None
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True)
class EngineSource:
    """What engine a process runs."""

    folder: Path
    config: EngineConfig
    place: Place = Place("cpu")
    adapters: Mapping[str, Path] = field(default_factory=dict)


class EngineProcess(asyncio.Protocol):
    """An engine in a child of this process; the two know each other by a socket without a name."""

    def __init__(self, source: EngineSource) -> None:
        self._end, theirs = socket.socketpair()
        for end in (self._end, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        context = multiprocessing.get_context("spawn")  # forking a process with threads hangs
        self._process = context.Process(target=_main, args=(theirs, source, os.getpid()))
        self._process.start()
        theirs.close()
        self._unframer, self._expects_the_end = Unframer(), False
        self._transport: asyncio.WriteTransport  # from `connect` on, as the client
        self._client: EngineClient

    async def connect(self, client: EngineClient) -> None:
        """Give a client what the engine says, from now on; and word of its end."""
        loop = asyncio.get_running_loop()
        pipes = self._end.family == getattr(socket, "AF_UNIX", None)
        connect = loop.create_unix_connection if pipes else loop.create_connection
        self._client = client
        self._transport, _ = await connect(lambda: self, sock=self._end)

    def data_received(self, data: bytes) -> None:
        """Give the client what the engine says."""
        for message in self._unframer.feed(data):
            self._client.take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give it word of the engine's end."""
        if not (self._expects_the_end or self._client.state == "dead"):
            self._client.lose(self._why())

    def send(self, message: ToEngine) -> None:
        """Send a message without waiting; nothing happens where the engine is gone."""
        if not self._transport.is_closing():
            self._transport.write(frame(message))

    def kill(self) -> None:
        """End the child at once, if it has not ended."""
        self._process.kill()

    def disconnect(self) -> None:
        """Send what is on its way and close the socket, which ends the child."""
        self._expects_the_end = True
        self._transport.close()

    def close(self) -> None:
        """Close the socket, which ends the child; `disconnect` first sends what is on its way."""
        self._end.close()

    def end(self, seconds: float) -> None:
        """Wait for the child to end, and kill it after so many seconds."""
        self.close()
        self._process.join(seconds)
        self._process.kill()
        self._process.join()

    def _why(self) -> Dead:
        """Why it is gone, where it has not said so itself."""
        self._process.join(LAST_WORDS)
        code = self._process.exitcode
        ending = "closed its socket" if code is None else f"died with exit code {code}"
        memory = ". If nobody killed it (-9), memory ran out" if code == -signal.SIGKILL else ""
        return Dead(f"the engine process {ending}{memory}")


def _main(end: socket.socket, source: EngineSource, parent: int) -> None:
    """Load the engine and answer messages until the parent has had enough, or is gone."""
    for of_the_group in (signal.SIGINT, signal.SIGTERM):
        signal.signal(of_the_group, signal.SIG_IGN)  # the parent ends us when it has drained
    end_with(parent)
    channel = Channel(end)
    code, last = 0, None
    try:
        _serve(channel, source)
    except HttpGone:
        pass
    except PTQError as error:
        code, last = 2, Dead(str(error))
    except Exception as error:  # the engine's boundary
        traceback.print_exc()
        code, last = 1, Dead(f"{type(error).__name__}: {error}")
    channel.close(last, LAST_WORDS)
    sys.stderr.flush()
    os._exit(code)  # a GPU in error, or a library's thread, may keep an orderly end from coming


def _serve(channel: Channel, source: EngineSource) -> None:
    place = source.place
    if place.cores is not None:
        if hasattr(os, "sched_setaffinity"):  # where the system lets a process choose
            os.sched_setaffinity(0, place.cores)
        torch.set_num_threads(min(torch.get_num_threads(), len(place.cores)))
    if place.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)  # before CUDA starts
    engine = engines.Engine.from_pretrained(
        source.folder, config=source.config, device=place.device, adapters=source.adapters
    )
    engine.warm_up()
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection looks at it again
    loops.EngineLoop(engine, channel).run()


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def places(
    device: str, engines: int, cores: Sequence[int], ranks: int = 1, visible: str | None = None
) -> list[Place]:
    """A place for each engine.

    Args:
        device: `cpu`, whose cores are divided; `cuda` or `cuda:K`: GPUs from the first or from
            number K on, one for each rank of an engine.
        engines: How many.
        cores: Numbers of the CPU's cores; neighbours stay together, since they share caches.
        ranks: Processes of an engine, each on a GPU of its own.
        visible: What CUDA_VISIBLE_DEVICES says, if anything.

    Raises:
        RequestError: there are fewer cores than engines, or fewer GPUs than their ranks.
    """
    kind, _, number = device.partition(":")
    if engines == 1:
        return [Place(device)]
    if kind != "cpu" and ranks == 1:
        return [Place(f"{kind}:{int(number or 0) + i}") for i in range(engines)]
    if kind != "cpu":  # each sees the GPUs of its own ranks alone
        first = int(number or 0)
        last = first + engines * ranks
        names = visible.split(",") if visible else list(map(str, range(last)))
        if len(names) < last:
            raise RequestError(
                f"--data-parallel {engines} --tensor-parallel {ranks}: that takes {engines * ranks}"
                f" GPUs from number {first} on, and CUDA_VISIBLE_DEVICES names {len(names)}"
            )
        starts = range(first, last, ranks)
        return [Place(kind, gpus=tuple(names[start : start + ranks])) for start in starts]
    if engines > len(cores):
        raise RequestError(
            f"--data-parallel {engines}: on a CPU each engine needs a core, and this process may "
            f"use {len(cores)}; lower it"
        )
    ends = [len(cores) * i // engines for i in range(engines + 1)]
    return [Place(device, tuple(cores[start:end])) for start, end in pairwise(ends)]
