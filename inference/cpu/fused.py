"""A decoder as one call of the compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from inference.cpu.batch import Batch
from inference.cpu.decoder import CpuDecoder, CpuLayer
from inference.cpu.layers import Linear
from inference.models.feed_forward import GatedMLP
from kernels.attention_inputs import KVPool
from kernels.cpu.decoder import BlockSpec, DecoderSpec, FusedDecoder, LinearSpec
from kernels.cpu.weights import NativeWeight


def fuse(model: CpuDecoder, pools: Sequence[KVPool]) -> Callable[[Batch], Tensor] | None:
    """Put a model and a cache together: what gives the logits of a batch.

    Returns:
        None where a part has no fused kernel: mixtures of experts, other types than fp32, weights
        that are not packed for the compiled kernels, inputs in another order (act-order), latent
        attention.
    """
    config = model.config
    parts = [_block(*triple) for triple in zip(model.layers, pools, config.windows, strict=True)]
    head = _linear(model.head)
    blocks = [part for part in parts if part is not None]
    if model.dtype != torch.float32 or head is None or len(blocks) < len(parts):
        return None
    fused = FusedDecoder(
        DecoderSpec(
            embedding=model.embedding,
            blocks=blocks,
            norm=model.norm,
            head=head,
            heads=config.heads,
            eps=config.eps,
            scale=config.scale,
            activation=config.activation,
            embedding_scale=config.embedding_scale,
            growth=model.query_growth,
            softcap=config.softcap,
            logits_softcap=config.logits_softcap,
            sink_tokens=max([model.sink_tokens, *(pool.sink_tokens for pool in pools)]),
        )
    )
    return lambda batch: fused.step(**vars(batch))


def _linear(linear: Linear) -> LinearSpec | None:
    if not isinstance(linear.weight, NativeWeight) or linear.order is not None:
        return None
    packed, spec = linear.weight.packed, linear.activations
    if spec is None:
        return LinearSpec(packed)
    inputs = cast(Literal["int8", "fp8_e4m3"], spec.dtype)
    return LinearSpec(packed, inputs, linear.input_scale, spec.group, linear.sink_scale)


def _block(layer: CpuLayer, pool: KVPool, window: int | None) -> BlockSpec | None:
    own = layer.feed_forward
    if not isinstance(own, GatedMLP) or layer.latent is not None:
        return None
    linears = (layer.qkv, layer.o, own.gate_up, own.down)
    specs = [spec for spec in map(_linear, linears) if spec is not None]
    if len(specs) < len(linears):
        return None
    qkv, o, gate_up, down = specs
    return BlockSpec(
        cos=layer.cos,
        sin=layer.sin,
        before_attention=layer.before_attention,
        qkv=qkv,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        sinks=layer.sinks,
        o=o,
        after_attention=layer.after_attention,
        before_feed_forward=layer.before_feed_forward,
        gate_up=gate_up,
        down=down,
        after_feed_forward=layer.after_feed_forward,
        pool=pool,
        window=window,
    )
