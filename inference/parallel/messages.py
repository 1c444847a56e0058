"""Messages between rank 0, "the first", which has the engine, and the other ranks.

    rank 0 -> rank   `RankSpec`; then one of `Task` after another, until the connection ends
    rank -> rank 0   `Heartbeat`s, and `Failed` where it cannot go on

A step of GPUs is the one block of bytes that its arrays are; one of CPUs is the `Batch` itself.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from inference.backend import Backend
from inference.config import EngineConfig
from inference.cpu.batch import Batch
from inference.gpu.sizes import Size, WholeSize
from inference.models.adapters import AdapterParts, CachedTokens
from inference.scheduling.blocks import BlockChanges

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
        loader: Gives the kind of `inference.parallel.loader.RankLoader` for a rank's device, by
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
