"""Reading a checkpoint folder: float, or quantized in the compressed-tensors layout.

    config.json                    with `quantization_config` where weights are quantized
    model*.safetensors (+ index)   a layer's weight as `formats.stored.weights` says,
    X.input_scale [1];
                                   merged layers and experts as `formats.checkpoint.split` says
    tokenizer and generation files
    quant/kv_scales.safetensors    A.k_scale and A.v_scale of each attention module A, fp32
    quant/scale_table.json         every scale and where it came from
    quant/manifest.json            size and SHA-256 of every other file

`quant/` is ours and optional: a folder written by other software has none. Nothing is guessed: what
is missing, extra, of another shape, not finite or not positive is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from formats.checkpoint.compressed_tensors import Groups, find_scheme, read_groups
from formats.checkpoint.join import MergedLayers
from formats.checkpoint.split import split_stored
from formats.checkpoint.targets import is_ignored
from formats.errors import CheckpointError
from formats.families.family import heads_of
from formats.families.names import HEAD, is_projection
from formats.families.registry import attention_names
from formats.hub import model_folder
from formats.links import find_file
from formats.scale_table import TOGETHER, ScaleTable
from formats.scheme import KVCacheSpec, LayerScheme, Scheme
from formats.stored.folder import (
    KV_SCALES,
    MANIFEST,
    auxiliary_files,
    check_manifest,
    check_own_cache,
    read_config,
)
from formats.stored.other_kinds import refuse_other_kinds
from formats.stored.safetensors_files import (
    SafetensorsFile,
    TensorFile,
    open_weights,
    read_elements,
    read_tensors,
)
from formats.stored.weights import (
    LEAVES,
    StoredWeight,
    check_scale,
    check_scale_kind,
    check_scale_values,
    check_weight,
    expect,
    is_scale,
    needed_leaves,
    read_weights,
)

SCALE_TABLE = "quant/scale_table.json"
QUANTIZED = (torch.int8, torch.float8_e4m3fn)


class Checkpoint:
    """A checked, lazily read checkpoint folder; make one with `Checkpoint.open`.

    Attributes:
        path: The folder.
        config: config.json without its `quantization_config`.
        auxiliary_files: Tokenizer, generation and licence files: what a checkpoint made of this one
            takes.
        ignore: Linear layers that the quantization left alone, as `quantization_config` says.
        scheme: What is quantized. Single layers may have a scheme of their own: `scheme_of` tells;
            this is that of the first group of `quantization_config`.
        quantized_modules: Full names of the quantized linear layers, sorted.
        kv_scales: Static (K, V) scales, fp32 [Hkv] (of K [Hkv, D] where it is scaled by channel),
            of each attention module by its full name.
        scale_table: Where the scales came from, or None for a foreign or float checkpoint.
    """

    def __init__(self, path: Path, quantized_kv: bool = True) -> None:
        self.path = path
        self.config, quantization, self._own = read_config(path)
        self.auxiliary_files = auxiliary_files(path)
        self._files = split_stored(open_weights(path), self.config)
        self._merged = MergedLayers(self.config)
        self._kv_file = _open_optional(path, KV_SCALES)
        self.ignore: tuple[str, ...] = tuple((quantization or {}).get("ignore", ()))
        self._groups: Groups = read_groups(quantization) if quantization else ()
        main = self._groups[0][1] if self._groups else LayerScheme()
        kv_cache = self._kv_spec()
        check_own_cache(path, self._own, kv_cache, needed=quantized_kv)
        self.scheme = Scheme(weights=main.weights, activations=main.activations, kv_cache=kv_cache)
        self.quantized_modules = tuple(
            sorted(
                name.rpartition(".")[0]
                for name, file in self._files.items()
                if name.endswith(".weight_packed") or file.tensors[name][0] in QUANTIZED
            )
        )
        self.kv_scales = self._read_kv_scales()
        self.scale_table = self._read_scale_table()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        verify: bool = False,
        quantized_kv: bool = True,
        revision: str | None = None,
    ) -> Checkpoint:
        """Open a folder and check it.

        Args:
            path: The folder, or a model's name (`formats.hub`).
            verify: Also compare every file's SHA-256 with the manifest. A folder that was written
                here must have one then; one of other software has none.
            quantized_kv: Whether the scales of a quantized cache are needed, where config.json says
                that they belong to the checkpoint.
            revision: Branch, tag or commit of a model on the hub.

        Raises:
            CheckpointError: something is missing, extra, damaged or not run here; it is named.
        """
        if Path(path).exists() and not Path(path).is_dir():
            refuse_other_kinds(Path(path))
        path = model_folder(path, revision)
        listed = check_manifest(path, verify)
        checkpoint = cls(path, quantized_kv)
        if verify and checkpoint._own is not None and not listed:
            raise CheckpointError(
                f"{path}: {MANIFEST} is missing, without which nothing can be verified. Copy the "
                "checkpoint again with its folder quant/, or open it without verifying it"
            )
        checkpoint._check_quantized()
        checkpoint._check_scale_table()
        return checkpoint

    def names(self) -> tuple[str, ...]:
        """Names of all tensors of the served files, sorted."""
        return tuple(sorted(self._files))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its file's header."""
        return self._kind(name)[1]

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor, from its file's header."""
        return self._kind(name)[0]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor from its file."""
        return read_elements({name: self._file(name)}, [name]).reshape(self.shape(name))

    def tensors(self, names: Sequence[str]) -> Tensor:
        """Read tensors that differ in their first size at most as one, as `torch.cat` gives it."""
        width = self.shape(names[0])[1:]
        return read_elements({name: self._file(name) for name in names}, names).reshape(-1, *width)

    def weight(self, module: str) -> StoredWeight:
        """The quantized weight of a linear layer, checked."""
        return self.weights([module])

    def weights(self, modules: Sequence[str], device: torch.device | str = "cpu") -> StoredWeight:
        """The quantized weights of linear layers of one scheme and as many inputs, read as one.

        Args:
            modules: Full names.
            device: Where they go, and where packed integers are unpacked.
        """
        shapes = [self.weight_shape(module) for module in modules]
        return read_weights(
            self.scheme_of(modules[0]),
            shapes,
            lambda leaf: self.tensors([f"{module}.{leaf}" for module in modules]).to(device),
        )

    def scheme_of(self, module: str) -> LayerScheme:
        """How a linear layer's weight and input are quantized; of nothing where they are not."""
        return self._schemes.get(module) or LayerScheme()

    @cached_property
    def _schemes(self) -> dict[str, LayerScheme]:
        found = {name: self._scheme_in_config(name) for name in self.quantized_modules}
        return {name: scheme for name, scheme in found.items() if scheme is not None}

    def _scheme_in_config(self, module: str) -> LayerScheme | None:
        return find_scheme(self._merged.stored_name(module), self._groups)

    @property
    def own_schemes(self) -> dict[str, LayerScheme]:
        """Quantized layers whose scheme is not `scheme`'s, by full name."""
        main = self.scheme.of_layers
        return {name: scheme for name, scheme in self._schemes.items() if scheme != main}

    def weight_shape(self, module: str) -> tuple[int, ...]:
        """Outputs and inputs of a linear layer, quantized or not."""
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
        for name, scheme in self.own_schemes.items():
            raise CheckpointError(
                f"{self.path}: found {scheme.text} in {name} and {self.scheme.of_layers.text} in "
                f"others; {target} holds one scheme for all layers. Quantize with a recipe "
                "without layers"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files and of the cache's scales."""
        files = {file.path for file in self._files.values()}
        if self._kv_file is not None:
            files.add(self._kv_file.path)
        return sum(path.stat().st_size for path in files)

    def scale(self, name: str) -> Tensor:
        """A scale tensor in fp32, whether it lies in the served files or in `quant/`."""
        if name in self._files:
            return self.tensor(name).float()
        if self._kv_file is not None and name in self._kv_file.tensors:
            return self._kv_file.tensor(name).float()
        raise CheckpointError(f"{name} is missing from {self.path}; write the checkpoint again")

    def _kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._file(name).tensors[name]

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            raise CheckpointError(f"{name} is missing from {self.path}")
        return self._files[name]

    def _kv_spec(self) -> KVCacheSpec | None:
        if self._kv_file is None:
            return None
        try:
            return KVCacheSpec.model_validate_json(self._kv_file.metadata.get("kv_cache", ""))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise CheckpointError(
                f"{KV_SCALES}: its metadata do not say how the cache is quantized ({reason})"
            ) from error

    def _read_kv_scales(self) -> dict[str, tuple[Tensor, Tensor]]:
        if self._kv_file is None or self.scheme.kv_cache is None or self.scheme.kv_cache.dynamic:
            return {}
        heads, attentions = heads_of(self.config), attention_names(self.config)
        wanted = {f"{a}.{kind}_scale" for a in attentions for kind in "kv"}
        _same_names(wanted, set(self._kv_file.tensors), f"{KV_SCALES}: ")
        spec, scales = self.scheme.kv_cache, {}
        for attention in attentions:
            pair = []
            for role in ("k_cache", "v_cache"):
                scale = self._kv_file.tensor(name := f"{attention}.{role[0]}_scale")
                check_scale(name, scale, (spec.scale_shape(role, heads.kv, heads.size),))
                pair.append(scale.expand(heads.kv) if scale.numel() == 1 else scale)
            scales[attention] = (pair[0], pair[1])
        return scales

    def _read_scale_table(self) -> ScaleTable | None:
        path = find_file(self.path, SCALE_TABLE)
        return None if path is None else ScaleTable.from_json(path.read_bytes())

    def _check_quantized(self) -> None:
        """Every quantized layer has the tensors of its scheme, and there are no others."""
        quantized = set(self.quantized_modules)
        weights = (name.rpartition(".") for name in self._files)
        projections = {
            module
            for module, _, leaf in weights
            if leaf in ("weight", "weight_packed") and is_projection(module)
        }
        projections |= quantized & {HEAD}
        known = (*LEAVES[1:], "input_scale", "input_zero_point", "weight_g_idx")
        found = {
            name
            for name in self._files
            if name.rpartition(".")[2] in known or name.endswith(("_scale", "_zero_point"))
        }
        if self.scheme.weights is None:
            if quantized:
                raise CheckpointError(
                    f"{min(quantized)}: its weight is quantized, but config.json has no "
                    "quantization_config"
                )
            _same_names(set(), found, "")
            return
        wanted = {
            name
            for name in projections
            if not is_ignored(self._merged.stored_name(name), self.ignore)
            and self._scheme_in_config(name)
        }
        _same_names(wanted, quantized, f"{self.scheme.weights.dtype} weights by config.json: ")
        tensors = {f"{name}.{leaf}" for name in quantized for leaf in self._leaves(name)}
        found |= {f"{name}.weight" for name in quantized if f"{name}.weight" in self._files}
        _same_names(tensors, found, "")
        scales = []
        for module in self.quantized_modules:
            scheme = self.scheme_of(module)
            check_weight(scheme, module, self.weight_shape(module), self._kind)
            scales.append(f"{module}.weight_scale")
            if scheme.static_input:
                scales.append(f"{module}.input_scale")
                check_scale_kind(scales[-1], self._kind, ((1,), ()))
        for i in range(0, len(scales), TOGETHER):
            run = scales[i : i + TOGETHER]
            if not is_scale(read_elements(self._files, run)):
                for name in run:
                    check_scale_values(name, self.tensor(name))

    def _leaves(self, module: str) -> set[str]:
        """Last parts of the names of the tensors that a quantized layer needs."""
        scheme = self.scheme_of(module)
        return needed_leaves(scheme) | ({"input_scale"} if scheme.static_input else set())

    def _check_scale_table(self) -> None:
        if self.scale_table is None:
            return
        files = {name: file for name, file in self._files.items() if name.endswith("_scale")}
        files |= dict.fromkeys(self._kv_file.tensors, self._kv_file) if self._kv_file else {}
        named = {row.tensor for row in self.scale_table.entries}
        _same_names(set(files), named, f"{SCALE_TABLE}: ")
        self.scale_table.check(lambda names: [t.float() for t in read_tensors(files, names)])


def _open_optional(folder: Path, name: str) -> SafetensorsFile | None:
    path = find_file(folder, name)
    return None if path is None else SafetensorsFile(path)


def _same_names(wanted: set[str], found: set[str], where: str) -> None:
    """Refuse a difference between two sets of tensor or module names."""
    for names, verb in ((wanted - found, "missing"), (found - wanted, "not expected")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{where}{min(names)}{more}: {verb}. Every quantized layer needs exactly the "
                "scales of its scheme; write the checkpoint again"
            )
