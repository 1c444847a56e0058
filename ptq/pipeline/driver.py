"""The driver: takes a plan through calibration to a quantized checkpoint, block by block.

    load a block -> run the samples -> method by method: prepare, observe, solve, commit
                 -> measure -> write -> hand its float outputs to the next block

At any time one block, the samples' hidden states and one shard are in memory. Each solved block is
stored with the hidden states after it (`ptq.pipeline.resume`), so that a run that was killed goes
on there. Blocks see the outputs of the float model, so a block's scales do not depend on how those
before it were quantized. Samples are put in an order set by their content, and sums over them are
exact: the checkpoint has the same bytes however the data set is shuffled.
"""

from __future__ import annotations

import hashlib
import math
import time
from contextlib import closing

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from calibrate.data import TokenSet, load_tokens
from calibrate.statistics import Statistics
from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.write import CheckpointWriter
from formats.errors import RecipeError
from formats.files import replace_file
from formats.memory import peak_rss_bytes
from formats.scale_table import ScaleEntry, ScaleTable
from ptq.methods.common.block import BlockWork
from ptq.methods.common.events import Event, SmoothingRow
from ptq.methods.common.float_model import config_of
from ptq.methods.common.rounding import round_to_nearest
from ptq.methods.registry import block_methods, view_of
from ptq.pipeline.artifact import Artifact, check_solvable, drop_hessians, save_hessians, seen_key
from ptq.pipeline.emit import block_tensors, emit_rest, kv_scales, linear_entries
from ptq.pipeline.live import LiveTable
from ptq.pipeline.measure import SAMPLES, Ratios, measure, module_rows
from ptq.pipeline.passes import block_work, observe, quantized_outputs
from ptq.pipeline.resume import BlockRecord, ResumableRun, SolvedBlock, discard, run_key
from ptq.plan.plan import Plan
from ptq.plan.schedule import Schedule
from ptq.plan.shapes import shard_bytes
from ptq.plan.speed import fast_products
from ptq.recipe.schema import Recipe, resolved_yaml
from ptq.result import (
    CHECKPOINT_FOLDER,
    RECIPE_FILE,
    RESULT_FILE,
    STATISTICS_FILE,
    BlockRow,
    CalibrationSummary,
    ModuleRow,
    QuantizationResult,
    Stopwatch,
)

CLIPPING_EVENT = 1e-3  # share of clipped values from which on a person is told


def quantize(
    plan: Plan, *, force: bool = False, progress: bool = True, keep: bool = False
) -> QuantizationResult:
    """Quantize a model as planned.

    Writes below the recipe's output path: `checkpoint/` (whole or not at all), `recipe.yaml`
    (resolved), `statistics.safetensors`, and `quantization.json`, the record of the run.

    Args:
        plan: From `ptq.plan.plan.build_plan`.
        force: Replace an existing checkpoint, once the new one is complete.
        progress: Show a progress bar.
        keep: Leave what a run needs to go on after its end, until `ptq.pipeline.resume.discard`.

    Raises:
        RecipeError: the calibration data cannot be used, or activations hold NaN or infinity.
        CheckpointError: the model is damaged, the output exists, or it cannot be written.
    """
    watch = Stopwatch()
    with watch.phase("data"):
        tokenizer = AutoTokenizer.from_pretrained(plan.recipe.model.path, local_files_only=True)
        tokens = load_tokens(plan.recipe.dataset, tokenizer, "calibration")
    return quantize_tokens(plan, tokens, force=force, progress=progress, keep=keep, watch=watch)


def quantize_tokens(
    plan: Plan,
    tokens: TokenSet,
    *,
    force: bool = False,
    progress: bool = True,
    keep: bool = False,
    watch: Stopwatch | None = None,
) -> QuantizationResult:
    """`quantize` with given calibration tokens; arguments and errors as there."""
    output = plan.recipe.output.path
    driver = _Driver(plan, watch or Stopwatch(), CalibrationSummary.of(tokens))
    try:
        with fast_products(driver.device):
            table = driver.run(
                in_canonical_order(tokens.sequences()), force=force, progress=progress
            )
    except RecipeError:  # it would come to the same end
        discard(output)
        raise
    finally:
        if driver.store.done == 0:  # nothing to go on with
            discard(output)
    result = driver.result(table)
    if not keep:
        discard(output)
    return result


def solve(
    plan: Plan, artifact: Artifact, *, force: bool = False, progress: bool = True
) -> QuantizationResult:
    """Quantize a model as planned from what an earlier run saw, without running it.

    Writes what `quantize` writes. What is measured on samples is missing from the record.

    Raises:
        RecipeError: the plan needs more than the artifact holds.
        CheckpointError: the model is damaged, the output exists, or it cannot be written.
    """
    check_solvable(artifact, plan.recipe)
    driver = _Driver(plan, Stopwatch(), artifact.record.calibration, artifact)
    try:
        with fast_products(driver.device):
            return driver.result(driver.run([], force=force, progress=progress))
    finally:
        discard(plan.recipe.output.path)


