"""Latent attention op by op, for the interpreter of `inference.cpu.decoder`."""

from __future__ import annotations

from torch import Tensor

from formats.families.attention import LatentAttention
from inference.cpu.batch import Batch
from inference.cpu.layers import Linear
from inference.models.config import ModelConfig
from inference.models.latent import LatentProjections
from kernels.attention_inputs import AttentionInputs
from kernels.ops import apply_rope, heads_product, latent_attention, rms_norm, write_latent


def attend_latents(
    config: ModelConfig,
    own: LatentProjections[Linear],
    read: Tensor,
    turn: tuple[Tensor, Tensor],
    batch: Batch,
    inputs: AttentionInputs,
    sinks: Tensor | None = None,
) -> Tensor:
    """What each head of latent attention gives.

    Args:
        config: The decoder's.
        own: Its projections in a block.
        read: What the layer gives that reads the attention's input [T, n].
        turn: cos and sin of the tokens' positions, [T, rotated].
        batch: The step.
        inputs: What the queries see.
        sinks: As in `inference.cpu.decoder.run_block`.

    Returns:
        [T, heads, value].
    """
    sizes, names = config.latent, config.family.attention
    assert sizes is not None
    assert isinstance(names, LatentAttention)
    cached = sizes.rank + sizes.rotated
    q, latent, key = read.split([read.shape[1] - cached, sizes.rank, sizes.rotated], dim=1)
    if own.q_b is not None and own.q_norm is not None:
        q = own.q_b(rms_norm(q, own.q_norm, names.norm_eps), sinks)
    plain, rotated = q.unflatten(1, (sizes.heads, -1)).split([sizes.plain, sizes.rotated], dim=2)
    rotated, keys = apply_rope(rotated, key[:, None], *turn)
    latent = rms_norm(latent, own.kv_norm, names.norm_eps)
    write_latent(latent, keys[:, 0], inputs.pool, batch.slots, batch.positions)
    attended = latent_attention(heads_product(plain, own.up_k), rotated, inputs)
    return heads_product(attended, own.up_v)
