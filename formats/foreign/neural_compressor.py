"""neural-compressor's weight-only checkpoints in its `huggingface` format; read only.

They call themselves `quant_method: gptq`, and are version 1 of that layout (`formats.foreign.gptq`)
but for

    X.g_idx               only with act-order; otherwise input k is of group k // group_size
    X.scale_bf16_to_fp8   bf16 [1]: 0, unless activations run in fp8 as well
    X.bias                of every layer, zeros where the model has none

Not read: `nf4` and `fp4`, and its own packing (`use_optimum_format=False`), which have no `qzeros`
and whose settings do not say which of them they are; AWQ with multipliers of the inputs kept beside
the weights; the `default` format, a pickle without the model's configuration.

Source: neural-compressor 3.10 `torch/algorithms/weight_only/modules.py` (INCWeightOnlyLinear) and
`save_load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.foreign.gptq import Version, gptq_layout
from formats.foreign.layout import Layout, require_tensor
from formats.scheme import WeightSpec

PICKLE, SETTINGS = "quantized_weight.pt", "qconfig.json"
FP8 = "scale_bf16_to_fp8"
T = TypeVar("T")
SAVE = 'save(model, folder, format="huggingface")'


def refuse_pickle(folder: Path) -> None:
    """Refuse neural-compressor's `default` format.

    Raises:
        CheckpointError: the folder holds it.
    """
    if (folder / SETTINGS).is_file() and (folder / PICKLE).is_file():
        raise CheckpointError(
            f"{folder}: found neural-compressor's default format: {PICKLE} is a pickle, which can "
            "run any code when it is read, and there is no config.json of the model. Save it as "
            f"safetensors with neural_compressor.torch.quantization.{SAVE}"
        )


def is_neural_compressor(names: Collection[str]) -> bool:
    """Whether the names of tensors under `quant_method: gptq` are those that it writes."""
    leaves = {name.rpartition(".")[2] for name in names}
    return FP8 in leaves or ("qweight" in leaves and "g_idx" not in leaves)


def neural_compressor_layout(
    spec: WeightSpec, config: Mapping[str, Any], names: Collection[str], version: Version = 1
) -> Layout:
    """The layout of a folder that `is_neural_compressor` knows.

    Args:
        config: The folder's `quantization_config`.
        version: How zero points are stored; its own is 1.

    Raises:
        CheckpointError: it is one of those that are not read; see the module's docstring.
    """
    leaves = {name.rpartition(".")[2] for name in names}
    scaled = sorted(name for name in names if name.endswith(".input_scale"))
    if scaled:
        raise CheckpointError(
            f"{scaled[0]}: inputs are multiplied beside the weights, which the schemes here do not "
            "have. Quantize again with AWQConfig(folding=True), or with one of the shipped recipes"
        )
    if "qzeros" not in leaves:
        name = min(name for name in names if name.endswith(".qweight"))
        raise CheckpointError(
            f"{name} has no qzeros beside it: neural-compressor's nf4, fp4 or own packing, which "
            "its settings do not tell apart. Quantize with dtype int and use_optimum_format True, "
            "or with one of the shipped recipes"
        )
    if config.get("desc_act") and "g_idx" not in leaves:
        raise CheckpointError(
            "found desc_act True, but there is no g_idx that tells the groups of the inputs. Get "
            f"it with its g_idx, or save it again: {SAVE}"
        )
    size = config.get("group_size")
    layout = gptq_layout(spec, version, g_idx="g_idx" in leaves, group_size=size)
    if FP8 not in leaves:  # what others than it write without g_idx
        return replace(layout, pack=None)
    assert layout.unpack is not None
    assert layout.values is not None
    return replace(
        layout,
        name="neural-compressor",
        leaves=(*layout.leaves, FP8),
        pack=None,
        unpack=partial(_checked, layout.unpack),
        values=partial(_checked, layout.values),
    )


def _checked(read: Callable[[Mapping[str, Tensor]], T], tensors: Mapping[str, Tensor]) -> T:
    """What `read` makes of tensors whose activations are no fp8.

    Raises:
        CheckpointError: they are, or a tensor is damaged.
    """
    scale = require_tensor(tensors, FP8, torch.bfloat16, (1,))
    if bool(scale != 0):
        raise CheckpointError(
            f"{FP8} is {scale.item():.4g}: activations run in fp8, which no scheme here has "
            "beside integer weights; allowed is 0. Quantize the weights alone"
        )
    return read(tensors)
