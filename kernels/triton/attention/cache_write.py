"""Quantized keys and values into the paged cache, each a few tokens of a head at a time.

Columns are the costly part: a token's values lie 64 bytes apart. Where there are many tokens a
program takes 64 of a head. If they stand one after another, wherever the first stands in its page,
they are permuted so that column j of the program is place j of a page: pieces of 16 places are then
stored whole, to the first page from that place on, to the second before it; only the piece that
both pages share goes byte by byte, as do tokens that do not stand so (ends of prompts, decodes).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.paged_cache import load_channels
from kernels.triton.common import absmax_scale, quantize


@triton.jit
def write_keys(
    a, b, head, slot, written, k_pages, k_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Quantize both halves of rotated keys and put them in rows; `rope_cache.halves` gives them."""
    TYPE: tl.constexpr = k_pages.dtype.element_ty
    half: tl.constexpr = DIM // 2
    WHOLE: tl.constexpr = a.shape[2] == half
    i = tl.arange(0, a.shape[2])[None, None, :]
    line = ((slot // 64)[:, None] * HEADS + head[None, :]) * 64 + (slot % 64)[:, None]
    place = k_pages + line[:, :, None] * (2 * half) + i
    if SCALES > 0:
        scale_a = tl.zeros_like(a)
        scale_b = tl.zeros_like(b)
        if SCALES == 3:
            absmax = tl.maximum(tl.max(tl.abs(a), 2), tl.max(tl.abs(b), 2))
            own = absmax_scale(absmax, TYPE).to(k_scale.dtype.element_ty)
            tl.store(k_scale + line, own, mask=written[:, None])
            scale_a += own.to(tl.float32)[:, :, None]
            scale_b += own.to(tl.float32)[:, :, None]
        elif SCALES == 2:
            places = k_scale + head[None, :, None] * (2 * half) + i
            scale_a += load_channels(places, i < half, WHOLE)
            scale_b += load_channels(places + half, i < half, WHOLE)
        else:
            scale_a += tl.load(k_scale + head)[None, :, None]
            scale_b += tl.load(k_scale + head)[None, :, None]
        a, b = quantize(a, scale_a, TYPE), quantize(b, scale_b, TYPE)
    mask = written[:, None, None]
    if not WHOLE:
        mask = mask & (i < half)
    tl.store(place, a.to(TYPE), mask=mask)
    tl.store(place + half, b.to(TYPE), mask=mask)


@triton.jit
def values_of(
    token, head, v, slots, v_scale, T, pitch,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SCALES: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Where the values of tokens lie and go, and their scales, which are stored if they are new.

    Returns:
        (pointers to rows [tokens, 1], lines of 64 tokens to write to, places in them, which are
        written, scales), of each token.
    """
    slot = tl.load(slots + token, mask=token < T, other=-1).to(tl.int64)
    written = slot >= 0
    slot = tl.where(written, slot, 0)
    rows = v + (token * pitch + head * DIM)[:, None]
    line, place = ((slot // 64) * HEADS + head) * 64, slot % 64
    scale = (token * 0).to(tl.float32)
    if SCALES == 3:
        d = tl.arange(0, WIDE)[None, :]
        inside = written[:, None]
        if WIDE != DIM:
            inside = inside & (d < DIM)
        x = tl.load(rows + d, mask=inside, other=0.0)
        absmax = tl.max(tl.abs(x.to(tl.float32)), 1)
        own = absmax_scale(absmax, TYPE).to(v_scale.dtype.element_ty)
        tl.store(v_scale + line + place, own, mask=written)
        scale += own.to(tl.float32)
    elif SCALES > 0:
        scale += tl.load(v_scale + head)
    return rows, line, place, written, scale


@triton.jit
def columns_of(rows, d, written, scale, SCALES: tl.constexpr, TYPE: tl.constexpr):
    """Channels d of tokens, all of them in their heads, quantized: [channels, tokens]."""
    x = tl.load(rows + d[None, :], mask=written[:, None], other=0.0).to(tl.float32)
    y = quantize(x, scale[:, None], TYPE) if SCALES > 0 else x.to(TYPE)
    return tl.trans(y)


@triton.jit
def run_at(slots, first, T):
    """Where in its page a run of 64 tokens from `first` on starts; -1 where they are no run."""
    i = tl.arange(0, 64)
    slot = tl.load(slots + first + i, mask=first + i < T, other=-1).to(tl.int64)
    start, last = tl.max(tl.where(i == 0, slot, -1), 0), tl.max(tl.where(i == 63, slot, -1), 0)
    place = start % 64 + i
    wanted = tl.where(place < 64, start // 64, last // 64) * 64 + place % 64
    strays = tl.sum((slot != wanted).to(tl.int32), 0)
    return tl.where((strays == 0) & (start >= 0) & (last >= 0), start % 64, -1).to(tl.int32)


@triton.jit
def write_run(
    v, v_pages, slots, v_scale, first, at, head, T, pitch,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Values of 64 tokens in a run that starts at place `at` of a page: whole pieces of 16.

    Some channels at a time: few registers leave an SM room for many programs.
    """
    TYPE: tl.constexpr = v_pages.dtype.element_ty
    WIDTH: tl.constexpr = 32 if DIM % 32 == 0 else 16
    j = tl.arange(0, 64)
    rows, _, _, written, scale = values_of(
        first + (j - at + 64) % 64, head, v, slots, v_scale, T, pitch, HEADS, DIM, WIDE, SCALES,
        TYPE,
    )  # fmt: skip
    page_a, page_b = tl.load(slots + first) // 64, tl.load(slots + first + 63) // 64
    head_a = v_pages + (page_a.to(tl.int64) * HEADS + head) * (64 * DIM)
    head_b = v_pages + (page_b.to(tl.int64) * HEADS + head) * (64 * DIM)
    piece = j // 16 * 16
    for part in range(DIM // WIDTH):
        d = part * WIDTH + tl.arange(0, WIDTH)
        columns = columns_of(rows, d, written, scale, SCALES, TYPE)
        inside = (d * 64)[:, None] + j[None, :]
        tl.store(head_a + inside, columns, mask=(piece >= at)[None, :])
        tl.store(head_b + inside, columns, mask=(piece + 16 <= at)[None, :])


@triton.jit
def write_values(
    v, v_pages, slots, v_scale, first, head, T, pitch,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Quantize a head's values of TOKENS tokens, 16 or 64, from `first` on; write columns."""
    TYPE: tl.constexpr = v_pages.dtype.element_ty
    begin, count = 0, 1  # of the groups of 16 tokens that go byte by byte
    if TOKENS == 64:
        at = run_at(slots, first, T)
        begin, count = at * 0, at * 0 + 4
        if at >= 0:
            write_run(
                v, v_pages, slots, v_scale, first, at, head, T, pitch, HEADS, DIM, WIDE, SCALES
            )
            begin, count = 64 - at % 16, (at % 16 != 0).to(tl.int32)
    d = tl.arange(0, WIDE)
    channel = d % DIM if WIDE != DIM else d  # what stands behind a head's last is not written
    for group in range(count):
        token = first + (begin + group * 16 + tl.arange(0, 16)) % 64
        rows, line, place, written, scale = values_of(
            token, head, v, slots, v_scale, T, pitch, HEADS, DIM, WIDE, SCALES, TYPE
        )
        columns = columns_of(rows, channel, written, scale, SCALES, TYPE)
        cells = (line * DIM + place)[None, :] + (d * 64)[:, None]
        inside = written[None, :]
        if WIDE != DIM:
            inside = inside & (d < DIM)[:, None]
        tl.store(v_pages + cells, columns, mask=inside)
