"""Reading a checkpoint folder: float, or quantized in the layout of compressed-tensors.

    config.json                    with `quantization_config` where weights are quantized
    model*.safetensors (+ index)   a layer's weight as `formats.stored.weights` says,
    X.input_scale [1];
                                   merged layers and experts as `formats.checkpoint.split` says
    tokenizer and generation files
    quant/kv_scales.safetensors    A.k_scale and A.v_scale of each attention module A, fp32
    quant/sink_scales.safetensors  X.input_sink_scale [1] (`formats.checkpoint.kv_scales`)
    quant/adapter_factors.safetensors  what smoothing divided by (`formats.adapters.factors`)
    quant/scale_table.json         every scale and its origin
    quant/manifest.json            size and SHA-256 of every other file

`quant/` is ours and optional: a folder written by other software has none, and may have the cache's
scales among its tensors (`formats.checkpoint.kv_scales`). Folders of GPTQ, AWQ, AutoRound and FP8
blocks are seen as such a folder (`formats.checkpoint.contents`). Nothing is guessed: what is
missing, extra, of another shape, not finite or not positive is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.compressed_tensors import find_scheme
from formats.checkpoint.contents import Contents, check_quantized, read_contents, same_names
from formats.checkpoint.join import MergedLayers
from formats.checkpoint.kv_scales import read_cache, read_sinks
from formats.checkpoint.native import only_here
from formats.checkpoint.targets import is_ignored
from formats.errors import CheckpointError
from formats.families.registry import BLOCKS, predicting_layer, uncounted_blocks
from formats.files import find_file
from formats.foreign.folder import named
from formats.hub import locate_folder
from formats.modeling.layers import embedding_name, head_name
from formats.pack import unpack_powers
from formats.scale_table import ScaleTable
from formats.scheme import LayerScheme, Scheme, has_float_zeros
from formats.stored.folder import MANIFEST, auxiliary_files, check_manifest, check_own_cache
from formats.stored.safetensors_files import NamedTensors, TensorFile, read_tensor, read_tensors
from formats.stored.weights import StoredWeight, expect, join_weights, read_weights

SCALE_TABLE = "quant/scale_table.json"
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
log = logging.getLogger("ptq.formats")


class Checkpoint(NamedTensors):
    """A checked, lazily read checkpoint folder; make one with `Checkpoint.open`.

    Attributes:
        config: config.json without its `quantization_config`.
        auxiliary_files: Tokenizer, generation and licence files: what a checkpoint made of this one
            takes.
        ignore: Linear layers that the quantization left alone, as `quantization_config` says.
        scheme: What is quantized. Single layers may have a scheme of their own: `scheme_of` tells;
            this is that of the first group of `quantization_config`.
        quantized_modules: Full names of the quantized linear layers, sorted.
        kv_scales: Static (K, V) scales, fp32 [Hkv] (of K [Hkv, D] where it is scaled by channel),
            of each attention module by its full name.
        kv_offsets: What is subtracted from K where keys are centred, fp32 [Hkv, D], likewise.
        query_moments: Second moments of queries where keys are compensated, fp32 [Hkv, D, D],
            likewise.
        caches: How the cache of each is quantized.
        sinks: The tokens that are quantized apart, and the scales of their rows.
        scale_table: Origin of each scale, or None for a foreign or float checkpoint.
    """

    def __init__(self, path: Path, contents: Contents, quantized_kv: bool = True) -> None:
        self.path = path
        self.config, self.ignore = contents.config, contents.ignore
        self.auxiliary_files = auxiliary_files(path)
        self._files, self._groups, self._foreign = contents.files, contents.groups, contents.foreign
        self._merged = MergedLayers(self.config)
        self._cache = read_cache(path, self.config, contents.cache, self._files)
        self.kv_scales = self._cache.by_attention
        main = self._groups[0][1] if self._groups else LayerScheme()
        self.kv_offsets, self.caches = self._cache.offsets, self._cache.schemes
        self.query_moments = self._cache.moments
        check_own_cache(path, contents.own, self.caches, needed=quantized_kv)
        self.scheme = Scheme(
            weights=main.weights,
            activations=main.activations,
            kv_cache=self.caches.kv_cache,
            states=contents.own and contents.own.states,
        )
        self.quantized_modules = self.modules_stored_in(QUANTIZED)
        static = [name for name in self.quantized_modules if f"{name}.input_scale" in self._files]
        self.sinks = read_sinks(path, contents.own, static)
        table = find_file(path, SCALE_TABLE)
        self.scale_table = table and ScaleTable.from_json(table.read_bytes())

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        verify: bool = False,
        quantized_kv: bool = True,
        revision: str | None = None,
        to_run: bool = True,
    ) -> Self:
        """Open a folder and check it.

        Args:
            path: The folder, or a model's name (`formats.hub`).
            verify: Also compare every file's SHA-256 with the manifest. A folder that was written
                here must have one then; one of other software has none.
            quantized_kv: Whether the scales of a quantized cache are needed, where config.json says
                that they belong to the checkpoint.
            revision: Branch, tag or commit of a model on the hub.
            to_run: Refuse a layout of other software that has to be converted before it is run.

        Raises:
            CheckpointError: something is missing, extra, damaged or not run here; it is named.
        """
        path = locate_folder(path, revision)
        listed = check_manifest(path, verify)
        contents = read_contents(path, to_run=to_run)
        if verify and contents.own is not None and not listed:
            raise CheckpointError(
                f"{path}: {MANIFEST} is missing, without which nothing can be verified. Copy the "
                "checkpoint again with its folder quant/, or open it without verifying it"
            )
        if more := uncounted_blocks(contents.config, contents.files):
            _warn_of_blocks(path, contents.config[BLOCKS], len(more))
            files = {n: file for n, file in contents.files.items() if not n.startswith(more)}
            contents = replace(contents, files=files)
        checkpoint = cls(path, contents, quantized_kv)
        if not contents.foreign:  # what its own layout asks for has been checked
            check_quantized(checkpoint, contents.files)
        if checkpoint.scale_table is not None:
            checkpoint._check_scale_table(checkpoint.scale_table)
        return checkpoint

    def kv_scheme_of(self, attention: str) -> KVCacheSpec | None:
        """How the cache of an attention module, by its full name, is quantized; None for not."""
        return self.caches.of(attention)

    def weight(self, module: str) -> StoredWeight:
        """The quantized weight of a linear layer, checked."""
        return self.weights([module])

    def weights(self, modules: Sequence[str], device: torch.device | str = "cpu") -> StoredWeight:
        """The quantized weights of linear layers of one scheme and as many inputs, read as one.

        Args:
            device: Where they go, and where packed integers are unpacked.
        """
        foreign = [self._foreign[module] for module in modules if module in self._foreign]
        if foreign:
            return join_weights([layer.weight(device) for layer in foreign])
        shapes = [self.weight_shape(module) for module in modules]
        with named(modules[0]):
            return read_weights(
                self.scheme_of(modules[0]),
                shapes,
                lambda leaf: self.tensors([f"{module}.{leaf}" for module in modules]).to(device),
            )

    def reorders_inputs(self, module: str) -> bool:
        """Whether a layer's columns are in another order than its inputs (GPTQ's act-order)."""
        own = self._foreign.get(module)
        return own is not None and own.weight().order is not None

    @cached_property
    def predicting_layers(self) -> tuple[str, ...]:
        """Full names of the layers that predict further tokens; config.json may tell of more."""
        found = (predicting_layer(self.config, name) for name in self._files)
        return tuple(sorted({layer for layer in found if layer is not None}))

    @cached_property
    def shares_head(self) -> bool:
        """Whether the quantized head is the embedding, too, which has no tensor of its own then."""
        if self.config.get("tie_word_embeddings") is False or not self.quantized_modules:
            return False
        head, embedding = head_name(self.config), embedding_name(self.config)
        return head in self.quantized_modules and f"{embedding}.weight" not in self._files

    @property
    def only_here(self) -> str | None:
        """Why no other software opens it, and what to set for one that others do; None for others.

        A folder in another tool's layout is one that the tool opens.
        """
        quantized = self.scheme.weights is not None and not self._foreign
        return only_here(
            self.config,
            quantized=quantized,
            shares_head=self.shares_head,
            float_zeros=has_float_zeros(self._schemes.values()),
        )

    def scheme_of(self, module: str) -> LayerScheme:
        """How a linear layer's weight and input are quantized; of nothing where they are not."""
        return self._schemes.get(module) or LayerScheme()

    @cached_property
    def _schemes(self) -> dict[str, LayerScheme]:
        found = {name: self.scheme_in_config(name) for name in self.quantized_modules}
        return {name: scheme for name, scheme in found.items() if scheme is not None}

    def scheme_in_config(self, module: str) -> LayerScheme | None:
        """What config.json says of a linear layer; None where it is left alone."""
        stored = self._merged.stored_name(module)
        return None if is_ignored(stored, self.ignore) else find_scheme(stored, self._groups)

    @property
    def own_schemes(self) -> dict[str, LayerScheme]:
        """Quantized layers whose scheme is not `scheme`'s, by full name."""
        main = self.scheme.of_layers
        return {name: scheme for name, scheme in self._schemes.items() if scheme != main}

    def weight_shape(self, module: str) -> tuple[int, ...]:
        """Outputs and inputs of a linear layer, quantized or not."""
        packed = f"{module}.weight_packed"
        if packed in self._files and self.dtype(packed) == torch.uint8:
            rows, pairs = self.shape(packed)
            return rows, 2 * pairs
        return self._packed_shapes.get(module) or self.shape(f"{module}.weight")

    @cached_property
    def _packed_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights that are packed into words; they are stored beside them."""
        names = [name for name in self._files if name.endswith(".weight_shape")]
        if not names:
            return {}
        for name in names:
            expect(name, self._kind, torch.int64, (2,))
        modules = [name.removesuffix(".weight_shape") for name in names]
        sizes = self.tensors(names).reshape(-1, 2).tolist()
        return dict(zip(modules, map(tuple, sizes), strict=True))

    def require_one_scheme(self, target: str) -> None:
        """Refuse a checkpoint whose layers have several schemes, for a target that holds one.

        Raises:
            CheckpointError: it has several.
        """
        schemes = (self.scheme.of_layers, *self.own_schemes.values())
        sizes = {scheme.weights.group_size or 0 for scheme in schemes if scheme.weights}
        one = ""
        if len(sizes) > 1 and all(sizes):
            size = f"--set scheme.weights.group_size={min(sizes)}"
            one = f" and with `--set 'layers=[]' {size}`, as `ptq solve` does"
        for name, scheme in self.own_schemes.items():
            raise CheckpointError(
                f"{self.path}: found {scheme.text} in {name} and {self.scheme.of_layers.text} in "
                f"others; {target} holds one scheme for all layers. Quantize with a recipe "
                f"without layers{one}"
            )

    @property
    def _beside(self) -> Mapping[str, TensorFile]:
        """Where what is in `quant/` is read from, the cache's scales and those of sink tokens."""
        return {**self._cache.files, **self.sinks.files}

    def _check_scale_table(self, table: ScaleTable) -> None:
        """Check that a table has a row for every scale of the files, and that each is as it says.

        Raises:
            CheckpointError: a row or a scale is missing, or a scale is another.
        """
        leaves = (".weight_scale", ".input_scale")  # a model may have factors of its own: `x_scale`
        files = {n: f for n, f in self._files.items() if n.endswith(leaves)}
        files |= {n: f for n, f in self._cache.files.items() if n.endswith("_scale")}
        files |= self.sinks.files
        named = {row.tensor for row in table.entries}
        powers = {name for name, file in files.items() if file.tensors[name][0] == torch.uint8}
        same_names(set(files) - (powers - named), named, f"{SCALE_TABLE}: ")  # some were published
        table.check(partial(_read_scales, files))

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files and of the cache's scales."""
        files = {file.path for file in (*self._files.values(), *self._beside.values())}
        return sum(path.stat().st_size for path in files)

    def scale(self, name: str) -> Tensor:
        """A scale tensor in fp32, whether it is in the served files or in `quant/`."""
        if name in self._files:
            return _as_float(self.tensor(name))
        file = self._beside.get(name)
        if file is not None:
            return read_tensor(file, name).float()
        raise CheckpointError(f"{name} is missing from {self.path}; write the checkpoint again")


@cache  # once, however often it is opened
def _warn_of_blocks(path: Path, blocks: int, more: int) -> None:
    log.warning(
        "%s: num_hidden_layers of config.json is %d, and the files hold tensors of %d more; these "
        "are left out. Where the model has them, correct num_hidden_layers",
        *(path, blocks, more),
    )


def _read_scales(files: Mapping[str, TensorFile], names: Sequence[str]) -> list[Tensor]:
    """Scales in fp32; those of one type are read together."""
    runs = groupby(names, lambda name: files[name].tensors[name][0])
    return [_as_float(scale) for _, run in runs for scale in read_tensors(files, [*run])]


def _as_float(scale: Tensor) -> Tensor:
    """Scales in fp32; bytes are powers of two."""
    return unpack_powers(scale) if scale.dtype == torch.uint8 else scale.float()
