"""One block at work: what the plan says of it, and the passes of the samples through it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from calibrate.statistics import Statistics
from calibrate.stream import Block, to_host
from ptq.methods.base import BlockWork, Method, quantized_block
from ptq.plan import Plan
from ptq.source import Source


def block_work(plan: Plan, checkpoint: Source, block: Block) -> BlockWork:
    """A loaded block with what the plan says of it."""
    config = checkpoint.config
    heads = config["num_attention_heads"]
    return BlockWork(
        block=block,
        scheme=plan.recipe.scheme,
        targets=tuple(name for name in plan.quantized if name in block.linears),
        fused={m.name: m.fused_group for m in plan.modules if m.fused_group is not None},
        groups=tuple(group for group in plan.smoothing if group.block == block.name),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        input_observer=plan.recipe.observers.input,
        dtype_of=checkpoint.dtype,
    )


def quantized_outputs(work: BlockWork) -> list[Tensor] | None:
    """Outputs of the quantized block for what the quantized blocks before it hand over, if kept."""
    inputs = work.block.quantized_inputs
    if inputs is None:
        return None
    with quantized_block(work), torch.no_grad():
        return [to_host(work.block.forward(x)) for x in inputs]


def observe(
    work: BlockWork, methods: Sequence[Method] = (), *, histograms: bool = True
) -> list[Tensor]:
    """Run every sample through the block as it is now, for its statistics and for `methods`.

    Without `histograms` only maxima are kept, which all that smoothing needs is derived from.
    Layers that are fused at run time read one input: it is observed once for all of them.

    Returns:
        The block's output for each sample.
    """
    for method in methods:
        method.prepare(work)
    stand_in, statistics = work.observed_for, Statistics()
    observed = set(stand_in.values())

    def on_input(name: str, x: Tensor) -> None:
        for method in methods:
            method.observe(name, x)
        if name in observed:
            statistics.observe(name, "input", x, histogram=histograms)

    def on_kv(k: Tensor, v: Tensor) -> None:
        statistics.observe(work.block.attention, "k_cache", k, histogram=histograms)
        statistics.observe(work.block.attention, "v_cache", v, histogram=histograms)

    outputs = [
        work.block.output(sample, on_input=on_input, on_kv=on_kv)
        for sample in range(len(work.block.inputs))
    ]
    for name in work.block.linears:
        statistics[name, "input"] = statistics[stand_in[name], "input"]
    work.statistics = statistics
    return outputs
