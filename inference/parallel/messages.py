"""Messages between rank 0, "the first", which has the engine, and the other ranks.

    rank 0 -> rank   `RankSpec`; then one of `Task` after another, until the connection ends
    rank -> rank 0   `Heartbeat`s, and `Failed` where it cannot go on

A step of GPUs is the one block of bytes that its arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from formats.checkpoint.read import Checkpoint
from inference.backend import Backend
from inference.config import EngineConfig
from inference.cpu.batch import Batch
from inference.gpu.sizes import Size, WholeSize
from inference.models.adapters import AdaptedLayer, AdapterPart, AdapterParts, CachedTokens
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
        side: What a rank does in its own way on the device of a backend: a
            `inference.parallel.loader.DeviceSide`.
    """

    rank: int
    ranks: int
    open: Callable[[], Checkpoint]
    config: EngineConfig
    backend: Callable[[int], Backend]
    meeting: str
    threads: int
    side: Callable[[Backend], Any]


@dataclass(frozen=True)
class MakeCache:
    """Allocate the rank's part of a cache of so many blocks, quantized or not."""

    blocks: int
    quantized: bool


@dataclass(frozen=True)
class TellFree:
    """Take part in finding the least memory that a rank has free for its cache."""


@dataclass(frozen=True)
class WriteKV:
    """Put K and V that no step computes into the cache; see `CachedTokens`.

    Attributes:
        keys: An array, and `values` another: tensors would be shared and not sent.
    """

    keys: Any
    values: Any
    start: int
    slots: Sequence[int]

    @classmethod
    def of(cls, tokens: CachedTokens) -> Self:
        """Of what the first rank has, for all heads."""
        return cls(tokens.keys.numpy(), tokens.values.numpy(), tokens.start, tokens.slots)

    @property
    def tokens(self) -> CachedTokens:
        """What the first rank has, for all heads."""
        keys, values = torch.from_numpy(self.keys), torch.from_numpy(self.values)
        return CachedTokens(keys, values, self.start, self.slots)


@dataclass(frozen=True)
class HoldAdapter:
    """Hold a part of an adapter in a slot; see `inference.parallel.adapters`.

    Attributes:
        arrays: The whole adapter by block and layer: index, A and B of each part.
    """

    slot: int
    arrays: Mapping[tuple[int, AdaptedLayer], Sequence[tuple[int, Any, Any]]]

    @classmethod
    def of(cls, slot: int, parts: AdapterParts) -> Self:
        """Of what the first rank has read; arrays, as tensors would be shared and not sent."""
        arrays = {
            key: [(part.index, part.a.numpy(), part.b.numpy()) for part in own]
            for key, own in parts.items()
        }
        return cls(slot, arrays)

    @property
    def parts(self) -> AdapterParts:
        """What the first rank has read."""
        tensor = torch.from_numpy
        return {
            key: [AdapterPart(index, tensor(a), tensor(b)) for index, a, b in own]
            for key, own in self.arrays.items()
        }


@dataclass(frozen=True)
class RunStep:
    """Run the tokens of a step.

    Attributes:
        arrays: Those of a `Batch`; they are sent, where tensors would be shared.
    """

    arrays: Mapping[str, Any]

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Of what the first rank has planned."""
        return cls({name: own.numpy() for name, own in vars(batch).items() if own is not None})

    @property
    def batch(self) -> Batch:
        """What the first rank has planned."""
        tensors: Any = {name: torch.from_numpy(own) for name, own in self.arrays.items()}
        return Batch(**tensors)


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
    | WriteKV
    | HoldAdapter
    | RunStep
    | RunPlan
    | WarmUp
    | Replay
)


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
