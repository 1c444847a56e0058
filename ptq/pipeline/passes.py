"""One block at work: what the plan says of it, and the passes of the samples through it.

A pass runs on one or more devices. Maxima and counts of the devices are merged, and second moments
added up in the order of the samples (`calibrate.workers`): nothing depends on the number of
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from calibrate.attention import watched_queries
from calibrate.block import DecoderBlock
from calibrate.spec import SINK_INPUT, SINK_TOKENS
from calibrate.statistics import Statistics
from calibrate.transfers import passed_through, run_size
from calibrate.workers import InTurn, in_order_of_samples, samples_of, shares
from formats.errors import RecipeError
from formats.families.sizes import heads_of, turning_pairs
from formats.modeling.layers import common_inputs, structure_of
from ptq.methods.common.block import BlockSettings, BlockWork, Seen, quantized_block
from ptq.methods.common.events import Event
from ptq.methods.common.float_model import FloatModel, config_of, kept_layers
from ptq.methods.common.method import Method
from ptq.methods.common.moments import Moments, WeightedMoments
from ptq.methods.common.positions import Positions
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
        kept=kept_layers(checkpoint),
    )
    scheme = plan.recipe.scheme.model_copy(update={"kv_cache": cache})
    return BlockWork(block, settings, checkpoint.dtype, scheme, schemes, tuple(schemes), groups)


def quantized_outputs(work: BlockWork, team: Team) -> list[Tensor] | None:
    """Outputs of the quantized block for what the quantized blocks before it hand over, if kept."""
    inputs = work.block.quantized_inputs
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


class Pass:
    """Gathers what a pass shows; `run` on every worker, then `close`.

    Args:
        work: Gets what is seen.
        methods: See every input; they are prepared.
        team: Has the block.
        histograms: Whether magnitudes are counted.
        hessians: Whether full second moments are kept for every target.
    """

    def __init__(
        self,
        work: BlockWork,
        methods: Sequence[Method],
        team: Team,
        *,
        histograms: bool,
        hessians: bool,
    ) -> None:
        self.work, self.methods, self.team = work, methods, team
        self.histograms, self.stand_in = histograms, work.observed_for
        self.statistics = [Statistics() for _ in team.devices]
        self.routed: list[dict[str, Tensor]] = [{} for _ in team.devices]
        self.key_sums: dict[int, Tensor] = {}  # of a sample's channels
        self.query_moments: dict[int, Tensor] = {}  # of a sample
        self.turns = InTurn(team)
        wanted = {method.moments for method in methods} | ({"full"} if hessians else set())
        self.moments = self.weighted = None
        if wanted - {"none"}:
            self.moments = Moments(self.stand_in, work.targets, full="full" in wanted)
            self.moments.place(self._places({self.stand_in[name] for name in work.targets}))
        if work.gradients is not None:
            self.weighted = WeightedMoments(work.gradients, work.targets)
            self.weighted.place(self._places(set(work.targets)))

    def _places(self, names: set[str]) -> dict[str, torch.device]:
        """Where second moments of layers are kept, of several devices: about as much on each."""
        if len(self.team) == 1:
            return {}
        ordered = sorted(names)
        widths = [float(self.work.block.linears[name].in_features) ** 2 for name in ordered]
        places = shares(widths, len(self.team))
        return {name: self.team.devices[w] for name, w in zip(ordered, places, strict=True)}

    def run(self, worker: int) -> list[Tensor]:
        """Run a worker's samples; the block's output for each of them."""
        count = len(self.work.block.inputs)
        samples = samples_of(worker, count, len(self.team))
        eye = _Eye(self, worker, run_size(count))
        block, cache = self.team.block(worker), self.work.scheme.kv_cache
        queries: AbstractContextManager[None] = nullcontext()
        if cache is not None and cache.compensate_keys and block.attention is not None:
            queries = watched_queries(block.submodule(block.attention), eye.on_queries)
        try:
            with queries:
                outputs = block.outputs(
                    on_input=eye.on_input,
                    on_sinks=eye.on_sinks,
                    on_kv=eye.on_kv,
                    on_route=eye.on_route,
                    samples=samples,
                    begin=eye.begin,
                )
        except RecipeError:
            self.statistics[worker].gathered()  # which names the layer, where it can
            raise
        eye.end_run()
        self.statistics[worker].gathered()
        return outputs

    def close(self) -> None:
        """Hand over what was seen."""
        work, statistics = self.work, self.statistics[0]
        for other in self.statistics[1:]:
            statistics.merge(other)
        for name, kept in (("channel_sum", self.key_sums), ("query_moments", self.query_moments)):
            if kept:
                sums = torch.stack([kept[i] for i in sorted(kept)]).sum(0)
                setattr(statistics[work.block.attended, "k_cache"], name, sums)
        for name in work.block.linears:
            for role in ("input", SINK_INPUT) if work.block.sinks else ("input",):
                key = self.stand_in[name], role
                if name in work.targets or key in statistics:  # else its code reads the weight
                    statistics[name, role] = statistics[key]
        for part in (self.moments, self.weighted):
            if part is not None:
                part.complete()
        work.seen = Seen(statistics, self.moments, self.weighted)

    def routes(self) -> Mapping[str, Tensor]:
        """Tokens that routers sent to each expert [experts], by the experts' full name."""
        total: dict[str, Tensor] = {}
        for each in self.routed:
            for name, counts in each.items():
                total[name] = total[name] + counts.cpu() if name in total else counts.cpu()
        return total


