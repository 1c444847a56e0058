"""Attention over latents of `kernels.triton.attention.latent` by Hopper's tensor cores, for R = 512
and P = 64 (DeepSeek-V2, V3; Kimi K2).

A page's latents lie in shared memory once, as fp16 or bf16, and both products read them there:

    S^T = C Q^T + K R^T    [64 tokens, rows]        O^T = C^T P^T    [512, rows]

so that the dimension of 64 that wgmma wants is a page's tokens, or the latents' numbers, and rows
may be as few as 16. The next page is on its way to registers meanwhile; eight bits become fp16 on
the way from there to shared memory.

The plain kernel, whose launcher chooses, is the twin, and takes what this one does not.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false
from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton.attention.gluon_parts import FP8, LOWEST, TYPES, to_fp16
from kernels.triton.attention.prefill_hopper import HIDDEN, LOG2_E, tile_of
from kernels.triton.gluon_names import barrier, wait_ahead

RANK = gl.constexpr(512)
TURN = gl.constexpr(64)
PLAIN = gl.constexpr(16)  # what pages hold, beside `TYPES`: floats of 16 bits
WARPS = gl.constexpr(8)


@gluon.jit
def numbers(raw, TYPE: gl.constexpr, SIZE: gl.constexpr):
    """A page as it was loaded as an operand [64, SIZE]."""
    return raw if TYPE == PLAIN else to_fp16(raw, TYPE == FP8).reshape([64, SIZE])


@gluon.jit
def load_queries(
    q, places, scale, real, SIZE: gl.constexpr, kind: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Rows of queries [ROWS, SIZE] from places, times a scale of each number if there is one."""
    d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))
    real = gl.expand_dims(real, 1) & (gl.expand_dims(d, 0) >= 0)
    x = gl.load(q + gl.expand_dims(places, 1) + gl.expand_dims(d, 0), mask=real, other=0.0)
    if scale is not None:
        x = x.to(gl.float32) * gl.expand_dims(gl.load(scale + d), 0)
    return x.to(kind)


