"""Takes decoder blocks from float to quantized, one at a time; reads the model and writes nothing.

load a block -> run the samples -> method by method: prepare, observe, solve, commit
             -> measure -> hand its float outputs to the next block
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from calibrate.gradients import BlockGradients
from calibrate.sinks import Peaks, find_peaks
from calibrate.statistics import Statistics
from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.command import bar
from formats.memory import peak_rss_bytes
from formats.scale_table import ScaleEntry
from ptq.methods.common.block import BlockWork, QuantizedLinear, loss_against, power_of
from ptq.methods.common.events import Event
from ptq.methods.common.float_model import config_of
from ptq.methods.common.method import Method
from ptq.methods.common.rounding import round_to_nearest
from ptq.methods.common.spec import MethodSpec, Stage
from ptq.methods.registry import block_methods, view_of
from ptq.pipeline import emit
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.gradients import GradientStore, run_backward
from ptq.pipeline.measure import Ratios, measure, module_rows
from ptq.pipeline.passes import block_work, observe, quantized_outputs
from ptq.pipeline.resume import BlockRecord, SolvedBlock
from ptq.pipeline.team import Team
from ptq.plan.machine import devices_of
from ptq.plan.plan import Plan
from ptq.plan.schedule import COMPARED, Schedule
from ptq.result import BlockRow, ModuleRow, Stopwatch

CHANGED = 1e-3  # share of an output's power that rounding folded weights does not reach
CLIPPING_EVENT = 1e-3  # share of clipped values from which on it is an event


class BlockSolver:
    """Solves the blocks of a plan's model.

    Args:
        watch: Counts seconds by phase; a method's phase has its name.
        artifact: What an earlier run saw, in place of samples.
        keep: Called with each block once its samples have run through it, and with the method after
            which they did; '' for the original block.
    """

    def __init__(
        self,
        plan: Plan,
        watch: Stopwatch,
        artifact: Artifact | None = None,
        keep: Callable[[BlockWork, str], None] | None = None,
    ) -> None:
        self.plan, self.recipe, self.watch = plan, plan.recipe, watch
        self.artifact, self.keep = artifact, keep
        self.model = view_of(Checkpoint.open(plan.recipe.model.folder), plan.recipe.methods)
        named = block_methods(plan.recipe.methods)
        self.specs, self.methods = [spec for spec, _ in named], [method for _, method in named]
        self.recalled = artifact.found.recalled(plan.recipe) if artifact else []
        self.schedule = Schedule(plan.recipe, self.methods)
        self.team = Team(devices_of(plan.recipe))
        self.device = self.team.devices[0]
        self.gradients: Callable[[str], BlockGradients] | None = None  # by a block's name
        self.sinks = 0
        self.stream = self.new_stream(any(method.quantized_path for method in self.methods))

    def new_stream(self, quantized_path: bool = False) -> BlockStream:
        """The model's blocks once more."""
        stream = BlockStream(
            config_of(self.model),
            self.model.tensor,
            device=self.device,
            quantized_path=quantized_path,
        )
        stream.sinks = self.sinks
        return stream

    def find_sinks(
        self, sequences: Sequence[Tensor], blocks: int | None = None, *, progress: bool = False
    ) -> Peaks | None:
        """Settle how many sink tokens there are, before anything else runs.

        Args:
            blocks: How many of the first blocks are looked at; all by default.

        Returns:
            What was found on the way, where the data were looked at.
        """
        keep, found = self.recipe.sinks.keep, None
        if self.artifact is not None:
            self.sinks = self.artifact.record.sink_tokens
        elif isinstance(keep, int):
            self.sinks = keep
        elif keep == "auto" and self.schedule.needs_data:
            stream, count = self.new_stream(), len(self.plan.blocks)
            shown = bar(title="Looking for sink tokens", unit="block", total=count, shown=progress)
            with self.watch.phase("sinks"), shown as tick:
                found = find_peaks(
                    stream,
                    sequences,
                    self.team,
                    by_values=self.plan.sinks_by_values,
                    blocks=blocks,
                    tick=tick.update,
                )
            self.sinks = found.sinks
        self.stream.sinks = self.sinks
        return found

    def run_backward(
        self, sequences: Sequence[Tensor], store: GradientStore, *, progress: bool = False
    ) -> None:
        """Learn what gradients the blocks get, where a method wants them and they are not known."""
        if not self.schedule.gradients:
            return
        self.gradients = store.block
        if not store.complete:
            with self.watch.phase("backward"):
                samples = run_backward(sequences, self.recipe.statistics.gradient_tokens)
                store.make(self.new_stream(), samples, self.team, progress=progress)

    def of_stages(self, stages: Sequence[Stage]) -> list[tuple[MethodSpec, Method]]:
        """The methods of some stages, in the recipe's order."""
        pairs = zip(self.specs, self.methods, strict=True)
        return [(spec, method) for spec, method in pairs if spec.stage in stages]

    def start(self, sequences: Sequence[Tensor]) -> None:
        """Embed the samples: as many as the run needs."""
        with self.watch.phase("forward"):
            self.stream.start(list(sequences[: self.schedule.samples]))

    def solve(self, index: int) -> SolvedBlock:
        """Solve a block and hand its outputs to the next one.

        Raises:
            RecipeError: activations hold NaN or infinity.
            CheckpointError: the model is damaged.
        """
        begin = time.perf_counter()
        with self.watch.phase("load"):
            work = block_work(self.plan, self.model, self.stream.load(index, index + 1))
            self.team.take(work.block)
            if self.gradients is not None:
                work.gradients = self.gradients(work.block.name)
        outputs = self.see(work, self.methods, self.team)
        if self.artifact is not None:
            for method in self.methods:
                method.prepare(work)
        with self.watch.phase("measure"):
            baseline = self._compared(work, "rounding", round_to_nearest)
        seen, found = Statistics(), dict[str, Tensor]()  # which the artifact keeps
        seen.update(work.seen.statistics)
        for i, (spec, method) in enumerate(zip(self.specs, self.methods, strict=True)):
            with self.watch.phase(spec.name):
                if self.artifact is not None and spec.name in self.recalled:
                    self.artifact.recall(work, spec, method)  # what an earlier run found
                else:
                    self.team.solve(work, method, spec.name)
                found |= {f"{spec.name}/{name}": own for name, own in method.found().items()}
                method.commit(work)
                if method.folds:
                    self.team.take(work.block)
            if i + 1 in self.schedule.passes:
                again = self.see(work, self.methods[i + 1 :], self.team, i + 1)
                _tell_change(work, spec.name, outputs, again)
                seen.update(work.seen.statistics.marked(spec.name))
        with self.watch.phase("measure"):
            lost = self._compared(work, "measuring", lambda part: part.quantized)
            rows = module_rows(work, baseline, lost)
        solved = self._solved(work, rows, begin)
        solved.statistics, solved.found = seen, found
        with self.watch.phase("forward"):
            self.stream.advance(work.block, outputs, quantized_outputs(work, self.team))
            self.team.leave()
        return solved

    def see(
        self, work: BlockWork, methods: Sequence[Method], team: Team | None = None, first: int = 0
    ) -> list[Tensor]:
        """Learn of a block as it is, from the samples or from what an earlier run saw.

        Args:
            methods: Those that see the samples.
            team: Devices that have the block; its own alone by default.
            first: How many methods have changed it before.

        Returns:
            The block's output for each sample, if they ran.
        """
        stage = self.specs[first - 1].name if first else ""
        if self.artifact is not None:
            with self.watch.phase("load"):
                self.artifact.give(work, stage)
            return []
        hessians, counted = self.recipe.statistics.hessians is True, self.schedule.counts(first)
        with self.watch.phase("observe"):
            outputs = observe(work, methods, histograms=counted, hessians=hessians, team=team)
        if self.keep is not None:
            with self.watch.phase("write"):
                self.keep(work, stage)
        return outputs

    def _compared(
        self,
        work: BlockWork,
        what: str,
        layers: Callable[[BlockWork], Mapping[str, QuantizedLinear]],
    ) -> dict[str, Ratios]:
        """What quantized layers of a block lose, each by itself."""
        parts = self.team.over_layers(work, what, lambda part: measure(part, layers(part)))
        return {name: ratios for part in parts for name, ratios in part.items()}

    def _solved(self, work: BlockWork, rows: list[ModuleRow], begin: float) -> SolvedBlock:
        """What the checkpoint and the record get of a solved block."""

        def stored(part: BlockWork) -> tuple[dict[str, dict[str, Tensor]], list[ScaleEntry]]:
            own = [row for row in rows if row.module in part.quantized]
            return emit.layer_tensors(self.model, part), emit.linear_entries(part, own)

        parts = self.team.over_layers(work, "storing", stored)
        place = {row.module: i for i, row in enumerate(rows)}
        entries = sorted(
            (entry for _, own in parts for entry in own), key=lambda entry: place[entry.module]
        )
        layers = {name: tensors for own, _ in parts for name, tensors in own.items()}
        beside, cached = emit.cache_tensors(work, self.recipe.observers.kv_cache)
        entries += cached
        sinks, of_sinks = emit.sink_tensors(work)
        beside = beside | sinks | emit.adapter_factors(self.model, work)
        entries += of_sinks
        record = BlockRecord(
            entries=tuple(entries),
            events=(*work.events, *_clipping(entries)),
            smoothing=tuple(work.smoothing),
            modules=tuple(rows),
            schemes={n: s for n, s in work.schemes.items() if s != self.plan.schemes[n]},
            cost=BlockRow(
                block=work.block.name,
                seconds=time.perf_counter() - begin,
                memory_bytes=self.peak_bytes(),
            ),
        )
        return SolvedBlock(emit.block_tensors(self.model, work, layers), beside, record)

    def peak_bytes(self) -> int:
        """Peak memory so far: of the fullest GPU that blocks are solved on, else of the process."""
        if self.device.type == "cuda":
            return max(map(torch.cuda.max_memory_allocated, self.team.devices))
        return peak_rss_bytes()


def _tell_change(
    work: BlockWork, method: str, before: Sequence[Tensor], after: Sequence[Tensor]
) -> None:
    """An event where a method changed what the float block computes.

    Layers are compared with that block, so that their rows do not show what this cost.
    """
    sinks, pairs = work.block.sinks, list(zip(before, after, strict=False))[:COMPARED]
    power = sum(power_of([a], sinks) for a, _ in pairs)  # each on a device of its own
    error = sum(loss_against(a, sinks)(b.to(a.device)).item() for a, b in pairs)
    if error > CHANGED * power:
        message = (
            f"{method} changed the float block's output by {error / power:.1%} of its power; the "
            "SQNR of layers is measured after that and leaves it out: see the loss of the model"
        )
        work.report(work.block.name, "changed_function", message)


def _clipping(entries: Iterable[ScaleEntry]) -> Iterator[Event]:
    """An event for each input or cache of which a scale cuts off much."""
    for entry in entries:
        if entry.role != "weight" and entry.clip_fraction >= CLIPPING_EVENT:
            share = f"{entry.clip_fraction:.2%}"
            message = f"{entry.statistic} clips {share} of the values of {entry.tensor}"
            yield Event(module=entry.module, kind="clipping", message=message)