class _Eye:
    """What one worker sees of its samples."""

    def __init__(self, of: Pass, worker: int, size: int) -> None:
        self.of, self.size = of, size
        self.statistics, self.routed = of.statistics[worker], of.routed[worker]
        self.moments = None if of.moments is None else of.moments.part()
        self.weighted = None if of.weighted is None else of.weighted.part()
        self.observed = set(of.stand_in.values())
        self.samples: Sequence[int] = ()  # those that are shown together
        self.energy = torch.zeros(())  # mean of |x|^2 of a layer's ordinary tokens, by sample

    def begin(self, samples: Sequence[int]) -> None:
        self.of.team.check()
        if self.samples and samples[0] // self.size != self.samples[0] // self.size:
            self.end_run()
        self.samples = samples

    def each(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Samples, and what is of each: equal parts of the rows."""
        return zip(self.samples, x.chunk(len(self.samples)), strict=True)

    def end_run(self) -> None:
        """Add the sums of a run, when it is its turn."""
        if not self.samples or (self.moments is None and self.weighted is None):
            return
        with self.of.turns.turn(self.samples[0] // self.size):
            if self.moments is not None and self.of.moments is not None:
                self.of.moments.merge(self.moments)
            if self.weighted is not None and self.of.weighted is not None:
                self.of.weighted.merge(self.weighted)

    def on_input(self, name: str, x: Tensor) -> None:
        if self.of.work.block.sinks and (self.moments or self.weighted):
            squares = x.float().square().sum(dim=1)
            self.energy = torch.stack([own.mean() for _, own in self.each(squares)])
        if self.moments is not None:
            self.moments.add(name, x)
        for sample, own in self.each(x):
            if self.weighted is not None:
                self.weighted.observe(name, own, sample)
            for method in self.of.methods:
                method.observe(name, own, sample)
        if name in self.observed:
            self.statistics.observe(
                name,
                "input",
                x,
                histogram=self.of.histograms,
                first=self.of.work.block.sinks,
                samples=len(self.samples),
            )

    def on_sinks(self, name: str, x: Tensor) -> None:
        """Sink tokens of a sample, after its others: in moments of as much energy as some of these.

        Left out, their channels would be free to be spoiled; as they are, nothing else would count.
        """
        if self.moments is not None or self.weighted is not None:
            own = x.float().square().sum(dim=1, keepdim=True).clamp(min=1e-30)
            energy = self.energy.repeat_interleave(len(x) // len(self.samples))[:, None]
            rows = x.float() * (SINK_TOKENS * energy / own).sqrt()
            if self.moments is not None:
                self.moments.add(name, rows, 0)
            if self.weighted is not None:
                for sample, part in self.each(rows):
                    self.weighted.observe_sinks(name, part, sample)
        if name in self.observed:
            count = len(self.samples)
            self.statistics.observe(name, SINK_INPUT, x, histogram=False, samples=count)

    def on_kv(self, k: Tensor, v: Tensor) -> None:
        work, counted = self.of.work, self.of.histograms
        assert work.block.attention is not None
        cache = work.scheme.kv_cache
        if cache is not None and cache.center_keys:
            for sample, own in self.each(k):
                self.of.key_sums[sample] = own.sum(0, dtype=torch.float64).cpu()
        for role, x in (("k_cache", k), ("v_cache", v)):
            name, count = work.block.attention, len(self.samples)
            self.statistics.observe(name, role, x, histogram=counted, samples=count)

    def on_queries(self, q: Tensor) -> None:
        for sample, own in zip(self.samples, q, strict=True):  # [kv heads, group, tokens, D]
            seen = own[:, :, self.of.work.block.sinks :].flatten(1, 2).float()
            moments = (seen.mT @ seen).double().cpu()
            self.of.query_moments[sample] = (moments + moments.mT) / 2

    def on_route(self, experts: str, counts: Tensor) -> None:
        known = self.routed.get(experts)
        self.routed[experts] = counts if known is None else known + counts
