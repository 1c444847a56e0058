"""The GPTQ layout: integer weights in groups, packed along their inputs; write and read.

    X.qweight  int32 [K b / 32, N]        input k in word k // c, at bit b (k % c); c = 32 / b
    X.qzeros   int32 [groups, N b / 32]   likewise along N
    X.scales   fp16  [groups, N]
    X.g_idx    int32 [K]                  group of each input

Some software leaves g_idx out where groups are neighbouring inputs, and some has negative scales.
Values and zero points are unsigned: ours + 2^(b - 1). Version 1 (`checkpoint_format: gptq`) stores
zero points less one, modulo 2^b: 0 becomes 2^b - 1. Version 2 (`gptq_v2`) stores them as they are.

Source: AutoGPTQ 0.7 `nn_modules/qlinear`, GPTQModel 7.6 `utils/model.py`. Where a zero point is 0,
software disagrees on version 1: some add one to whole words, so that the carry of one value reaches
its neighbour. Version 2 has no such case.

GPTQ's `quantization_config`: written for a specification, and read.

Source: AutoGPTQ 0.7 and GPTQModel 7.6 `quantization/config.py`; formats/foreign/gptq.py has the
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.families.block_layers import MERGED
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
    require_table,
    require_tensor,
    runs,
    without_signs,
)
from formats.pack import pack_words, unpack_words
from formats.scheme import Scheme, WeightSpec
from formats.stored.weights import StoredWeight, check_scale

RUN_BITS = (4, 8)
READ_BITS = (2, 3, 4, 8)
AGAIN = "Quantize the original model with one of the shipped recipes"
HELD = (
    "Supported of quant_method 'gptq' are 4 and 8 bits, per channel or in groups of 32, 64 or "
    f"128. {AGAIN}"
)
# vLLM and SGLang merge these layers, and look the merged name up.
MERGED_INTO = {part: merged for merged, parts in MERGED.items() for part in parts}


def gptq_config(
    spec: WeightSpec,
    *,
    version: Version,
    quantizer: str,
    unquantized: Sequence[str] = (),
    head: bool = False,
) -> dict[str, Any]:
    """The `quantization_config`.

    Args:
        version: 1 or 2.
        quantizer: Name and version of who made it, such as `ptq:0.1.0`.
        unquantized: Full names of the linear layers that were left alone.
        head: Whether lm_head is quantized, too.
    """
    dynamic = {f"-:^{_pattern(module)}$": {} for module in unquantized if module != "lm_head"}
    return {
        "quant_method": "gptq",
        "bits": spec.bits,
        "group_size": spec.group_size or -1,
        "sym": spec.symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "damp_percent": 0.01,  # unused when loading, but some readers want the key
        "true_sequential": True,
        "lm_head": head,
        "static_groups": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": [quantizer]},
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _pattern(module: str) -> str:
    """A pattern for a layer's name and for that of the layer it is merged into."""
    parent, _, leaf = module.rpartition(".")
    name = f"({leaf}|{MERGED_INTO[leaf]})" if leaf in MERGED_INTO else re.escape(leaf)
    return f"{re.escape(parent)}\\.{name}" if parent else name


def read_gptq_config(config: Mapping[str, Any]) -> tuple[Scheme, Version]:
    """The scheme and version of settings that are run.

    Keys that do not change the tensors, such as `damp_percent` and `desc_act` (`g_idx` tells), are
    not looked at, nor `dynamic` (`gptq_rules`).

    Raises:
        CheckpointError: another method, or settings that are not read here.
    """
    require_key(config, "quant_method", ("gptq",), AGAIN)
    bits = require_key(config, "bits", RUN_BITS, HELD)
    size = read_size(config, "group_size", RUN_SIZES, HELD)
    symmetric = require_key(config, "sym", (True, False), AGAIN)
    require_key(config, "pack_dtype", ("int32", None), "Pack it again with pack_dtype int32")
    require_key(config, "lm_head", (True, False, None), AGAIN)
    require_key(config, "is_marlin_format", (False, None), "Get the checkpoint in the gptq format")
    key = "format" if "checkpoint_format" not in config and "format" in config else None
    layout = require_key(
        config, key or "checkpoint_format", ("gptq", "gptq_v2", None), "Get the gptq format"
    )
    if not runs(size):
        require_key(config, "group_size", RUN_SIZES, HELD)
    return Scheme(weights=group_spec(bits, size, symmetric)), 2 if layout == "gptq_v2" else 1


