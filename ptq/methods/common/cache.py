"""What the quantized cache makes of keys and values, for methods that weigh its error."""

from __future__ import annotations

import torch
from torch import Tensor

from formats.cache_scheme import CacheRole, KVCacheSpec
from kernels.numerics import (
    INT4,
    TYPES,
    block_absmax,
    choose_scale,
    fake_quantize,
    fake_quantize_activations,
)
from kernels.packed_cache import compensated, token_scales, turn_size, turned
from ptq.methods.common.block import BlockWork


def key_mean(work: BlockWork) -> Tensor:
    """Mean of each channel of K in a context, after RoPE, as K is now: fp64 [kv heads, D]."""
    seen, positions = work.observed(work.block.attended, "k_cache"), work.settings.positions
    assert seen.channel_sum is not None, "the cache's scheme does not ask for it"
    mean = seen.channel_sum / seen.tokens
    return mean if positions is None else positions.mean(mean)


def query_moments(work: BlockWork) -> Tensor:
    """Second moments of the queries that read K in a context: fp64 [kv heads, D, D]."""
    seen, positions = work.observed(work.block.attended, "k_cache"), work.settings.positions
    assert seen.query_moments is not None, "the cache's scheme does not ask for them"
    moments = seen.query_moments / seen.tokens
    return moments if positions is None else positions.moments(moments)


def through_cache(
    x: Tensor,
    absmax: Tensor,
    spec: KVCacheSpec,
    role: CacheRole,
    sinks: int = 0,
    feedback: Tensor | None = None,
) -> Tensor:
    """K or V rounded as the cache holds it, static scales by the largest magnitudes.

    Args:
        x: [..., tokens, kv heads, D].
        absmax: Largest magnitude of each channel over all samples [kv heads, D].
        role: Which of the two it is: K alone may have a scale for each channel.
        sinks: Tokens from the first on that stay as they are.
        feedback: Of int4 keys that are rounded with feedback, fp32 [kv heads, D, D]; None for what
            they lose without.

    Returns:
        fp32, of the shape of `x`.
    """
    if sinks:
        rounded = through_cache(x[..., sinks:, :, :], absmax, spec, role, 0, feedback)
        return torch.cat((x[..., :sinks, :, :].float(), rounded), dim=-3)
    if role == "k_cache" and spec.rotate_keys:
        size = turn_size(x.shape[-1])
        return turned(_rounded(turned(x.float(), size), absmax, spec, role, feedback), size)
    return _rounded(x, absmax, spec, role, feedback)


def _rounded(
    x: Tensor, absmax: Tensor, spec: KVCacheSpec, role: CacheRole, feedback: Tensor | None
) -> Tensor:
    kind = TYPES[spec.dtype_of(role)]
    if spec.dynamic and kind is INT4:
        scale = token_scales(x).float()
        if feedback is not None:
            return compensated(x, scale, feedback) * scale
        return fake_quantize(x, scale, kind)
    if spec.dynamic:
        return fake_quantize_activations(x, None, kind)
    block = (-1, -1) if spec.granularity == "per_tensor" else (1, -1)
    if spec.granularity == "per_channel" and role == "k_cache":
        block = (1, 1)
    scale = choose_scale(block_absmax(absmax, block), kind).to(x.device)
    return fake_quantize(x, scale.view(*(1,) * (x.dim() - 2), *scale.shape), kind)
