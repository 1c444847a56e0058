"""The layer that gives logits, solved after the last block, some of its rows at a time.

Every row of it reads the same: what is seen of its input, by `BlockStream.finish`, serves all. So
memory is that of some rows (`ptq.plan.modules.piece_rows`), whatever the vocabulary. It is a block
of one layer to the methods that round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
from ptq.methods.common.rounding import round_to_nearest
from ptq.pipeline.emit import linear_entries
from ptq.pipeline.measure import LayerPowers, module_row, powers
from ptq.pipeline.resume import BlockRecord, SolvedBlock
from ptq.pipeline.solver import BlockSolver
from ptq.plan.modules import HEAD_STAGES, head_weight, piece_rows
from ptq.result import BlockRow, ModuleRow


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
        module, linear = nn.Module(), nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        module.add_module("head", linear)
        super().__init__(
            name, None, "", module, inputs, Handed(), device=device, names={"": "", "head": name}
        )

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
