"""int4 in the paged cache: two numbers a byte, and the turn that makes keys fit into them.

Byte i of a head holds channels i (its low four bits) and i + D / 2 (high), each as q + 8, 0 to 15.
A static scale is fp32 and positive, absmax / 7.5. A dynamic one is fp16 and may be negative: it
makes the number of largest magnitude -8, the one integer whose negative is not there, so that all
sixteen are used (a trick of llama.cpp's Q4_0; 12% less error than absmax / 7.5). Integers are
quantized with the scale as it is held.

Before they are cached, keys are turned head by head, and queries with them, so that their products
stay: x H / sqrt(n) for every run of n channels, H the Hadamard matrix in Sylvester's order,
H_2n = [[H_n, H_n], [H_n, -H_n]] (Ashkboos et al., "QuaRot", arXiv 2404.00456, section 4). It is its
own inverse.

Keys may be rounded with feedback: what counts is not the error e of a key, but e^T M e with the
second moments M of the queries that read it. With M = L L^T, L lower triangular, that is a sum of
|L_bb^T e_b + sum_{c > b} L_cb^T e_c|^2 over blocks b of four channels: they are rounded from the
last to the first, and each is moved by what makes its own part small. For weights this is GPTQ's
rule (Frantar et al., arXiv 2210.17323; Chee et al., "QuIP", arXiv 2307.13304, section 3); a key is
a row that is rounded when it is written. Blocks of one channel would lose a tenth less, in four
times as many steps that wait for each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_FP16, MOST_FP16 = 2.0**-14, 65504.0  # magnitudes of scales that are held in fp16
AT_ONCE = 4  # channels of a block that are rounded without hearing of each other's errors
DAMPING = 0.01  # of a mean square of queries, added to all: moments are those of few samples


def pack_halves(q: Tensor) -> Tensor:
    """int8 [..., D] in [-8, 7], D even, to uint8 [..., D / 2]."""
    low, high = (q + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack_halves(packed: Tensor) -> Tensor:
    """uint8 [..., D / 2] to int8 [..., D] in [-8, 7]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.int8) - 8


def token_scales(x: Tensor) -> Tensor:
    """Scales of heads [..., D] that are quantized as they come: fp16 [..., 1].

    -max / 8 where max > -min, else -min / 8, divided in fp32; its magnitude is kept to normal fp16.

    Raises:
        ValueError: `x` holds NaN or infinity.
    """
    wide = x.float()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise ValueError("the data hold NaN or infinity, of which no scale can be taken")
    size = (torch.maximum(high, -low) * 0.125).clamp(LEAST_FP16, MOST_FP16)
    return torch.where(high > -low, -size, size).half()


def compensated(x: Tensor, scale: Tensor, feedback: Tensor) -> Tensor:
    """Heads rounded with feedback, from the last block to the first: int8 [..., Hkv, D].

    Errors are those of what is read, so that a block also makes up for what is clamped.
    Compiled kernels do the same in the same order, products and sums rounded apart.

    Args:
        x: [..., Hkv, D].
        scale: Of each head, as it is held: fp32 [..., Hkv, 1].
        feedback: fp32 [Hkv, D, D], as `feedback_of` gives it.
    """
    wanted = x.float()
    moved, q = wanted.clone(), torch.empty_like(wanted, dtype=torch.int8)
    for start in reversed(range(0, x.shape[-1], AT_ONCE)):
        own = slice(start, start + AT_ONCE)
        near = (moved[..., own] / scale).round().clamp(-8.0, 7.0)
        error, q[..., own] = wanted[..., own] - near * scale, near.to(torch.int8)
        for i in reversed(range(error.shape[-1])):
            moved[..., :start] += error[..., i, None] * feedback[:, start + i, :start]
    return q


def feedback_of(moments: Tensor, size: int) -> Tensor:
    """What the error of each channel of a key adds to the blocks before it: fp32 [Hkv, D, D].

    Rows of a block c are L_cb L_bb^-1 in the columns of each block b before it, and 0 elsewhere.

    Args:
        moments: Second moments of the queries of each KV head [Hkv, D, D], before their turn.
        size: Channels of keys and queries that are turned together; 0 where they are not.
    """
    own, eye = moments.double(), torch.eye(moments.shape[-1], device=moments.device)
    if size:
        turn = turned(eye, size).double()
        own = turn.T @ own @ turn
    mean = own.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    low = torch.linalg.cholesky(own + (DAMPING * mean).clamp(min=LEAST_FP16) * eye.double())
    block = torch.arange(len(eye), device=low.device) // AT_ONCE
    within = torch.where(block[:, None] == block, low, 0.0)
    answers = torch.linalg.solve_triangular(within, low, upper=False, left=False)
    return torch.where(block[:, None] > block, answers, 0.0).float()


def channels(held: Tensor) -> int:
    """Size of the heads of a pool whose channels lie last: two a byte where it is uint8."""
    return held.shape[-1] * (2 if held.dtype == torch.uint8 else 1)


def turn_size(dim: int) -> int:
    """Channels that are turned together: the largest power of two that divides a head's size."""
    return dim & -dim


def turned(x: Tensor, size: int) -> Tensor:
    """Every run of `size` channels times H / sqrt(size), in fp32: a fast Walsh-Hadamard transform.

    Steps of h = 1, 2, 4, ... make (a + b, a - b) of channels i and i + h; then comes the factor.
    Compiled kernels do the same in the same order.

    Args:
        x: [..., D], D a multiple of `size`.
        size: A power of two.

    Returns:
        Of the shape and type of `x`.
    """
    y, h = x.float(), 1
    while h < size:
        a, b = y.unflatten(-1, (-1, 2, h)).unbind(-2)
        y, h = torch.stack((a + b, a - b), dim=-2).flatten(-3), 2 * h
    return (y * (1.0 / math.sqrt(size))).to(x.dtype)
