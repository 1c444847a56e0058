"""A plain torch twin of every op in `kernels.ops`: the specification, slow and without tricks.

Integer products are taken in int64, everything else in fp64 where rounding is not part of the
contract. The arguments and results are those of the op of the same name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.numerics import TINY_SCALE


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """clamp(round_half_even(x / scale), -127, 127)."""
    return torch.round(x.float() / scale.float().reshape(())).clamp(-127, 127).to(torch.int8)


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale a row: absmax / 127."""
    scale = torch.stack([row.float().abs().max() / 127 for row in x]).clamp(min=TINY_SCALE)
    quantized = [quantize_static(row, s) for row, s in zip(x, scale, strict=True)]
    return torch.stack(quantized), scale.reshape(-1, 1)


def int8_linear(
    xq: Tensor,
    x_scale: Tensor,
    q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """acc * (x_scale * w_scale) + bias; `q` int8 [N, K] as in the checkpoint."""
    accumulated = xq.long() @ q.long().T
    scale = x_scale.float().reshape(-1, 1) * w_scale.float().reshape(1, -1)
    out = accumulated.float() * scale
    return (out if bias is None else out + bias).to(out_dtype)


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias in fp64."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    wide = x.double()
    norm = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (wide / norm * weight.double()).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up."""
    wide = gate.double()
    return (wide * torch.sigmoid(wide) * up.double()).to(gate.dtype)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the pair (x_i, x_{i + D/2}) of each token by its angle."""

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        c, s = cos[:, None, :half].double(), sin[:, None, :half].double()
        a, b = x[..., :half].double(), x[..., half:].double()
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


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
    """Token by token, head by head."""
    for x, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        size, top = pool.shape[2], 127.0 if pool.dtype == torch.int8 else 448.0
        for token, slot in enumerate(slots.tolist()):
            for head in range(pool.shape[1]):
                row, place = x[token, head].float(), (slot // size, head, slot % size)
                if scale is not None and dynamic:
                    scale[place] = (row.abs().max() / top).clamp(min=TINY_SCALE)
                    row = row / scale[place]
                elif scale is not None:
                    row = row / scale[head]
                if scale is not None:
                    row = (row.round() if pool.dtype == torch.int8 else row).clamp(-top, top)
                pool[place] = row.to(pool.dtype)


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
    """Softmax of each query over its visible positions, one query and head at a time, in fp64."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_pool.shape[1]
    for s, context in enumerate(context_len.tolist()):
        k, v = (
            _values(pool, scale, block_tables[s]).transpose(1, 2).flatten(0, 1)
            for pool, scale in ((k_pool, k_scale), (v_pool, v_scale))
        )  # [positions, Hkv, D]
        first, last = query_start[s : s + 2].tolist()
        for row in range(first, last):
            position = context - (last - row)
            begin = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            for head in range(q.shape[1]):
                keys, values = (x[begin : position + 1, head // group] for x in (k, v))
                weights = torch.softmax(keys @ q[row, head].double() * softmax_scale, dim=0)
                out[row, head] = (weights @ values).to(q.dtype)
    return out


def _values(pool: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    """What cached numbers stand for: fp64 [blocks, Hkv, 64, D]."""
    values = pool[blocks].double()
    if scale is None:
        return values
    if scale.dim() == 3:  # one for each cached token
        return values * scale[blocks].double()[..., None]
    return values * scale.double().reshape(1, scale.shape[0], 1, -1)
