"""A Llama-like decoder as one call of the compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch

from inference.models.feed_forward import SwiGLU
from inference.models.layers import Linear
from kernels.attention_inputs import KVPool
from kernels.cpu.decoder import BlockSpec, DecoderSpec, FusedDecoder, LinearSpec
from kernels.weights import PackedWeight

if TYPE_CHECKING:
    from inference.gpu.layers import GpuLinear
    from inference.models.decoder import Layer, LlamaModel


def fuse(model: LlamaModel, pools: Sequence[KVPool]) -> FusedDecoder | None:
    """Put a model and a cache together for `FusedDecoder`.

    Returns:
        None where a part has no fused kernel: mixtures of experts, other types than fp32, weights
        that are not packed for the compiled kernels.
    """
    windows = model.config.windows
    parts = [_block(*triple) for triple in zip(model.layers, pools, windows, strict=True)]
    head = _linear(model.head)
    blocks = [part for part in parts if part is not None]
    if model.dtype != torch.float32 or head is None or len(blocks) < len(parts):
        return None
    return FusedDecoder(
        DecoderSpec(
            embedding=model.embedding,
            blocks=blocks,
            norm=model.norm,
            head=head,
            cos=model.cos,
            sin=model.sin,
            heads=model.config.heads,
            eps=model.config.eps,
        )
    )


def _linear(linear: Linear | GpuLinear) -> LinearSpec | None:
    if not isinstance(linear, Linear) or not isinstance(linear.weight, PackedWeight):
        return None
    packed, spec = linear.weight.packed, linear.activations
    if spec is None:
        return LinearSpec(packed)
    inputs = cast(Literal["int8", "fp8_e4m3"], spec.dtype)
    return LinearSpec(packed, inputs, linear.input_scale, spec.group)


def _block(layer: Layer, pool: KVPool, window: int | None) -> BlockSpec | None:
    if not isinstance(layer.feed_forward, SwiGLU):
        return None
    linears = (layer.qkv, layer.o, layer.feed_forward.gate_up, layer.feed_forward.down)
    specs = [spec for spec in map(_linear, linears) if spec is not None]
    if len(specs) < len(linears):
        return None
    qkv, o, gate_up, down = specs
    return BlockSpec(
        input_norm=layer.input_norm,
        qkv=qkv,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=o,
        post_norm=layer.post_norm,
        gate_up=gate_up,
        down=down,
        pool=pool,
        window=window,
    )
