"""One block at work: what the plan says of it, and the passes of the samples through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from calibrate.block import DecoderBlock
from calibrate.statistics import Statistics
from calibrate.transfers import passed_through
from formats.errors import RecipeError
from formats.families.pairs import turning_pairs
from formats.families.sizes import heads_of
from formats.modeling.layers import common_inputs, structure_of
from ptq.methods.common.block import BlockWork, quantized_block
from ptq.methods.common.events import Event
from ptq.methods.common.fisher import WeightedMoments
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.method import Method
from ptq.methods.common.moments import Moments
from ptq.plan.plan import Plan

STARVED = 0.01  # of an even share of the tokens; an expert that gets less is told of


def block_work(plan: Plan, checkpoint: FloatModel, block: DecoderBlock) -> BlockWork:
    """A loaded block with what the plan says of it."""
    config = checkpoint.config
    schemes = {name: s for name, s in plan.schemes.items() if name in block.linears}
    index = int(block.name.rpartition(".")[2])
    family, found = block.family, None
    if family is None:
        found = structure_of(config).block(block.name).attention
    return BlockWork(
        block=block,
        scheme=plan.recipe.scheme.model_copy(update={"kv_cache": plan.recipe.cache_of(block.name)}),
        schemes=schemes,
        targets=tuple(schemes),
        common_input=common_inputs(config, block.name, tuple(block.linears)),
        groups=tuple(group for group in plan.smoothing if group.block == block.name),
        head_dim=heads_of(config).size if found is None else found.value_size,
        pairs=() if family is None else turning_pairs(family, config, index),
        input_observer=plan.recipe.observers.input,
        dtype_of=checkpoint.dtype,
    )


def quantized_outputs(work: BlockWork) -> list[Tensor] | None:
    """Outputs of the quantized block for what the quantized blocks before it hand over, if kept."""
    inputs = work.block.quantized_inputs
    if inputs is None:
        return None
    with quantized_block(work), torch.no_grad():
        return passed_through(inputs, work.block.forward, work.block.device)


def observe(
    work: BlockWork,
    methods: Sequence[Method] = (),
    *,
    histograms: bool = True,
    hessians: bool = False,
) -> list[Tensor]:
    """Run every sample through the block as it is now, for its statistics and for `methods`.

    Layers that read one input share what is seen of it: it is observed once for all of them.
    Experts that the router hardly ever chose are told of, in the first pass.

    Args:
        work: Gets what is seen.
        methods: Those that see every input; the second moments that they want are accumulated.
        histograms: Whether magnitudes are counted; without, only maxima are kept.
        hessians: Whether full second moments are kept for every target, whoever wants them.

    Returns:
        The block's output for each sample.
    """
    for method in methods:
        method.prepare(work)
    stand_in, statistics = work.observed_for, Statistics()
    wanted = {method.moments for method in methods} | ({"full"} if hessians else set())
    moments = None
    if wanted - {"none"}:
        moments = Moments(stand_in, work.targets, full="full" in wanted)
    weighted = None
    if work.gradients is not None:
        weighted = WeightedMoments(work.gradients, work.targets)
    routed: dict[str, Tensor] = {}
    observed = set(stand_in.values())

    def on_input(name: str, x: Tensor) -> None:
        if moments is not None:
            moments.observe(name, x)
        if weighted is not None:
            weighted.observe(name, x)
        for method in methods:
            method.observe(name, x)
        if name in observed:
            statistics.observe(name, "input", x, histogram=histograms)

    cache, sums = work.scheme.kv_cache, list[Tensor]()

    def on_kv(k: Tensor, v: Tensor) -> None:
        if cache is not None and cache.center_keys:
            sums.append(k.sum(0, dtype=torch.float64).cpu())
        statistics.observe(work.block.attention, "k_cache", k, histogram=histograms)
        statistics.observe(work.block.attention, "v_cache", v, histogram=histograms)

    def on_route(experts: str, counts: Tensor) -> None:
        routed[experts] = routed[experts] + counts if experts in routed else counts

    try:
        outputs = work.block.outputs(on_input=on_input, on_kv=on_kv, on_route=on_route)
    except RecipeError:
        statistics.gathered()  # which names the layer, where it can
        raise
    if sums:
        statistics[work.block.attention, "k_cache"].channel_sum = torch.stack(sums).sum(0)
    for name in work.block.linears:
        statistics[name, "input"] = statistics[stand_in[name], "input"]
    if work.statistics is None:
        work.events += starved_experts(routed)
    work.statistics, work.moments, work.weighted = statistics, moments, weighted
    work.divisors = {}
    return outputs


def starved_experts(routed: Mapping[str, Tensor]) -> Iterator[Event]:
    """An event for each expert that got less than a hundredth of an even share of the tokens.

    It is quantized like the others, as all tokens calibrate it; but the data hardly hold what the
    model uses it for. The bound is relative, so that it does not depend on the number of samples.

    Args:
        routed: Tokens that the router sent to each expert [experts], by the experts' full name.
    """
    for experts, counts in routed.items():
        share = counts.sum().item() / len(counts)
        for i, count in enumerate(counts.tolist()):
            if count < max(1, STARVED * share):
                message = (
                    f"the router sent it {count} calibration tokens, an even share is {share:.0f}; "
                    "it was calibrated with the tokens of all experts. Add data of other kinds"
                )
                yield Event(module=f"{experts}.{i}", kind="expert_starved", message=message)
