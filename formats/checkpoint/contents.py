"""What a checkpoint folder holds, whichever layout its `quantization_config` names.

Every layout is seen as the tensors of compressed-tensors: its own files are taken as they are,
layers of a foreign folder (`formats.foreign.folder`) are unpacked when they are read. Of each
quantized layer these must be the tensors of its scheme: none missing, extra, or damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.compressed_tensors import (
    CLASS,
    METHOD,
    Groups,
    read_cache_scheme,
    read_groups,
)
from formats.checkpoint.native import native_tensors, own_layers
from formats.errors import CheckpointError
from formats.families.registry import find_family, predicting_layer
from formats.families.sizes import merged_rows
from formats.foreign import mxfp4
from formats.foreign.folder import ForeignFolder, ForeignLayer, refuse_to_run, require_scheme
from formats.modeling.layers import head_name, quantizable_of
from formats.scale_table import TOGETHER
from formats.scheme import LayerScheme
from formats.stored.folder import SETTINGS_FILES, OwnPart, read_config
from formats.stored.names import open_native
from formats.stored.safetensors_files import TensorFile, read_elements
from formats.stored.weights import (
    LEAVES,
    check_scale_kind,
    check_scale_values,
    check_weight,
    is_scale,
    needed_leaves,
)

if TYPE_CHECKING:
    from formats.checkpoint.read import Checkpoint

FEATURES = "fc"  # of an EAGLE-3 head, outside of its block
OF_LAYERS = (*LEAVES[1:], "input_scale", "input_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class Contents:
    """Tensors of a folder by names of compressed-tensors, and how they are quantized.

    Attributes:
        config: config.json without its `quantization_config`.
        files: Where each tensor is read from.
        groups: Targets and scheme of each group of linear layers.
        cache: How the cache is quantized, where `kv_cache_scheme` says so.
        own: What belongs in `quant/`; None in a folder that was not written here.
    """

    config: dict[str, Any]
    files: dict[str, TensorFile]
    groups: Groups = ()
    ignore: tuple[str, ...] = ()
    cache: KVCacheSpec | None = None
    foreign: Mapping[str, ForeignLayer] = field(default_factory=dict)
    own: OwnPart | None = None


def read_contents(path: Path, *, to_run: bool) -> Contents:
    """Look into a folder; of weights nothing is read.

    Args:
        to_run: Whether to refuse a layout that has to be converted before it is run.

    Raises:
        CheckpointError: it is damaged, or of a kind that is not read here.
    """
    config, quantization, own, published, _ = read_config(path)
    if is_foreign(quantization):
        return _foreign_contents(ForeignFolder(path), to_run)
    stored = open_native(path, config, published)
    if published is not None and not quantization:
        return Contents(config, native_tensors(stored, published, config))
    files = own_layers(stored, config)
    if not quantization:
        _refuse_integers(path, files)
        return Contents(config, files, own=own)
    if quantization.get("quant_method") == mxfp4.METHOD:
        return Contents(config, files, mxfp4.mxfp4_groups(find_family(config), files))
    return Contents(
        config,
        files,
        groups=read_groups(quantization),
        ignore=tuple(quantization.get("ignore") or ()),
        cache=read_cache_scheme(quantization),
        own=own,
    )


def _refuse_integers(path: Path, files: Mapping[str, TensorFile]) -> None:
    """Refuse GPTQ's or AWQ's integers that nothing says the settings of."""
    name = next((name for name in files if name.endswith(".qweight")), None)
    if name is not None:
        raise CheckpointError(
            f"{path}: found {name}, integers of GPTQ or AWQ, but neither a quantization_config in "
            f"config.json nor one of {', '.join(SETTINGS_FILES)} says of how many bits and groups. "
            "Copy that file of the checkpoint, too"
        )


def is_foreign(quantization: Mapping[str, Any] | None) -> bool:
    """Whether a `quantization_config` names another layout than compressed-tensors."""
    return (quantization or {}).get("quant_method") not in (None, METHOD, mxfp4.METHOD)


def _foreign_contents(folder: ForeignFolder, to_run: bool) -> Contents:
    require_scheme(folder)
    if to_run:
        refuse_to_run(folder)
    files = own_layers(folder.plain_files, folder.config)
    layers = _apart(folder)
    tensors = {name: layer for layer in layers.values() for name in layer.tensors}
    return Contents(folder.config, files | tensors, _groups(folder), foreign=layers)


def _groups(folder: ForeignFolder) -> Groups:
    """The schemes of a folder's layers: the one that most have, and each other by its layers."""
    layers: dict[LayerScheme, list[str]] = {}
    for module in folder.modules:
        layers.setdefault(folder.scheme_of(module).of_layers, []).append(module)
    main, *others = sorted(layers, key=lambda scheme: -len(layers[scheme]))
    return ((CLASS,), main), *((tuple(layers[scheme]), scheme) for scheme in others)


