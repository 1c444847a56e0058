"""Linear recurrences of layers that keep a state.

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
"""

# pyright: reportMissingImports=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import require

NARROW = 8  # columns of a program that goes token by token: its sums then stay within a warp
CHUNK, WIDE, WARPS = 16, 32, 4  # of a program that goes by chunks: tokens of one, columns, warps


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


@dataclass(frozen=True, eq=False)
class TimeSteps:
    """How beta and decay follow from one number d a token and head: beta is d + bias, its softplus
    if that is asked for, within limits; decay is beta times rate.

    Attributes:
        rate: Float [H]; None where beta and decay are given.
        bias: Float [H] or None.
        softplus: Whether it is taken.
        low: Least beta.
        high: Largest beta.
    """

    rate: Tensor | None
    bias: Tensor | None = None
    softplus: bool = True
    low: float = 0.0
    high: float = float("inf")


GIVEN = TimeSteps(None, softplus=False)


@triton.jit
def gates(g, b, rate, bias, head, low, high, SOFTPLUS: tl.constexpr):
    """(decay, beta) as they are given, or as `TimeSteps` makes both of b."""
    g, b = g.to(tl.float32), b.to(tl.float32)
    if rate is not None:
        if bias is not None:
            b += tl.load(bias + head).to(tl.float32)
        if SOFTPLUS:
            b = tl.where(b > 20.0, b, tl.log(1.0 + tl.exp(b)))
        b = tl.minimum(tl.maximum(b, low), high)
        g = b * tl.load(rate + head).to(tl.float32)
    return g, b


@triton.jit(do_not_specialize=["T"])
def recurrence_kernel(
    q, k, v, decay, beta, skip, rate, bias, low, high, state, places, count, out,
    T, ROWS, COLUMNS, scale,
    q_sequence, q_token, q_head, k_sequence, k_token, k_head, v_sequence, v_token, v_head,
    decay_sequence, decay_token, decay_head, beta_sequence, beta_token, beta_head,
    row, column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, DELTA: tl.constexpr,
    NORM: tl.constexpr, SOFTPLUS: tl.constexpr, BY_CHANNEL: tl.constexpr,
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
        g0, b0 = gates(gt, bt, rate, bias, head, low, high, SOFTPLUS)
        g0 = tl.exp(g0)
        more = t + 1 < T
        q, k, v = q + q_token, k + k_token, v + v_token
        decay, beta = decay + decay_token, beta + beta_token
        qt = tl.load(q, mask=in_rows & more, other=0.0)
        kt = tl.load(k, mask=in_rows & more, other=0.0)
        vt = tl.load(v, mask=in_columns & more, other=0.0)
        bt = tl.load(beta, mask=more, other=0.0)
        gt = tl.load(decay, mask=in_rows & more if BY_CHANNEL else more, other=0.0)
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
    q, k, v, decay, beta, skip, rate, bias, low, high, state, places, count, out,
    T, ROWS, COLUMNS, scale,
    q_sequence, q_token, q_head, k_sequence, k_token, k_head, v_sequence, v_token, v_head,
    decay_sequence, decay_token, decay_head, beta_sequence, beta_token, beta_head,
    row, column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, DELTA: tl.constexpr,
    NORM: tl.constexpr, SOFTPLUS: tl.constexpr, CHUNK: tl.constexpr,
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
        b0 = tl.load(beta + first * beta_token, mask=real, other=0.0)
        g0 = tl.load(decay + first * decay_token, mask=real, other=0.0)
        g0, b0 = gates(g0, b0, rate, bias, head, low, high, SOFTPLUS)
        if rate is not None:  # tokens after the last one change nothing
            g0, b0 = tl.where(real, g0, 0.0), tl.where(real, b0, 0.0)
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
    decay: Tensor | None,
    beta: Tensor,
    state: Tensor,
    *,
    delta: bool,
    steps: TimeSteps = GIVEN,
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
            [B, T, H, R]; None where `steps` makes it of beta.
        beta: Float [B, T, H].
        state: Float [B, H, R, C], contiguous; if `transposed` [B, H, C, R]; with `places` of more
            sequences than B.
        delta: Whether v is less what the state has for k.
        steps: How beta and decay follow from `beta`, where they do.
        norm: Whether q and k are divided by their lengths.
        scale: Of what is read.
        skip: What is added of v, float [H], if anything is.
        places: int64 [B], which state is a sequence's, negative ones from the end; None: its own.

    Returns:
        Like v, contiguous.

    Raises:
        ValueError: a shape does not fit, or both or none of `decay` and `steps` are given.
    """
    decay = _decay(decay, beta, steps)
    _check(q, k, v, decay, beta, state, transposed, places)
    (batch, tokens, groups, rows), (heads, columns) = q.shape, v.shape[2:]
    given = (q, k, v, decay)
    q, k, v, decay = (x if x.dim() < 4 or x.stride(3) == 1 else x.contiguous() for x in given)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel():
        kernel, width, more = chunk_kernel, WIDE, {"CHUNK": CHUNK, "num_warps": WARPS}
        if tokens == 1 or decay.dim() == 4:
            kernel, width = recurrence_kernel, NARROW if tokens > 1 else 4 * NARROW
            more = {"BY_CHANNEL": decay.dim() == 4, "num_warps": width // NARROW}
        strides = [n for x in (q, k, v, decay, beta) for n in x.stride()[:3]]
        strides += (1, rows) if transposed else (columns, 1)
        kernel[(batch, heads, triton.cdiv(columns, width))](
            q, k, v, decay, beta, skip, steps.rate, steps.bias, steps.low, steps.high, state,
            places, len(state), out, tokens, rows, columns, scale, *strides,
            HEIGHT=max(16, triton.next_power_of_2(rows)), WIDTH=width, SHARE=heads // groups,
            DELTA=delta, NORM=norm, SOFTPLUS=steps.softplus, **more,
        )  # fmt: skip
    return out


def _decay(decay: Tensor | None, beta: Tensor, steps: TimeSteps) -> Tensor:
    """What a kernel reads as decay: beta where it follows from that."""
    require((decay is None) != (steps is GIVEN), "either decay is given or how it follows")
    return beta if decay is None else decay


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
        len(state if places is None else places) == batch
        and state.shape[1:] == (heads, *sizes)
        and state.is_contiguous(),
        f"the state is {tuple(state.shape)}; needed is a contiguous {(batch, heads, *sizes)}, or "
        f"{batch} places in one of more sequences",
    )
    scalars = (batch, tokens, heads)
    require(
        decay.shape[:3] == scalars and beta.shape == scalars,
        f"decay and beta are {tuple(decay.shape)}, {tuple(beta.shape)}; needed are {scalars}",
    )
