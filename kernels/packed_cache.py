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
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_FP16, MOST_FP16 = 2.0**-14, 65504.0  # magnitudes of scales that are held in fp16


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
