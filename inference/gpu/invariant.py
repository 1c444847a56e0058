"""Decoders whose tokens have the same bits in any step.

What a token's row goes through is made to depend on that row alone: each token is a sequence of its
own in attention (`kernels.triton.attention.invariant`), and linear layers sum in one order
(`GpuWeight.invariant_tile`). So no batch, chunk of a prompt, prefix that was found, preemption,
graph or draft changes a bit.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from formats.errors import NoFixedOrderError
from inference.gpu.decoder import GpuDecoder
from inference.gpu.feed_forward import GpuExperts
from inference.gpu.layers import GpuLinear
from inference.gpu.ranks import OfSeveralRanks
from inference.models.layers import GatedMLP
from inference.models.parts import Layer
from inference.transformers_code.model import CodeModel
from kernels.triton.linear.w16a16 import DenseWeight, fits


def invariant_decoder(model: GpuDecoder | CodeModel) -> GpuDecoder:
    """A decoder on the same weights whose tokens have the same bits in any step.

    Raises:
        NoFixedOrderError: a part of it has no kernel that does so.
    """
    if isinstance(model, CodeModel):
        raise _refused("the model is run by transformers' code")
    other = copy.copy(model.with_layers([_layer(layer) for layer in model.layers]))
    other.head = _linear(model.head, "the output head")
    return other


def _layer(layer: Layer[GpuLinear, GpuExperts]) -> Layer[GpuLinear, GpuExperts]:
    own = layer.feed_forward
    if layer.latent is not None:
        raise _refused("attention is over latents")
    if not isinstance(own, GatedMLP):
        raise _refused("it is a mixture of experts")
    ways = _linear(own.gate_up, "gate and up"), _linear(own.down, "down")
    return replace(
        layer,
        qkv=_linear(layer.qkv, "q, k and v"),
        o=_linear(layer.o, "o"),
        feed_forward=replace(own, gate_up=ways[0], down=ways[1]),
    )


def _linear(own: GpuLinear, name: str) -> GpuLinear:
    if isinstance(own, OfSeveralRanks):
        return own.with_own(lambda part: _linear(part, name))
    weight = own.weight
    if isinstance(weight, DenseWeight) and not (fits(weight.weight) and weight.weight.is_cuda):
        raise _refused(f"{name} {tuple(weight.weight.shape)} runs by torch's library")
    return replace(own, invariant=True)


def _refused(reason: str) -> NoFixedOrderError:
    return NoFixedOrderError(
        f"invariant: {reason}, which has no fixed order of sums on a GPU; leave it out, or run on "
        "the CPU, where all have"
    )
