"""Whether a checkpoint's tensors are those of its schemes: none missing, extra, or damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from formats.errors import CheckpointError
from formats.families.registry import find_family, predicting_layer
from formats.modeling.layers import head_name, quantizable_of
from formats.scale_table import TOGETHER
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
    for _, alike in groupby(sorted(scales, key=_type_of(files)), _type_of(files)):
        names = list(alike)
        for run in (names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)):
            if not is_scale(read_elements(files, run)):
                for name in run:
                    check_scale_values(name, checkpoint.tensor(name))


def _type_of(files: Mapping[str, TensorFile]) -> Callable[[str], str]:
    """Names the type of a tensor: elements of several float types with 8 bits cannot be joined."""
    return lambda name: str(files[name].tensors[name][0])


def same_names(wanted: set[str], found: set[str], where: str) -> None:
    """Refuse a difference between two sets of tensor or module names."""
    for names, verb in ((wanted - found, "missing"), (found - wanted, "not expected")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{where}{min(names)}{more}: {verb}. Every quantized layer needs exactly the "
                "scales of its scheme; write the checkpoint again"
            )
