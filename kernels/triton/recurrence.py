"""Layers that keep a state: linear recurrences, and short convolutions before them.

A head's state S is a matrix of a row a channel of k and a column a channel of v. Of each token

    S = exp(decay) S;   u = beta v, or beta (v - k^T S);   S = S + k u^T;   y = scale q^T S + skip v

With the memory k^T S taken from v this is the gated delta rule (Yang et al. 2024, arXiv 2412.06464;
with a decay of each channel of k that of Kimi Linear, arXiv 2510.26692), without it Mamba-2's state
space (Dao and Gu 2024, arXiv 2405.21060: k is B, q is C, beta the time step). A program holds some
columns of one head's state in registers, which no other program needs, through all tokens. All is
fp32, but for large products of chunks, whose operands have the 11 bits of tf32.

Several tokens with one decay a head go by chunks of 16, on the tensor cores. With G_t the sum of
decays of a chunk up to token t, S_0 its first state and, for s < t,

    A_ts = beta_t exp(G_t - G_s) k_t . k_s,    (1 + A) U = beta (V - exp(G) K S_0)

the chunk's outputs are exp(G) Q S_0 + P U, P_ts = exp(G_t - G_s) q_t . k_s for s <= t, and its
state exp(G_16) S_0 + (exp(G_16 - G) K)^T U. As A is strictly lower triangular of 16 rows,
(1 + A)^-1 = (1 - A) (1 + A^2) (1 + A^4) (1 + A^8).

A convolution multiplies each channel's last few inputs.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import require
from kernels.triton.fused import activate

NARROW = 8  # columns of a program that goes token by token: its sums then stay within a warp
CHUNK, WIDE, WARPS = 16, 32, 4  # of a program that goes by chunks: tokens of one, columns, warps
TOKENS, BLOCK = 16, 128  # of a convolution's program: tokens, channels


@triton.jit
def inverse_length(x, AXIS: tl.constexpr):
    """1 over the length of x along an axis."""
    return tl.rsqrt(tl.sum(x * x, AXIS) + 1e-6)


@triton.jit
def place_of(sequence, places, count):
    """Which of so many states is a sequence's; negative ones count from the end."""
    place = sequence
    if places is not None:
        place = tl.load(places + sequence)
        place = tl.where(place < 0, place + count, place)
    return place


@triton.jit(do_not_specialize=["T"])
def recurrence_kernel(
    q, k, v, decay, beta, skip, state, places, count, out, T, ROWS, COLUMNS, scale,
    q_sequence, q_token, q_head, k_sequence, k_token, k_head, v_sequence, v_token, v_head,
    decay_sequence, decay_token, decay_head, beta_sequence, beta_token, beta_head,
    row, column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, DELTA: tl.constexpr,
    NORM: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, columns of its state); `row` and `column` are strides of a state.

    What the next token brings is loaded before what this one brings is computed with.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    i, j = tl.arange(0, HEIGHT), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_rows, in_columns = i < ROWS, j < COLUMNS
    q += sequence * q_sequence + head // SHARE * q_head + i
    k += sequence * k_sequence + head // SHARE * k_head + i
    v += sequence * v_sequence + head * v_head + j
    decay += sequence * decay_sequence + head * decay_head
    if BY_CHANNEL:
        decay += i
    beta += sequence * beta_sequence + head * beta_head
    out += (sequence * T * heads + head) * COLUMNS + j
    inside = in_rows[:, None] & in_columns[None, :]
    state += (place_of(sequence, places, count) * heads + head) * ROWS * COLUMNS
    state += i[:, None] * row + j[None, :] * column
    s = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    through = tl.load(skip + head).to(tl.float32) if skip is not None else 0.0
    qt, kt = tl.load(q, mask=in_rows, other=0.0), tl.load(k, mask=in_rows, other=0.0)
    vt, bt = tl.load(v, mask=in_columns, other=0.0), tl.load(beta)
    gt = tl.load(decay, mask=in_rows, other=0.0) if BY_CHANNEL else tl.load(decay)
    for t in range(T):
        q0, k0, v0 = qt.to(tl.float32), kt.to(tl.float32), vt.to(tl.float32)
        g0, b0 = tl.exp(gt.to(tl.float32)), bt.to(tl.float32)
        more = t + 1 < T
        q, k, v = q + q_token, k + k_token, v + v_token
        decay, beta = decay + decay_token, beta + beta_token
        qt = tl.load(q, mask=in_rows & more, other=0.0)
        kt = tl.load(k, mask=in_rows & more, other=0.0)
        vt = tl.load(v, mask=in_columns & more, other=0.0)
        bt = tl.load(beta, mask=more, other=0.0)
        if BY_CHANNEL:
            gt = tl.load(decay, mask=in_rows & more, other=0.0)
        else:
            gt = tl.load(decay, mask=more, other=0.0)
        if NORM:
            q0 *= inverse_length(q0, 0)
            k0 *= inverse_length(k0, 0)
        s *= g0[:, None] if BY_CHANNEL else g0
        u = v0 - tl.sum(s * k0[:, None], 0) if DELTA else v0
        s += k0[:, None] * (u * b0)[None, :]
        y = tl.sum(s * q0[:, None], 0) * scale + v0 * through
        tl.store(out, y.to(out.dtype.element_ty), mask=in_columns)
        out += heads * COLUMNS
    tl.store(state, s.to(state.dtype.element_ty), mask=inside)


