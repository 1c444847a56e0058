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
        that are not packed for the compiled kernels, inputs in another order (act-order), norms
        elsewhere than before the sub-layers and over single heads.
    """
    windows = model.config.windows
    parts = [_block(*triple) for triple in zip(model.layers, pools, windows, strict=True)]
    head, config, first = _linear(model.head), model.config, model.layers[0]
    bounds = (config.softcap, config.logits_softcap, model.query_growth)
    other = (
        any(bound is not None for bound in bounds)
        or config.embedding_scale != 1
        or config.scale != config.head_dim**-0.5
        or any(layer.cos is not first.cos for layer in model.layers)
    )
    if other:
        return None
    blocks = [part for part in parts if part is not None]
    if model.dtype != torch.float32 or head is None or len(blocks) < len(parts):
        return None
    fused = FusedDecoder(
        DecoderSpec(
            embedding=model.embedding,
            blocks=blocks,
            norm=model.norm,
            head=head,
            cos=model.layers[0].cos,
            sin=model.layers[0].sin,
            heads=model.config.heads,
            eps=model.config.eps,
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
    return LinearSpec(packed, inputs, linear.input_scale, spec.group)


def _block(layer: CpuLayer, pool: KVPool, window: int | None) -> BlockSpec | None:
    own, first, second = layer.feed_forward, layer.before_attention, layer.before_feed_forward
    after = layer.after_attention is not None or layer.after_feed_forward is not None
    whole = layer.q_norm is not None and len(layer.q_norm) != pool.k.shape[3]
    if (
        not isinstance(own, GatedMLP)
        or own.activation != "silu"
        or first is None
        or second is None
        or after
        or whole
        or layer.sinks is not None
        or layer.latent is not None
    ):
        return None
    linears = (layer.qkv, layer.o, own.gate_up, own.down)
    specs = [spec for spec in map(_linear, linears) if spec is not None]
    if len(specs) < len(linears):
        return None
    qkv, o, gate_up, down = specs
    return BlockSpec(
        input_norm=first,
        qkv=qkv,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=o,
        post_norm=second,
        gate_up=gate_up,
        down=down,
        pool=pool,
        window=window,
    )
