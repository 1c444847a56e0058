"""The turn of keys and queries before an int4 cache, `kernels.packed_cache.turned`, in a kernel.

Rows come in halves, as rotary embedding leaves them. A fast Walsh-Hadamard transform of n channels
has steps of 1, 2, ..., n / 2, and both halves of a head are a whole number of n / 2: steps below
that stay in a half. The last pairs runs of n / 2, where a head is n channels its two halves.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned(a, b, DIM: tl.constexpr, N: tl.constexpr):
    """Both halves [tokens, heads, HALF] of heads of DIM channels, runs of N turned; 0: none.

    N is a power of two from 2 on, DIM a multiple of it; HALF is DIM / 2, up to a power of two.
    """
    STEPS: tl.constexpr = N.bit_length() - 2
    for step in tl.static_range(STEPS):
        a, b = _step(a, 1 << step), _step(b, 1 << step)
    if N == DIM:
        a, b = a + b, a - b
    else:
        a, b = _last(a, b, 0, DIM, N), _last(b, a, DIM // N, DIM, N)
    FACTOR: tl.constexpr = N**-0.5
    return a * FACTOR, b * FACTOR


@triton.jit
def _step(x, H: tl.constexpr):
    """Sums and differences of channels i and i + H in runs of 2 H."""
    T: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    W: tl.constexpr = x.shape[2]
    first, second = tl.split(x.reshape(T, P, W // (2 * H), 2, H).permute(0, 1, 2, 4, 3))
    both = tl.join(first + second, first - second)
    return both.permute(0, 1, 2, 4, 3).reshape(T, P, W)


@triton.jit
def _last(own, other, FIRST: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr):
    """The step of N / 2 for a half that begins with run FIRST of the head's runs of N / 2."""
    M: tl.constexpr = N // 2
    RUNS: tl.constexpr = DIM // N  # of M, in a half: an odd number
    i = tl.arange(0, own.shape[2])
    run = FIRST + i // M
    paired = run ^ 1
    inside = (paired >= FIRST) & (paired < FIRST + RUNS)
    start = tl.where(paired >= RUNS, paired - RUNS, paired)
    place = (start * M + i % M) % own.shape[2]
    place = place[None, None, :] + tl.zeros_like(own).to(tl.int32)
    pair = tl.where(inside[None, None, :], tl.gather(own, place, 2), tl.gather(other, place, 2))
    y = tl.where((run % 2 == 0)[None, None, :], own + pair, pair - own)
    return tl.where((i < DIM // 2)[None, None, :], y, 0.0)