@gluon.jit(do_not_specialize=["decodes", "S", "width"])
def latent_kernel(
    q, rotated, keys, latents, tables, lengths, query_start, key_scale, latent_scale, out, parts,
    softmax_scale, decodes, S, width, q_token, q_head,
    HEADS: gl.constexpr, OWN: gl.constexpr, QUERIES: gl.constexpr, ROWS: gl.constexpr,
    SPLITS: gl.constexpr, TYPE: gl.constexpr, PROMPTS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Program (split, block of OWN heads, sequence or tile), as the plain one; pages of eight bits
    are given as int32 words."""
    OPERAND: gl.constexpr = latents.dtype.element_ty if TYPE == PLAIN else gl.float16
    wait_ahead(OVERLAP)
    split, block = gl.program_id(0), gl.program_id(1)
    if PROMPTS:
        tile = gl.num_programs(2) - 1 - gl.program_id(2)
        sequence, start, count, first = tile_of(tile, query_start, decodes, S, QUERIES)
        if first >= count:
            return
    else:
        sequence = gl.program_id(2)
        start, count, first = sequence, sequence * 0 + 1, sequence * 0
    length = gl.load(lengths + sequence).to(gl.int32)
    pages = (length - count + gl.minimum(first + QUERIES, count) + 63) // 64
    share = gl.maximum((pages + SPLITS - 1) // SPLITS, 1)
    if split >= gl.maximum((pages + share - 1) // share, 1):
        return
    begin, end = split * share, gl.minimum((split + 1) * share, pages)
    table = tables + sequence * width

    # Sixteen bytes a thread; eight lanes that store together fill different banks.
    RUN: gl.constexpr = 8 if TYPE == PLAIN else 4
    WIDE: gl.constexpr = RANK if TYPE == PLAIN else RANK // 4
    NARROW: gl.constexpr = TURN if TYPE == PLAIN else TURN // 4
    LANES: gl.constexpr = [4, 8] if TYPE == PLAIN else [8, 4]
    PAGE: gl.constexpr = gl.BlockedLayout([1, RUN], LANES, [WARPS, 1], [1, 0])
    t = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, PAGE)), 1)
    c_place = t * WIDE + gl.expand_dims(gl.arange(0, WIDE, layout=gl.SliceLayout(0, PAGE)), 0)
    k_place = t * NARROW + gl.expand_dims(gl.arange(0, NARROW, layout=gl.SliceLayout(0, PAGE)), 0)
    page = gl.load(table + begin, mask=begin < end, other=0).to(gl.int64)
    raw_c = gl.load(latents + page * (64 * WIDE) + c_place)
    raw_k = gl.load(keys + page * (64 * NARROW) + k_place)
    following = gl.load(table + gl.minimum(begin + 1, width - 1))

    cs = gl.allocate_shared_memory(
        OPERAND, [64, RANK], gl.NVMMASharedLayout.get_default_for([64, RANK], OPERAND)
    )
    ks = gl.allocate_shared_memory(
        OPERAND, [64, TURN], gl.NVMMASharedLayout.get_default_for([64, TURN], OPERAND)
    )
    ps = gl.allocate_shared_memory(
        OPERAND, [64, ROWS], gl.NVMMASharedLayout.get_default_for([64, ROWS], OPERAND)
    )
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ROW))
    query, head = first + i // OWN, (block * OWN + i % OWN).to(gl.int64)
    real = (query < count) & (i < OWN * QUERIES) & (head < HEADS)
    row = (start + query).to(gl.int64)
    places = row * q_token + head * q_head
    x = load_queries(q, places, latent_scale, real, RANK, OPERAND, ROW)
    places = (row * HEADS + head) * TURN
    y = load_queries(rotated, places, key_scale, real, TURN, OPERAND, ROW)
    qs = gl.allocate_shared_memory(
        OPERAND, [ROWS, RANK], gl.NVMMASharedLayout.get_default_for([ROWS, RANK], OPERAND), x
    )
    rs = gl.allocate_shared_memory(
        OPERAND, [ROWS, TURN], gl.NVMMASharedLayout.get_default_for([ROWS, TURN], OPERAND), y
    )

    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, ROWS * 4 // WARPS, 16]
    )
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUM))
    position = gl.expand_dims(length - count + first + i // OWN, 0)
    token = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, SUM)), 1)
    m = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(0, SUM))
    l = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(0, SUM))  # noqa: E741
    zero = gl.full([64, ROWS], 0.0, gl.float32, layout=SUM)
    acc = gl.full([RANK, ROWS], 0.0, gl.float32, layout=ACC)
    factor = softmax_scale * LOG2_E
    for p in range(begin, end):
        cs.store(numbers(raw_c, TYPE, RANK))
        ks.store(numbers(raw_k, TYPE, TURN))
        fence_async_shared()
        barrier()
        page = following.to(gl.int64)
        raw_c = gl.load(latents + page * (64 * WIDE) + c_place)
        raw_k = gl.load(keys + page * (64 * NARROW) + k_place)
        following = gl.load(table + gl.minimum(p + 2, width - 1))
        s = warpgroup_mma(ks, rs.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(cs, qs.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,)) * factor
        s = gl.where(p * 64 + token <= position, s, HIDDEN)
        top = gl.maximum(m, gl.max(s, 0))
        weights, shrink = gl.exp2(s - gl.expand_dims(top, 0)), gl.exp2(m - top)
        l = l * shrink + gl.sum(weights, 0)  # noqa: E741
        m = top
        ps.store(weights.to(OPERAND))
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(0, ACC)), 0)
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(cs.permute((1, 0)), ps, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
    d = gl.expand_dims(gl.arange(0, RANK, layout=gl.SliceLayout(1, ACC)), 1)
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(0, ACC))
    if SPLITS > 1:
        item = sequence * gl.num_programs(1) + block
        own = parts + (item * SPLITS + split).to(gl.int64) * (ROWS * (RANK + 2))
        gl.store(own + gl.expand_dims(i, 0) * RANK + d, acc)
        line = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUM))
        gl.store(own + ROWS * RANK + line, m)
        gl.store(own + ROWS * RANK + ROWS + line, l)
    else:
        part = gl.where(l > 0, 1.0 / l, 0.0)
        z = acc * gl.expand_dims(gl.convert_layout(part, gl.SliceLayout(0, ACC)), 0)
        if latent_scale is not None:
            scale = gl.load(latent_scale + gl.arange(0, RANK, layout=gl.SliceLayout(1, ACC)))
            z = z * gl.expand_dims(scale, 1)
        query, head = first + i // OWN, (block * OWN + i % OWN).to(gl.int64)
        real = (query < count) & (i < OWN * QUERIES) & (head < HEADS)
        cells = ((start + query).to(gl.int64) * HEADS + head) * RANK
        cells, real = gl.expand_dims(cells, 0) + d, gl.expand_dims(real, 0) & (d >= 0)
        gl.store(out + cells, z.to(out.dtype.element_ty), mask=real)


def launch(
    grid: tuple[int, int, int], arguments: tuple[Any, ...], kind: torch.dtype, **own: Any
) -> None:
    """Run the kernel with the plain one's arguments, for pages of a type."""
    q, rotated, keys, latents, *rest = arguments
    if kind in TYPES:
        keys, latents = keys.view(torch.int32), latents.view(torch.int32)
    latent_kernel[grid](
        q, rotated, keys, latents, *rest, TYPE=TYPES.get(kind, PLAIN.value), num_warps=WARPS.value,
        enable_fp_fusion=True, **own,
    )  # fmt: skip
