"""The AWQ layout (GEMM): int4 weights in groups, packed along their outputs; write and read.

    X.qweight  int32 [K, N / 8]        bits 4 i of word j hold output 8 j + ORDER[i]
    X.qzeros   int32 [groups, N / 8]   likewise
    X.scales   fp16  [groups, N]

Values and zero points are unsigned: ours + 8; zero points are stored as they are. There are always
zero points: symmetric weights have 8.

Source: AutoAWQ 0.2 `modules/linear/gemm.py` and `utils/packing_utils.py`. The order lets its kernel
take two neighbouring values out of a word with one mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from formats.foreign.gptq import AGAIN, refuse_others
from formats.foreign.layout import (
    RUN_SIZES,
    Layout,
    check_divides,
    group_spec,
    half_scales,
    in_groups,
    packed_shape,
    read_size,
    require_key,
    require_tensor,
    runs,
    without_signs,
)
from formats.pack import pack_words, unpack_words
from formats.scheme import Scheme, WeightSpec
from formats.stored.weights import StoredWeight, check_scale

LEAVES = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLACE = tuple(ORDER.index(i) for i in range(8))


def awq_layout(spec: WeightSpec, group_size: int | None = None) -> Layout:
    """The layout of weights of a specification that `refuse_awq` accepts.

    Args:
        group_size: That of the tensors, where it is a multiple of the specification's.
    """
    size = group_size or spec.block[1]
    return replace(
        awq_values(size),
        pack=partial(pack_awq, group_size=size),
        unpack=lambda tensors: in_groups(unpack_awq(tensors, size), size),
        zero_word=int(_pack(torch.zeros(1, 8, dtype=torch.int8)).item()),
    )


def awq_values(group_size: int) -> Layout:
    """The layout of weights in groups of any size, of which only the values are read."""
    return Layout(
        name="awq",
        leaves=LEAVES,
        marker="qweight",
        shape=lambda words: (words[1] * 8, words[0]),
        values=partial(_values, group_size=group_size),
    )


def refuse_awq(scheme: Scheme) -> None:
    """Refuse a scheme that AWQ cannot express; raises as `refuse_others`."""
    refuse_others(scheme, "AWQ", "int4")


def pack_awq(weight: StoredWeight, group_size: int) -> dict[str, Tensor]:
    """The three tensors of a weight.

    Args:
        weight: q int8 [N, K] in [-8, 7], scale fp32 [N, groups], zero_point int8 [N, groups] or
            None.
        group_size: Inputs of a group; -1 for all.

    Raises:
        CheckpointError: N or K does not fill words and groups, or a scale does not fit fp16.
    """
    check_divides(tuple(weight.q.shape), group_size, 4)
    return {
        "qweight": _pack(weight.q.T),
        "qzeros": _pack(weight.zeros.T),
        "scales": half_scales(weight).T.contiguous(),
    }


def unpack_awq(tensors: Mapping[str, Tensor], group_size: int) -> StoredWeight:
    """Inverse of `pack_awq`; zero_point is None where all are 0 (a symmetric grid).

    Raises:
        CheckpointError: a tensor has another type or shape, or a scale is 0 or not finite.
    """
    columns, words = packed_shape(tensors)
    rows, size = words * 8, columns if group_size == -1 else group_size
    groups = -(-columns // size)
    qweight = require_tensor(tensors, "qweight", torch.int32, (columns, words))
    qzeros = require_tensor(tensors, "qzeros", torch.int32, (groups, words))
    packed_shape(tensors, "scales")
    check_scale("scales", tensors["scales"].abs(), ((groups, rows),))
    q, zeros = (_unpack(words).T.contiguous() for words in (qweight, qzeros))
    group = torch.arange(columns, device=q.device) // size
    scale = tensors["scales"].float().T.contiguous()
    q, scale, zeros = without_signs(q, scale, zeros, group)
    return StoredWeight(q, scale, zeros if bool(zeros.any()) else None)


def _values(tensors: Mapping[str, Tensor], group_size: int) -> Tensor:
    """The weight that the tensors stand for, fp32 [N, K]; errors as of `unpack_awq`."""
    weight = unpack_awq(tensors, group_size)
    columns = weight.q.shape[1]
    group = torch.arange(columns) // (columns if group_size == -1 else group_size)
    q = weight.q.float()
    if weight.zero_point is not None:
        q -= weight.zero_point.float()[:, group]
    return q * weight.scale[:, group]


def _pack(values: Tensor) -> Tensor:
    """Signed [..., N] to int32 [..., N / 8], in AWQ's order."""
    return pack_words(values.unflatten(-1, (-1, 8))[..., list(ORDER)].flatten(-2), 4)


def _unpack(words: Tensor) -> Tensor:
    """Inverse of `_pack`."""
    values = unpack_words(words, 4, words.shape[-1] * 8)
    return values.unflatten(-1, (-1, 8))[..., list(PLACE)].flatten(-2)


def awq_config(spec: WeightSpec, unquantized: Sequence[str] = ()) -> dict[str, Any]:
    """The `quantization_config`.

    Args:
        unquantized: Full names of the linear layers that were left alone.
    """
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": spec.group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(dict.fromkeys([*unquantized, "lm_head"])),
    }


def read_awq_config(config: Mapping[str, Any]) -> tuple[Scheme, int]:
    """The scheme of settings, asymmetric, as zero points are always stored, and their group size.

    The scheme is empty where no kernel here takes groups of that size.

    Raises:
        CheckpointError: another method, or settings that are not read here.
    """
    require_key(config, "quant_method", ("awq",), AGAIN)
    key = "w_bit" if "bits" not in config and "w_bit" in config else "bits"
    bits = require_key(config, key, (4,), AGAIN)
    key = "q_group_size" if "group_size" not in config and "q_group_size" in config else None
    size = read_size(config, key or "group_size", RUN_SIZES, AGAIN)
    require_key(config, "zero_point", (True,), AGAIN)
    known = ("gemm", "GEMM", None)
    require_key(config, "version", known, "Get the checkpoint in the gemm version")
    return Scheme(weights=group_spec(bits, size, symmetric=False) if runs(size) else None), size


def read_awq(config: Mapping[str, Any]) -> tuple[Scheme, Layout]:
    """The scheme and layout of settings; errors as of `read_awq_config`."""
    scheme, size = read_awq_config(config)
    if scheme.weights is not None:
        return scheme, awq_layout(scheme.weights, size)
    allowed = ", ".join(map(str, RUN_SIZES))
    refusal = f"found group_size {size}; allowed: {allowed}, which kernels here take"
    return scheme, replace(awq_values(size), refusal=refusal)
