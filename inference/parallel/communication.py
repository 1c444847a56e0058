"""How ranks communicate: collectives within a step, and messages of rank 0 and the others.

`Group` is all that a model's layers know of other ranks: all-reduce (sum, maximum), all-gather, and
gather to rank 0. Its results have the same bits on every rank, and those of a sum do not depend on
how many rows there are: floats are added in the order of ranks, integers in any order.

Rank 0, "the first", has the engine:

    rank 0 -> rank   `RankSpec`; then one of `Task` after another, until the connection ends
    rank -> rank 0   `Heartbeat`s, and `Failed` where it cannot go on

A step of GPUs is the one block of bytes that its arrays are; one of CPUs is the `Batch` itself.
"""

from __future__ import annotations

import copyreg
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from formats.checkpoint.read import Checkpoint
from inference.backend import Backend
from inference.config import EngineConfig
from inference.cpu.batch import Batch
from inference.gpu.sizes import Size, WholeSize
from inference.models.adapters import AdapterParts, CachedTokens
from inference.scheduling.blocks import BlockChanges

DEVICE_WAIT = 14.0  # seconds; kernels that wait for a rank give up before


class Progress:
    """How far a rank has come: a number that grows with each layer that it loads and each
    collective that it takes part in, alike on all ranks.

    Attributes:
        count: The number.
        doing: What it is at, for messages.
        until: When it has waited too long for its device, a time of `time.monotonic`; None where
            it does not wait.
    """

    def __init__(self) -> None:
        self.count, self.doing = 0, "starting"
        self.until: float | None = None

    @contextmanager
    def waiting(self, seconds: float = DEVICE_WAIT) -> Iterator[None]:
        """While its device is waited for, so many seconds at the most."""
        self.until = time.monotonic() + seconds
        try:
            yield
        finally:
            self.until = None


