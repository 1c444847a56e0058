"""The numbers and structures of `csrc/api.h`, for calls by `ctypes`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from kernels.op_inputs import Activation

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


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of a structure that are of one type, by their names."""
    return [(name, kind) for name in names.split()]


class Packed(Structure):
    """Header of a packed weight; see `csrc/api.h`."""

    _fields_ = [
        ("magic", c_uint64),
        *fields(c_int32, "isa format"),
        *fields(c_int64, "outputs inputs group"),
        *fields(c_int32, "scale_type zero_type has_bias panel"),
        *fields(c_int64, "panel_bytes group_bytes data_offset bias_offset bytes"),
    ]


class PackSource(Structure):
    """A weight to be packed; see `csrc/api.h`."""

    _fields_ = [
        *fields(c_void_p, "q scale zero bias"),
        *fields(c_int32, "format scale_type zero_type"),
        *fields(c_int64, "outputs inputs group"),
    ]


class LinearArgs(Structure):
    """Arguments of a linear layer."""

    _fields_ = [
        *fields(c_void_p, "weight x x_scale"),
        *fields(c_int32, "x_is_int8 x_scale_per_row accumulate"),
        *fields(c_int64, "rows x_stride y_stride"),
        ("y", c_void_p),
    ]


class AttentionArgs(Structure):
    """Arguments of attention over the paged cache."""

    _fields_ = [
        *fields(c_void_p, "q out k_pool v_pool k_scale v_scale sink_k sink_v block_tables"),
        *fields(c_void_p, "query_start context_len"),
        *fields(c_int64, "sequences table_stride q_stride out_stride"),
        *fields(c_void_p, "sinks alibi"),
        *fields(c_int64, "heads kv_heads dim v_dim window"),
        *fields(c_int32, "k_format v_format k_scale_kind v_scale_kind"),
        *fields(c_float, "softmax_scale softcap"),
        *fields(c_int64, "blocks sink_tokens"),
        *fields(c_void_p, "problem partials"),
    ]


class WriteKvArgs(Structure):
    """Arguments of writing to the paged cache."""

    _fields_ = [
        *fields(c_void_p, "k v k_pool v_pool k_scale v_scale k_offset k_feedback sink_k sink_v"),
        *fields(c_void_p, "slots positions"),
        *fields(c_int64, "tokens stride v_stride kv_heads dim v_dim"),
        *fields(c_int32, "k_format v_format k_scale_kind v_scale_kind"),
        *fields(c_int64, "blocks sink_tokens"),
        ("problem", c_void_p),
    ]


class QuantizeArgs(Structure):
    """Arguments of quantizing activations."""

    _fields_ = [
        ("x", c_void_p),
        *fields(c_int64, "rows columns x_stride group"),
        ("scale", c_void_p),
        ("format", c_int32),
        *fields(c_void_p, "q values scales problem"),
    ]


class LoraPart(Structure):
    """An adapter of a linear layer, or of one of those that were merged."""

    _fields_ = [
        *fields(c_void_p, "a b"),
        *fields(c_int64, "rank first outputs format"),
    ]


class Lora(Structure):
    """The parts of an adapter in a merged layer."""

    _fields_ = [("parts", c_void_p), ("count", c_int64), ("inputs", c_int64)]


class FeedbackTile(Structure):
    """A tile of a weight that is rounded with feedback."""

    _fields_ = [
        *fields(c_void_p, "x values scale zero row_factor column_factor q errors"),
        *fields(c_int64, "rows columns stride row_stride column_stride"),
        *fields(c_float, "low high"),
        *fields(c_int32, "mantissa exponent"),
    ]


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's data."""
    return None if tensor is None else tensor.data_ptr()
