"""The op table: every operation that the runtime is made of, its contract, and its registration.

An op is registered with `torch.library` under the namespace `ptq`, with one implementation a device
and one for fake tensors, so that eager code, `torch.compile` and meta tensors all find it. The
function of the same name in this module is what callers import. `kernels.reference` holds a plain
twin of each; the twin is the specification that implementations are tested against.

**Row invariance.** A model's answer must not depend on what else is in the batch. On a given
machine, every op here returns a row (a token; a sequence in attention) with the same bits whatever
other rows share the call, and attention returns a query's row with the same bits whether it came in
a decode step, in a whole prefill or in any chunk of one.

Symbols: T tokens, H hidden size, K and N inputs and outputs of a linear layer, Hq and Hkv query and
key/value heads, D head size, S sequences. Activations are fp32, bf16 or fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import attention as cpu_attention
from kernels.cpu import elementwise as cpu_elementwise
from kernels.cpu import linear as cpu_linear
from kernels.cpu import native, native_ops
from kernels.numerics import dequantize
from kernels.weights import Int8Weight, PackedWeight, Weight

KV_BLOCK = cpu_attention.KV_BLOCK  # tokens of one block of the paged cache

_library = torch.library.Library("ptq", "DEF")


def _register(
    schema: str, cpu: Callable[..., Any], fake: Callable[..., Any], **others: Callable[..., Any]
) -> None:
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for device, implementation in {"CPU": cpu, **others}.items():
        _library.impl(name, implementation, device)
    torch.library.register_fake(f"ptq::{name}", fake, lib=_library)


def _either(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled kernel of a name where there is one, else the one of torch's operations."""

    def run(*arguments: Any) -> Any:
        chosen = plain if native.library() is None else getattr(native_ops, name)
        return chosen(*arguments)

    return run


_register(
    "quantize_static(Tensor x, Tensor scale) -> Tensor",
    _either("quantize_static", cpu_elementwise.quantize_static),
    lambda x, scale: torch.empty_like(x, dtype=torch.int8),
)
_register(
    "quantize_per_token(Tensor x) -> (Tensor, Tensor)",
    _either("quantize_per_token", cpu_elementwise.quantize_per_token),
    lambda x: (
        torch.empty_like(x, dtype=torch.int8),
        x.new_empty((x.shape[0], 1), dtype=torch.float32),
    ),
)
_register(
    "fake_quantize_fp8(Tensor x, Tensor? scale, int group) -> Tensor",
    _either("fake_quantize_fp8", cpu_elementwise.fake_quantize_fp8),
    lambda x, scale, group: torch.empty_like(x, dtype=torch.float32),
)
_register(
    "packed_linear(Tensor x, Tensor packed, Tensor? x_scale, int outputs, ScalarType out_dtype) "
    "-> Tensor",
    lambda x, packed, x_scale, outputs, out_dtype: native_ops.linear(x, packed, x_scale).to(
        out_dtype
    ),
    lambda x, packed, x_scale, outputs, out_dtype: x.new_empty(
        (x.shape[0], outputs), dtype=out_dtype
    ),
)
_register(
    "int8_linear(Tensor xq, Tensor x_scale, Tensor weight, Tensor w_scale, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
    cpu_linear.int8_linear,
    lambda xq, x_scale, weight, w_scale, bias, out_dtype: xq.new_empty(
        (xq.shape[0], weight.shape[0]), dtype=out_dtype
    ),
)
_register(
    "float_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    cpu_linear.float_linear,
    lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0])),
)
_register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    _either("rms_norm", cpu_elementwise.rms_norm),
    lambda x, weight, eps: torch.empty_like(x),
)
_register(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    _either("silu_mul", cpu_elementwise.silu_mul),
    lambda gate, up: torch.empty_like(gate, memory_format=torch.contiguous_format),
    CUDA=cpu_elementwise.silu_mul,
)
_register(
    "apply_rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    _either("apply_rope", cpu_elementwise.apply_rope),
    lambda q, k, cos, sin: (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
    ),
)
_register(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slots, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, bool dynamic) -> ()",
    _either("write_kv", cpu_attention.write_kv),
    lambda k, v, k_pool, v_pool, slots, k_scale, v_scale, dynamic: None,
)
_register(
    "paged_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_tables, "
    "Tensor query_start, Tensor context_len, Tensor? k_scale, Tensor? v_scale, "
    "float softmax_scale, int? sliding_window) -> Tensor",
    _either("paged_attention", cpu_attention.paged_attention),
    lambda q, *rest: torch.empty_like(q, memory_format=torch.contiguous_format),
)


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize activations with one calibrated scale.

    Args:
        x: [T, K], float.
        scale: fp32, one element.

    Returns:
        int8 [T, K]: clamp(round_half_even(x / scale), -127, 127), with a true fp32 division.
    """
    return torch.ops.ptq.quantize_static(x, scale)


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row with a scale of its own, absmax / 127 (a tiny one for a row of zeros).

    Args:
        x: [T, K], float, finite.

    Returns:
        (int8 [T, K], fp32 scales [T, 1]).
    """
    return torch.ops.ptq.quantize_per_token(x)


