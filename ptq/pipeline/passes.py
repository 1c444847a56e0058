"""One block at work: what the plan says of it, and the passes of the samples through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from calibrate.block import DecoderBlock
from calibrate.transfers import passed_through, run_size
from calibrate.workers import in_order_of_samples, samples_of
from formats.families.sizes import heads_of, turning_pairs
from formats.modeling.layers import common_inputs, structure_of
from ptq.methods.common.block import BlockSettings, BlockWork, quantized_block
from ptq.methods.common.events import Event
from ptq.methods.common.float_model import FloatModel, config_of
from ptq.methods.common.method import Method
from ptq.methods.common.positions import Positions
from ptq.pipeline.observing import Pass
from ptq.pipeline.team import Team
from ptq.plan.plan import Plan

STARVED = 0.01  # of an even share of the tokens; an expert that gets less is an event


def block_work(plan: Plan, checkpoint: FloatModel, block: DecoderBlock) -> BlockWork:
    """A loaded block with what the plan says of it."""
    config = checkpoint.config
    schemes = {name: s for name, s in plan.schemes.items() if name in block.linears}
    index = int(block.name.rpartition(".")[2])
    family = block.family
    if family is None:
        found = structure_of(config).block(block.name).attention
        head = 1 if found is None else found.value_size
    else:
        head = heads_of(config).size
    cache = None if block.attention is None else plan.recipe.cache_of(block.name)
    pairs = () if family is None else turning_pairs(family, config, index)
    positions = None
    if family is not None and cache is not None and (cache.center_keys or cache.compensate_keys):
        positions = Positions.of_layer(family, config_of(checkpoint), index, pairs)
    groups = tuple(group for group in plan.smoothing if group.block == block.name)
    norms = (group.source for group in groups if group.kind == "mlp_input")
    settings = BlockSettings(
        input_observer=plan.recipe.observers.input,
        common_input=common_inputs(config, block.name, tuple(block.linears)),
        head_dim=head,
        pairs=pairs,
        before_feed_forward=next(norms, None),
        positions=positions,
    )
    scheme = plan.recipe.scheme.model_copy(update={"kv_cache": cache})
    return BlockWork(block, settings, checkpoint.dtype, scheme, schemes, tuple(schemes), groups)


def quantized_outputs(work: BlockWork, team: Team | None = None) -> list[Tensor] | None:
    """Outputs of the quantized block for what the quantized blocks before it hand over, if kept."""
    inputs, team = work.block.quantized_inputs, team or _alone(work)
    if inputs is None:
        return None

    def run(worker: int) -> list[Tensor]:
        part, chosen = work.part(team.block(worker)), samples_of(worker, len(inputs), len(team))
        groups = part.block.together(chosen, run_size(len(inputs)))
        with quantized_block(part), torch.no_grad():
            own, left = [[inputs[i] for i in group] for group in groups], iter(groups)
            forward = part.block.forward
            return passed_through(own, lambda x: forward(x, next(left)[0]), part.block.device)

    found = team.each(f"running samples through the quantized {work.block.name}", run)
    return in_order_of_samples(found, len(inputs))


def observe(
    work: BlockWork,
    methods: Sequence[Method] = (),
    *,
    histograms: bool = True,
    hessians: bool = False,
    team: Team | None = None,
) -> list[Tensor]:
    """Run every sample through the block as it is now, for its statistics and for `methods`.

    Layers that read one input share what is seen of it: it is observed once for all of them.
    Experts that the router hardly ever chose are events of the first pass.

    Args:
        work: Gets what is seen.
        methods: Those that see every input; the second moments that they want are accumulated.
        histograms: Whether magnitudes are counted; without, only maxima are kept.
        hessians: Whether full second moments are kept for every target, whoever wants them.
        team: Devices that have the block; none beside its own by default.

    Returns:
        The block's output for each sample.
    """
    for method in methods:
        method.prepare(work)
    team = team or _alone(work)
    seen = Pass(work, methods, team, histograms=histograms, hessians=hessians)
    found = team.each(f"running samples through {work.block.name}", seen.run)
    if not work.seen.statistics:
        work.events += starved_experts(seen.routes())
    seen.close()
    return in_order_of_samples(found, len(work.block.inputs))


def _alone(work: BlockWork) -> Team:
    """A block's own device."""
    team = Team([work.block.device])
    team.take(work.block)
    return team


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
