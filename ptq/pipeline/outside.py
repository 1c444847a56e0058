"""Layers outside of the decoder blocks: the one that gives logits, and those for further tokens.

The head is solved after the last block, some of its rows at a time. Every row of it reads the same:
what is seen of its input, by `BlockStream.finish`, serves all. So memory is that of some rows
(`ptq.plan.modules.piece_rows`), whatever the vocabulary. It is a block of one layer to the methods
that round.

Layers that predict further tokens are rounded to the nearest: no sample runs through them. What
drafts costs no accuracy, only drafts that are not accepted, so that these layers are solved by
their weights alone, whatever methods the recipe has: scales by absmax, of less than 8 bits by the
search for the least squared error. Inputs are scaled when they arrive. What is lost of a weight
stands beside its scales; the layers in the record are those whose outputs are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from calibrate.block import DecoderBlock, OnInput
from calibrate.handed import Handed
from calibrate.statistics import Statistics
from formats.modeling.load import check_finite
from formats.scale_table import ScaleEntry
from formats.stored.weights import StoredWeight, join_weights, weight_tensors
from ptq.methods.common.block import BlockSettings, BlockWork
from ptq.methods.common.events import Event
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.rounding import round_to_nearest
from ptq.pipeline.emit import layer_tensors, linear_entries
from ptq.pipeline.measure import LayerPowers, measure, module_row, module_rows, powers
from ptq.pipeline.resume import BlockRecord, SolvedBlock
from ptq.pipeline.solver import BlockSolver
from ptq.plan.modules import HEAD_STAGES, head_weight, piece_rows
from ptq.plan.plan import Plan
from ptq.result import BlockRow, ModuleRow

ABSMAX_BITS = 8  # from which on scales of layers for further tokens need no search


class HeadBlock(DecoderBlock):
    """Some rows of a head, as a block whose samples are what the head reads.

    Args:
        name: Full name of the head, of its block, and of the one layer of it.
        weight: fp32 [rows, in].
        inputs: What it reads of each sample: [tokens, in], in the host's memory.
        device: Where it is solved.
    """

    def __init__(
        self, name: str, weight: Tensor, inputs: list[Tensor], device: torch.device
    ) -> None:
        module, names = _linears({name: weight}, "")
        super().__init__(name, None, "", module, inputs, Handed(), device=device, names=names)

    def run(self, sample: int, *, on_input: OnInput | None = None, **_: object) -> Tensor:
        """Show what the head reads; logits are not computed."""
        x = self.inputs[sample]
        if on_input is not None:
            on_input(self.name, x.to(self.device))
        return x

    def outputs(
        self,
        *,
        on_input: OnInput | None = None,
        samples: Sequence[int] | None = None,
        begin: Callable[[Sequence[int]], None] = lambda _: None,
        **_: object,
    ) -> list[Tensor]:
        """`run` on some samples; None for all."""
        found = []
        for sample in range(len(self.inputs)) if samples is None else samples:
            begin([sample])
            found.append(self.run(sample, on_input=on_input))
        return found


@dataclass
class _Solved:
    """What is gathered of the pieces."""

    weights: list[StoredWeight] = field(default_factory=list)
    found: LayerPowers = field(default_factory=lambda: LayerPowers([], [], []))
    before: LayerPowers = field(default_factory=lambda: LayerPowers([], [], []))
    entries: list[list[ScaleEntry]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    events: dict[Event, None] = field(default_factory=dict)
    input_scale: Tensor | None = None


def solve_head(solver: BlockSolver) -> SolvedBlock:
    """Solve the head of a solver's model, whose blocks are all solved.

    Raises:
        RecipeError: its inputs hold NaN or infinity.
        CheckpointError: the model is damaged.
    """
    begin, watch, gathered = time.perf_counter(), solver.watch, _Solved()
    if solver.artifact is None:
        with watch.phase("forward"):
            solver.stream.finish()
    first, gradients = None, None
    for work in _pieces(solver):
        if first is None:
            first = work
            if solver.gradients is not None:
                work.gradients = solver.gradients(work.block.name)
            solver.see(work, [method for _, method in solver.of_stages(HEAD_STAGES)])
            gradients = work.gradients
        else:
            work.seen = first.seen
        if gradients is not None:
            start, rows = sum(gathered.rows), work.block.linears[work.block.name].out_features
            work.gradients = gradients.rows(work.block.name, start, start + rows)
        _solve_piece(solver, work, gathered)
    assert first is not None
    name, scheme = first.block.name, first.scheme_of(first.block.name)
    weight = join_weights(gathered.weights)
    stored = weight_tensors(scheme, weight, first.dtype_of(name))
    if gathered.input_scale is not None:
        stored["input_scale"] = gathered.input_scale.cpu()
    rows, columns = weight.q.shape
    row = module_row(name, (rows, columns), gathered.found.ratios, gathered.before.ratios)
    record = BlockRecord(
        entries=tuple(_joined(gathered, row)),
        events=tuple(gathered.events),
        modules=(row,),
        cost=BlockRow(
            block=name,
            seconds=time.perf_counter() - begin,
            memory_bytes=solver.peak_bytes(),
        ),
    )
    tensors = {f"{name}.{leaf}": tensor for leaf, tensor in stored.items()}
    seen = Statistics()
    seen.update(first.seen.statistics)
    return SolvedBlock(tensors, record=record, statistics=seen)


def _pieces(solver: BlockSolver) -> Iterator[BlockWork]:
    """The head, some rows at a time, as blocks at work."""
    plan, model = solver.plan, solver.model
    name, holds = plan.head, head_weight(model)
    assert name is not None
    with solver.watch.phase("load"):
        whole = check_finite(holds, model.tensor(holds))
    dtype = model.dtype(holds)
    outputs, inputs = whole.shape
    for rows in whole.split(piece_rows((outputs, inputs))):
        block = HeadBlock(name, rows.to(solver.device).float(), solver.stream.inputs, solver.device)
        yield BlockWork(
            block=block,
            settings=BlockSettings(plan.recipe.observers.input),
            dtype_of=lambda _: dtype,
            scheme=plan.recipe.scheme,
            schemes={name: plan.schemes[name]},
            targets=(name,),
        )


def _solve_piece(solver: BlockSolver, work: BlockWork, gathered: _Solved) -> None:
    """Solve some rows and measure what they lost."""
    name = work.block.name
    with solver.watch.phase("measure"):
        before = powers(work, round_to_nearest(work))[name]
    for spec, method in solver.of_stages(HEAD_STAGES):
        with solver.watch.phase(spec.name):
            method.prepare(work)
            method.solve(work)
            method.commit(work)
    with solver.watch.phase("measure"):
        found, solved = powers(work, work.quantized)[name], work.quantized[name]
        for pairs, more in zip((*gathered.before, *gathered.found), (*before, *found), strict=True):
            pairs += more
        rows, columns = work.block.linears[name].weight.shape
        row = module_row(name, (rows, columns), found.ratios, before.ratios)
        gathered.entries.append(linear_entries(work, [row]))
    gathered.weights.append(solved.weight.to(torch.device("cpu")))
    gathered.rows.append(rows)
    gathered.input_scale = solved.input_scale
    gathered.events |= dict.fromkeys(work.events)


def _joined(gathered: _Solved, row: ModuleRow) -> Iterator[ScaleEntry]:
    """Rows of the scale table of the whole head, from those of its pieces."""
    for entries in zip(*gathered.entries, strict=True):
        first = entries[0]
        if first.role != "weight":
            yield first
            continue
        weighted = zip(entries, gathered.rows, strict=True)
        clipped = sum(entry.clip_fraction * rows for entry, rows in weighted)
        yield first.model_copy(
            update={
                "shape": (sum(entry.shape[0] for entry in entries), *first.shape[1:]),
                "scale_min": min(entry.scale_min for entry in entries),
                "scale_max": max(entry.scale_max for entry in entries),
                "absmax": max(entry.absmax for entry in entries),
                "clip_fraction": clipped / sum(gathered.rows),
                "sqnr_db": row.weight_sqnr_db,
            }
        )


def solve_predicting(
    plan: Plan, model: FloatModel, device: torch.device
) -> Iterator[tuple[str, SolvedBlock]]:
    """Round the linear layers of a plan's model that are in such layers.

    Args:
        model: As the recipe's methods see it.
        device: Where they are rounded.

    Yields:
        Layers that are merged at run time together, and every other one alone: a name, and what
        the checkpoint gets.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
    """
    merged: dict[str, list[str]] = {}
    of = {module.name: module.fused_group or module.name for module in plan.modules}
    for name in plan.predicting:
        merged.setdefault(of[name], []).append(name)
    for group, names in merged.items():
        read = ((name, check_finite(name, model.tensor(f"{name}.weight"))) for name in names)
        weights = {name: weight.to(device).float() for name, weight in read}
        work = _work(plan, model, group, weights, device)
        spec = work.weight_spec(names[0])
        work.quantized = round_to_nearest(work, "mse" if spec.bits < ABSMAX_BITS else "absmax")
        rows = module_rows(work, {}, measure(work, work.quantized))
        layers = layer_tensors(model, work).items()
        tensors = {f"{n}.{leaf}": tensor for n, own in layers for leaf, tensor in own.items()}
        record = BlockRecord(entries=tuple(linear_entries(work, rows)))
        yield group, SolvedBlock(tensors, record=record)


def _work(
    plan: Plan,
    model: FloatModel,
    group: str,
    weights: Mapping[str, Tensor],
    device: torch.device,
) -> BlockWork:
    """Layers as a block that no sample runs through."""
    module, names = _linears(weights, group)
    schemes = plan.schemes
    return BlockWork(
        block=DecoderBlock(group, None, None, module, [], Handed(), device=device, names=names),
        settings=BlockSettings(plan.recipe.observers.input, dict.fromkeys(weights, group)),
        dtype_of=model.dtype,
        scheme=plan.recipe.scheme,
        schemes={name: schemes[name] for name in weights},
        targets=tuple(weights),
    )


def _linears(weights: Mapping[str, Tensor], name: str) -> tuple[nn.Module, dict[str, str]]:
    """Linear layers of such weights in a module, and full names by those that they have in it.

    Args:
        name: Full name of the module itself.
    """
    module, names = nn.Module(), {"": name}
    for index, (full_name, weight) in enumerate(weights.items()):
        linear = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        module.add_module(str(index), linear)
        names[str(index)] = full_name
    return module, names
