"""Which blocks of a decoder run in one kernel, to the next block's q/k/v.

Steps of few tokens on Hopper, as many as `BlockShape.most_rows`; of blocks without norms after
their sub-layers whose linear layers hold 4-bit weights in groups of 128 inputs or bf16 ones and
take bf16 rows, or int8 weights and rows: `kernels.cuda.fused_block`. It begins with the rotation
of q and k, the write to the cache and attention, where `kernels.cuda.attention` takes these, else
with the o layer. All other blocks and steps run kernel by kernel (`inference.gpu.decoder`), as do
steps whose tokens have the same bits in any step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inference.gpu.adapters import BlockAdapters
from inference.gpu.feed_forward import GpuExperts
from inference.gpu.layers import GpuLinear
from inference.models.layers import MixtureOfExperts
from inference.models.parts import Layer
from kernels.cuda.attention import Attention, AttentionShape, attention_shape
from kernels.cuda.block_weights import BlockShape, BlockWeights, Router, Weight
from kernels.cuda.fused_block import FusedBlocks
from kernels.triton.common import capability
from kernels.triton.linear.w16a16 import DenseWeight

log = logging.getLogger("ptq.inference")


class FusedLayers:
    """Runs blocks of a decoder, each in one kernel; one for each stream.

    Args:
        layers: The decoder's.
        dtype: Of its activations.
        device: Where it is.
    """

    def __init__(
        self,
        layers: Sequence[Layer[GpuLinear, GpuExperts]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device = device
        self._blocks: list[BlockWeights | None] = [None] * len(layers)
        self._kernels: dict[tuple[BlockShape, int], FusedBlocks | None] = {}
        if dtype == torch.bfloat16 and device.type == "cuda" and capability() == 90:
            self._blocks = list(map(_block, layers, [*layers[1:], None]))

    def takes(self, block: int, rows: Tensor, adapters: BlockAdapters | None) -> bool:
        """Whether a block runs in one kernel.

        Args:
            block: Its number.
            rows: What its o layer reads, [T, inputs].
            adapters: Those of the tokens, if any has one.
        """
        return adapters is None and self._kernel(block, len(rows)) is not None

    def attends(self, block: int, own: Attention, adapters: BlockAdapters | None) -> bool:
        """Whether a block runs in one kernel with its attention.

        Args:
            block: Its number.
            own: The attention.
            adapters: Those of the tokens, if any has one.
        """
        return adapters is None and self._with_attention(block, own) is not None

    def _with_attention(self, block: int, own: Attention) -> FusedBlocks | None:
        weights = self._blocks[block]
        if weights is None:
            return None
        heads = attention_shape(own.inputs, weights.o.size[1] // own.inputs.pool.k.shape[-1])
        return None if heads is None else self._kernel(block, len(own.qkv), heads)

    def run(
        self,
        block: int,
        rows: Tensor | Attention,
        scales: Tensor | None,
        total: Tensor,
        eps: float,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a block that `takes` or `attends` said yes to.

        Args:
            block: Its number.
            rows: Its attention, or what its o layer reads, [T, inputs].
            scales: Of the rows, where they are quantized.
            total: The residual stream [T, H].
            eps: Added to mean squares by norms.
            sinks: int32 [T], 1 for the rows of sink tokens; None where none is.

        Returns:
            (the residual stream after it [T, H], what the next block's q/k/v layer gives, or
            None after the last).
        """
        weights = self._blocks[block]
        if isinstance(rows, Attention):
            kernel = self._with_attention(block, rows)
        else:
            kernel = self._kernel(block, len(rows))
        assert weights is not None
        assert kernel is not None
        return kernel.run(weights, rows, scales, total, eps, sinks)

    def _kernel(
        self, block: int, rows: int, heads: AttentionShape | None = None
    ) -> FusedBlocks | None:
        weights = self._blocks[block]
        shape = None if weights is None else weights.shape
        if shape is None or not 1 <= rows <= shape.most_rows:
            return None
        key = replace(shape, heads=heads), rows
        if key not in self._kernels:
            self._kernels[key] = self._compiled(*key)
        return self._kernels[key]

    def _compiled(self, shape: BlockShape, rows: int) -> FusedBlocks | None:
        found = "blocks run by more kernels in steps of %d tokens: %s"
        try:
            return FusedBlocks(shape, rows, self._device)
        except ValueError as error:  # the shape does not fit, which is no fault
            log.debug(found, rows, error)
        except RuntimeError as error:
            log.warning(found, rows, error)
        return None


def _block(
    own: Layer[GpuLinear, GpuExperts], following: Layer[GpuLinear, GpuExperts] | None
) -> BlockWeights | None:
    """What is between two attentions, or after the last, where the kernel takes it."""
    inner, after = own.feed_forward, () if following is None else (following,)
    if inner.activation != "silu" or any(layer.latent is not None for layer in (own, *after)):
        return None
    if own.after_attention is not None or own.after_feed_forward is not None:
        return None
    router, (gate_up, down) = None, (inner.gate_up, inner.down)
    if isinstance(inner, MixtureOfExperts):
        router = _router(inner)
        if router is None or inner.gate_up.merged is None or inner.down.merged is None:
            return None
        gate_up, down = inner.gate_up.each[0], inner.down.each[0]
    layers = [own.o, gate_up, down, *(layer.qkv for layer in after)]
    norms = [own.before_feed_forward, *(layer.before_attention for layer in after)]
    plain = [layer for layer in layers if isinstance(layer, GpuLinear) and _plain(layer)]
    weights = [own.weight for own in plain if isinstance(own.weight, Weight)]
    known = [norm for norm in norms if norm is not None]
    if len(weights) < len(layers) or len(known) < len(norms):
        return None
    inputs = [own.rows for own in plain]
    block = BlockWeights(*weights, norms=known, inputs=inputs, router=router)
    return None if block.shape is None else block


def _router(own: MixtureOfExperts[GpuLinear, GpuExperts]) -> Router | None:
    """How a mixture chooses, where the kernel can."""
    how, weight = own.routing, own.router.weight
    if how.scores != "softmax" or how.groups > 1 or own.correction is not None:
        return None
    if own.shared is not None or not isinstance(weight, DenseWeight) or weight.bias is not None:
        return None
    return Router(weight.weight, how.chosen, how.normalized, how.factor)


def _plain(layer: GpuLinear) -> bool:
    """Whether rows are given to the weight as they are, and all of its outputs are wanted."""
    return layer.order is None and layer.outputs is None and not layer.missing
