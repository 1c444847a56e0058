"""Takes decoder blocks from float to quantized, one at a time; reads the model and writes nothing.

load a block -> run the samples -> method by method: prepare, observe, solve, commit
             -> measure -> hand its float outputs to the next block
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from calibrate.gradients import BlockGradients
from calibrate.sinks import Peaks, find_peaks
from calibrate.statistics import Statistics
from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.memory import peak_rss_bytes
from formats.scale_table import ScaleEntry
from ptq.methods.common.block import BlockWork
from ptq.methods.common.events import Event
from ptq.methods.common.float_model import config_of
from ptq.methods.common.method import Method
from ptq.methods.common.rounding import round_to_nearest
from ptq.methods.common.spec import MethodSpec, Stage
from ptq.methods.registry import block_methods, view_of
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.device import devices_of
from ptq.pipeline.emit import (
    adapter_factors,
    block_tensors,
    cache_tensors,
    layer_tensors,
    linear_entries,
    sink_tensors,
)
from ptq.pipeline.gradients import GradientStore, run_backward
from ptq.pipeline.measure import Ratios, measure, module_rows
from ptq.pipeline.passes import block_work, observe, quantized_outputs
from ptq.pipeline.resume import BlockRecord, SolvedBlock
from ptq.pipeline.team import Team
from ptq.plan.plan import Plan
from ptq.plan.schedule import Schedule
from ptq.result import BlockRow, ModuleRow, Stopwatch

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

    def find_sinks(self, sequences: Sequence[Tensor]) -> Peaks | None:
        """Settle how many sink tokens there are, before anything else runs.

        Returns:
            What was found on the way, where the data were looked at.
        """
        keep, found = self.recipe.sinks.keep, None
        cached = any(self.recipe.cache_of(block) is not None for block in self.plan.blocks)
        if self.artifact is not None:
            self.sinks = self.artifact.record.sink_tokens
        elif isinstance(keep, int):
            self.sinks = keep
        elif keep == "auto" and self.schedule.needs_data:
            with self.watch.phase("sinks"):
                found = find_peaks(self.new_stream(), sequences, self.team, cached=cached)
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
        outputs, baseline = self._see(work)
        seen, found = Statistics(), {}  # which the artifact keeps
        seen.update(work.seen.statistics)
        for i, (spec, method) in enumerate(zip(self.specs, self.methods, strict=True)):
            with self.watch.phase(spec.name):
                self._decide(work, spec, method)
                found[spec.name] = method.found()
                method.commit(work)
                if method.folds:
                    self.team.take(work.block)
            if i + 1 in self.schedule.passes:
                seen.update(self._see_again(work, i + 1).marked(spec.name))
        with self.watch.phase("measure"):
            rows = module_rows(work, baseline, self._measured(work))
        solved = self._solved(work, rows, begin)
        solved.statistics, solved.found = seen, found
        with self.watch.phase("forward"):
            self.stream.advance(work.block, outputs, quantized_outputs(work, self.team))
            self.team.leave()
        return solved

    def _see(self, work: BlockWork) -> tuple[list[Tensor], dict[str, Ratios]]:
        """Learn of an original block: its outputs, and what rounding alone would lose."""
        outputs: list[Tensor] = []
        if self.artifact is not None:
            with self.watch.phase("load"):
                self.artifact.give(work)
            for method in self.methods:
                method.prepare(work)
        else:
            outputs = self._observe(work, 0)
        with self.watch.phase("measure"):
            return outputs, self._baseline(work)

    def _baseline(self, work: BlockWork) -> dict[str, Ratios]:
        """What rounding alone would lose of each layer."""

        def rounded(part: BlockWork) -> dict[str, Ratios]:
            return measure(part, round_to_nearest(part))

        return _joined(self.team.over_layers(work, "rounding", rounded))

    def _measured(self, work: BlockWork) -> dict[str, Ratios]:
        """What each solved layer has lost."""

        def solved(part: BlockWork) -> dict[str, Ratios]:
            return measure(part, part.quantized)

        return _joined(self.team.over_layers(work, "measuring", solved))

    def _see_again(self, work: BlockWork, first: int) -> Statistics:
        """Learn of a block after a method has changed it, for the methods from `first` on."""
        if self.artifact is not None:
            with self.watch.phase("load"):
                self.artifact.give(work, self.specs[first - 1].name)
        else:
            self._observe(work, first)
        return work.seen.statistics

    def _decide(self, work: BlockWork, spec: MethodSpec, method: Method) -> None:
        """Let a method solve a block, or take what it found in an earlier run."""
        if self.artifact is not None and spec.name in self.recalled:
            self.artifact.recall(work, spec, method)
        else:
            self.team.solve(work, method, spec.name)

    def _observe(self, work: BlockWork, first: int) -> list[Tensor]:
        """Run the samples for the methods from `first` on; returns the block's outputs."""
        hessians = self.recipe.statistics.hessians is True
        counted = self.schedule.counts(first)
        with self.watch.phase("observe"):
            outputs = observe(
                work,
                self.methods[first:],
                histograms=counted,
                hessians=hessians,
                team=self.team,
            )
        if self.keep is not None:
            with self.watch.phase("write"):
                self.keep(work, self.specs[first - 1].name if first else "")
        return outputs

    def _solved(self, work: BlockWork, rows: list[ModuleRow], begin: float) -> SolvedBlock:
        """What the checkpoint and the record get of a solved block."""

        def stored(part: BlockWork) -> tuple[dict[str, dict[str, Tensor]], list[ScaleEntry]]:
            own = [row for row in rows if row.module in part.quantized]
            return layer_tensors(self.model, part), linear_entries(part, own)

        parts = self.team.over_layers(work, "storing", stored)
        place = {row.module: i for i, row in enumerate(rows)}
        entries = sorted(
            (entry for _, own in parts for entry in own), key=lambda entry: place[entry.module]
        )
        layers = {name: tensors for own, _ in parts for name, tensors in own.items()}
        beside, cached = cache_tensors(work, self.recipe.observers.kv_cache)
        entries += cached
        sinks, of_sinks = sink_tensors(work)
        beside = beside | sinks | adapter_factors(self.model, work)
        entries += of_sinks
        record = BlockRecord(
            entries=tuple(entries),
            events=(*work.events, *map(_clipping_event, filter(_clips_much, entries))),
            smoothing=tuple(work.smoothing),
            modules=tuple(rows),
            schemes={n: s for n, s in work.schemes.items() if s != self.plan.schemes[n]},
            cost=BlockRow(
                block=work.block.name,
                seconds=time.perf_counter() - begin,
                memory_bytes=self.peak_bytes(),
            ),
        )
        return SolvedBlock(block_tensors(self.model, work, layers), beside, record)

    def peak_bytes(self) -> int:
        """Peak memory so far: of the fullest GPU that blocks are solved on, else of the process."""
        if self.device.type == "cuda":
            return max(map(torch.cuda.max_memory_allocated, self.team.devices))
        return peak_rss_bytes()


def _joined(parts: Sequence[dict[str, Ratios]]) -> dict[str, Ratios]:
    return {name: ratios for part in parts for name, ratios in part.items()}


def _clips_much(entry: ScaleEntry) -> bool:
    return entry.role != "weight" and entry.clip_fraction >= CLIPPING_EVENT


def _clipping_event(entry: ScaleEntry) -> Event:
    message = f"{entry.statistic} clips {entry.clip_fraction:.2%} of the values of {entry.tensor}"
    return Event(module=entry.module, kind="clipping", message=message)
