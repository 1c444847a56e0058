"""Steps on a GPU, planned on the host: the next one while the device computes the last.

One copy in, one copy of tokens out. A step is launched before the host knows the tokens of the one
before it. `launch` writes the arrays of a step into a block of bytes, and
`inference.gpu.execute.StepExecutor` executes it.

Steps are padded (`inference.gpu.steps`) and, with `graphs`, replayed as CUDA graphs
(`inference.gpu.graphs`). Without, the same tensors go through the same kernels one by one: the
tokens are equal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from inference.gpu.decoder import GpuDecoder
from inference.gpu.execute import Executed, StepExecutor
from inference.gpu.feed_forward import as_one
from inference.gpu.fields import HostBlock, HostBlocks
from inference.gpu.memory import OF_STEPS, free_bytes, memory_for, ran_out, too_small
from inference.gpu.ranks import StepRanks
from inference.gpu.sizes import (
    Size,
    WholeSize,
    decodes_of,
    drafts_of,
    most_tokens,
    padded_sizes,
    size_of,
    whole_size,
)
from inference.gpu.steps import (
    StepPlan,
    logprob_rows,
    places,
    step_shapes,
    wanted_tokens,
    write_moved,
    write_pieces,
    write_step,
    write_tables,
)
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.work import Work
from inference.transformers_code.model import CodeModel
from inference.transformers_code.state_rows import alone_in, pieces_of
from kernels.devices import launches_on
from kernels.op_inputs import KVPool


@dataclass
class Launched:
    """A step on its way, and whose rows are whose.

    Attributes:
        step: What runs, decodes first.
        executed: What it gives, in that order.
        at: When it was launched, seconds of `time.perf_counter`.
        hidden: Whether its hidden states are given to who drafts.
    """

    step: Prepared
    executed: Executed
    at: float = field(default_factory=time.perf_counter)
    hidden: bool = False

    @property
    def work(self) -> Work:
        """What runs."""
        return self.step.work

    @property
    def firsts(self) -> Ints:
        """The one of `step.rows` of each slice of `work` that is its last token but for drafts."""
        return np.cumsum(self.step.parts) - 1 - self.work.drafts

    @property
    def done(self) -> bool:
        """Whether a device is known to have ended it."""
        return self.executed.done is not None and self.executed.done.query()

    def tokens(self) -> Ints:
        """Wait for the step: the next token of each of `step.rows`, negative where logits were not
        finite; of no meaning where the slice is not its sequence's last."""
        if self.executed.done is not None:
            self.executed.done.synchronize()
        if self.work.plain:
            return self.executed.tokens.numpy()[self.step.places]
        samples = self.step.rows.samples
        found = np.zeros(len(samples), np.int64)
        found[samples] = self.executed.tokens.numpy()[self.step.places[samples]]
        return found

    def logprobs(self) -> dict[int, dict[int, float]]:
        """Of a step that was waited for: what the device tells with new tokens, by index in
        `step.rows`."""
        if self.executed.logprobs is None:
            return {}
        rows, found = self.step.rows, {}
        which = np.flatnonzero(rows.logprobs >= 0)
        ranked = zip(*(tensor.tolist() for tensor in self.executed.logprobs), strict=True)
        own = zip(which.tolist(), rows.logprobs[which].tolist(), strict=True)
        for (row, count), (index, values) in zip(own, ranked, strict=True):
            best = dict(zip(index[:count], values, strict=False))
            found[row] = best | {index[-1]: values[-1]}
        return found

    def logits_of(self, which: Ints) -> Tensor:
        """Logits of some slices of `work`, fp32 [rows, vocabulary], on the host."""
        logits = self.executed.logits
        assert logits is not None
        wanted = np.repeat(np.isin(np.arange(len(self.work)), which), self.work.rows)
        if wanted.all():
            return logits[: len(wanted)].cpu()
        return logits[torch.from_numpy(np.flatnonzero(wanted)).to(logits.device)].cpu()