@triton.jit
def exact(a, b):
    """A product of small fp32 matrices, to about the bits of fp32."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit(do_not_specialize=["T"])
def chunk_kernel(
    q, k, v, decay, beta, skip, state, places, count, out, T, ROWS, COLUMNS, scale,
    q_sequence, q_token, q_head, k_sequence, k_token, k_head, v_sequence, v_token, v_head,
    decay_sequence, decay_token, decay_head, beta_sequence, beta_token, beta_head,
    row, column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, DELTA: tl.constexpr,
    NORM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As `recurrence_kernel`, by chunks."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    i, j = tl.arange(0, HEIGHT), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    t = tl.arange(0, CHUNK)
    in_rows, in_columns = i < ROWS, j < COLUMNS
    q += sequence * q_sequence + head // SHARE * q_head + t[:, None] * q_token + i[None, :]
    k += sequence * k_sequence + head // SHARE * k_head + t[:, None] * k_token + i[None, :]
    v += sequence * v_sequence + head * v_head + t[:, None] * v_token + j[None, :]
    decay += sequence * decay_sequence + head * decay_head + t * decay_token
    beta += sequence * beta_sequence + head * beta_head + t * beta_token
    out += ((sequence * T + t[:, None]) * heads + head) * COLUMNS + j[None, :]
    inside = in_rows[:, None] & in_columns[None, :]
    state += (place_of(sequence, places, count) * heads + head) * ROWS * COLUMNS
    state += i[:, None] * row + j[None, :] * column
    s = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    through = tl.load(skip + head).to(tl.float32) if skip is not None else 0.0
    later, same = t[:, None] > t[None, :], (t[:, None] == t[None, :]).to(tl.float32)
    for first in range(0, T, CHUNK):
        real = first + t < T
        q0 = tl.load(q + first * q_token, mask=real[:, None] & in_rows[None, :], other=0.0)
        k0 = tl.load(k + first * k_token, mask=real[:, None] & in_rows[None, :], other=0.0)
        v0 = tl.load(v + first * v_token, mask=real[:, None] & in_columns[None, :], other=0.0)
        b0 = tl.load(beta + first * beta_token, mask=real, other=0.0).to(tl.float32)
        g0 = tl.load(decay + first * decay_token, mask=real, other=0.0).to(tl.float32)
        q0, k0, v0 = q0.to(tl.float32), k0.to(tl.float32), v0.to(tl.float32)
        if NORM:
            q0 *= inverse_length(q0, 1)[:, None]
            k0 *= inverse_length(k0, 1)[:, None]
        g, total = tl.cumsum(g0, 0), tl.sum(g0, 0)
        apart = tl.exp(tl.where(later, g[:, None] - g[None, :], 0.0))
        before = tl.exp(g)[:, None]
        kt = tl.trans(k0)
        if DELTA:
            a = tl.where(later, tl.dot(k0, kt) * apart * b0[:, None], 0.0)
            squared = exact(a, a)
            fourth = exact(squared, squared)
            inverse = exact(same - a, same + squared)
            inverse = exact(exact(inverse, same + fourth), same + exact(fourth, fourth))
            u = exact(inverse, b0[:, None] * (v0 - before * tl.dot(k0, s)))
        else:
            u = b0[:, None] * v0
        p = tl.dot(q0, kt) * tl.where(later, apart, same)
        y = (before * tl.dot(q0, s) + tl.dot(p, u)) * scale + v0 * through
        tl.store(out, y.to(out.dtype.element_ty), mask=real[:, None] & in_columns[None, :])
        out += CHUNK * heads * COLUMNS
        s = tl.exp(total) * s + tl.dot(kt * tl.exp(total - g)[None, :], u)
    tl.store(state, s.to(state.dtype.element_ty), mask=inside)


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    delta: bool,
    norm: bool = False,
    scale: float = 1.0,
    skip: Tensor | None = None,
    transposed: bool = False,
    places: Tensor | None = None,
) -> Tensor:
    """Tokens of several sequences, each after its state, which is changed in place.

    Args:
        q: Float [B, T, G, R]; channels one after the other in memory, like those of k and v.
        k: Like q.
        v: Float [B, T, H, C]; heads h of it go with head h G / H of q and k.
        decay: Logarithm of what is kept of a state, float [B, T, H] or, by channel of k,
            [B, T, H, R].
        beta: Float [B, T, H].
        state: Float [B, H, R, C], contiguous; if `transposed` [B, H, C, R]; with `places` of more
            sequences than B.
        delta: Whether v is less what the state has for k.
        norm: Whether q and k are divided by their lengths.
        scale: Of what is read.
        skip: What is added of v, float [H]; None: nothing.
        places: int64 [B], which state is a sequence's, negative ones from the end; None: its own.

    Returns:
        Like v, contiguous.

    Raises:
        ValueError: a shape does not fit.
    """
    _check(q, k, v, decay, beta, state, transposed, places)
    (batch, tokens, groups, rows), (heads, columns) = q.shape, v.shape[2:]
    by_channel = decay.dim() == 4
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    decay = decay.contiguous() if by_channel else decay
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel():
        width = NARROW if tokens > 1 else 4 * NARROW
        kernel, more = recurrence_kernel, {"BY_CHANNEL": by_channel, "num_warps": width // NARROW}
        if tokens > 1 and not by_channel:
            width, kernel, more = WIDE, chunk_kernel, {"CHUNK": CHUNK, "num_warps": WARPS}
        strides = [n for x in (q, k, v, decay, beta) for n in x.stride()[:3]]
        kernel[(batch, heads, triton.cdiv(columns, width))](
            q, k, v, decay, beta, skip, state, places, len(state), out, tokens, rows, columns,
            scale, *strides, *((1, rows) if transposed else (columns, 1)),
            HEIGHT=max(16, triton.next_power_of_2(rows)), WIDTH=width, SHARE=heads // groups,
            DELTA=delta, NORM=norm, **more,
        )  # fmt: skip
    return out


def _check(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, transposed: bool,
    places: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError unless shapes fit."""
    (batch, tokens, groups, rows), (heads, columns) = q.shape, v.shape[2:]
    sizes = (columns, rows) if transposed else (rows, columns)
    require(
        k.shape == q.shape and heads % groups == 0 and v.shape[:2] == q.shape[:2],
        f"q, k, v are {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; needed are "
        "[B, T, G, R] twice and [B, T, H, C], G a divisor of H",
    )
    require(
        (places is not None or len(state) == batch)
        and state.shape[1:] == (heads, *sizes)
        and state.is_contiguous(),
        f"the state is {tuple(state.shape)}; needed is a contiguous {(batch, heads, *sizes)}",
    )
    scalars = (batch, tokens, heads)
    require(
        decay.shape[:3] == scalars and beta.shape == scalars,
        f"decay and beta are {tuple(decay.shape)}, {tuple(beta.shape)}; needed are {scalars}",
    )


