"""Feed-forward layers of a step on a GPU: a gated MLP, or a mixture of them.

The experts of a mixture run as one, on rows that are sorted on the device
(`kernels.triton.experts.sorting`): nothing is asked of the host, and a step can be captured. Only
many tokens of prompts go through large experts one by one, in steps that are not captured: there
the kernels for many rows are ahead by more than launches cost.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inference.gpu.adapters import BlockAdapters, run_adapted
from inference.gpu.experts import GpuExperts, MergedExperts
from inference.gpu.layers import GpuLinear
from inference.models.layers import GatedMLP, MixtureOfExperts, by_expert
from kernels.activations import Activation
from kernels.triton.experts.routing import combine, route
from kernels.triton.experts.sorting import sort_by_expert
from kernels.triton.fused import gated_product
from kernels.triton.linear.weight import InputFormat
from kernels.triton.tuning import fewest_rows, power_of_two

GpuFeedForward = GatedMLP[GpuLinear] | MixtureOfExperts[GpuLinear, GpuExperts]
MANY_ROWS = 64  # an expert, on average
LARGE = 16 << 20  # bytes of an expert's gate and up


def as_one(own: GpuFeedForward, tokens: int | None) -> bool:
    """Whether experts run as one, without the host, in a step of so many tokens of prompts.

    In one without prompts, `tokens` None, they do wherever they can; dense layers always.
    """
    if isinstance(own, GatedMLP):
        return True
    gate_up = own.gate_up.merged
    if gate_up is None or own.down.merged is None:
        return False
    few = tokens is None or tokens * own.routing.chosen <= MANY_ROWS * own.routing.experts
    return few or gate_up.weight.nbytes < LARGE


def inputs_of(own: GpuFeedForward, dtype: torch.dtype) -> InputFormat:
    """How the layer wants its input; mixtures quantize their rows themselves."""
    return own.gate_up.rows if isinstance(own, GatedMLP) else InputFormat(dtype)


def feed_forward(
    own: GpuFeedForward,
    rows: Tensor,
    scales: Tensor | None,
    dtype: torch.dtype,
    padded: bool,
    sinks: Tensor | None = None,
    loras: BlockAdapters | None = None,
) -> Tensor:
    """The layer on rows that are as it wants them: [T, H] in `dtype`.

    Args:
        rows: [T, H].
        scales: Of the rows, where they are quantized.
        dtype: The model's float type.
        padded: Whether the step may be captured.
        sinks: int32 [T], 1 for the rows of sink tokens; None where none is.
        loras: Adapters of a gated MLP, if rows run with any.
    """
    if isinstance(own, GatedMLP):
        y = run_adapted(own.gate_up, "gate_up", rows, scales, dtype, loras)
        return _down(own, y, sinks, loras)
    return _mixture(own, rows, padded, sinks)


def _on_floats(own: GatedMLP[GpuLinear], x: Tensor, sinks: Tensor | None) -> Tensor:
    return _down(own, own.gate_up(x, sinks), sinks)


def _down(
    own: GatedMLP[GpuLinear],
    y: Tensor,
    sinks: Tensor | None,
    loras: BlockAdapters | None = None,
) -> Tensor:
    """The layer from what gate and up say on."""
    wanted = own.down.rows
    scale, by = wanted.scales_of(sinks)
    rows, scales = gated_product(
        y, scale, wanted.dtype, wanted.group, by, own.activation, wanted.length
    )
    return run_adapted(own.down, "down", rows, scales, y.dtype, loras)


def _mixture(
    own: MixtureOfExperts[GpuLinear, GpuExperts], x: Tensor, padded: bool, sinks: Tensor | None
) -> Tensor:
    routing = own.routing
    logits = own.router(x, dtype=torch.float32)
    weights, chosen = route(
        logits, routing.chosen, routing.normalized, sigmoid=routing.scores == "sigmoid",
        correction=own.correction, groups=routing.groups, chosen_groups=routing.chosen_groups,
        best_of_group=routing.best_of_group, factor=routing.factor,
    )  # fmt: skip
    gate_up, down = own.gate_up.merged, own.down.merged
    if gate_up is None or down is None or not (padded or as_one(own, len(x))):
        pairs = zip(own.gate_up.each, own.down.each, strict=True)
        experts = [GatedMLP(*pair, own.activation) for pair in pairs]

        def run(expert: GatedMLP[GpuLinear], tokens: Tensor) -> Tensor:
            return _on_floats(expert, x[tokens], None if sinks is None else sinks[tokens])

        y = by_expert(x, chosen, experts, run).flatten(0, 1)
    else:
        y = _all_at_once(gate_up, down, x, chosen, routing.experts, own.activation, sinks)
    if own.shared is None:
        return combine(y, weights)
    gate = None if own.shared_gate is None else own.shared_gate(x)
    return combine(y, weights, _on_floats(own.shared, x, sinks), gate)


def _all_at_once(
    gate_up: MergedExperts,
    down: MergedExperts,
    x: Tensor,
    chosen: Tensor,
    experts: int,
    activation: Activation = "silu",
    sinks: Tensor | None = None,
) -> Tensor:
    """What the experts of each pair say: [T k, H]."""
    weights = gate_up.weight, down.weight
    tallest = min(weight.tallest_tile for weight in weights)
    shortest = max(fewest_rows(weight.family) for weight in weights)
    height = tile_height(chosen.numel(), experts, tallest, shortest)
    pairs, numbers = sort_by_expert(chosen, experts, height), chosen.view(-1)
    ready = replace(pairs, metadata_ready=True)
    rows, scales = gate_up.quantized(x, numbers, sinks)
    y = gate_up.run(rows, scales, pairs if rows is x else ready, x.dtype)
    wanted = down.rows
    scale, by = down.scaled_by(numbers, sinks)
    rest = (scale, wanted.dtype, wanted.group, by, activation, wanted.length)
    rows, scales = gated_product(y, *rest)
    return down.run(rows, scales, ready, x.dtype)


def tile_height(pairs: int, experts: int, tallest: int, shortest: int) -> int:
    """Rows of a tile: twice as many as an expert has on average, so that few have two tiles.

    Of more than 64 products of a row cost more than weights: no more are wasted than there.
    """
    mean = pairs // experts
    rows = max(power_of_two(2 * mean + 1), shortest)
    return min(rows, 64 if mean < 128 else 128, tallest)
