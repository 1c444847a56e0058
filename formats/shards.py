"""Tensors into safetensors files of limited size, with the index that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from formats.files import fsync_path, write_bytes
from formats.memory import release_freed_memory
from formats.safetensors_files import INDEX, SINGLE


class ShardWriter:
    """Writes tensors into safetensors files of limited size, in the order they come.

    Args:
        folder: To write into.
        shard_bytes: Most bytes of one file, unless one tensor alone has more; memory held is one
            file.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is on the disk as soon as its file is full."""
        held = sum(other.nbytes for other in self._pending.values())
        if self._pending and held + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._total += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, name the files, and write their index if there are several."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            (self._folder / "0.part").rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            shard = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"{i}.part").rename(self._folder / shard)
            weight_map |= dict.fromkeys(names, shard)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_bytes(self._folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())

    def _flush(self) -> None:
        if self._pending:
            path = self._folder / f"{len(self._shards)}.part"
            save_file(self._pending, path, metadata={"format": "pt"})
            fsync_path(path)
            self._shards.append(list(self._pending))
            self._pending = {}
            release_freed_memory()