@triton.jit(do_not_specialize=["T"])
def convolve_kernel(
    x, weight, bias, out, T, CHANNELS, x_sequence, x_channel, x_token,
    TAPS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tokens, channels)."""
    sequence = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = c < CHANNELS
    x += sequence * x_sequence + c.to(tl.int64)[None, :] * x_channel
    acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    if bias is not None:
        acc += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        w = tl.load(weight + c * TAPS + tap, mask=real, other=0.0).to(tl.float32)
        at = t - (TAPS - 1) + tap
        there = real[None, :] & (at >= 0)[:, None] & (t < T)[:, None]
        own = tl.load(x + at.to(tl.int64)[:, None] * x_token, mask=there, other=0.0)
        acc += own.to(tl.float32) * w[None, :]
    place = out + (sequence * T + t[:, None]) * CHANNELS + c[None, :]
    y = (activate(acc, "silu") if SILU else acc).to(out.dtype.element_ty)
    tl.store(place, y, mask=real[None, :] & (t < T)[:, None])


@triton.jit
def next_kernel(
    x, state, places, count, weight, bias, out, CHANNELS, x_sequence, x_channel,
    TAPS: tl.constexpr, KEPT: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels)."""
    sequence, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = c < CHANNELS
    own = tl.load(x + sequence * x_sequence + c.to(tl.int64) * x_channel, mask=real, other=0.0)
    state += (place_of(sequence, places, count) * CHANNELS + c) * KEPT
    acc = tl.zeros([WIDTH], tl.float32)
    if bias is not None:
        acc += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    for i in tl.static_range(KEPT + 1):
        if i < KEPT:
            value = tl.load(state + i, mask=real, other=0.0).to(tl.float32)
        else:
            value = own.to(tl.float32)
        if i >= KEPT + 1 - TAPS:
            tap = weight + c * TAPS + i - (KEPT + 1 - TAPS)
            acc += value * tl.load(tap, mask=real, other=0.0).to(tl.float32)
        if i > 0:
            tl.store(state + i - 1, value.to(state.dtype.element_ty), mask=real)
    y = (activate(acc, "silu") if SILU else acc).to(out.dtype.element_ty)
    tl.store(out + sequence * CHANNELS + c, y, mask=real)


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool, state: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each channel's sum over its last inputs.

    Args:
        x: Float [B, C, T], zeros before it; with a state [B, C, 1].
        weight: Float [C, taps], the newest input's last.
        bias: Float [C] or None.
        silu: Whether what is returned is silu of the sum.
        state: Float [B, C, S], contiguous, S >= taps - 1: the inputs before x; changed in place to
            end with x. None: there are none.
        places: As of `linear_recurrence`.

    Returns:
        Like x; channels are next to each other in memory.

    Raises:
        ValueError: a shape does not fit.
    """
    (batch, channels, tokens), taps = x.shape, weight.shape[1]
    weight = weight.contiguous()
    require(len(weight) == channels, f"{len(weight)} channels' weights for {channels} channels")
    out = torch.empty((batch, tokens, channels), dtype=x.dtype, device=x.device)
    if state is None:
        grid = (batch, triton.cdiv(tokens, TOKENS), triton.cdiv(channels, BLOCK))
        convolve_kernel[grid](
            x, weight, bias, out, tokens, channels, *x.stride(), TAPS=taps, SILU=silu,
            WIDTH=BLOCK, TOKENS=TOKENS,
        )  # fmt: skip
        return out.mT
    kept = state.shape[-1]
    require(
        tokens == 1 and state.is_contiguous() and state.shape[1] == channels
        and (places is not None or len(state) == batch) and kept >= taps - 1,
        f"x {tuple(x.shape)} after a state {tuple(state.shape)}; needed are [B, C, 1] and a "
        f"contiguous [B, C, {taps - 1} or more]",
    )  # fmt: skip
    next_kernel[(batch, triton.cdiv(channels, BLOCK))](
        x, state, places, len(state), weight, bias, out, channels, *x.stride()[:2], TAPS=taps,
        KEPT=kept, SILU=silu, WIDTH=BLOCK,
    )  # fmt: skip
    return out.mT
