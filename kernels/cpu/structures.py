"""The numbers and structures of `csrc/api.h`, for calls by `ctypes`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from kernels.activations import Activation

FLOATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # of weights
FORMATS = {"f32": 0, "bf16": 1, "fp8_e4m3": 2, "int8": 3, "int4": 4, "f16": 5}
NO_SCALE, SCALE_F32, SCALE_BF16, SCALE_F16 = range(4)
NO_ZERO, ZERO_I8, ZERO_F32 = range(3)
SCALE_NONE, SCALE_HEAD, SCALE_CHANNEL, SCALE_TOKEN, SCALE_TOKEN_F16 = range(5)
NONFINITE, NO_SUCH_BLOCK = 1, 2
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
STORAGE_NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.int8: "int8",
}


class Packed(Structure):
    """Header of a packed weight; see `csrc/api.h`."""

    _fields_ = [
        ("magic", c_uint64),
        *[(name, c_int32) for name in ("isa", "format")],
        *[(name, c_int64) for name in ("outputs", "inputs", "group")],
        *[(name, c_int32) for name in ("scale_type", "zero_type", "has_bias", "panel")],
        *[
            (name, c_int64)
            for name in ("panel_bytes", "group_bytes", "data_offset", "bias_offset", "bytes")
        ],
    ]


class PackSource(Structure):
    """A weight to be packed; see `csrc/api.h`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("q", "scale", "zero", "bias")],
        *[(name, c_int32) for name in ("format", "scale_type", "zero_type")],
        *[(name, c_int64) for name in ("outputs", "inputs", "group")],
    ]


class LinearArgs(Structure):
    """Arguments of a linear layer."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "x", "x_scale")],
        *[(name, c_int32) for name in ("x_is_int8", "x_scale_per_row", "accumulate")],
        *[(name, c_int64) for name in ("rows", "x_stride", "y_stride")],
        ("y", c_void_p),
    ]


class AttentionArgs(Structure):
    """Arguments of attention over the paged cache."""

    _fields_ = [
        *[(name, c_void_p) for name in ("q", "out", "k_pool", "v_pool", "k_scale", "v_scale")],
        *[(name, c_void_p) for name in ("sink_k", "sink_v")],
        *[(name, c_void_p) for name in ("block_tables", "query_start", "context_len")],
        *[(name, c_int64) for name in ("sequences", "table_stride", "q_stride", "out_stride")],
        *[(name, c_void_p) for name in ("sinks", "alibi")],
        *[(name, c_int64) for name in ("heads", "kv_heads", "dim", "v_dim", "window")],
        *[(name, c_int32) for name in ("k_format", "v_format", "k_scale_kind", "v_scale_kind")],
        *[(name, c_float) for name in ("softmax_scale", "softcap")],
        *[(name, c_int64) for name in ("blocks", "sink_tokens")],
        *[(name, c_void_p) for name in ("problem", "partials")],
    ]


class WriteKvArgs(Structure):
    """Arguments of writing to the paged cache."""

    _fields_ = [
        *[(name, c_void_p) for name in ("k", "v", "k_pool", "v_pool", "k_scale", "v_scale")],
        *[(name, c_void_p) for name in ("k_offset", "k_feedback", "sink_k", "sink_v")],
        *[(name, c_void_p) for name in ("slots", "positions")],
        *[(name, c_int64) for name in ("tokens", "stride", "v_stride")],
        *[(name, c_int64) for name in ("kv_heads", "dim", "v_dim")],
        *[(name, c_int32) for name in ("k_format", "v_format", "k_scale_kind", "v_scale_kind")],
        *[(name, c_int64) for name in ("blocks", "sink_tokens")],
        ("problem", c_void_p),
    ]


class QuantizeArgs(Structure):
    """Arguments of quantizing activations."""

    _fields_ = [
        ("x", c_void_p),
        *[(name, c_int64) for name in ("rows", "columns", "x_stride", "group")],
        ("scale", c_void_p),
        ("format", c_int32),
        *[(name, c_void_p) for name in ("q", "values", "scales", "problem")],
    ]


class LoraPart(Structure):
    """An adapter of a linear layer, or of one of those that were merged."""

    _fields_ = [
        *[(name, c_void_p) for name in ("a", "b")],
        *[(name, c_int64) for name in ("rank", "first", "outputs", "format")],
    ]


class Lora(Structure):
    """The parts of an adapter in a merged layer."""

    _fields_ = [("parts", c_void_p), ("count", c_int64), ("inputs", c_int64)]


class FeedbackTile(Structure):
    """A tile of a weight that is rounded with feedback."""

    _fields_ = [
        *[(name, c_void_p) for name in ("x", "values", "scale", "zero")],
        *[(name, c_void_p) for name in ("row_factor", "column_factor", "q", "errors")],
        *[(name, c_int64) for name in ("rows", "columns", "stride")],
        *[(name, c_int64) for name in ("row_stride", "column_stride")],
        *[(name, c_float) for name in ("low", "high")],
        *[(name, c_int32) for name in ("mantissa", "exponent")],
    ]


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's data."""
    return None if tensor is None else tensor.data_ptr()
