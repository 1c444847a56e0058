"""Writing a checkpoint folder: shard by shard, read back, and there at once or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.compressed_tensors import quantization_config
from formats.checkpoint.join import MergedLayers
from formats.checkpoint.kv_scales import LEAF, cache_metadata
from formats.checkpoint.native import CARD, as_stored, card, only_here
from formats.checkpoint.read import SCALE_TABLE, Checkpoint
from formats.errors import CheckpointError
from formats.files import building_directory, fsync_path, sha256_file, write_bytes, writing
from formats.scale_table import ScaleTable
from formats.scheme import LayerScheme, Scheme, has_float_zeros
from formats.stored.folder import (
    ADAPTER_FACTORS,
    INPUT_DIVISOR,
    KV_SCALES,
    MANIFEST,
    OUTPUT_DIVISOR,
    OWN_KEY,
    SINK_SCALES,
    UNMOVABLE,
    OwnPart,
)
from formats.stored.safetensors_files import write_tensors
from formats.stored.shards import ShardWriter
from formats.stored.weights import StoredWeight, weight_tensors
from formats.tokenizer import SETTINGS, native_settings, needs_code

FILES = {  # of tensors in `quant/` that are not of the cache, by the last part of their names
    LEAF: SINK_SCALES,
    INPUT_DIVISOR: ADAPTER_FACTORS,
    OUTPUT_DIVISOR: ADAPTER_FACTORS,
}
HASHING_THREADS = max(4, os.cpu_count() or 1)  # SHA-256 of large buffers runs beside other threads


@dataclass
class _Beside:
    """What a checkpoint has beside its weight files: config.json, tokenizer files and `quant/`.

    Arguments are those of `CheckpointWriter`, and what is set while layers are added:

    Attributes:
        tensors: Those of `quant/`, fp32, by full name, for each file.
    """

    config: dict[str, Any]
    scheme: Scheme
    layers: dict[str, LayerScheme]
    caches: Mapping[str, KVCacheSpec | None]
    ignore: tuple[str, ...]
    shared_head: str | None
    sink_tokens: int
    aux_files: Sequence[Path]
    unmovable: str | None
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def write(self, folder: Path, table: ScaleTable, documents: Mapping[str, bytes]) -> None:
        """Write all of it into the checkpoint's folder, and other documents by their path there."""
        for file in self.aux_files:
            if file.name == SETTINGS and needs_code(file.parent):
                write_bytes(folder / file.name, _json(native_settings(file.parent)))
            else:
                shutil.copyfile(file, folder / file.name)
                fsync_path(folder / file.name)
        how = {"shared_head": self.shared_head, "config": self.config}
        quantization = quantization_config(self.scheme, self.ignore, self.layers, **how)
        config = self.config | ({"quantization_config": quantization} if quantization else {})
        own = OwnPart(
            kv_cache=self.scheme.kv_cache,
            kv_caches=self.caches,
            sink_tokens=self.sink_tokens,
            states=self.scheme.states,
        )
        config |= {OWN_KEY: own.model_dump()}
        everything = {"config.json": _json(config), SCALE_TABLE: table.to_json().encode()}
        shares, quantized = self.shared_head is not None, self.scheme.weights is not None
        zeros = has_float_zeros([self.scheme, *self.layers.values()])
        reason = only_here(self.config, quantized=quantized, shares_head=shares, float_zeros=zeros)
        if reason is not None:
            everything[CARD] = card(reason).encode()
        for name, data in (everything | dict(documents)).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, data)
        if own.any:
            write_tensors(folder / KV_SCALES, self.tensors.get(KV_SCALES, {}), cache_metadata(own))
        if self.sink_tokens:
            write_tensors(folder / SINK_SCALES, self.tensors.get(SINK_SCALES, {}))
        factors = self.tensors.get(ADAPTER_FACTORS, {})
        if factors or self.unmovable is not None:
            reason = None if self.unmovable is None else {UNMOVABLE: self.unmovable}
            write_tensors(folder / ADAPTER_FACTORS, factors, reason)


