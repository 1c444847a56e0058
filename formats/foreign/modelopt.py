"""NVIDIA ModelOpt's checkpoints, `quant_method: modelopt` or hf_quant_config.json; read only.

    FP8                  `formats.foreign.fp8` of one scale a tensor, by vLLM's names
    FP8_PER_CHANNEL_PER_TOKEN
                         likewise, a scale an output, inputs dynamic
    NVFP4                X.weight uint8 [N, K / 2]: as compressed-tensors' weight_packed
                         X.weight_scale float8_e4m3fn [N, K / 16]
                         X.weight_scale_2 fp32 [], a multiplier of these
                         X.input_scale fp32 [], of inputs in fp4
    NVFP4_AWQ, W4A16_NVFP4, ...   are not read

Source: ModelOpt `torch/export/quant_utils.py`, vLLM 0.33 `quantization/modelopt.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from formats.foreign.fp8 import whole_layout
from formats.foreign.layout import Layout, packed_shape, require_key, require_tensor
from formats.pack import unpack_elements
from formats.scheme import NV_GROUP, Scheme
from formats.stored.weights import check_scale

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")
AGAIN = "Quantize the original model with one of the shipped recipes"


def read_modelopt_config(config: Mapping[str, Any]) -> tuple[Scheme, Layout]:
    """The scheme and layout of settings; the scheme of NVFP4, whose inputs are in fp4, is empty.

    Raises:
        CheckpointError: settings that are not read here.
    """
    algorithm = require_key(config, "quant_algo", ALGORITHMS, AGAIN)
    if algorithm != "NVFP4":
        return whole_layout((), static=algorithm == "FP8")
    require_key(config, "group_size", (NV_GROUP, None), AGAIN)
    return Scheme(), Layout(
        name="modelopt",
        leaves=("weight", "weight_scale", "weight_scale_2", "input_scale"),
        marker="weight_scale_2",
        values=_values,
        refusal="found quant_algo 'NVFP4', whose inputs are in fp4, which is not run here",
    )


def _values(tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight in fp32 [N, K].

    Raises:
        CheckpointError: a tensor has another type or shape, or a scale is not finite and positive.
    """
    rows, pairs = packed_shape(tensors, "weight")
    q = unpack_elements(require_tensor(tensors, "weight", torch.uint8, (rows, pairs)))
    groups = (rows, 2 * pairs // NV_GROUP)
    scale = require_tensor(tensors, "weight_scale", torch.float8_e4m3fn, groups)
    check_scale("weight_scale_2", tensors["weight_scale_2"], ((), (1,)))
    scale = scale.float() * tensors["weight_scale_2"].float()
    return q.float() * scale.repeat_interleave(NV_GROUP, 1)
