"""Row-wise and element-wise ops on the CPU, of torch's own vectorized operations.

Only operations whose result for an element does not depend on where the element lies are used:
`torch.exp` has one code for whole vectors and for remainders, `torch.sigmoid` and `F.silu` have
two, which differ in the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.numerics import FP8, block_absmax, choose_scale, fake_quantize_activations, quantize


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """See `kernels.ops.quantize_static`."""
    return quantize(x, scale.reshape(()))


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.quantize_per_token`."""
    if x.shape[0] == 0:
        return x.to(torch.int8), x.new_empty((0, 1), dtype=torch.float32)
    scale = choose_scale(block_absmax(x, (1, -1)))
    return quantize(x, scale), scale


def fake_quantize_fp8(x: Tensor, scale: Tensor | None, group: int) -> Tensor:
    """See `kernels.ops.fake_quantize_fp8`."""
    return fake_quantize_activations(x, scale, FP8, group)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.ops.rms_norm`."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * (wide * inverse)).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `kernels.ops.silu_mul`."""
    wide = gate.float()
    return (wide / (1.0 + torch.exp(-wide)) * up.float()).to(gate.dtype)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.apply_rope`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