class Group(Protocol):
    """The ranks of an engine, as one of them sees them.

    Attributes:
        rank: Which one it is.
        ranks: How many there are.
        progress: How far it has come.
    """

    rank: int
    ranks: int
    progress: Progress

    def sum(self, part: Tensor) -> Tensor:
        """All-reduce: the sum of all ranks' tensors, fp32 or int32; `part` may be overwritten."""
        ...

    def largest(self, part: Tensor) -> Tensor:
        """All-reduce: the maximum of each element over ranks; `part` may be overwritten."""
        ...

    def smallest(self, number: int) -> int:
        """All-reduce: the minimum of all ranks' numbers. It is a barrier, too."""
        ...

    def side_by_side(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """All-gather: the columns of all ranks, in their order.

        Args:
            part: [T, n], n the size of this rank.
            sizes: Columns of each rank.
        """
        ...

    def on_first(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Gather: `side_by_side` on rank 0 alone; on others `part` itself."""
        ...


class GlooGroup(Group):
    """Ranks on CPUs of one machine; see `Group`.

    Args:
        backend: Gloo's connections between them, a `ProcessGroupGloo`.
    """

    def __init__(self, backend: Any) -> None:
        self._gloo = backend
        self.rank, self.ranks, self.progress = backend.rank(), backend.size(), Progress()

    @override
    def sum(self, part: Tensor) -> Tensor:
        if self.ranks == 2 or not part.is_floating_point():  # any order is the same
            return self._reduced(part, dist.ReduceOp.SUM)
        parts = self._all(part)
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

    @override
    def largest(self, part: Tensor) -> Tensor:
        return self._reduced(part, dist.ReduceOp.MAX)

    @override
    def smallest(self, number: int) -> int:
        return int(self._reduced(torch.tensor([number]), dist.ReduceOp.MIN).item())

    @override
    def side_by_side(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        return cut_parts(self._all(widened(part, sizes)), sizes)

    @override
    def on_first(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        self.progress.count += 1
        mine = widened(part, sizes)
        if self.rank:
            self._gloo.gather([], [mine], dist.GatherOptions()).wait()  # to rank 0
            return part
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._gloo.gather([parts], [mine], dist.GatherOptions()).wait()
        return cut_parts(parts, sizes)

    def _reduced(self, part: Tensor, kind: dist.ReduceOp.RedOpType) -> Tensor:
        self.progress.count += 1
        own, options = part.contiguous(), dist.AllreduceOptions()
        options.reduceOp = kind  # pyright: ignore[reportAttributeAccessIssue]
        self._gloo.allreduce([own], options).wait()
        return own

    def _all(self, part: Tensor) -> list[Tensor]:
        """All ranks' tensors of one shape."""
        self.progress.count += 1
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        self._gloo.allgather([parts], [own]).wait()
        return parts


def widened(part: Tensor, sizes: Sequence[int]) -> Tensor:
    """The columns of a rank, padded with zeros to as many as the widest rank has."""
    more = max(sizes) - part.shape[1]
    return (torch.nn.functional.pad(part, (0, more)) if more else part).contiguous()


def cut_parts(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Parts side by side, without their padding."""
    return torch.cat([part[:, :n] for part, n in zip(parts, sizes, strict=True)], dim=1)


LOADING = "loading its part of the model"


@dataclass(frozen=True)
class RankSpec:
    """What a rank runs.

    Attributes:
        rank: Which one it is.
        ranks: How many there are.
        open: Opens the checkpoint.
        config: The engine's sizes, resolved but for the cache's blocks.
        backend: Makes the backend of a rank's device.
        meeting: A file through which the ranks find each other.
        threads: Of its own, on a CPU.
        loader: Gives the kind of `inference.parallel.part.RankLoader` for a rank's device, by
            the backend of that.
    """

    rank: int
    ranks: int
    open: Callable[[], Checkpoint]
    config: EngineConfig
    backend: Callable[[int], Backend]
    meeting: str
    threads: int
    loader: Callable[[Backend], Any]


@dataclass(frozen=True)
class MakeCache:
    """Allocate the rank's part of a cache of so many blocks, quantized or not."""

    blocks: int
    quantized: bool


@dataclass(frozen=True)
class TellFree:
    """Take part in finding the least memory that a rank has free for its cache."""


@dataclass(frozen=True)
class HoldAdapter:
    """Hold a part of an adapter in a slot; see `inference.parallel.adapters`.

    Attributes:
        parts: The whole adapter.
    """

    slot: int
    parts: AdapterParts


@dataclass(frozen=True)
class RunPlan:
    """Run a step that is planned for a GPU: its size, and its arrays as a block."""

    size: Size | WholeSize
    block: bytes


@dataclass(frozen=True)
class WarmUp:
    """Compile and capture the usual steps; see `inference.gpu.runner.GpuRunner.warm_up`."""

    sequences: int
    tokens: int
    rows: int


@dataclass(frozen=True)
class Replay:
    """Replay the graph of a step of so many decodes, for measurements."""

    sequences: int
    times: int


Task = (
    MakeCache
    | TellFree
    | BlockChanges
    | CachedTokens
    | HoldAdapter
    | Batch
    | RunPlan
    | WarmUp
    | Replay
)


class _Pickler(pickle.Pickler):
    """Copies tensors, which `Connection.send` would share with the other process."""

    dispatch_table = copyreg.dispatch_table | {Tensor: lambda x: (torch.from_numpy, (x.numpy(),))}


def packed(task: Task) -> bytes:
    """A task as `Connection.recv` takes it."""
    buffer = BytesIO()
    _Pickler(buffer).dump(task)
    return buffer.getvalue()


@dataclass(frozen=True)
class Heartbeat:
    """A rank lives: how far it has come, and what it is at."""

    count: int
    doing: str


@dataclass(frozen=True)
class Failed:
    """A rank cannot go on: what it was at, and why."""

    doing: str
    why: str
