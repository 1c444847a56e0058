"""Rows of a packed weight as floats: the embedding of tokens, where the head is the embedding, too.

    y[t, k] = s[n, g] (q[n, k] - z[n, g]),        n = ids[t], g = k / group

The weight is stored as its product wants it, and the place of an element follows from that. A row
of tiles is read in pieces of some bytes: little beside a step, which reads the whole head.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Layout = Literal["tiles", "runs", "rows"]
WIDTH = 512  # elements of a row that a program gathers


@triton.jit
def byte_of_tile(n, k, BITS: tl.constexpr):
    """Where in its tile of 64 outputs and 128 inputs an element is, by `operands.pack_tiles`."""
    a, b, c = n % 64 // 16, n // 8 % 2, n % 8
    pair = (k // 2 % 4 * 4 + k // 8 % 4) * 2 + k % 2
    high, low = k // 64 % 2, k // 32 % 2
    if BITS == 8:
        place = ((((high * 2 + b) * 4 + a) * 8 + c) * 32 + pair) * 2 + low
    else:
        place = (((b * 4 + a) * 8 + c) * 32 + pair) * 2 + high
    return place


@triton.jit
def gather_kernel(
    ids, packed, scale, out, N, K,
    LAYOUT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (token, piece of its row); `GROUP` is 0 for one scale an output."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.load(ids + t)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = k < K
    if LAYOUT == "tiles":
        tile = (k // 128) * (N // 64) + n // 64
        q = tl.load(packed + tile * (1024 * BITS) + byte_of_tile(n, k, BITS), mask=real, other=0)
        q = q.to(tl.int32)
        if BITS == 4:
            q = (q >> (k // 32 % 2 * 4)) & 15
    elif LAYOUT == "runs":
        q = tl.load(packed + (k // 128).to(tl.int64) * N * 128 + n * 128 + k % 128, mask=real)
    else:
        q = tl.load(packed + n * K + k, mask=real)
    s = tl.load(scale + n + (k // GROUP * N if GROUP else 0 * k), mask=real)
    if ZERO:
        z = s & ((1 << BITS) - 1)
        q -= z
        s = (s - z).to(tl.float32, bitcast=True)
    elif LAYOUT == "tiles":
        q -= 1 << (BITS - 1)
    y = q.to(tl.float32) * s.to(tl.float32)
    tl.store(out + t * K + k, y.to(out.dtype.element_ty), mask=real)


def gather_rows(
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    size: tuple[int, int],
    dtype: torch.dtype,
    layout: Layout,
    *,
    bits: int = 8,
    group: int = 0,
    zero_points: bool = False,
) -> Tensor:
    """Rows of a weight.

    Args:
        ids: int64 [T].
        packed: The weight: bytes of `operands.pack_tiles` (`tiles`), int8 [K / 128, N, 128]
            (`runs`), or e4m3 [N, K] (`rows`).
        scale: [groups, N] as `packing.lay_scales` gives them, or [N].
        size: (N, K).
        layout: How the weight is laid out.
        bits: Of an element of tiles.
        group: Inputs that share a scale; 0 for all.
        zero_points: Whether the scales hold some.

    Returns:
        [T, K], rounded once.
    """
    outputs, inputs = size
    ids, out = ids.contiguous(), torch.empty((len(ids), inputs), dtype=dtype, device=packed.device)
    grid = (len(ids), triton.cdiv(inputs, WIDTH))
    if len(ids):
        gather_kernel[grid](
            ids, packed, scale, out, outputs, inputs, LAYOUT=layout, BITS=bits, GROUP=group,
            ZERO=zero_points, WIDTH=WIDTH,
        )  # fmt: skip
    return out