def device_of(recipe: Recipe) -> torch.device:
    """Where blocks are run and solved.

    Raises:
        RecipeError: the recipe asks for a GPU and there is none.
    """
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise RecipeError(
            "device: found cuda, but torch sees no GPU here; set device: cpu or auto, or install a "
            "torch with CUDA"
        )
    return torch.device("cuda" if available and recipe.device != "cpu" else "cpu")


def in_canonical_order(sequences: list[Tensor]) -> list[Tensor]:
    """Sequences by the SHA-256 of their tokens: one order, however they come, without a pattern."""
    return sorted(sequences, key=lambda ids: hashlib.sha256(ids.numpy().tobytes()).digest())


class _Driver:
    """Walks the blocks; what it gathers on the way is the record of the run."""

    def __init__(
        self,
        plan: Plan,
        watch: Stopwatch,
        calibration: CalibrationSummary,
        artifact: Artifact | None = None,
    ) -> None:
        self.plan, self.recipe, self.watch = plan, plan.recipe, watch
        self.calibration, self.artifact = calibration, artifact
        self.checkpoint = view_of(Checkpoint.open(plan.recipe.model.path), plan.recipe.methods)
        self.config = config_of(self.checkpoint)
        named = block_methods(plan.recipe.methods)
        self.methods, self.phases = [m for _, m in named], [spec.name for spec, _ in named]
        self.schedule = Schedule(plan.recipe, self.methods)
        self.device = device_of(plan.recipe)
        key = run_key(plan.recipe, self.checkpoint, calibration.fingerprint, self.device)
        self.store = ResumableRun(plan.recipe.output.path, key)
        self.resumed = self.store.done
        self.statistics = Statistics()
        self.entries: list[ScaleEntry] = []
        self.events: list[Event] = []
        self.smoothing: list[SmoothingRow] = []
        self.modules: list[ModuleRow] = []
        self.costs: list[BlockRow] = []
        self.table = LiveTable(shown=False, names=())

    def run(self, sequences: list[Tensor], *, force: bool, progress: bool) -> ScaleTable:
        """Quantize every block and write the checkpoint; returns its scale table."""
        with closing(self.store), self._writer(force or self.resumed > 0) as writer:
            stream = BlockStream(
                self.config,
                self.checkpoint.tensor,
                device=self.device,
                quantized_path=any(method.quantized_path for method in self.methods),
            )
            with self.watch.phase("write"):
                emit_rest(writer, self.checkpoint, stream.blocks)
            if self.artifact is None:
                if self.resumed == 0:
                    drop_hessians(self.recipe.output.path)
                with self.watch.phase("forward"):
                    stream.start(sequences if self.schedule.needs_data else sequences[:SAMPLES])
            self.table = LiveTable(shown=progress, names=self.plan.quantized)
            bar = tqdm(stream.blocks, desc="Quantizing", unit="block", disable=not progress)
            for index, name in enumerate(bar):
                bar.set_postfix_str(name)
                if index < self.resumed:
                    self._emit(writer, self.store.block(index))
                    continue
                if index == self.resumed > 0:
                    stream.go_on(*self.store.states())
                self._block(stream, index, writer)
            table = ScaleTable(entries=tuple(self.entries))
            with self.watch.phase("write"):
                writer.finish(table)
        return table

    def result(self, table: ScaleTable) -> QuantizationResult:
        """Write what lies beside the checkpoint; returns the outcome."""
        output = self.recipe.output.path
        with self.watch.phase("write"):
            self.statistics.save(output / STATISTICS_FILE)
            replace_file(output / RECIPE_FILE, resolved_yaml(self.recipe).encode())
        result = QuantizationResult(
            checkpoint=output / CHECKPOINT_FOLDER,
            scale_table=table,
            seconds=self.watch.seconds(),
            peak_rss_bytes=peak_rss_bytes(),
            calibration=self.calibration,
            events=tuple(self.events),
            smoothing=tuple(self.smoothing),
            modules=tuple(self.modules),
            blocks=tuple(self.costs),
            resumed_blocks=self.resumed,
            model_key=seen_key(self.recipe, self.checkpoint),
        )
        replace_file(output / RESULT_FILE, result.to_json().encode())
        return result

    def _writer(self, force: bool) -> CheckpointWriter:
        """A writer with shards of the size of an fp32 block: memory does not follow depth."""
        of_block = [n for n in self.checkpoint.names() if n.startswith(f"{self.plan.blocks[0]}.")]
        elements = sum(math.prod(self.checkpoint.shape(name)) for name in of_block)
        return CheckpointWriter(
            self.recipe.output.path / CHECKPOINT_FOLDER,
            config=self.checkpoint.config,
            scheme=self.recipe.scheme,
            layers=self.plan.schemes,
            ignore=[module.name for module in self.plan.modules if module.action == "float"],
            aux_files=self.checkpoint.auxiliary_files,
            force=force,
            shard_bytes=shard_bytes(elements),
        )

    def _block(self, stream: BlockStream, index: int, writer: CheckpointWriter) -> None:
        """Take one block from float to the writer."""
        begin = time.perf_counter()
        with self.watch.phase("load"):
            work = block_work(self.plan, self.checkpoint, stream.load(index))
        outputs, baseline = self._see(work)
        assert work.statistics is not None
        seen = work.statistics  # of the model as it came, which the artifact keeps
        for i, (method, phase) in enumerate(zip(self.methods, self.phases, strict=True)):
            if i in self.schedule.passes:
                with self.watch.phase("observe"):
                    self._observe(work, i)
            with self.watch.phase(phase):
                method.solve(work)
                method.commit(work)
        if len(self.methods) in self.schedule.passes:
            with self.watch.phase("observe"):
                self._observe(work, len(self.methods))
        with self.watch.phase("measure"):
            rows = module_rows(work, baseline)
        solved = self._solved(work, rows, seen, begin)
        with self.watch.phase("forward"):
            stream.advance(work.block, outputs, quantized_outputs(work))
        with self.watch.phase("write"):
            if self.schedule.needs_data and self.artifact is None:  # else starting over is as fast
                self.store.save(solved, stream.inputs, stream.quantized_inputs)
            self._emit(writer, solved)

    def _see(self, work: BlockWork) -> tuple[list[Tensor], dict[str, Ratios]]:
        """Learn of a block as it came: its outputs, and what rounding alone would lose."""
        if self.artifact is not None:
            with self.watch.phase("load"):
                self.artifact.give(work)
            for method in self.methods:
                method.prepare(work)
            with self.watch.phase("measure"):
                return [], measure(work, round_to_nearest(work))
        with self.watch.phase("observe"):
            outputs = self._observe(work, 0)
        if self.recipe.statistics.hessians:
            with self.watch.phase("write"):
                save_hessians(self.recipe.output.path, work)
        with self.watch.phase("measure"):
            return outputs, measure(work, round_to_nearest(work))

    def _observe(self, work: BlockWork, first: int) -> list[Tensor]:
        """Run the samples for the methods from `first` on; returns the block's outputs."""
        hessians = first == 0 and self.recipe.statistics.hessians
        counted = self.schedule.counts(first)
        return observe(work, self.methods[first:], histograms=counted, hessians=hessians)

    def _solved(
        self, work: BlockWork, rows: list[ModuleRow], seen: Statistics, begin: float
    ) -> SolvedBlock:
        """What is kept of a solved block, with what was seen of it as it came."""
        entries, scales = linear_entries(work, rows), {}
        kv_cache = self.recipe.scheme.kv_cache
        if kv_cache is not None:
            scales, cached = kv_scales(work, kv_cache, self.recipe.observers.kv_cache)
            entries += cached
        record = BlockRecord(
            entries=tuple(entries),
            events=(*work.events, *map(_clipping_event, filter(_clips_much, entries))),
            smoothing=tuple(work.smoothing),
            modules=tuple(rows),
            cost=BlockRow(
                block=work.block.name,
                seconds=time.perf_counter() - begin,
                memory_bytes=self._peak_bytes(),
            ),
        )
        return SolvedBlock(block_tensors(self.checkpoint, work), scales, record, seen)

    def _peak_bytes(self) -> int:
        """Peak memory so far: of the GPU that blocks are solved on, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_rss_bytes()

    def _emit(self, writer: CheckpointWriter, solved: SolvedBlock) -> None:
        """Write a solved block and keep its rows of the record."""
        for name, tensor in solved.tensors.items():
            writer.add(name, tensor)
        for attention, (k, v) in solved.kv_scales.items():
            writer.set_kv_scales(attention, k, v)
        self.statistics.merge(solved.statistics)
        self.entries += solved.record.entries
        self.events += solved.record.events
        self.smoothing += solved.record.smoothing
        self.modules += solved.record.modules
        if solved.record.cost is not None:
            self.costs.append(solved.record.cost)
            self.table.add(solved.record.modules, solved.record.entries, solved.record.cost)


def _clips_much(entry: ScaleEntry) -> bool:
    return entry.role != "weight" and entry.clip_fraction >= CLIPPING_EVENT


def _clipping_event(entry: ScaleEntry) -> Event:
    message = f"{entry.statistic} clips {entry.clip_fraction:.2%} of the values of {entry.tensor}"
    return Event(module=entry.module, kind="clipping", message=message)
