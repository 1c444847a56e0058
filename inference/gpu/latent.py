"""Latent attention on a GPU: between the layer that reads attention's input and the o layer.

Two launches more than other attention: each head's queries are multiplied by W^UK before, and what
attention gives by W^UV after it (`inference.models.parts`), as batched products of cuBLAS. Queries
of two projections have a norm and a layer besides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from formats.families.family import LatentAttention
from inference.gpu.layers import GpuLinear, workspace_on
from inference.models.config import ModelConfig
from inference.models.parts import LatentProjections
from kernels.attention_inputs import AttentionInputs
from kernels.triton.attention.latent import latent_attention
from kernels.triton.attention.latent_write import latent_write
from kernels.triton.fused import add_rms_norm


def attend_latents(
    config: ModelConfig,
    own: LatentProjections[GpuLinear],
    read: Tensor,
    turn: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    inputs: AttentionInputs,
    decodes: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the heads of latent attention give.

    Args:
        config: The decoder's.
        own: Its projections in a block.
        read: What the layer gives that reads the attention's input [T, n].
        turn: cos and sin of all positions, fp32 [positions, rotated].
        places: The tokens' positions, and where they go in the cache, int64 [T] both.
        inputs: What the queries see.
        decodes: Sequences that have one token, first in the batch, where others have more.
        sinks: int32 [T], 1 for the rows of sink tokens; None where none is.

    Returns:
        [T, heads * value] in the type of `read`.
    """
    sizes, names = config.latent, config.family.attention
    assert sizes is not None
    assert isinstance(names, LatentAttention)
    start = read.shape[1] - sizes.rank - sizes.rotated
    q, cached = read[:, :start], read[:, start:]
    if own.q_b is not None and own.q_norm is not None:
        wanted = own.q_b.rows
        scale, by = wanted.scales_of(sinks)
        rest = (scale, wanted.dtype, wanted.group)
        rows, scales, _ = add_rms_norm(
            q.contiguous(), None, own.q_norm, names.norm_eps, *rest, experts=by
        )
        q = own.q_b.run(rows, scales, read.dtype)
    heads = q.unflatten(1, (sizes.heads, -1))
    positions, slots = places
    rotated = latent_write(
        heads, cached, own.kv_norm, names.norm_eps, *turn, positions, inputs.pool, slots
    )
    absorbed = torch.bmm(heads[..., : sizes.plain].transpose(0, 1), own.up_k).transpose(0, 1)
    latents = latent_attention(absorbed, rotated, inputs, workspace_on(read.device), decodes)
    values = latents.new_empty(len(read), sizes.heads, sizes.value)
    torch.bmm(latents.transpose(0, 1), own.up_v, out=values.transpose(0, 1))
    return values.flatten(1)
