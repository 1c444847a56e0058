"""Tensors into safetensors files of limited size, with the index that transformers reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from torch import Tensor

from formats.errors import CheckpointError
from formats.files import sha256_file, write_bytes
from formats.memory import release_freed_memory
from formats.stored.safetensors_files import INDEX, SINGLE, write_tensors


class ShardWriter:
    """Writes tensors into safetensors files of limited size, in the order they come.

    Args:
        shard_bytes: Most bytes of one file, unless one tensor alone has more; memory held is one
            file, and one more where a pool writes it.
        pool: Writes full files while the next one fills, and reads them back; `wait` before it or
            the folder goes. Without one nothing is read back.
    """

    def __init__(self, folder: Path, shard_bytes: int, pool: Executor | None = None) -> None:
        self._folder = folder
        self._pool = pool
        self._written: Future[str] | None = None
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0
        self._digests: list[Callable[[], str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is on the disk as soon as its file is full."""
        held = sum(other.nbytes for other in self._pending.values())
        if self._pending and held + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._total += tensor.nbytes

    def finish(self) -> dict[str, str]:
        """Write what is left, name the files, and write their index if there are several.

        Returns:
            The SHA-256 of each weight file by its name.

        Raises:
            CheckpointError: a file was read back with other bits than were written.
        """
        self._flush()
        self.wait()
        digests, count = [digest() for digest in self._digests], len(self._shards)
        if count == 1:
            (self._folder / "0.part").rename(self._folder / SINGLE)
            return {SINGLE: digests[0]}
        weight_map: dict[str, str] = {}
        shards = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, (shard, names) in enumerate(zip(shards, self._shards, strict=True)):
            (self._folder / f"{i}.part").rename(self._folder / shard)
            weight_map |= dict.fromkeys(names, shard)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_bytes(self._folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        return dict(zip(shards, digests, strict=True))

    def wait(self) -> None:
        """Wait until full files are on the disk; what went wrong with them is raised here."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _flush(self) -> None:
        self.wait()
        if not self._pending:
            return
        path, tensors = self._folder / f"{len(self._shards)}.part", self._pending
        self._shards.append(list(tensors))
        self._pending = {}
        if self._pool is None:
            digest = _save(path, tensors)
            self._digests.append(lambda: digest)
        else:
            self._written = self._pool.submit(_save, path, tensors)
            self._digests.append(self._pool.submit(_read_back, path, self._written).result)


def _save(path: Path, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    write_tensors(path, tensors, {"format": "pt"}, digest.update)
    tensors.clear()
    release_freed_memory()
    return digest.hexdigest()


def _read_back(path: Path, written: Future[str]) -> str:
    digest = written.result()
    if sha256_file(path) != digest:
        raise CheckpointError("a weight file was read back with other bits; check the disk")
    return digest