def _apart(folder: ForeignFolder) -> dict[str, ForeignLayer]:
    """The layers of a folder, those that its family stores as one taken apart."""
    family = find_family(folder.config)
    merged = merged_rows(family, folder.config) if family and family.stored_merged else {}
    found: dict[str, ForeignLayer] = {}
    for module in folder.modules:
        layer, weights = folder.layer(module), folder.scheme_of(module).weights
        parent, _, whole = module.rpartition(".")
        first, parts = 0, merged.get(whole, {})
        if not parts:
            found[module] = layer
        elif sum(parts.values()) != layer.shape[0] or weights is None or weights.block[0] != 1:
            raise CheckpointError(
                f"{module} has {layer.shape[0]} outputs in {layer.layout.name}, which cannot be "
                f"cut into those of {', '.join(parts)}. Quantize the original model with one of "
                "the shipped recipes"
            )
        for part, rows in parts.items():
            name = f"{parent}.{part}"
            found[name] = layer.rows(name, first, rows)
            first += rows
    return found


def check_quantized(checkpoint: Checkpoint, files: Mapping[str, TensorFile]) -> None:
    """Check that every quantized layer has the tensors of its scheme, and that there are no others.

    Args:
        checkpoint: In the layout of compressed-tensors, or float.

    Raises:
        CheckpointError: a tensor is missing, extra, of another type or shape, or no scale.
    """
    quantized = set(checkpoint.quantized_modules)
    declared = find_family(checkpoint.config) is not None  # others may have tensors of such names
    found = {
        name
        for name in files
        if name.rpartition(".")[2] in OF_LAYERS
        or (declared and name.endswith(("_scale", "_zero_point")))
    }
    if checkpoint.scheme.weights is None:
        if quantized:
            raise CheckpointError(
                f"{min(quantized)}: its weight is quantized, but config.json has no "
                "quantization_config"
            )
        same_names(set(), found, "")
        return
    wanted = {module for module in _projections(checkpoint) if checkpoint.scheme_in_config(module)}
    same_names(wanted, quantized, f"{checkpoint.scheme.weights.dtype} weights by config.json: ")
    schemes = {name: checkpoint.scheme_of(name) for name in quantized}
    tensors = {f"{name}.{leaf}" for name, own in schemes.items() for leaf in needed_leaves(own)}
    tensors |= {f"{name}.input_scale" for name, own in schemes.items() if own.static_input}
    found |= {f"{name}.weight" for name in quantized if f"{name}.weight" in files}
    same_names(tensors, found, "")
    _check_values(checkpoint, files)


def _projections(checkpoint: Checkpoint) -> set[str]:
    """Linear layers that may be quantized: those of the blocks, and the head where it is.

    So may the layer that merges what a head for drafts reads, and those of layers that predict
    further tokens, which runtimes leave in float whether config.json says so or not.
    """
    is_quantizable = quantizable_of(checkpoint.config)
    weights = (name.rpartition(".") for name in checkpoint.names())
    further, quantized = partial(predicting_layer, checkpoint.config), checkpoint.quantized_modules
    return {
        module
        for module, _, leaf in weights
        if leaf in ("weight", "weight_packed") and is_quantizable(module) and not further(module)
    } | {
        name
        for name in quantized
        if name in (head_name(checkpoint.config), FEATURES) or further(name)
    }


def _check_values(checkpoint: Checkpoint, files: Mapping[str, TensorFile]) -> None:
    def kind(name: str) -> tuple:
        return checkpoint.dtype(name), checkpoint.shape(name)

    def type_of(name: str) -> str:  # elements of several float types with 8 bits cannot be joined
        return str(files[name].tensors[name][0])

    scales = []
    for module in checkpoint.quantized_modules:
        scheme = checkpoint.scheme_of(module)
        check_weight(scheme, module, checkpoint.weight_shape(module), kind)
        if checkpoint.dtype(f"{module}.weight_scale").is_floating_point:
            scales.append(f"{module}.weight_scale")  # others are looked at when they are read
        if "weight_global_scale" in needed_leaves(scheme):
            scales.append(f"{module}.weight_global_scale")
        if scheme.static_input:
            scales.append(f"{module}.input_scale")
            check_scale_kind(scales[-1], kind, ((1,), ()))
    for _, alike in groupby(sorted(scales, key=type_of), type_of):
        names = list(alike)
        for run in (names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)):
            if not is_scale(read_elements(files, run)):
                for name in run:
                    check_scale_values(name, checkpoint.tensor(name))


def same_names(wanted: set[str], found: set[str], where: str) -> None:
    """Refuse a difference between two sets of tensor or module names."""
    for names, verb in ((wanted - found, "missing"), (found - wanted, "not expected")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{where}{min(names)}{more}: {verb}. Every quantized layer needs exactly the "
                "scales of its scheme; write the checkpoint again"
            )
