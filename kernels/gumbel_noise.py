"""Noise that draws tokens, the same on every device: Gumbel noise of (seed, step, token).

    argmax_i of x_i - log E_i,  E_i = -log(1 - v_i),  v_i uniform

draws token i with probability exp(x_i) / sum_j exp(x_j). The uniform numbers are the first words of
Philox4x32 with 7 rounds (Salmon et al. 2011), key `seed`, counter (token, step). The Triton twin is
`kernels.triton.sampling.sample.noisy`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 7
FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD, HALF = np.uint64(2**32 - 1), np.uint64(32)
SERIES_BELOW = np.float32(2.0**-7)  # where -log(1 - v) is summed from its powers of v
CHUNK = 4096  # tokens whose numbers are made together: they stay in the processor's caches
LARGEST = 22.9  # no noise is larger: v is at least 2^-33


def uniform(seed: int, step: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Uniform numbers of tokens, in (0, 1].

    Args:
        seed: 64 bits, of the request.
        step: 64 bits, of its token.
        tokens: Ids.
    """
    a = tokens.astype(np.uint64)
    b, c = (np.full_like(a, (step >> shift) & 0xFFFFFFFF) for shift in (0, 32))
    d = np.zeros_like(a)
    keys = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(ROUNDS):
        one, other = FACTORS[0] * a, FACTORS[1] * c  # at most 64 bits
        a = (other >> HALF) ^ b ^ np.uint64(keys[0])
        c = (one >> HALF) ^ d ^ np.uint64(keys[1])
        b, d = other & WORD, one & WORD
        keys = [(key + more) & 0xFFFFFFFF for key, more in zip(keys, KEY_STEPS, strict=True)]
    return (a.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)


def noise(seed: int, step: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """-log E of tokens; arguments as of `uniform`."""
    v = uniform(seed, step, tokens)
    terms = [np.float32(c) for c in (1.0, 0.5, 0.3333333333, 0.25)]
    series = v * (terms[0] + v * (terms[1] + v * (terms[2] + v * terms[3])))
    with np.errstate(divide="ignore"):  # v may be rounded to 1, whose token is never drawn
        e = np.where(v < SERIES_BELOW, series, -_log(np.float32(1.0) - v))
        return -_log(e)


def draw(x: NDArray[np.float32], tokens: NDArray[np.int64], seed: int, step: int) -> int:
    """One of some tokens, by its probability; of equal ones the lowest id.

    Noise is made for those alone that any noise could bring to the top.

    Args:
        x: Their logits, after temperature; at least one is finite.
        tokens: Their ids, ascending.
        seed: Of the request.
        step: How many tokens it has made.
    """
    first = int(x.argmax())
    bound = float(x[first] + noise(seed, step, tokens[first : first + 1])[0])
    best, token = -np.inf, -1
    for start in range(0, len(x), CHUNK):
        likely = start + np.flatnonzero(x[start : start + CHUNK] + np.float32(LARGEST) >= bound)
        if len(likely):
            noisy = x[likely] + noise(seed, step, tokens[likely])
            top = int(noisy.argmax())
            if noisy[top] > best:
                best, token = float(noisy[top]), int(tokens[likely[top]])
                bound = max(bound, best)
    return token


def _log(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded from fp64, so that it is the same on all processors."""
    return np.log(x.astype(np.float64)).astype(np.float32)
