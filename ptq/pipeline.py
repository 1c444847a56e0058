"""The driver: takes a plan through calibration to a quantized checkpoint, block by block.

    load a block -> run the samples -> method by method: prepare, observe, solve, commit
                 -> measure -> write -> hand its float outputs to the next block

At any time one block, the samples' hidden states and one shard are in memory. Blocks see the
outputs of the float model, so a block's scales do not depend on how those before it were quantized.
Samples are put in an order set by their content, and sums over them are exact: the checkpoint has
the same bytes however the data set is shuffled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from calibrate.data import TokenSet, load_tokens
from calibrate.statistics import Statistics
from calibrate.stream import Block, BlockStream
from formats.checkpoint import Checkpoint
from formats.files import replace_file
from formats.scale_table import ScaleEntry, ScaleTable
from formats.writer import CheckpointWriter
from ptq.emit import emit_block, emit_kv_scales, emit_rest, linear_entries
from ptq.measure import measure, module_rows
from ptq.methods.base import BlockWork, Method
from ptq.methods.registry import build_methods
from ptq.methods.rtn import round_to_nearest
from ptq.plan import Plan
from ptq.recipe import resolved_yaml
from ptq.result import (
    CHECKPOINT_FOLDER,
    RESULT_FILE,
    CalibrationSummary,
    Event,
    ModuleRow,
    QuantizationResult,
    SmoothingRow,
    Stopwatch,
    peak_rss_bytes,
)

RECIPE_FILE = "recipe.yaml"
STATISTICS_FILE = "statistics.safetensors"
CLIPPING_EVENT = 1e-3  # share of clipped values from which on a person is told
SMALLEST_SHARD = 16 << 20  # bytes


def quantize(plan: Plan, *, force: bool = False, progress: bool = True) -> QuantizationResult:
    """Quantize a model as planned.

    Writes below the recipe's output path: `checkpoint/` (whole or not at all), `recipe.yaml`
    (resolved), `statistics.safetensors`, and `quantization.json`, the record of the run.

    Args:
        plan: From `ptq.plan.build_plan`.
        force: Replace an existing checkpoint, once the new one is complete.
        progress: Show a progress bar.

    Raises:
        RecipeError: the calibration data cannot be used, or activations hold NaN or infinity.
        CheckpointError: the model is damaged, the output exists, or it cannot be written.
    """
    watch = Stopwatch()
    with watch.phase("data"):
        tokenizer = AutoTokenizer.from_pretrained(plan.recipe.model.path, local_files_only=True)
        tokens = load_tokens(plan.recipe.dataset, tokenizer, "calibration")
    return quantize_tokens(plan, tokens, force=force, progress=progress, watch=watch)


def quantize_tokens(
    plan: Plan,
    tokens: TokenSet,
    *,
    force: bool = False,
    progress: bool = True,
    watch: Stopwatch | None = None,
) -> QuantizationResult:
    """`quantize` with given calibration tokens; arguments and errors as there."""
    watch = watch or Stopwatch()
    driver = _Driver(plan, watch)
    table = driver.run(in_canonical_order(tokens.sequences()), force=force, progress=progress)
    output = plan.recipe.output.path
    with watch.phase("write"):
        driver.statistics.save(output / STATISTICS_FILE)
        replace_file(output / RECIPE_FILE, resolved_yaml(plan.recipe).encode())
    result = QuantizationResult(
        checkpoint=output / CHECKPOINT_FOLDER,
        scale_table=table,
        seconds=watch.seconds(),
        peak_rss_bytes=peak_rss_bytes(),
        calibration=CalibrationSummary(
            source=tokens.source,
            split=tokens.split,
            sequences=len(tokens.ids),
            tokens=tokens.tokens,
            fingerprint=tokens.fingerprint,
        ),
        events=tuple(driver.events),
        smoothing=tuple(driver.smoothing),
        modules=tuple(driver.modules),
    )
    replace_file(output / RESULT_FILE, result.to_json().encode())
    return result


def in_canonical_order(sequences: list[Tensor]) -> list[Tensor]:
    """Sequences by the SHA-256 of their tokens: one order, however they come, without a pattern."""
    return sorted(sequences, key=lambda ids: hashlib.sha256(ids.numpy().tobytes()).digest())


class _Driver:
    """Walks the blocks; what it gathers on the way is the record of the run."""

    def __init__(self, plan: Plan, watch: Stopwatch) -> None:
        self.plan, self.recipe, self.watch = plan, plan.recipe, watch
        self.checkpoint = Checkpoint.open(plan.recipe.model.path)
        self.config = AutoConfig.from_pretrained(plan.recipe.model.path, local_files_only=True)
        self.methods = build_methods(plan.recipe.methods)
        self.statistics = Statistics()
        self.entries: list[ScaleEntry] = []
        self.events: list[Event] = []
        self.smoothing: list[SmoothingRow] = []
        self.modules: list[ModuleRow] = []

    def run(self, sequences: list[Tensor], *, force: bool, progress: bool) -> ScaleTable:
        """Quantize every block and write the checkpoint; returns its scale table."""
        with self._writer(force) as writer:
            stream = BlockStream(self.config, self.checkpoint.tensor)
            with self.watch.phase("write"):
                emit_rest(writer, self.checkpoint, stream.blocks)
            with self.watch.phase("forward"):
                stream.start(sequences)
            bar = tqdm(stream.blocks, desc="Quantizing", unit="block", disable=not progress)
            for index, name in enumerate(bar):
                bar.set_postfix_str(name)
                self._block(stream, index, writer)
            table = ScaleTable(entries=tuple(self.entries))
            with self.watch.phase("write"):
                writer.finish(table)
        return table

    def _writer(self, force: bool) -> CheckpointWriter:
        """A writer with shards of the size of an fp32 block: memory does not follow depth."""
        of_block = [n for n in self.checkpoint.names() if n.startswith(f"{self.plan.blocks[0]}.")]
        elements = sum(math.prod(self.checkpoint.shape(name)) for name in of_block)
        return CheckpointWriter(
            self.recipe.output.path / CHECKPOINT_FOLDER,
            config=self.checkpoint.config,
            scheme=self.recipe.scheme,
            ignore=[module.name for module in self.plan.modules if module.action == "float"],
            aux_files=self.checkpoint.auxiliary_files,
            force=force,
            shard_bytes=max(SMALLEST_SHARD, 4 * elements),
        )

    def _block(self, stream: BlockStream, index: int, writer: CheckpointWriter) -> None:
        """Take one block from float to the writer."""
        with self.watch.phase("load"):
            work = block_work(self.plan, self.checkpoint, stream.load(index))
        with self.watch.phase("observe"):
            observe(work, self.methods[:1], histograms=self._histograms(0))
        with self.watch.phase("measure"):
            baseline = measure(work, round_to_nearest(work))
        for i, method in enumerate(self.methods):
            if i:
                with self.watch.phase("observe"):
                    observe(work, [method], histograms=self._histograms(i))
            with self.watch.phase(self.recipe.methods[i].name):
                method.solve(work)
                method.commit(work)
        with self.watch.phase("measure"):
            rows = module_rows(work, baseline)
        with self.watch.phase("write"):
            self._emit(writer, work, rows)
        with self.watch.phase("forward"):
            stream.advance(work.block)

    def _histograms(self, method: int) -> bool:
        """Whether the pass before a method counts magnitudes: the last does, for the artifact."""
        last = method >= len(self.methods) - 1
        return last or self.recipe.observers.input.method != "absmax"

    def _emit(self, writer: CheckpointWriter, work: BlockWork, rows: list[ModuleRow]) -> None:
        """Write a solved block and keep its rows of the record."""
        emit_block(writer, self.checkpoint, work)
        entries = linear_entries(work, rows)
        kv_cache = self.recipe.scheme.kv_cache
        if kv_cache is not None:
            entries += emit_kv_scales(writer, work, kv_cache, self.recipe.observers.kv_cache)
        assert work.statistics is not None
        self.statistics.merge(work.statistics)
        self.entries += entries
        self.events += [*work.events, *map(_clipping_event, filter(_clips_much, entries))]
        self.smoothing += work.smoothing
        self.modules += rows


def block_work(plan: Plan, checkpoint: Checkpoint, block: Block) -> BlockWork:
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


def observe(work: BlockWork, methods: Sequence[Method] = (), *, histograms: bool = True) -> None:
    """Run every sample through the block as it is now, for its statistics and for `methods`.

    Without `histograms` only maxima are kept, which all that smoothing needs is derived from.
    Layers that are fused at run time read one input: it is observed once for all of them.
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

    for sample in range(len(work.block.inputs)):
        work.block.run(sample, on_input=on_input, on_kv=on_kv)
    for name in work.block.linears:
        statistics[name, "input"] = statistics[stand_in[name], "input"]
    work.statistics = statistics


def _clips_much(entry: ScaleEntry) -> bool:
    return entry.clip_fraction >= CLIPPING_EVENT


def _clipping_event(entry: ScaleEntry) -> Event:
    message = f"{entry.statistic} clips {entry.clip_fraction:.2%} of the values of {entry.tensor}"
    return Event(module=entry.module, kind="clipping", message=message)
