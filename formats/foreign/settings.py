"""Which layout a foreign `quantization_config` names, and the scheme of its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.foreign.auto_round import read_auto_round_config
from formats.foreign.awq import awq_layout, read_awq_config
from formats.foreign.bitsandbytes import read_bitsandbytes_config
from formats.foreign.fp8_block import fp8_block_layout, read_fp8_block_config
from formats.foreign.gptq import gptq_layout
from formats.foreign.gptq_config import float_layout, read_gptq_config
from formats.foreign.layout import Layout
from formats.foreign.neural_compressor import is_neural_compressor, neural_compressor_layout
from formats.scheme import Scheme, WeightSpec

METHODS = ("gptq", "awq", "auto-round", "fp8", "bitsandbytes", "mxfp4", "compressed-tensors")


def read_layout(quantization: Mapping[str, Any], names: Collection[str]) -> tuple[Scheme, Layout]:
    """Scheme and layout of a foreign `quantization_config`.

    Args:
        quantization: The `quantization_config`.
        names: Of all tensors of the folder.

    Raises:
        CheckpointError: another method, or settings that are not read here.
    """
    method = quantization.get("quant_method")
    if method == "auto-round":
        quantization = read_auto_round_config(quantization)
        method = quantization["quant_method"]
    if method == "gptq":
        g_idx = any(name.endswith(".g_idx") for name in names)
        values = float_layout(quantization, g_idx=g_idx)
        if values is not None:
            return Scheme(), values
        scheme, version = read_gptq_config(quantization)
        if is_neural_compressor(names):
            spec = integer_weights(scheme)
            return scheme, neural_compressor_layout(spec, quantization, names, version)
        return scheme, gptq_layout(integer_weights(scheme), version)
    if method == "bitsandbytes":
        return read_bitsandbytes_config(quantization)
    if method == "awq":
        scheme = read_awq_config(quantization)
        return scheme, awq_layout(integer_weights(scheme))
    if method == "fp8":
        return read_fp8_block_config(quantization), fp8_block_layout()
    raise CheckpointError(
        f"config.json: quantization_config has quant_method {method!r}; allowed: "
        f"{', '.join(map(repr, METHODS))}. Quantize the original model with one of the shipped "
        "recipes"
    )


def integer_weights(scheme: Scheme) -> WeightSpec:
    """What a scheme says of weights, which are quantized."""
    assert scheme.weights is not None
    return scheme.weights
