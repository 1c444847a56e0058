"""Quantized keys and values into the paged cache, each a few tokens of a head at a time.

Columns are the costly part: a token's values lie 64 bytes apart. Where there are many tokens a
program takes 64 of a head. If they stand one after another, wherever the first stands in its page,
they are permuted so that column j of the program is place j of a page: pieces of 16 places are then
stored whole, to the first page from that place on, to the second before it; only the piece that
both pages share goes byte by byte, as do tokens that do not stand so (ends of prompts, decodes).
A byte of int4 holds channels i and i + D / 2 of a token, which lie in the same place of both halves
of its head: both halves are quantized and joined.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.paged_cache import load_channels
from kernels.triton.common import quantize, token_scale


@triton.jit
def write_keys(
    a, b, head, token, slot, positions, T, k_pages, k_scale, k_offset, k_feedback, sink_k,
    HEADS: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Quantize both halves of rotated keys and put them in rows; `rope_cache.halves` gives them.

    Those at the first SINKS positions of a sequence are stored as floats, too.
    """
    written = slot >= 0
    slot = tl.where(written, slot, 0)
    if SINKS > 0:
        position = tl.load(positions + token, mask=token < T, other=SINKS).to(tl.int64)
    TYPE: tl.constexpr = k_pages.dtype.element_ty
    half: tl.constexpr = DIM // 2
    WHOLE: tl.constexpr = a.shape[2] == half
    ROW: tl.constexpr = half if tl.uint8 == TYPE else DIM
    i = tl.arange(0, a.shape[2])[None, None, :]
    if k_offset is not None:
        places = k_offset + head[None, :, None] * DIM + i
        a -= load_channels(places, i < half, WHOLE)
        b -= load_channels(places + half, i < half, WHOLE)
    if SINKS > 0:
        own = ((slot // 64)[:, None] * HEADS + head[None, :]) * SINKS + position[:, None]
        cells = sink_k + own[:, :, None] * DIM + i
        inside = (written & (position < SINKS))[:, None, None] & (i < half)
        tl.store(cells, a.to(sink_k.dtype.element_ty), mask=inside)
        tl.store(cells + half, b.to(sink_k.dtype.element_ty), mask=inside)
    line = ((slot // 64)[:, None] * HEADS + head[None, :]) * 64 + (slot % 64)[:, None]
    place = k_pages + line[:, :, None] * ROW + i
    if SCALES > 0:
        scale_a = tl.zeros_like(a)
        scale_b = tl.zeros_like(b)
        if SCALES == 3:
            low, high = tl.min(tl.minimum(a, b), 2), tl.max(tl.maximum(a, b), 2)
            own = token_scale(low, high, TYPE).to(k_scale.dtype.element_ty)
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
        if k_feedback is not None:
            a, b = compensated(a, b, own.to(tl.float32), k_feedback, head, DIM, TYPE)
        else:
            a, b = quantize(a, scale_a, TYPE), quantize(b, scale_b, TYPE)
    mask = written[:, None, None]
    if not WHOLE:
        mask = mask & (i < half)
    if tl.uint8 == TYPE:
        tl.store(place, a | (b << 4), mask=mask)
    else:
        tl.store(place, a.to(TYPE), mask=mask)
        tl.store(place + half, b.to(TYPE), mask=mask)


@triton.jit
def compensated(a, b, scale, feedback, head, DIM: tl.constexpr, TYPE: tl.constexpr):
    """Both halves rounded with feedback, `kernels.packed_cache.compensated`, plus 8 in uint8.

    Args:
        scale: Of each head of each token [tokens, heads].
        feedback: fp32 [Hkv, DIM, DIM].
        head: Which of its heads they are [heads].
    """
    half: tl.constexpr = DIM // 2
    AT_ONCE: tl.constexpr = 4 if a.shape[0] == 1 else 1  # rows of several blocks are on their way
    i = tl.arange(0, a.shape[2])[None, None, :]
    rows = feedback + head.to(tl.int64)[None, :, None] * (DIM * DIM) + i
    moved_a, moved_b, q_a, q_b = a, b, tl.zeros_like(a), tl.zeros_like(b)
    for block in tl.range(half // 4, loop_unroll_factor=AT_ONCE):
        start = half - 4 - 4 * block
        q_b, errors = _rounded(moved_b, b, q_b, i, start, scale, TYPE)
        for j in tl.static_range(4):
            row, error = rows + (half + start + 3 - j) * DIM, _channel(errors, i, start + 3 - j)
            moved_a += error * tl.load(row, mask=i < half, other=0.0)
            moved_b += error * tl.load(row + half, mask=i < start, other=0.0)
    for block in tl.range(half // 4, loop_unroll_factor=AT_ONCE):
        start = half - 4 - 4 * block
        q_a, errors = _rounded(moved_a, a, q_a, i, start, scale, TYPE)
        for j in tl.static_range(4):
            row, error = rows + (start + 3 - j) * DIM, _channel(errors, i, start + 3 - j)
            moved_a += error * tl.load(row, mask=i < start, other=0.0)
    return (q_a + 8.0).to(tl.uint8), (q_b + 8.0).to(tl.uint8)


@triton.jit
def _rounded(moved, wanted, q, i, start, scale, TYPE: tl.constexpr):
    """Four channels from `start` on rounded, beside those that are: floats q, and their errors."""
    near = quantize(moved, scale[:, :, None], TYPE).to(tl.float32) - 8.0
    q = tl.where((i >= start) & (i < start + 4), near, q)
    return q, wanted - q * scale[:, :, None]


@triton.jit
def _channel(x, i, which):
    """One channel of all heads [tokens, heads, 1]."""
    return tl.sum(tl.where(i == which, x, 0.0), 2)[:, :, None]


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
        x = x.to(tl.float32)
        own = token_scale(tl.min(x, 1), tl.max(x, 1), TYPE).to(v_scale.dtype.element_ty)
        tl.store(v_scale + line + place, own, mask=written)
        scale += own.to(tl.float32)
    elif SCALES > 0:
        scale += tl.load(v_scale + head)
    return rows, line, place, written, scale


@triton.jit
def columns_of(
    rows, d, written, scale, DIM: tl.constexpr, SCALES: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Rows d of tokens as a page holds them, [rows, tokens]: channels, of int4 two of each byte."""
    x = tl.load(rows + d[None, :], mask=written[:, None], other=0.0).to(tl.float32)
    y = quantize(x, scale[:, None], TYPE) if SCALES > 0 else x.to(TYPE)
    if tl.uint8 == TYPE:
        x = tl.load(rows + DIM // 2 + d[None, :], mask=written[:, None], other=0.0).to(tl.float32)
        y |= quantize(x, scale[:, None], TYPE) << 4
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
    ROWS: tl.constexpr = DIM // 2 if tl.uint8 == TYPE else DIM
    WIDTH: tl.constexpr = 32 if ROWS % 32 == 0 else 16 if ROWS % 16 == 0 else 8
    j = tl.arange(0, 64)
    rows, _, _, written, scale = values_of(
        first + (j - at + 64) % 64, head, v, slots, v_scale, T, pitch, HEADS, DIM, WIDE, SCALES,
        TYPE,
    )  # fmt: skip
    page_a, page_b = tl.load(slots + first) // 64, tl.load(slots + first + 63) // 64
    head_a = v_pages + (page_a.to(tl.int64) * HEADS + head) * (64 * ROWS)
    head_b = v_pages + (page_b.to(tl.int64) * HEADS + head) * (64 * ROWS)
    piece = j // 16 * 16
    for part in range(ROWS // WIDTH):
        d = part * WIDTH + tl.arange(0, WIDTH)
        columns = columns_of(rows, d, written, scale, DIM, SCALES, TYPE)
        inside = (d * 64)[:, None] + j[None, :]
        tl.store(head_a + inside, columns, mask=(piece >= at)[None, :])
        tl.store(head_b + inside, columns, mask=(piece + 16 <= at)[None, :])


@triton.jit
def write_sinks(
    v, sink_v, slots, positions, first, head, T, pitch,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Values of the tokens among these at the first SINKS positions of a sequence, as floats."""
    d = tl.arange(0, WIDE)[None, :]
    for group in range(TOKENS // 16):
        token = first + group * 16 + tl.arange(0, 16)
        slot = tl.load(slots + token, mask=token < T, other=-1).to(tl.int64)
        position = tl.load(positions + token, mask=token < T, other=SINKS).to(tl.int64)
        own = (slot >= 0) & (position < SINKS)
        if tl.max(own.to(tl.int32), 0) > 0:
            inside = own[:, None] & (d < DIM)
            x = tl.load(v + (token * pitch + head * DIM)[:, None] + d, mask=inside, other=0.0)
            line = ((slot // 64) * HEADS + head) * SINKS + position
            cells = sink_v + line[:, None] * DIM + d
            tl.store(cells, x.to(sink_v.dtype.element_ty), mask=inside)


@triton.jit
def write_values(
    v, v_pages, slots, v_scale, positions, sink_v, first, head, T, pitch,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    SCALES: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Quantize a head's values of TOKENS tokens, 16 or 64, from `first` on; write columns."""
    TYPE: tl.constexpr = v_pages.dtype.element_ty
    if SINKS > 0:
        write_sinks(
            v, sink_v, slots, positions, first, head, T, pitch, HEADS, DIM, WIDE, TOKENS, SINKS
        )
    begin, count = 0, 1  # of the groups of 16 tokens that go byte by byte
    if TOKENS == 64:
        at = run_at(slots, first, T)
        begin, count = at * 0, at * 0 + 4
        if at >= 0:
            write_run(
                v, v_pages, slots, v_scale, first, at, head, T, pitch, HEADS, DIM, WIDE, SCALES
            )
            begin, count = 64 - at % 16, (at % 16 != 0).to(tl.int32)
    ROWS: tl.constexpr = DIM // 2 if tl.uint8 == TYPE else DIM
    d = tl.arange(0, WIDE // 2 if tl.uint8 == TYPE else WIDE)
    channel = d % ROWS if WIDE != DIM else d  # what stands after a head's last is not written
    for group in range(count):
        token = first + (begin + group * 16 + tl.arange(0, 16)) % 64
        rows, line, place, written, scale = values_of(
            token, head, v, slots, v_scale, T, pitch, HEADS, DIM, WIDE, SCALES, TYPE
        )
        columns = columns_of(rows, channel, written, scale, DIM, SCALES, TYPE)
        cells = (line * ROWS + place)[None, :] + (d * 64)[:, None]
        inside = written[None, :]
        if WIDE != DIM:
            inside = inside & (d < ROWS)[:, None]
        tl.store(v_pages + cells, columns, mask=inside)
