"""A decoder interpreted op by op: what the fused call does not take, and what it is checked by.

The bits are those of `inference.cpu.fused`. In a mixture of experts, all that is added up of a
token is added in the order of its own probabilities, so that its bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.cpu.batch import Batch
from inference.cpu.latent import attend_latents
from inference.cpu.layers import CpuExperts, Linear
from inference.cpu.routing import route, sigmoid
from inference.models.decoder import Decoder, Layer
from inference.models.feed_forward import FeedForward, GatedMLP, MixtureOfExperts, by_expert
from kernels.attention_inputs import AttentionInputs, KVPool
from kernels.ops import apply_rope, gated_product, paged_attention, rms_norm, softcapped, write_kv

CpuDecoder = Decoder[Linear, CpuExperts]
CpuLayer = Layer[Linear, CpuExperts]


@torch.no_grad()
def forward_by_ops(model: CpuDecoder, pools: Sequence[KVPool], batch: Batch) -> Tensor:
    """Run the tokens of a step; their K and V go into the cache.

    Returns:
        Logits fp32 [R, vocabulary] of the rows asked for.
    """
    config = model.config
    x = model.embedding[batch.ids].to(model.dtype)
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    for layer, pool, window in zip(model.layers, pools, config.windows, strict=True):
        inputs = AttentionInputs(
            pool,
            batch.block_tables,
            batch.context_len,
            batch.query_start,
            softmax_scale=config.scale,
            sliding_window=window,
            softcap=config.softcap,
            sinks=layer.sinks,
        )
        read = _normed(x, layer.before_attention, config.eps)
        added = _attend(model, layer, read, batch, inputs)
        x = x + _normed(added, layer.after_attention, config.eps)
        read = _normed(x, layer.before_feed_forward, config.eps)
        added = feed_forward(layer.feed_forward, read)
        x = x + _normed(added, layer.after_feed_forward, config.eps)
    if not len(batch.rows):  # a step of prompts that go on
        return x.new_empty((0, config.vocab_size), dtype=torch.float32)
    x = rms_norm(x[batch.rows], model.norm, config.eps)
    logits = model.head(x).float()
    return logits if config.logits_softcap is None else softcapped(logits, config.logits_softcap)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of what comes [..., n]; itself where there is no norm."""
    return x if weight is None else rms_norm(x, weight, eps)


def _heads_normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of heads [T, heads, D]: of each where the weight is [D], else of all together."""
    if weight is None or len(weight) == x.shape[-1]:
        return _normed(x, weight, eps)
    return rms_norm(x.flatten(1), weight, eps).view_as(x)


def _attend(
    model: CpuDecoder,
    layer: CpuLayer,
    x: Tensor,
    batch: Batch,
    inputs: AttentionInputs,
) -> Tensor:
    """Attention with its projections: [T, H] to the same.

    Args:
        model: The decoder.
        layer: One of its blocks.
        x: What the block's attention reads.
        batch: The step.
        inputs: What the queries see.
    """
    c = model.config
    if layer.latent is not None:
        turn = layer.cos[batch.positions].to(x.dtype), layer.sin[batch.positions].to(x.dtype)
        heads = attend_latents(c, layer.latent, layer.qkv(x), turn, batch, inputs)
        return layer.o(heads.flatten(-2))
    heads = layer.qkv(x).unflatten(-1, (-1, c.head_dim))
    q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
    q, k = _heads_normed(q, layer.q_norm, c.eps), _heads_normed(k, layer.k_norm, c.eps)
    cos, sin = (angles[batch.positions].to(x.dtype) for angles in (layer.cos, layer.sin))
    q, k = apply_rope(q, k, cos, sin)
    if model.query_growth is not None:
        q = q * model.query_growth[batch.positions].to(q.dtype).view(-1, 1, 1)
    write_kv(k, v, inputs.pool, batch.slots)
    return layer.o(paged_attention(q, inputs).flatten(-2))


def feed_forward(own: FeedForward[Linear, CpuExperts], x: Tensor) -> Tensor:
    """A block's feed-forward layer: [T, H] to the same."""
    return _mixture(own, x) if isinstance(own, MixtureOfExperts) else _gated(own, x)


def _gated(own: GatedMLP[Linear], x: Tensor) -> Tensor:
    gate, up = own.gate_up(x).chunk(2, dim=-1)
    return own.down(gated_product(gate, up, own.activation))


def _mixture(own: MixtureOfExperts[Linear, CpuExperts], x: Tensor) -> Tensor:
    weights, chosen = route(own.router(x), own.routing, own.correction)
    pairs = zip(own.gate_up.each, own.down.each, strict=True)
    experts = [GatedMLP(*pair, own.activation) for pair in pairs]
    outputs = by_expert(x, chosen, experts, _gated)  # [T, k, H]
    y = outputs[:, 0] * weights[:, :1]
    for i in range(1, own.routing.chosen):  # in order: a sum of torch's may take any
        y = y + outputs[:, i] * weights[:, i : i + 1]
    if own.shared is not None:
        said = _gated(own.shared, x)
        y = y + (said if own.shared_gate is None else said * sigmoid(own.shared_gate(x)))
    return y.to(x.dtype)