@dataclass(frozen=True)
class Prepared:
    """A step whose arrays are written. Where its tokens stand may change before it is launched, and
    from it to the next step, which then need not be planned.

    Attributes:
        work: What runs.
        rows: The same with drafts as slices of their own.
        parts: How many of `rows` each slice of `work` has.
        plan: What the device gets.
        block: The arrays of the plan.
        places: Of `inference.gpu.steps.places`.
    """

    work: Work
    rows: Work
    parts: Ints
    plan: StepPlan
    block: HostBlock
    places: Ints

    def is_like(self, work: Work | None) -> bool:
        """Whether work is this one but for where its tokens stand: `Work.moved` gave the one of the
        other."""
        return work is not None and work.counts is self.work.counts

    def moved(self, work: Work) -> Prepared:
        """The same for work that it `is_like`; the arrays are as they were."""
        rows = work
        if self.rows is not self.work:
            rows = self.rows.moved(np.repeat(work.starts - self.work.starts, self.parts))
        return replace(self, work=work, rows=rows)


class GpuRunner:
    """Runs steps of a model.

    Args:
        model: On the GPU.
        batch: Which blocks of the cache each sequence holds, and its tokens.
        width: Most blocks of a sequence.
        graphs: Capture steps as CUDA graphs.
        invariant: Run each token as a sequence of its own; the model is made for it
            (`inference.gpu.invariant`).
        ranks: Those that run the same steps, each on its part of the model; None where there are
            no others. All but the first are given plans, and choose nothing.

    Attributes:
        executor: Executes what is planned.
        graphs: The steps that are captured.
    """

    def __init__(
        self,
        model: GpuDecoder | CodeModel,
        pools: Sequence[KVPool],
        device: torch.device,
        batch: RunningBatch,
        *,
        width: int,
        graphs: bool = True,
        invariant: bool = False,
        ranks: StepRanks | None = None,
    ) -> None:
        self.model, self._device, self._batch, self._width = model, device, batch, width
        self._invariant, self._ranks, self._on_gpu = invariant, ranks, device.type == "cuda"
        graphs = graphs and self._asks_nothing(decodes_of(len(batch.names) - 1))
        self.executor = StepExecutor(
            model, pools, device, batch, width=width, graphs=graphs, invariant=invariant,
            ranks=ranks,
        )  # fmt: skip
        self.graphs = self.executor.graphs
        layer = model.weight_bytes / max(1, len(pools)) if self.graphs.enabled else None
        self._most = most_tokens(layer, 1 if ranks is None else ranks.count)
        self._blocks = HostBlocks(pinned=self._on_gpu)

    def prepare(self, work: Work) -> Prepared | None:
        """Write the arrays of a step of single tokens and drafts before it is known where these
        stand; None where biases or the size of the step depend on that, too."""
        terms, owners = work.batch.terms, work.places
        made = work.starts + 1 - work.batch.prompt[owners]
        early = terms.bias_spans[owners].any(axis=(1, 2)) & (made < terms.bias_until[owners])
        if early.any():
            return None
        found = self._prepared(work)
        size = found.plan.size
        fits = isinstance(size, Size) and not size.prompts and found.plan.edits is None
        return found if fits else None

    def launch(self, work: Work, prepared: Prepared | None = None) -> Launched:
        """Start a step; what it reads was put on its way before it, nothing is waited for.

        Args:
            work: What runs.
            prepared: The same work, fewer tokens on, which was not launched, or was the last that
                was; None without.

        Raises:
            EngineError: memory is too small for it.
        """
        if prepared is None:
            step = self._prepared(work.decodes_first())  # attention takes single tokens first
        else:
            step = prepared.moved(work)
            if step.is_like(step.block.launched):
                step = self._in_another_block(step)
            write_moved(step.block.arrays, step.rows)
        plan = step.plan
        if self._ranks is not None:
            self._ranks.tell(plan)
        try:
            executed = self.executor.execute(plan)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            free = free_bytes(self._device)
            raise too_small("a step", self._device, free, 0, OF_STEPS) from error
        step.block.moved = executed.done
        if plan.edits is not None:
            self.executor.edits.note(step.rows, plan.edits)
        step.block.launched = step.work
        return Launched(step, executed)

    def follow(self, size: Size | WholeSize, arrays: bytes) -> None:
        """Start a step that the first rank has planned; nothing is waited for."""
        block = self._block_for(size)
        block.bytes.numpy()[:] = np.frombuffer(arrays, np.uint8)  # torch would wait for threads
        block.moved = self.executor.execute(StepPlan(size, block.bytes)).done

    def score(self, work: Work) -> Tensor:
        """Logits of the tokens of a sequence that is run apart, fp32 [tokens, vocabulary], on the
        device."""
        logits = self.launch(work).executed.logits
        assert logits is not None
        return logits[: work.tokens].clone()  # the next step may write there

    def warm_up(self, sequences: int, tokens: int, rows: int = 0) -> None:
        """Compile and capture the steps of up to so many decodes and tokens of prompts.

        Args:
            sequences: Most decodes.
            tokens: Most tokens of prompts.
            rows: Decodes and drafts of a step, where there are more of them.

        Raises:
            EngineError: memory is too small for them.
        """
        rows = rows if self._batch.states is None else 0  # those of drafts have sizes of their own
        sizes = padded_sizes(sequences, tokens, rows) if self.graphs.enabled else []
        if self._invariant:  # those with prompts are not padded
            sizes = [size for size in sizes if not size.prompts]
        if self.executor.adapted:
            sizes += [replace(size, adapted=True) for size in sizes if not size.prompts]
        with memory_for("warming up", self._device, 0, OF_STEPS), launches_on(self._device):
            for size in sizes:
                if not size.prompts or self._asks_nothing(size):
                    self.graphs.expect(size)
                    self.executor.graph_for(size)

    def _asks_nothing(self, size: Size) -> bool:
        """Whether a step of a size asks nothing of the host, and so can be captured."""
        tokens = size.tokens if size.prompts else None
        if isinstance(self.model, CodeModel):  # found out by its first step
            return self._batch.states is None or not size.prompts
        return all(as_one(layer.feed_forward, tokens) for layer in self.model.layers)

    def _size(self, work: Work, rows: Work) -> Size | WholeSize:
        """The size that a step runs in, of work and what `row_by_row` gives of it."""
        size = size_of(rows, self._most)
        if size is None:
            return whole_size(rows)
        if size.prompts and (self._invariant or not self._asks_nothing(size)):
            return whole_size(rows)  # (invariant: logits of few tokens are wanted)
        if size.every and (self._ranks is not None or isinstance(self.model, CodeModel)):
            return whole_size(rows)
        if self._batch.states is None:
            return size
        if not alone_in(work, self._batch.states).all():
            return whole_size(rows)
        most = int(work.drafts.max(initial=0))
        return drafts_of(len(work), most) if most else size

    def _prepared(self, work: Work) -> Prepared:
        """A step whose arrays are written, wherever its tokens stand now."""
        rows, parts = work.row_by_row(every=self._invariant)
        size = self._size(work, rows)
        plan, block = self._planned(rows, size)
        if self._batch.states is not None:
            plan = self._with_pieces(plan, block, work)
        return Prepared(work, rows, parts, plan, block, places(rows, plan.size))

    def _with_pieces(self, plan: StepPlan, block: HostBlock, work: Work) -> StepPlan:
        """The same with what modules that keep a state take at once."""
        if isinstance(plan.size, WholeSize):
            return replace(plan, pieces=pieces_of(work, longest=True))
        if plan.size.pieces is not None:
            write_pieces(block.arrays, pieces_of(work))
        return plan

    def _in_another_block(self, step: Prepared) -> Prepared:
        """A step of single tokens whose block is on its way, in one that is not."""
        block = self._block_for(step.plan.size)
        if not step.is_like(block.launched):
            block.bytes.numpy()[:] = step.block.bytes.numpy()
        write_tables(block.arrays["tables"], self._batch, step.rows.places)
        return replace(step, block=block, plan=replace(step.plan, block=block.bytes))

    def _planned(self, work: Work, size: Size | WholeSize) -> tuple[StepPlan, HostBlock]:
        """A step as the device gets it, and the block that says so."""
        block = self._block_for(size)
        block.launched = None
        write_step(block.arrays, work, size)
        edits = self.executor.edits.new_for(work)
        read, wanted = logprob_rows(work, size), wanted_tokens(work, size)
        return StepPlan(size, block.bytes, read, edits, wanted), block

    def _block_for(self, size: Size | WholeSize) -> HostBlock:
        """A block for the arrays of a step, which nobody reads any more."""
        with launches_on(self._device):  # its memory is pinned for the current one
            if isinstance(size, WholeSize):  # of any length: hardly ever again of this one
                return HostBlock(step_shapes(size, self._width), pinned=self._on_gpu)
            return self._blocks.next(size, lambda: step_shapes(size, self._width))
