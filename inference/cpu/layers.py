"""Layers that `inference.cpu.decoder` runs by `kernels.ops`: linear ones, experts, latents.

The router's scores and weights are fp32 and a token's own: its bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.families.family import LatentAttention
from formats.scheme import ActivationSpec
from inference.cpu.batch import Batch
from inference.models.config import ModelConfig, Routing
from inference.models.parts import LatentProjections
from inference.models.read import StoredLinear
from kernels.cpu import native
from kernels.cpu.structures import FLOATS, FORMATS
from kernels.cpu.weights import (
    FloatWeight,
    NativeWeight,
    Weight,
    pack_float_weight,
    pack_quantized_weight,
)
from kernels.op_inputs import AttentionInputs
from kernels.ops import (
    apply_rope,
    fake_quantize_fp8,
    heads_product,
    latent_attention,
    linear,
    quantize_per_token,
    quantize_static,
    rms_norm,
    weight_rows,
    write_latent,
)


@dataclass(frozen=True)
class Linear:
    """A linear layer, quantized or not.

    Attributes:
        weight: Packed for the ops.
        activations: How the input is quantized, or None.
        input_scale: fp32, one element, or None where each token is scaled when it arrives.
        sink_scale: The same of sink tokens; None where they have no scale of their own.
        order: int64 [K], the input that each column of the weight multiplies; None where column k
            multiplies input k.
    """

    weight: Weight
    activations: ActivationSpec | None = None
    input_scale: Tensor | None = None
    order: Tensor | None = None
    sink_scale: Tensor | None = None

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, K] float -> [T, N] in the type of `x`; `sinks` as of `LinearLayer`."""
        spec = self.activations
        if self.order is not None:
            x = x[:, self.order]
        if spec is None:
            return linear(x, self.weight, None, x.dtype)
        if spec.dtype == "fp8_e4m3":
            seen = fake_quantize_fp8(x, self.input_scale, spec.group)
            if sinks is not None and self.sink_scale is not None:
                seen[sinks] = fake_quantize_fp8(x[sinks], self.sink_scale)
            return linear(seen, self.weight, None, x.dtype)
        if self.input_scale is None:
            xq, scale = quantize_per_token(x)
        else:
            xq, scale = static_integers(x, self.input_scale, self.sink_scale, sinks)
        return linear(xq, self.weight, scale, x.dtype)

    @property
    def quantized(self) -> bool:
        """Whether its weight is."""
        own = self.weight
        if isinstance(own, NativeWeight):
            floats = [FORMATS[name] for name in FLOATS.values()]
            return native.header(own.packed).format not in floats
        return not isinstance(own, FloatWeight)

    @property
    def gathers(self) -> bool:
        """Whether `gather` gives rows of the weight as it is in memory."""
        return self.order is None

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as floats: [T, K] in `dtype` of ids int64 [T]."""
        return weight_rows(self.weight, ids).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes

    @property
    def matrix(self) -> Tensor | None:
        """The weight [N, K], where there are no compiled kernels and it is stored as that."""
        return self.weight.packed if isinstance(self.weight, FloatWeight) else None


@dataclass(frozen=True)
class CpuExperts:
    """The same linear layer of each expert of a mixture, in the router's order."""

    each: Sequence[Linear]

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(layer.nbytes for layer in self.each)


def static_integers(
    x: Tensor, scale: Tensor, sink_scale: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows quantized with static scales.

    Args:
        x: Float [T, K].
        scale: fp32, one element.
        sink_scale: That of rows of sink tokens, or None.
        sinks: bool [T], which rows these are, or None.

    Returns:
        (int8 [T, K], scales fp32: one element, or [T, 1]).
    """
    xq = quantize_static(x, scale)
    if sinks is None or sink_scale is None:
        return xq, scale
    xq[sinks] = quantize_static(x[sinks], sink_scale)
    return xq, torch.where(sinks[:, None], sink_scale.reshape(()), scale.reshape(()))


def pack_linear(stored: StoredLinear, dtype: torch.dtype) -> Linear:
    """Lay a layer out for the ops; `dtype` is that of float weights."""
    weights, activations = stored.scheme.weights, stored.scheme.activations
    if weights is None or stored.scale is None:
        return Linear(pack_float_weight(stored.weight, stored.bias, dtype))
    weight, scale, kind = stored.weight, stored.scale, weights.dtype
    if kind == "fp4_e2m1":  # twice its values are integers, up to 12
        weight, scale, kind = (weight.float() * 2).to(torch.int8), scale / 2, "int8"
    packed = pack_quantized_weight(
        weight,
        scale,
        kind,
        stored.zero_point,
        stored.group,
        stored.bias,
        integer_inputs=activations is not None and activations.dtype == "int8",
    )
    return Linear(packed, activations, stored.input_scale, stored.order, stored.sink_scale)


def attend_latents(
    config: ModelConfig,
    own: LatentProjections[Linear],
    read: Tensor,
    turn: tuple[Tensor, Tensor],
    batch: Batch,
    inputs: AttentionInputs,
    sinks: Tensor | None,
) -> Tensor:
    """What each head of latent attention gives.

    Args:
        config: The decoder's.
        own: Its projections in a block.
        read: What the layer gives that reads the attention's input [T, n].
        turn: cos and sin of the tokens' positions, [T, rotated].
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


TINY = 1e-20  # added to sums of scores, all of which may be next to nothing


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    Args:
        logits: Float [T, E], of the router.
        routing: How they are chosen.
        correction: fp32 [E], added to scores where experts are chosen, or None.

    Returns:
        (weights fp32 [T, k], experts int64 [T, k]), the best first.
    """
    scores = torch.softmax(logits.float(), -1) if routing.scores == "softmax" else sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if routing.chosen_groups < routing.groups:
        ranked = _of_best_groups(ranked, routing)
    chosen = torch.topk(ranked, routing.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return weights * routing.factor, chosen


def sigmoid(logits: Tensor) -> Tensor:
    """fp32 of the same shape."""
    return 1.0 / (1.0 + torch.exp(-logits.float()))


def _of_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Ranks [T, E] of the experts of a token's best groups, -inf of all others."""
    grouped = ranked.unflatten(1, (routing.groups, -1))  # [T, G, E / G]
    own = grouped.topk(routing.best_of_group, dim=-1).values.sum(-1)
    best = own.topk(routing.chosen_groups, dim=-1).indices
    others = torch.ones_like(own, dtype=torch.bool).scatter(1, best, value=False)
    return grouped.masked_fill(others[..., None], -torch.inf).flatten(1)