def gptq_rules(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
    """Settings of single layers by a pattern for `re.match` on their names; the first counts.

    What a pattern says goes before what is said of all; None leaves a layer alone.

    Raises:
        CheckpointError: a pattern is none, or says no settings.
    """
    rules: dict[str, Mapping[str, Any] | None] = {}
    for name, own in require_table(config, "dynamic", AGAIN).items():
        pattern = name.removeprefix("+:").removeprefix("-:")
        if not is_pattern(pattern) or not isinstance(own, Mapping):
            raise CheckpointError(
                f"found dynamic {name!r}: {own!r}; needed is an object of settings under a regular "
                f"expression, with +: before it, or -: for layers left alone. {AGAIN}"
            )
        rules[pattern] = None if name.startswith("-:") else own
    return rules


def is_pattern(text: str) -> bool:
    """Whether a text is a regular expression."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def float_layout(config: Mapping[str, Any], *, g_idx: bool) -> Layout | None:
    """The layout of settings that no kernel here runs, but whose values can be read.

    Args:
        g_idx: Whether layers have it.

    Returns:
        None of settings that are run, or not read at all.
    """
    bits, size = config.get("bits"), config.get("group_size")
    if bits not in READ_BITS or (config.get("desc_act") and not g_idx):
        return None
    size = read_size(config, "group_size", RUN_SIZES, HELD)
    if bits in RUN_BITS and runs(size):
        return None
    run = {"bits": next(iter(RUN_BITS)), "group_size": next(iter(RUN_SIZES))}
    _, version = read_gptq_config(dict(config) | run)
    key, found, allowed = (
        ("group_size", size, RUN_SIZES) if bits in RUN_BITS else ("bits", bits, RUN_BITS)
    )
    return replace(
        gptq_values(bits, size, version, g_idx=g_idx),
        refusal=f"found {key} {found}; allowed: {', '.join(map(str, allowed))}, which kernels "
        "here take",
    )


Version = Literal[1, 2]
T = TypeVar("T")
LEAVES = ("qweight", "qzeros", "scales", "g_idx")


def gptq_layout(
    spec: WeightSpec, version: Version, *, g_idx: bool = True, group_size: int | None = None
) -> Layout:
    """The layout of weights of a specification that `refuse_gptq` accepts.

    Args:
        version: How zero points are stored.
        g_idx: Whether layers have it.
        group_size: That of the tensors, where it is a multiple of the specification's.
    """
    size, bits = group_size or spec.block[1], spec.bits
    return replace(
        gptq_values(bits, size, version, g_idx=g_idx),
        pack=partial(pack_gptq, group_size=size, bits=bits, version=version),
        unpack=_reading(_unpack, bits, size, version, g_idx),
        zero_word=int(_pack_zeros(torch.zeros(32 // bits, 1), bits, version).item()),
    )


def gptq_values(bits: int, group_size: int, version: Version, *, g_idx: bool) -> Layout:
    """The layout of weights of any settings, of which only the values are read."""
    return Layout(
        name="gptq" if version == 1 else "gptq_v2",
        leaves=LEAVES if g_idx else LEAVES[:-1],
        marker="qweight",
        shape=lambda words: (words[1], words[0] * 32 // bits),
        values=_reading(_values, bits, group_size, version, g_idx),
    )


def _reading(
    read: Callable[[Mapping[str, Tensor], int, Version, int], T],
    bits: int,
    group_size: int,
    version: Version,
    g_idx: bool,
) -> Callable[[Mapping[str, Tensor]], T]:
    def of(tensors: Mapping[str, Tensor]) -> T:
        own = tensors if g_idx else _with_g_idx(tensors, bits, group_size)
        return read(own, bits, version, group_size)

    return of


def _with_g_idx(tensors: Mapping[str, Tensor], bits: int, group_size: int) -> dict[str, Tensor]:
    """The tensors with the `g_idx` of groups of neighbouring inputs."""
    columns = packed_shape(tensors)[0] * 32 // bits
    size = columns if group_size == -1 else group_size
    inputs = torch.arange(columns, dtype=torch.int32, device=tensors["qweight"].device)
    return dict(tensors) | {"g_idx": inputs // size}


def refuse_gptq(scheme: Scheme) -> None:
    """Refuse a scheme that GPTQ cannot express; raises as `refuse_others`."""
    refuse_others(scheme, "GPTQ", "int4", "int8")


def refuse_others(scheme: Scheme, target: str, *kinds: str) -> None:
    """Refuse what is no weight-only scheme of some integers.

    Raises:
        CheckpointError: weights are of another type, or have float zero points, or activations are
            quantized.
    """
    weights = scheme.weights
    if weights is None or weights.dtype not in kinds or weights.float_zeros:
        raise CheckpointError(
            f"found {weights.text if weights else 'no quantized weights'}; {target} holds "
            f"{' and '.join(kinds)} weights, per channel or in groups, with integer zero points. "
            "Quantize the original model with a recipe such as w4_gptq"
        )
    if scheme.activations is not None:
        raise CheckpointError(
            f"found {scheme.activations.text}; {target} holds weight-only schemes, and whoever "
            "loads it would run the activations unquantized. Serve the compressed-tensors "
            "checkpoint as it is, or quantize with a weight-only recipe such as w4"
        )


def pack_gptq(
    weight: StoredWeight, group_size: int, bits: int, *, version: Version = 1
) -> dict[str, Tensor]:
    """The four tensors of a weight.

    Args:
        weight: q int8 [N, K], scale fp32 [N, groups], zero_point int8 [N, groups] or None.
        group_size: Inputs of a group; -1 for all.
        bits: 4 or 8.
        version: How zero points are stored; see the module's docstring.

    Raises:
        CheckpointError: N or K does not fill words and groups, or a scale does not fit fp16.
    """
    rows, columns = weight.q.shape
    check_divides((rows, columns), group_size, bits)
    size = columns if group_size == -1 else group_size
    return {
        "qweight": pack_words(weight.q, bits).T.contiguous(),
        "qzeros": _pack_zeros(weight.zeros, bits, version),
        "scales": half_scales(weight).T.contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // size,
    }


def _pack_zeros(zeros: Tensor, bits: int, version: Version) -> Tensor:
    """Signed zero points [N, groups] as int32 [groups, N b / 32]."""
    lowered = zeros.T.to(torch.int32) - (1 if version == 1 else 0)
    return pack_words(lowered, bits).contiguous()  # the mask of packing does the wrapping


def unpack_gptq(
    tensors: Mapping[str, Tensor], bits: int, version: Version, group_size: int
) -> tuple[StoredWeight, Tensor | None]:
    """Inverse of `pack_gptq`.

    Returns:
        The weight, with zero_point None where all are 0 (a symmetric grid), and None; or, with
        act-order, the weight whose column j belongs to input order[j], and order int64 [K]: in
        that order, and only in that, groups are neighbours.

    Raises:
        CheckpointError: a tensor has another type or shape, a scale is 0 or not finite, or groups
            have unequal sizes, which no grouped layout expresses.
    """
    q, scale, zeros, g_idx = _fields(tensors, bits, version)
    weight = StoredWeight(q, scale, zeros if bool(zeros.any()) else None)
    size = q.shape[1] if group_size == -1 else group_size
    if size * scale.shape[1] != q.shape[1]:
        raise CheckpointError(
            f"scales has {scale.shape[1]} groups of {size} for {q.shape[1]} inputs; needed is "
            f"their quotient. group_size of quantization_config is not that of the tensors"
        )
    if torch.equal(g_idx, torch.arange(len(g_idx), device=g_idx.device) // size):
        return weight, None
    if bool((g_idx.bincount(minlength=scale.shape[1]) != size).any()):
        raise CheckpointError(
            f"g_idx has groups of other sizes than {size}, which is not run. Make a float model "
            f"with ptq convert SRC FLOAT --to float. {AGAIN}"
        )
    order = g_idx.argsort(stable=True)
    return StoredWeight(q[:, order], scale, weight.zero_point), order


def dequantize_gptq(tensors: Mapping[str, Tensor], bits: int, version: Version) -> Tensor:
    """The weight that the tensors stand for, fp32 [N, K], whatever the order of its groups.

    Raises:
        CheckpointError: as `unpack_gptq`, but for the groups.
    """
    q, scale, zeros, g_idx = _fields(tensors, bits, version)
    return (q.float() - zeros.float()[:, g_idx]) * scale[:, g_idx]


def _values(tensors: Mapping[str, Tensor], bits: int, version: Version, group_size: int) -> Tensor:
    return dequantize_gptq(tensors, bits, version)  # g_idx tells all of the groups


def _unpack(
    tensors: Mapping[str, Tensor], bits: int, version: Version, group_size: int
) -> StoredWeight:
    """`unpack_gptq` with the order of the inputs in the weight."""
    weight, order = unpack_gptq(tensors, bits, version, group_size)
    weight = in_groups(weight, group_size)
    return weight if order is None else replace(weight, order=order.unsqueeze(0))


def _fields(
    tensors: Mapping[str, Tensor], bits: int, version: Version
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checked q [N, K], positive fp32 scale and int8 zeros [N, groups], g_idx int64 [K]."""
    words, rows = packed_shape(tensors)
    groups, columns = packed_shape(tensors, "scales")[0], words * 32 // bits
    check_scale("scales", tensors["scales"].abs(), ((groups, rows),))
    qweight = require_tensor(tensors, "qweight", torch.int32, (words, rows))
    qzeros = require_tensor(tensors, "qzeros", torch.int32, (groups, -(-rows * bits // 32)))
    g_idx = require_tensor(tensors, "g_idx", torch.int32, (columns,)).long()
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise CheckpointError(f"g_idx names groups outside of 0 to {groups - 1}; it is damaged")
    q = unpack_words(qweight.T, bits, columns)
    zeros = unpack_words(qzeros, bits, rows).to(torch.int32) + (1 if version == 1 else 0)
    half = 1 << (bits - 1)
    zeros = ((zeros + half) % (1 << bits) - half).to(torch.int8).T.contiguous()
    scale = tensors["scales"].float().T.contiguous()
    return *without_signs(q, scale, zeros, g_idx), g_idx
