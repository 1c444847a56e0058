"""The FP8 block layout of DeepSeek-V3, `quant_method: fp8`; written, and read by
`formats.foreign.fp8`.

    X.weight            float8_e4m3fn [N, K]
    X.weight_scale_inv  fp32 [ceil(N / 128), ceil(K / 128)]: a multiplier, despite the name

Inputs are quantized when they arrive, in groups of 128 of a token.

Source: DeepSeek-V3 `README_WEIGHTS.md` and `inference/kernel.py` (y = x * s).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.foreign.layout import Layout, packed_shape, require_tensor
from formats.scheme import BLOCK, PRESETS, Scheme
from formats.stored.weights import StoredWeight, check_scale

LEAVES = ("weight", "weight_scale_inv")
SCHEME = PRESETS["fp8_block"]
AGAIN = "Quantize the original model with an fp8_block recipe"


def fp8_block_layout() -> Layout:
    """The layout of weights of the one scheme that it holds."""
    return Layout(
        name="fp8_block",
        leaves=LEAVES,
        marker="weight_scale_inv",
        shape=lambda shape: shape,
        pack=pack_fp8_block,
        unpack=unpack_fp8_block,
    )


def refuse_fp8_block(scheme: Scheme) -> None:
    """Refuse a scheme that the layout cannot express.

    Raises:
        CheckpointError: it is not fp8 in blocks with inputs in groups.
    """
    if (scheme.weights, scheme.activations) != (SCHEME.weights, SCHEME.activations):
        parts = [part.text for part in (scheme.weights, scheme.activations) if part]
        raise CheckpointError(
            f"found {' and '.join(parts) or 'no quantized weights'}; fp8_block holds fp8 weights "
            f"in blocks of {BLOCK} x {BLOCK} with inputs in groups of {BLOCK}. {AGAIN}"
        )


def pack_fp8_block(weight: StoredWeight) -> dict[str, Tensor]:
    """The two tensors of a weight: q float8_e4m3fn [N, K], scale fp32 by block."""
    return {"weight": weight.q, "weight_scale_inv": weight.scale.float()}


def unpack_fp8_block(tensors: Mapping[str, Tensor]) -> StoredWeight:
    """Inverse of `pack_fp8_block`.

    Raises:
        CheckpointError: a tensor has another type or shape, or a scale is not finite and positive.
    """
    rows, columns = packed_shape(tensors, "weight")
    q = require_tensor(tensors, "weight", torch.float8_e4m3fn, (rows, columns))
    blocks = packed_shape(tensors, "weight_scale_inv")
    scale = tensors["weight_scale_inv"]
    check_scale("weight_scale_inv", scale, ((-(-rows // BLOCK), -(-columns // BLOCK)),))
    return StoredWeight(q, scale.float().reshape(blocks))


def fp8_block_config(unquantized: Sequence[str] = ()) -> dict[str, Any]:
    """The `quantization_config`.

    Args:
        unquantized: Full names of the linear layers that were left alone, not merged: vLLM
            compares exactly.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(dict.fromkeys([*unquantized, "lm_head"])),
    }
