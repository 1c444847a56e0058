"""A decoder interpreted op by op: what the fused call does not take, and what it is checked by.

The bits are those of `inference.cpu.loop`. In a mixture of experts, all that is added up of a
token is added in the order of its own probabilities, so that its bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from inference.cpu.batch import Batch
from inference.cpu.layers import CpuExperts, Linear, attend_latents, route, sigmoid
from inference.models.config import ModelConfig
from inference.models.decoder import Decoder
from inference.models.layers import FeedForward, GatedMLP, MixtureOfExperts, by_expert, sum_in_order
from inference.models.parts import Layer
from kernels.op_inputs import AttentionInputs, KVPool
from kernels.ops import (
    apply_rope,
    gated_product,
    paged_attention,
    rms_norm,
    softcapped,
    turn_heads,
    write_kv,
)

CpuDecoder = Decoder[Linear, CpuExperts]
CpuLayer = Layer[Linear, CpuExperts]
Adapted = Callable[..., Tensor]  # `Batch.adapted` of a block


@torch.no_grad()
def forward_by_ops(model: CpuDecoder, pools: Sequence[KVPool], batch: Batch) -> Tensor:
    """Run the tokens of a step; their K and V go into the cache.

    Returns:
        Logits fp32 [R, vocabulary] of the rows asked for.
    """
    config, sinks = model.config, batch.sinks(model.sink_tokens)
    x = model.embed(batch.ids)
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    for index, (layer, pool, window) in enumerate(
        zip(model.layers, pools, config.windows, strict=True)
    ):
        _tap(batch, index, x)
        growth = model.query_growth
        x = run_block(config, layer, None, x, batch, pool, window, growth, sinks, index)
    _tap(batch, len(model.layers), x)
    if not len(batch.rows):  # a step of prompts that go on
        return x.new_empty((0, config.vocab_size), dtype=torch.float32)
    x = rms_norm(x[batch.rows], model.norm, config.eps)
    logits = model.head(x).float()
    return logits if config.logits_softcap is None else softcapped(logits, config.logits_softcap)


def run_block(
    config: ModelConfig,
    layer: CpuLayer,
    read: Tensor | None,
    x: Tensor,
    batch: Batch,
    pool: KVPool,
    window: int | None,
    growth: Tensor | None = None,
    sinks: Tensor | None = None,
    number: int = 0,
) -> Tensor:
    """Run a block: [T, H] to the same.

    Args:
        read: What attention reads; None for the norm of x.
        x: What it reads.
        window: Positions that a query sees, or None for all.
        growth: fp32 [positions], what q is multiplied by at each; or None.
        sinks: bool [T], which rows are of sink tokens; None where none is.
        number: The block's, by which adapters have it.
    """
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
    if read is None:
        read = _normed(x, layer.before_attention, config.eps)
    added = attend(config, growth, layer, read, batch, inputs, sinks, number)
    x = x + _normed(added, layer.after_attention, config.eps)
    read = _normed(x, layer.before_feed_forward, config.eps)
    added = feed_forward(layer.feed_forward, read, sinks, partial(batch.adapted, block=number))
    return x + _normed(added, layer.after_feed_forward, config.eps)


def _tap(batch: Batch, index: int, x: Tensor) -> None:
    """Tell what block `index` reads, if that is asked for."""
    if batch.taps is not None and batch.hidden is not None:
        batch.hidden[:, batch.taps == index] = x[:, None].to(batch.hidden.dtype)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of what comes [..., n]; itself where there is no norm."""
    return x if weight is None else rms_norm(x, weight, eps)


def _heads_normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of heads [T, heads, D]: of each where the weight is [D], else of all together."""
    if weight is None or len(weight) == x.shape[-1]:
        return _normed(x, weight, eps)
    return rms_norm(x.flatten(1), weight, eps).view_as(x)


def attend(
    c: ModelConfig,
    growth: Tensor | None,
    layer: CpuLayer,
    x: Tensor,
    batch: Batch,
    inputs: AttentionInputs,
    sinks: Tensor | None = None,
    number: int = 0,
) -> Tensor:
    """Attention with its projections: [T, inputs of q, k and v] to [T, H].

    Args:
        growth: fp32 [positions], what q is multiplied by at each; or None.
        layer: One of its blocks.
        x: What the block's attention reads.
        inputs: What the queries see.
        sinks: As in `run_block`.
        number: Likewise.
    """
    if layer.latent is not None:
        turn = layer.cos[batch.positions].to(x.dtype), layer.sin[batch.positions].to(x.dtype)
        read = layer.qkv(x, sinks)
        heads = attend_latents(c, layer.latent, read, turn, batch, inputs, sinks)
        return layer.o(heads.flatten(-2), sinks)
    qkv = batch.adapted(x, layer.qkv(x, sinks), number, "qkv")
    heads = qkv.unflatten(-1, (-1, c.head_dim))
    q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
    q, k = _heads_normed(q, layer.q_norm, c.eps), _heads_normed(k, layer.k_norm, c.eps)
    cos, sin = (angles[batch.positions].to(x.dtype) for angles in (layer.cos, layer.sin))
    q, k = apply_rope(q, k, cos, sin)
    if growth is not None:
        q = q * growth[batch.positions].to(q.dtype).view(-1, 1, 1)
    if inputs.pool.turn:
        q, k = (turn_heads(x, inputs.pool.turn) for x in (q, k))
    write_kv(k, v, inputs.pool, batch.slots, batch.positions)
    attended = paged_attention(q, inputs).flatten(-2)
    return batch.adapted(attended, layer.o(attended, sinks), number, "o")


def feed_forward(
    own: FeedForward[Linear, CpuExperts],
    x: Tensor,
    sinks: Tensor | None = None,
    adapted: Adapted | None = None,
) -> Tensor:
    """A block's feed-forward layer: [T, H] to the same; `sinks` as in `run_block`."""
    if isinstance(own, MixtureOfExperts):
        return _mixture(own, x, sinks)
    return _gated(own, x, sinks, adapted)


def _gated(
    own: GatedMLP[Linear], x: Tensor, sinks: Tensor | None, adapted: Adapted | None = None
) -> Tensor:
    """A gated MLP: [T, H] to the same."""
    gate_up = own.gate_up(x, sinks)
    if adapted is not None:
        gate_up = adapted(x, gate_up, layer="gate_up")
    gate, up = gate_up.chunk(2, dim=-1)
    product = gated_product(gate, up, own.activation)
    y = own.down(product, sinks)
    return y if adapted is None else adapted(product, y, layer="down")


def _mixture(own: MixtureOfExperts[Linear, CpuExperts], x: Tensor, sinks: Tensor | None) -> Tensor:
    def run(expert: GatedMLP[Linear], tokens: Tensor) -> Tensor:
        return _gated(expert, x[tokens], None if sinks is None else sinks[tokens])

    weights, chosen = route(own.router(x), own.routing, own.correction)
    pairs = zip(own.gate_up.each, own.down.each, strict=True)
    experts = [GatedMLP(*pair, own.activation) for pair in pairs]
    y = sum_in_order(by_expert(x, chosen, experts, run), weights)
    if own.shared is not None:
        said = _gated(own.shared, x, sinks)
        y = y + (said if own.shared_gate is None else said * sigmoid(own.shared_gate(x)))
    return y.to(x.dtype)