class CheckpointWriter:
    """Writes one checkpoint; a context manager.

    Memory held is one shard. Leaving the context before `finish`, by an error or otherwise, leaves
    nothing.

    Args:
        config: config.json of the model, without `quantization_config`.
        layers: Schemes of all quantized layers, where they are not the same; see
            `quantization_config`.
        caches: How the caches of attention modules are quantized that have one of their own.
        ignore: Linear layers left alone: full names or `re:` patterns.
        shared_head: Full name of the quantized head, where it is to be the embedding, too.
        sink_tokens: Tokens at the beginning of a sequence that are quantized apart.
        aux_files: Tokenizer and other files to copy.
        unmovable: Why adapters of the original model cannot follow what was done to it; None where
            factors tell.
        force: Whether an existing `out` may be replaced; it stays until the new one is complete.
        shard_bytes: Most bytes of one weight file.

    Raises:
        CheckpointError: `out` exists, the disk is full or refuses, or what was read back differs.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        config: Mapping[str, Any],
        scheme: Scheme,
        layers: Mapping[str, LayerScheme] | None = None,
        caches: Mapping[str, KVCacheSpec | None] | None = None,
        ignore: Sequence[str] = ("lm_head",),
        shared_head: str | None = None,
        sink_tokens: int = 0,
        aux_files: Sequence[Path] = (),
        unmovable: str | None = None,
        force: bool = False,
        shard_bytes: int = 2 << 30,
    ) -> None:
        self.out = Path(out)
        self.scheme = scheme
        self._merged = MergedLayers(config)
        self._beside = _Beside(
            config=dict(config),
            scheme=scheme,
            layers=dict(layers or {}),
            caches=caches or {},
            ignore=self._merged.stored_names(ignore),
            shared_head=shared_head,
            sink_tokens=sink_tokens,
            aux_files=aux_files,
            unmovable=unmovable,
        )
        self._force = force
        self._shard_bytes = shard_bytes
        self._kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._digests: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(HASHING_THREADS)
        self._stack = ExitStack()
        self._folder = Path()
        self._shards = ShardWriter(self._folder, shard_bytes)
        self._finished = False

    def __enter__(self) -> CheckpointWriter:
        self._stack.enter_context(self._pool)
        building = building_directory(self.out, replace=self._force)
        self._folder = self._stack.enter_context(building)
        self._shards = ShardWriter(self._folder, self._shard_bytes, self._pool)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            with suppress(Exception):  # nothing writes any more when the folder is removed
                self._shards.wait()
        if kind is None and not self._finished:
            error = CheckpointError(f"{self.out}: the writer was left before finish()")
            self._stack.__exit__(CheckpointError, error, None)
            raise error
        self._stack.__exit__(kind, error, trace)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor as it is; it is on the disk as soon as its shard is full.

        A part of a layer that the family stores merged waits for the other parts.
        """
        if name in self._kinds:
            raise CheckpointError(f"{name} was added twice")
        if tensor.dtype.is_floating_point and not _is_finite(tensor):
            raise CheckpointError(f"{name} holds NaN or infinity; nothing was written")
        tensor = tensor.detach().contiguous()
        self._kinds[name] = tensor.dtype, tuple(tensor.shape)
        as_it_is = False
        with writing(self.out):
            for stored, whole in self._merged.add(name, tensor):
                laid_out = as_stored(stored, whole, self._beside.config)
                as_it_is = stored == name and laid_out is tensor
                self._shards.add(stored, laid_out)
        if not as_it_is:  # else its file's bytes tell
            self._digests[name] = self._pool.submit(_digest, tensor)

    def add_linear(
        self,
        module: str,
        weight: StoredWeight,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
    ) -> None:
        """Add a quantized linear layer, but for its bias, which is added as it is.

        Args:
            dtype: The type that the weight has in the unquantized model.
            input_scale: fp32 [1] where activations are static, else None.
        """
        scheme = self._beside.layers.get(module, self.scheme)
        for leaf, tensor in weight_tensors(scheme, weight, dtype).items():
            self.add(f"{module}.{leaf}", tensor)
        if input_scale is not None:
            self.add(f"{module}.input_scale", input_scale.float().reshape(1))

    def set_kv_scales(self, attention: str, k: Tensor, v: Tensor) -> None:
        """Set the cache's scales of an attention module: shapes as the scheme says."""
        self.set_beside({f"{attention}.k_scale": k, f"{attention}.v_scale": v})

    def set_schemes(self, layers: Mapping[str, LayerScheme]) -> None:
        """Change how some quantized layers are stored, by their full names."""
        self._beside.layers |= layers

    def set_beside(self, tensors: Mapping[str, Tensor]) -> None:
        """Set tensors of `quant/` by full name: of the cache, such as `A.k_offset`, as the scheme
        says, `X.input_sink_scale` [1] of layers with static inputs where there are sink tokens, and
        `X.input_divisor` [K] and `X.output_divisor` [N] for adapters (`formats.adapters.factors`).
        """
        for name, tensor in tensors.items():
            file = FILES.get(name.rpartition(".")[2], KV_SCALES)
            self._beside.tensors.setdefault(file, {})[name] = tensor.float().contiguous()

    def finish(self, scale_table: ScaleTable, documents: Mapping[str, bytes] | None = None) -> Path:
        """Write what is left, read everything back, and put the folder in its place.

        Args:
            scale_table: A row for every scale that was added.
            documents: More files, by their path in the folder.

        Returns:
            The folder.

        Raises:
            CheckpointError: a check failed or the disk refused; nothing is left.
        """
        with writing(self.out):
            for stored, tensor in self._merged.rest():
                self._shards.add(stored, tensor)
            digests = self._shards.finish()
            self._beside.write(self._folder, scale_table, documents or {})
            self._write_manifest(digests)
        written = Checkpoint.open(self._folder)
        self._check_tensors(written)
        if written.scheme != self.scheme:
            raise CheckpointError(
                f"{self.out}: tensors were added for {written.scheme.wac}, the scheme is "
                f"{self.scheme.wac}; nothing was kept"
            )
        if written.caches.kv_caches != self._beside.caches:
            raise CheckpointError(
                f"{self.out}: the caches of single blocks were read back as others; nothing was "
                "kept"
            )
        for module, scheme in self._beside.layers.items():
            if written.scheme_of(module) != scheme:
                raise CheckpointError(
                    f"{module} was read back as {written.scheme_of(module).text}; its scheme is "
                    f"{scheme.text}. Nothing was kept"
                )
        self._finished = True
        self._stack.close()
        return self.out

    def _check_tensors(self, written: Checkpoint) -> None:
        """Compare what is there with what was added; the files' bytes have been compared."""
        for name, (dtype, shape) in self._kinds.items():
            kinds = {dtype, torch.float32} if name in self._digests else {dtype}  # of joined parts
            if written.dtype(name) not in kinds or written.shape(name) != shape:
                raise CheckpointError(f"{name} was read back as another tensor; nothing was kept")

        def as_added(name: str) -> str:
            return _digest(written.tensor(name).to(self._kinds[name][0]))

        found = self._pool.map(as_added, self._digests)
        for (name, digest), read_back in zip(self._digests.items(), found, strict=True):
            if read_back != digest.result():
                raise CheckpointError(f"{name} was read back with other bits; check the disk")

    def _write_manifest(self, known: Mapping[str, str]) -> None:
        """List all files with their SHA-256, those of weight files known."""

        def digest_of(path: Path) -> str:
            return known.get(path.name) or sha256_file(path)

        paths = [path for path in sorted(self._folder.rglob("*")) if path.is_file()]
        files = {
            path.relative_to(self._folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": digest,
            }
            for path, digest in zip(paths, self._pool.map(digest_of, paths), strict=True)
        }
        write_bytes(self._folder / MANIFEST, _json({"files": files}))


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # for which torch has no isfinite: no infinity, two NaN
        return not bool((tensor.view(torch.uint8).bitwise_and(0x7F) == 0x7F).any())
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    return bool(torch.isfinite(wide).all())


def _digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()  # pyright: ignore[reportArgumentType]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
