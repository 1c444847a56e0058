"""What the quantized cache makes of keys and values, for methods that weigh its error."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from formats.scheme import KVCacheSpec
from kernels.numerics import (
    TYPES,
    block_absmax,
    choose_scale,
    fake_quantize,
    fake_quantize_activations,
)


def through_cache(
    x: Tensor, absmax: Tensor, spec: KVCacheSpec, role: Literal["k_cache", "v_cache"]
) -> Tensor:
    """K or V rounded as the cache holds it, static scales by the largest magnitudes.

    Args:
        x: [tokens, kv heads, D].
        absmax: Largest magnitude of each channel over all samples [kv heads, D].
        spec: How the cache is quantized.
        role: Which of the two it is: K alone may have a scale for each channel.

    Returns:
        fp32 [tokens, kv heads, D].
    """
    kind = TYPES[spec.dtype]
    if spec.dynamic:
        return fake_quantize_activations(x, None, kind)
    block = (-1, -1) if spec.granularity == "per_tensor" else (1, -1)
    if spec.granularity == "per_channel" and role == "k_cache":
        block = (1, 1)
    scale = choose_scale(block_absmax(absmax, block), kind).to(x.device)
    return fake_quantize(x, scale[None], kind)