def linear(
    x: Tensor,
    weight: Weight,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A linear layer: x W^T + bias.

    Args:
        x: Float [T, K], or int8 [T, K] in [-127, 127] with scales.
        weight: From `pack_quantized_weight` or `pack_float_weight`.
        x_scale: fp32, one element (static) or [T, 1] (per token), for int8 inputs.
        out_dtype: Element type of the result.

    Returns:
        [T, N]. Integer inputs: sums over the inputs that share a scale are exact integers; with
        one scale an output, acc * (x_scale * w_scale) + bias in fp32. Float inputs: fp32 sums.
    """
    if isinstance(weight, PackedWeight):
        return torch.ops.ptq.packed_linear(x, weight.packed, x_scale, weight.outputs, out_dtype)
    if isinstance(weight, Int8Weight):
        return torch.ops.ptq.int8_linear(
            x, x_scale, weight.packed, weight.scale, weight.bias, out_dtype
        )
    if x_scale is not None:
        x = dequantize(x, x_scale.reshape(-1, 1) if x_scale.numel() > 1 else x_scale.reshape(()))
    return torch.ops.ptq.float_linear(x, weight.packed, weight.bias).to(out_dtype)


def fake_quantize_fp8(x: Tensor, scale: Tensor | None = None, group: int = -1) -> Tensor:
    """What an fp8 linear layer sees of its input: quantized to e4m3 and back.

    Args:
        x: [T, K], float.
        scale: fp32, one static element, or None where scales come from the data.
        group: Inputs of a row that share a dynamic scale, -1 for all; the last may be fewer.

    Returns:
        fp32 [T, K].
    """
    return torch.ops.ptq.fake_quantize_fp8(x, scale, group)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019, Eq. 4).

    Args:
        x: [..., H].
        weight: [H].
        eps: Added to the mean square.

    Returns:
        x / sqrt(mean(x^2) + eps) * weight in the type of `x`; the mean is taken in fp32.
    """
    return torch.ops.ptq.rms_norm(x, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product silu(gate) * up (Shazeer 2020, Eq. 6): two [T, I] -> [T, I]."""
    return torch.ops.ptq.silu_mul(gate, up)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al. 2021) in the two-halves layout of Llama checkpoints.

    Args:
        q: [T, Hq, D].
        k: [T, Hkv, D].
        cos: [T, D] of each token's position, the two halves equal.
        sin: [T, D], likewise.

    Returns:
        (q, k) rotated, new tensors.
    """
    return torch.ops.ptq.apply_rope(q, k, cos, sin)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    dynamic: bool = False,
) -> None:
    """Put the keys (after RoPE) and values of new tokens into the paged cache, quantizing them.

    Static scales say how; with `dynamic`, each head of each token is scaled by its own absmax, and
    its scale is put where the tensors of scales have a place for it.

    Args:
        k: [T, Hkv, D].
        v: [T, Hkv, D].
        k_pool: [blocks, Hkv, 64, D]; int8 or fp8 with scales, float without. Changed in place.
        v_pool: Likewise.
        slots: int64 [T], block * 64 + offset; no two alike.
        k_scale: fp32 [Hkv], [Hkv, D] (a scale for each channel), with `dynamic` [blocks, Hkv, 64],
            changed in place, or None.
        v_scale: fp32 [Hkv], with `dynamic` [blocks, Hkv, 64], changed in place, or None.
        dynamic: Whether scales are taken from the data.
    """
    torch.ops.ptq.write_kv(k, v, k_pool, v_pool, slots, k_scale, v_scale, dynamic)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softmax_scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of new tokens over their sequences' paged cache (Kwon et al. 2023).

    The keys and values of the new tokens are in the cache already. Query i of the n of sequence s
    stands at position context_len[s] - n + i; it sees its own and earlier positions, of which the
    last `sliding_window` where one is given.

    Args:
        q: [T, Hq, D], the sequences' queries one after another.
        k_pool: [blocks, Hkv, 64, D], int8 or fp8 with scales, float without.
        v_pool: Likewise.
        block_tables: int64 [S, M], the blocks of each sequence in order; entries beyond its
            context are ignored but must be valid block numbers.
        query_start: int64 [S + 1] on the CPU, where each sequence's queries begin in `q`.
        context_len: int64 [S] on the CPU, tokens in the cache, new ones included.
        k_scale: fp32 [Hkv], [Hkv, D], [blocks, Hkv, 64] (one for each cached token) or None.
        v_scale: fp32 [Hkv], [blocks, Hkv, 64] or None.
        softmax_scale: Factor of q k^T, usually 1 / sqrt(D).
        sliding_window: Positions seen, or None for all.

    Returns:
        [T, Hq, D] in the type of `q`.
    """
    return torch.ops.ptq.paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        query_start,
        context_len,
        k_scale,
        v_scale,
        softmax_scale,
        sliding_window,
    )
