"""Plain torch twins of the GPU kernels: what each computes, slow and without tricks.

In fp64 where rounding is not part of the contract. W8A8's twin is `kernels.reference.int8_linear`.
Arguments are those of the function of the same name, weights as they are before packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kernels.reference as reference
from kernels.numerics import FP8, INT8, block_absmax, choose_scale, quantize


def grouped_linear(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """W4A16, W8A16 and W4A8: fp64 [M, N] of x [M, K] and a weight as it was before packing."""
    out = x.double() @ grouped_weight(q, scale, zero_point).T
    if x_scale is not None:
        out = out * x_scale.double().reshape(-1, 1)
    return out if bias is None else out + bias.double()


def grouped_weight(q: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """fp64 [N, K] of integers q [N, K], scales and zero points [N, groups]."""
    group = q.shape[1] // scale.shape[1]
    values = q.double()
    if zero_point is not None:
        values -= zero_point.double().repeat_interleave(group, dim=1)
    return values * scale.double().repeat_interleave(group, dim=1)


def scaled_linear(
    xq: Tensor, x_scale: Tensor, wq: Tensor, w_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """fp8: fp64 [M, N], scales of rows and of output channels."""
    out = (xq.double() @ wq.double().T) * x_scale.double().reshape(-1, 1) * w_scale.double()
    return out if bias is None else out + bias.double()


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """fp64 [S, Hq, D], one sequence at a time; zeros for a sequence of length 0."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k_pages.shape[1]
    for s, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        pages = tables[s, : -(-length // 64)].long()
        begin = 0 if sliding_window is None else max(0, length - sliding_window)
        k = dequantize_pages(k_pages, k_scale, pages)[:, begin:length]  # [Hkv, n, D]
        v = dequantize_pages(v_pages.transpose(2, 3), v_scale, pages)[:, begin:length]
        own = q[s].double().unflatten(0, (-1, group))  # [Hkv, group, D]
        weights = torch.softmax(own @ k.transpose(1, 2) * softmax_scale, dim=-1)
        out[s] = (weights @ v).flatten(0, 1)
    return out


def dequantize_pages(pool: Tensor, scale: Tensor, pages: Tensor) -> Tensor:
    """What a sequence's pages [., Hkv, 64, D] stand for: fp64 [Hkv, tokens, D]."""
    wide = scale[pages] if scale.dim() == 3 else scale[None]
    shape = (wide.shape[0], wide.shape[1], wide.shape[2] if scale.dim() == 3 else 1, -1)
    values = pool[pages].double() * wide.double().reshape(shape)
    return values.transpose(0, 1).flatten(1, 2)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(rows, their scales, the sum) of norm(x + residual) * weight, in fp32."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    normed = wide / (wide.double().square().mean(-1, keepdim=True) + eps).sqrt().float()
    return *finish_rows(normed * weight.float(), scale, dtype), total


def silu_mul(
    gate_up: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor | None]:
    """(rows, their scales) of silu(gate) * up, gate_up [T, 2 I], in fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return finish_rows(gate / (1 + torch.exp(-gate)) * up, scale, dtype)


def finish_rows(
    y: Tensor, scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """y in a float type; or quantized, with one scale, else each row with its absmax's."""
    kinds = {kind.storage: kind for kind in (INT8, FP8)}
    if dtype not in kinds:
        return y.to(dtype), None
    if scale is None:
        scale = choose_scale(block_absmax(y, (1, -1)), kinds[dtype])
    return quantize(y, scale if scale.dim() == 2 else scale.reshape(()), kinds[dtype]), scale


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> Tensor:
    """Rotated q [T, Hq, D]; K (rotated, fp32) and V put into the cache, one token at a time."""
    rotated, keys = reference.apply_rope(q.float(), k.float(), cos.float(), sin.float())
    kind = INT8 if k_pages.dtype == torch.int8 else FP8
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, place = divmod(slot, 64)
        for x, pool, scale in (
            (keys[token], k_pages[page, :, place], k_scale),
            (v[token].float(), v_pages[page, :, :, place], v_scale),
        ):  # [Hkv, D]
            if scale.dim() == 3:
                scale[page, :, place] = choose_scale(block_absmax(x, (1, -1)), kind)[:, 0]
                own = scale[page, :, place].float().reshape(-1, 1)
            else:
                own = scale.reshape(scale.shape[0], -1)
            pool.copy_(quantize(x, own, kind))
    return rotated.to(q.dtype)
