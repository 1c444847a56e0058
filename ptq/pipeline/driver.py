"""The driver: takes a plan through calibration to a quantized checkpoint, block by block.

    solve a block (`ptq.pipeline.solver`) -> keep it for going on -> write it

At any time one block, the samples' hidden states and one shard are in memory. Each solved block is
stored with the hidden states after it (`ptq.pipeline.resume`), so that a run that was killed goes
on there. Blocks see the outputs of the float model, so a block's scales do not depend on how those
before it were quantized. Samples are put in an order set by their content, and sums over them are
exact: the checkpoint has the same bytes however the data set is shuffled.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from functools import partial
from typing import Any

from torch import Tensor

from calibrate.data import TokenSet, load_tokens
from calibrate.statistics import Statistics
from calibrate.workers import BackgroundWriter
from formats.adapters.factors import read_factors
from formats.checkpoint.write import CheckpointWriter
from formats.command import bar, on_terminal, say
from formats.errors import RecipeError
from formats.families.registry import predicting_layer, predicting_patterns
from formats.files import replace_file
from formats.memory import peak_rss_bytes
from formats.modeling.layers import stored_names
from formats.scale_table import ScaleTable
from formats.tokenizer import load_tokenizer
from ptq.methods.common.events import Event
from ptq.methods.common.float_model import LEFT_OUT, FloatModelView, kept_layers
from ptq.output import CHECKPOINT_FOLDER, RECIPE_FILE, RESULT_FILE, RESUME_FOLDER, STATISTICS_FILE
from ptq.pipeline.artifact import (
    FISHER_FOLDER,
    HESSIANS_FOLDER,
    Artifact,
    Found,
    drop_moments,
    expect_moments,
    keep_moments,
    save_moments,
)
from ptq.pipeline.emit import emit_rest
from ptq.pipeline.gradients import GradientStore
from ptq.pipeline.live import LiveTable
from ptq.pipeline.outside import solve_head, solve_predicting
from ptq.pipeline.resume import BlockRecord, ResumableRun, SolvedBlock, discard
from ptq.pipeline.reuse import check_solvable, gradients_key, key_of, run_facts, seen_key
from ptq.pipeline.solver import BlockSolver
from ptq.pipeline.team import fast_products
from ptq.plan.modules import head_weight, shard_bytes
from ptq.plan.plan import Plan
from ptq.recipe.reading import resolved_yaml
from ptq.result import CalibrationSummary, QuantizationResult, Stopwatch
from ptq.text import typed_path


def quantize(plan: Plan, *, force: bool = False, progress: bool = True) -> QuantizationResult:
    """Quantize a model as planned.

    Writes below the recipe's output path: `checkpoint/` (whole or not at all), `recipe.yaml`
    (resolved), `quantization.json`, the record of the run, and what `solve` works from:
    `statistics.safetensors`, `found.safetensors` and, where they are kept, `hessians/` and
    `fisher/`.

    Args:
        plan: From `ptq.plan.plan.build_plan`.
        force: Replace an existing checkpoint, once the new one is complete.
        progress: Show a progress bar.

    Raises:
        RecipeError: the calibration data cannot be used, or activations hold NaN or infinity.
        CheckpointError: the model is damaged, the output exists, or it cannot be written.
    """
    watch = Stopwatch()
    with watch.phase("data"):
        tokenizer = load_tokenizer(plan.recipe.model.folder)
        tokens = load_tokens(plan.recipe.dataset, tokenizer, "calibration")
    return quantize_tokens(plan, tokens, force=force, progress=progress, watch=watch)


def quantize_tokens(
    plan: Plan,
    tokens: TokenSet,
    *,
    force: bool = False,
    progress: bool = True,
    keep: bool = False,
    watch: Stopwatch | None = None,
) -> QuantizationResult:
    """`quantize` with given calibration tokens; arguments and errors as there.

    Args:
        keep: Leave what a run needs to go on after its end, until `ptq.pipeline.resume.discard`.
    """
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
        if driver.store.done == 0 and not driver.gradients.complete:  # nothing to go on with
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
    check_solvable(artifact, plan)
    driver = _Driver(plan, Stopwatch(), artifact.record.calibration, artifact)
    try:
        with fast_products(driver.device):
            return driver.result(driver.run([], force=force, progress=progress))
    finally:
        discard(plan.recipe.output.path)


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
        expected = plan.prediction
        kept = {HESSIANS_FOLDER: expected.moments_bytes, FISHER_FOLDER: expected.factors_bytes}
        folders = [name for name, size in kept.items() if size > 0]
        keep = partial(save_moments, plan.recipe.output.path / RESUME_FOLDER, folders)
        self.keeps_moments = artifact is None and bool(folders)
        self.solver = BlockSolver(plan, watch, artifact, keep if self.keeps_moments else None)
        self.model, self.device = self.solver.model, self.solver.device
        facts = run_facts(plan, self.model, calibration.fingerprint, self.device)
        self.parts = (*plan.blocks, *([] if plan.head is None else [plan.head]))
        output = plan.recipe.output.path
        self.store = ResumableRun(output, key_of(facts), len(self.parts), facts)
        self.resumed = self.store.done
        if self.keeps_moments and not self.resumed:
            expect_moments(output / RESUME_FOLDER)
        self.gradients = GradientStore(output, gradients_key(plan, self.model, facts))
        self.background = BackgroundWriter()
        self.statistics = Statistics()
        self.found: dict[str, Tensor] = {}  # by `<block>/<method>/<name>`
        left_out = self.model.left_out if isinstance(self.model, FloatModelView) else ()
        events = (Event(module=n, kind="left_out", message=LEFT_OUT) for n in left_out)
        self.records = [BlockRecord(events=tuple(events))]
        self.table = LiveTable(shown=False, blocks=(), layers=())

    def run(self, sequences: list[Tensor], *, force: bool, progress: bool) -> ScaleTable:
        """Quantize every block and write the checkpoint; returns its scale table."""
        stream = self.solver.stream
        greeting = self.store.greeting()
        if greeting and progress:
            say(f"{typed_path(self.recipe.output.path)}: {greeting}")
        self._settle_sinks(sequences, progress)
        writing = self._writer(force or self.resumed > 0)
        with closing(self.store), writing as writer, self.background:
            others = {f"{name}.weight" for name in self.plan.predicting}
            others |= set() if self.plan.head is None else {head_weight(self.model)}
            rest = partial(emit_rest, writer, self.model, stream.blocks, without=others)
            self.background.put(rest)
            if self.artifact is None:
                self.solver.run_backward(sequences, self.gradients, progress=progress)
                self.solver.start(sequences)
            measures = self.artifact is None  # without samples there is nothing to tell
            self.table = LiveTable(
                shown=progress and measures, blocks=self.plan.blocks, layers=self.plan.quantized
            )
            shown = progress and on_terminal()  # elsewhere the table's lines tell enough
            for index, name in enumerate(
                bar(self.parts, title="Quantizing", unit="block", shown=shown)
            ):
                if index < self.resumed:
                    self._emit(writer, name, self.store.block(index))
                    continue
                if index == self.resumed > 0:
                    stream.go_on(*self.store.states())
                self._block(index, name, writer)
            for name, solved in solve_predicting(self.plan, self.model, self.device):
                self._emit(writer, name, solved)
            table = ScaleTable(entries=self._rows("entries"))
            with self.watch.phase("write"):
                self.background.wait()
                writer.finish(table)
        return table

    def _settle_sinks(self, sequences: list[Tensor], progress: bool) -> None:
        """Find out how many sink tokens there are, and say where a static scale meets others."""
        peaks = self.solver.find_sinks(sequences, progress=progress)
        schemes = self.plan.schemes
        for name, ratio in peaks.others(self.solver.sinks).items() if peaks else ():
            if name not in schemes or not schemes[name].static_input:
                continue
            message = (
                f"a token after the first {self.solver.sinks} has an input {ratio:.0f} times that "
                "of an ordinary one; a static scale of its layer serves others badly. Scale this "
                "layer by token"
            )
            event = Event(module=name, kind="outlier_token", message=message)
            self.records.append(BlockRecord(events=(event,)))

    def _rows(self, kind: str) -> tuple[Any, ...]:
        """All rows of a kind, by its name in `BlockRecord`."""
        return tuple(row for record in self.records for row in getattr(record, kind))

    def result(self, table: ScaleTable) -> QuantizationResult:
        """Write what is beside the checkpoint; returns the outcome."""
        output = self.recipe.output.path
        with self.watch.phase("write"):
            self.statistics.save(output / STATISTICS_FILE)
            Found.under(self.recipe, self.found).save(output)
            self._keep_moments()
            replace_file(output / RECIPE_FILE, resolved_yaml(self.recipe).encode())
        result = QuantizationResult(
            checkpoint=output / CHECKPOINT_FOLDER,
            scale_table=table,
            seconds=self.watch.seconds(),
            peak_rss_bytes=peak_rss_bytes(),
            calibration=self.calibration,
            events=self._rows("events"),
            smoothing=self._rows("smoothing"),
            modules=self._rows("modules"),
            blocks=tuple(own.cost for own in self.records if own.cost is not None),
            resumed_blocks=self.resumed,
            model_key=seen_key(self.recipe, self.model),
            sink_tokens=self.solver.sinks,
        )
        replace_file(output / RESULT_FILE, result.to_json().encode())
        return result

    def _keep_moments(self) -> None:
        """Leave in the output those of this run, and no others."""
        output = self.recipe.output.path
        if self.keeps_moments:
            keep_moments(output / RESUME_FOLDER, output)
        elif self.artifact is None or self.artifact.folder.resolve() != output.resolve():
            drop_moments(output)

    def _writer(self, force: bool) -> CheckpointWriter:
        """A writer with shards of the size of an fp32 block: memory does not follow depth."""
        of_block = [n for n in self.model.names() if n.startswith(f"{self.plan.blocks[0]}.")]
        elements = sum(math.prod(self.model.shape(name)) for name in of_block)
        scheme, kept = self.recipe.scheme, kept_layers(self.model)
        if scheme.weights is None and kept:  # only those are
            scheme = scheme.model_copy(update={"weights": next(iter(kept.values())).weights})
        shared, config = self.plan.shared, dict(self.model.config)
        if self.plan.head is not None:
            config["tie_word_embeddings"] = shared is not None
        return CheckpointWriter(
            self.recipe.output.path / CHECKPOINT_FOLDER,
            config=config,
            scheme=scheme,
            shared_head=None if shared is None else self.plan.head,
            sink_tokens=self.solver.sinks if self._keeps_sinks() else 0,
            layers={**self.plan.schemes, **kept},
            caches=self.plan.caches,
            ignore=self._ignored(),
            aux_files=self.model.auxiliary_files,
            unmovable=self._unmovable(),
            force=force,
            shard_bytes=shard_bytes(elements),
        )

    def _unmovable(self) -> str | None:
        """Why adapters of the original model cannot follow what is done to it here, or was."""
        reasons = (spec.unmovable for spec in self.recipe.methods)
        before = read_factors(self.model.path).unmovable
        return next((reason for reason in (before, *reasons) if reason is not None), None)

    def _keeps_sinks(self) -> bool:
        """Whether anything is stored that sink tokens do not share."""
        caches = [self.recipe.cache_of(block) for block in self.plan.blocks]
        static = any(scheme.static_input for scheme in self.plan.schemes.values())
        return static or any(cache is not None for cache in caches)

    def _ignored(self) -> list[str]:
        """Full names of the layers left alone, in the files and, where it differs, in the code.

        Of layers that predict further tokens in which none is quantized it is a pattern for all
        that is in them.
        """
        left = [module.name for module in self.plan.modules if module.action == "float"]
        code = {own: name for name, own in stored_names(self.model.config).items()}
        weights = (f"{name}.weight" for name in left)
        left += [code[w].removesuffix(".weight") for w in weights if w in code]
        config, names = self.model.config, self.model.names()
        inside = {predicting_layer(config, f"{name}.weight") for name in self.plan.predicting}
        return left + predicting_patterns(
            config, (name for name in names if predicting_layer(config, name) not in inside)
        )

    def _block(self, index: int, name: str, writer: CheckpointWriter) -> None:
        """Take one block from float to the writer."""
        stream, is_head = self.solver.stream, name == self.plan.head
        solved = solve_head(self.solver) if is_head else self.solver.solve(index)
        with self.watch.phase("write"):
            if self.solver.schedule.needs_data and self.artifact is None:  # else as fast again
                states = ([], None) if is_head else (stream.inputs, stream.quantized_inputs)
                self.store.save(solved, *states)  # nothing comes after the head
            self._emit(writer, name, solved)

    def _emit(self, writer: CheckpointWriter, name: str, solved: SolvedBlock) -> None:
        """Write a solved block and keep its rows of the record.

        What belongs to no block comes first, however long that takes: files have one order of
        tensors, and the writer takes them from one thread at a time.
        """
        self.background.wait()
        for tensor_name, tensor in solved.tensors.items():
            writer.add(tensor_name, tensor)
        writer.set_beside(solved.beside)
        writer.set_schemes(solved.record.schemes)
        self.statistics.merge(solved.statistics)
        self.found |= {f"{name}/{own}": tensor for own, tensor in solved.found.items()}
        self.records.append(solved.record)
        if solved.record.cost is not None:
            self.table.add(solved.record.modules, solved.record.entries, solved.record.cost)
