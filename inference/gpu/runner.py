"""Steps on a GPU: planned on the host, executed as kernels or as a CUDA graph of them.

One copy in, one copy of tokens out. Tokens are chosen on the device and kept there by batch index,
so that the next step can be launched before the host knows them: a token that it does not know yet
stands as `PENDING` in a sequence, and its id is taken from the sequence's index.

`launch` writes the arrays of a step into a block of bytes; `execute` looks at these and their size
alone.

Steps are padded (`inference.gpu.steps`) and, with `graphs`, replayed as the CUDA graph of their
size: one of decodes alone is captured when it is first needed, any other when it is needed again.
Without, the same tensors go through the same kernels one by one: the tokens are equal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from inference.gpu.adapters import GpuAdapters
from inference.gpu.code_step import asks_host, forward_code
from inference.gpu.decoder import (
    GpuBatch,
    GpuDecoder,
    read_logits,
    run_blocks,
    scales_of_rows,
)
from inference.gpu.edit_tables import EditTables
from inference.gpu.feed_forward import as_one
from inference.gpu.fields import Fields, HostBlock, HostBlocks
from inference.gpu.layers import workspace_on
from inference.gpu.memory import OF_STEPS, capturing, free_bytes, memory_for, ran_out, too_small
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
)
from inference.models.adapters import check_adaptable
from inference.proposers import HiddenStates
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.sampler import rank
from inference.scheduling.sequence import PENDING
from inference.scheduling.work import Work
from inference.transformers_code.model import CodeModel
from inference.transformers_code.pieces import SPARE, Piece, alone_in, pieces_of
from kernels.attention_inputs import KVPool
from kernels.devices import launches_on
from kernels.triton.common import Workspace
from kernels.triton.sampling.sample import sample

TIMED = 3  # replays of a captured step that tell what it takes
log = logging.getLogger("ptq.inference")


@dataclass
class Executed:
    """What a step gives; on its way until `done`.

    Attributes:
        logits: fp32 [rows, vocabulary] on the device, until the next step; None where nobody wants
            them.
        tokens: int64, the next token of each row that samples, on the host; negative where logits
            were not finite.
        done: When `tokens` and `logprobs` are there; None where they are.
        logprobs: As `inference.scheduling.sampler.rank`, on the host, of the plan's rows.
    """

    logits: Tensor | None
    tokens: Tensor
    done: torch.cuda.Event | None
    logprobs: tuple[Tensor, Tensor] | None = None


@dataclass
class Launched:
    """A step on its way, and whose rows are whose.

    Attributes:
        work: What runs, decodes first.
        rows: The same with drafts as slices of their own (`Work.row_by_row`).
        executed: What it gives, in that order.
        at: When it was launched, seconds of `time.perf_counter`.
        hidden: Whether its hidden states are given to who drafts.
    """

    work: Work
    rows: Work
    executed: Executed
    _places: Ints
    _parts: Ints
    at: float = field(default_factory=time.perf_counter)
    hidden: bool = False

    @property
    def firsts(self) -> Ints:
        """The one of `rows` of each slice of `work` that is its last token but for drafts."""
        return np.cumsum(self._parts) - 1 - self.work.drafts

    @property
    def done(self) -> bool:
        """Whether a device is known to have ended it."""
        return self.executed.done is not None and self.executed.done.query()

    def tokens(self) -> Ints:
        """Wait for the step: the next token of each of `rows`, negative where logits were not
        finite; of no meaning where the slice is not its sequence's last."""
        if self.executed.done is not None:
            self.executed.done.synchronize()
        found = np.zeros(len(self.rows), np.int64)
        samples = self.rows.samples
        found[samples] = self.executed.tokens.numpy()[self._places[samples]]
        return found

    def logprobs(self) -> dict[int, dict[int, float]]:
        """Of a step that was waited for: what the device tells with new tokens, by index in
        `rows`."""
        if self.executed.logprobs is None:
            return {}
        which, found = np.flatnonzero(self.rows.logprobs >= 0), {}
        ranked = zip(*(tensor.tolist() for tensor in self.executed.logprobs), strict=True)
        own = zip(which.tolist(), self.rows.logprobs[which].tolist(), strict=True)
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


@dataclass
class Captured:
    """A step of a size: its arguments and results, its graph, and the workspace that it writes to.

    Results are logits and tokens, logits of decodes alone: those of prompts nobody reads, and the
    next graph has their memory. Those of a size that keeps the rows of all tokens are rows and
    their scales.
    """

    fields: Fields
    results: tuple[Tensor | None, Tensor | None]
    graph: torch.cuda.CUDAGraph
    workspace: Workspace


@dataclass(frozen=True)
class Prepared:
    """A step whose arrays are written; before it is launched its tokens may move on.

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

    def precedes(self, work: Work) -> bool:
        """Whether work is this one, some tokens further on: what `Work.moved` gave of it."""
        return work.counts is self.work.counts

    def moved(self, work: Work) -> Prepared:
        """The same for work that it `precedes`; the arrays are as they were."""
        by = np.repeat(work.starts - self.work.starts, self.parts)
        return replace(self, work=work, rows=self.rows.moved(by))


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
        self._invariant, self._ranks = invariant, ranks
        self.model, self._pools, self._batch, self._width = model, pools, batch, width
        self._device, self._on_gpu = device, device.type == "cuda"
        places = len(batch.names)
        self._graphs = graphs and self._on_gpu and self._asks_nothing(decodes_of(places - 1))
        layer = model.weight_bytes / max(1, len(pools)) if self._graphs else None
        self._most = most_tokens(layer, 1 if ranks is None else ranks.count)
        self._tokens = torch.zeros(places, dtype=torch.int64, device=self._device)
        self._blocks = HostBlocks(pinned=self._on_gpu)
        self._edits = EditTables(batch, device, pinned=self._on_gpu)
        self._captured: dict[Size, Captured] = {}
        self._seen: set[Size] = set()  # steps of prompts that ran
        self._short: set[Size] = set()  # those for whose graph there was no memory
        self._reads: HiddenStates | None = None
        self._adapters: GpuAdapters | None = None
        self._tables = 0  # the version of its tables that graphs hold
        if self._graphs:
            self._stream = torch.cuda.Stream(self._device)
            self._pool = torch.cuda.graph_pool_handle()

    def tell_hidden(self, reads: HiddenStates | None) -> None:
        """Give hidden states of all steps to come to a reader, or to none any more."""
        if reads is not self._reads:
            self._reads = reads
            self._captured.clear()  # a graph has what it gives to whom

    def adapters(self) -> GpuAdapters:
        """What holds the adapters that requests run with.

        Raises:
            EngineError: none are run with this model.
        """
        if self._adapters is None:
            own = check_adaptable(self.model)
            self._adapters = GpuAdapters(own, self._device, self._ranks)
        return self._adapters

    def _forget_moved_tables(self) -> None:
        """Give up the graphs that hold tables of adapters where these were."""
        if self._adapters is not None and self._adapters.version != self._tables:
            self._tables = self._adapters.version
            for size in [size for size in self._captured if size.adapted]:
                del self._captured[size]

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
            prepared: What `prepare` gave for the same work, fewer tokens on; None without.

        Raises:
            EngineError: memory is too small for it.
        """
        if prepared is None:
            step = self._prepared(work.decodes_first())  # attention takes single tokens first
        else:
            step = prepared.moved(work)
            write_moved(step.block.arrays, step.rows)
        plan = step.plan
        if self._ranks is not None:
            self._ranks.tell(plan)
        try:
            executed = self.execute(plan)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            free = free_bytes(self._device)
            raise too_small("a step", self._device, free, 0, OF_STEPS) from error
        step.block.moved = executed.done
        if plan.edits is not None:
            self._edits.note(step.rows, plan.edits)
        return Launched(step.work, step.rows, executed, step.places, step.parts)

    def execute(self, plan: StepPlan) -> Executed:
        """Start a planned step; nothing is waited for."""
        with launches_on(self._device):
            self._workspace = workspace_on(self._device)  # held, so that all kernels share it
            if plan.edits is not None:
                self._edits.put(plan.edits)
            if isinstance(plan.size, WholeSize):
                logits, chosen = self._whole(plan)
            else:
                logits, chosen = self._padded(plan)
            found = [chosen]
            if plan.logprobs is not None:
                assert logits is not None
                rows, own = (self._moved(t) for t in (plan.logprobs.logits, plan.logprobs.tokens))
                found += rank(logits[rows], chosen[own].clamp(min=0), plan.logprobs.count)
            if not self._on_gpu:
                return Executed(logits, chosen, None, _pair(found))
            found = [_to_host(tensor) for tensor in found]
            done = torch.cuda.Event()
            done.record()
            return Executed(logits, found[0], done, _pair(found))

    def follow(self, size: Size | WholeSize, arrays: bytes) -> None:
        """Start a step that the first rank has planned; nothing is waited for."""
        block = self._block_for(size)
        block.bytes.copy_(torch.frombuffer(bytearray(arrays), dtype=torch.uint8))
        block.moved = self.execute(StepPlan(size, block.bytes)).done

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
        sizes = padded_sizes(sequences, tokens, rows) if self._graphs else []
        if self._invariant:  # those with prompts are not padded
            sizes = [size for size in sizes if not size.prompts]
        if self._adapters is not None and self._adapters.version:  # on all ranks alike
            sizes += [replace(size, adapted=True) for size in sizes if not size.prompts]
        with memory_for("warming up", self._device, 0, OF_STEPS), launches_on(self._device):
            for size in sizes:
                if not size.prompts or self._asks_nothing(size):
                    self._seen.add(size)
                    self._graph_for(size)

    def step_times(self) -> dict[int, float]:
        """Seconds of the captured steps of decodes by their rows, all of which stand for nothing;
        no logprobs where other ranks would have to take part."""
        alone = {} if self._ranks is not None else self._captured
        found = {}
        for size, captured in alone.items():
            if size.prompts or size.adapted or size.pieces is not None:
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            captured.graph.replay()
            start.record()
            for _ in range(TIMED):
                captured.graph.replay()
            end.record()
            end.synchronize()
            found[size.decodes] = start.elapsed_time(end) / 1000 / TIMED
        return found

    def release(self) -> None:
        """Give up all graphs: what connects ranks waits, when it ends, for those that hold its
        collectives."""
        self._captured.clear()

    def replay(self, sequences: int, times: int) -> None:
        """Launch the graph of a decode step of so many sequences again and again; where steps are
        not captured, its kernels one by one."""
        size = decodes_of(sequences)
        if self._graphs:
            graph = self._graph_of(size).graph
            for _ in range(times):
                graph.replay()
            return
        with launches_on(self._device):
            self._workspace = workspace_on(self._device)
            block = self._planned(Work.nothing(self._batch), size)[0].block
            x = self._uploaded(size, block)
            for _ in range(times):
                self._run(x, size)

    def _moved(self, indices: Tensor) -> Tensor:
        """Indices on the device, without waiting."""
        return indices.pin_memory().to(self._device, non_blocking=True) if self._on_gpu else indices

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
        rows, parts = work.row_by_row(every=self._invariant), work.parts(every=self._invariant)
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

    def _planned(self, work: Work, size: Size | WholeSize) -> tuple[StepPlan, HostBlock]:
        """A step as the device gets it, and the block that says so."""
        block = self._block_for(size)
        write_step(block.arrays, work, size)
        edits = self._edits.new_for(work)
        read, wanted = logprob_rows(work, size), wanted_tokens(work, size)
        return StepPlan(size, block.bytes, read, edits, wanted), block

    def _block_for(self, size: Size | WholeSize) -> HostBlock:
        """A block for the arrays of a step, which nobody reads any more."""
        with launches_on(self._device):  # its memory is pinned for the current one
            if isinstance(size, WholeSize):  # of any length: hardly ever again of this one
                return HostBlock(step_shapes(size, self._width), pinned=self._on_gpu)
            return self._blocks.next(size, lambda: step_shapes(size, self._width))

    def _padded(self, plan: StepPlan) -> tuple[Tensor | None, Tensor]:
        """A padded step: logits, if they are kept, and a next token for each of its rows."""
        size = plan.size
        assert isinstance(size, Size)
        captured = self._graph_for(size)
        if captured is not None:
            captured.fields.upload(plan.block)
            captured.graph.replay()
            x, (first, second) = captured.fields.on_device, captured.results
        else:
            x = self._uploaded(size, plan.block)
            first, second = self._run(x, size)
        if plan.wanted is None:
            assert second is not None
            return first, second
        assert first is not None
        rows = torch.cat([x["rows"], self._moved(plan.wanted)])
        logits = read_logits(self._decoder, first[rows], scales_of_rows(second, rows))
        chosen, rest = logits.tensor_split([size.sequences])
        return rest, self._choose(chosen, x)

    def _uploaded(self, size: Size | WholeSize, block: Tensor) -> dict[str, Tensor]:
        fields = Fields(step_shapes(size, self._width), self._device)
        fields.upload(block)
        return fields.on_device

    def _run(self, x: Mapping[str, Tensor], size: Size) -> tuple[Tensor, Tensor | None]:
        """Logits and next tokens of the rows of a padded step, or the rows of all of its tokens."""
        batch = self._inputs(x, size.decodes, padded=True)
        if size.every:
            return run_blocks(self._decoder, self._pools, replace(batch, rows=None))
        logits = self._forward(batch)
        return logits, self._choose(logits, x)

    @property
    def _decoder(self) -> GpuDecoder:
        assert not isinstance(self.model, CodeModel)
        return self.model

    def _forward(self, batch: GpuBatch) -> Tensor:
        """Logits fp32 [R, vocabulary] of the tokens of a step."""
        if isinstance(self.model, CodeModel):
            return forward_code(self.model, self._pools, batch)
        return read_logits(self.model, *run_blocks(self.model, self._pools, batch))

    def _graph_for(self, size: Size) -> Captured | None:
        """The graph that a step is replayed as; None if it runs kernel by kernel."""
        if not self._graphs or size in self._short:
            return None
        if size.adapted:
            self._forget_moved_tables()
        if size.prompts and size not in self._seen:
            self._seen.add(size)
            return None
        if size not in self._captured and self._must_wait(size):
            return None
        new, captured, fits = size not in self._captured, None, True
        try:
            captured = self._graph_of(size)
        except RuntimeError as error:
            if not (size.prompts and ran_out(error)):
                raise
            fits = False
            torch.cuda.empty_cache()  # of the attempt
        if new and size.prompts and self._ranks is not None:  # all replay it, or none does
            fits = self._ranks.agree(fits)
        if fits:
            return captured
        self._captured.pop(size, None)
        if not self._short:  # once: other sizes are likely to lack it too
            log.warning(
                "%s: no memory for the CUDA graph of a step of %d tokens of prompts; such steps "
                "run kernel by kernel. A smaller cache (kv_blocks) leaves room",
                self._device,
                size.tokens,
            )
        self._short.add(size)
        return None

    def _must_wait(self, size: Size) -> bool:
        """Whether transformers' code asks the host during a step; then no step is captured."""
        if not isinstance(self.model, CodeModel):
            return False
        block = HostBlock(step_shapes(size, self._width), pinned=self._on_gpu)
        write_step(block.arrays, Work.nothing(self._batch), size)
        x = self._uploaded(size, block.bytes)
        self._run(x, size)  # kernels are compiled before
        self._graphs = not asks_host(lambda: self._run(x, size))
        torch.cuda.synchronize(self._device)  # the block has been moved
        if not self._graphs:
            log.warning(
                "%s: the model's code asks the host during a step, which no CUDA graph holds; "
                "steps run kernel by kernel",
                self._device,
            )
        return not self._graphs

    def _graph_of(self, size: Size) -> Captured:
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        return self._captured[size]

    def _capture(self, size: Size) -> Captured:
        fields = Fields(step_shapes(size, self._width), self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                workspace = workspace_on(self._device)
                fields.upload(self._planned(Work.nothing(self._batch), size)[0].block)
                self._run(fields.on_device, size)  # kernels are compiled before the capture
        finally:  # where memory runs out, the next step has that of the fields
            current.wait_stream(self._stream)
        if self._ranks is not None:
            self._ranks.meet()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool, self._stream):
            first, second = self._run(fields.on_device, size)
        kept = first if size.every or not size.prompts else None
        return Captured(fields, (kept, second), graph, workspace)

    def _whole(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """A step as it is: logits, and the next tokens of those that sample."""
        x = self._uploaded(plan.size, plan.block)
        batch = self._inputs(x, plan.size.decodes, padded=False)
        pieces = [piece.moved(self._moved) for piece in plan.pieces]
        logits = self._forward(replace(batch, pieces=pieces))
        return logits, self._choose(logits[x["samples"]], x)

    def _inputs(self, x: Mapping[str, Tensor], decodes: int, *, padded: bool) -> GpuBatch:
        return GpuBatch(
            self._known(x), x["positions"], x["slots"], x["tables"], x["lengths"],
            rows=x.get("rows"), query_start=x.get("query_start"), decodes=decodes,
            padded=padded, invariant=self._invariant, reads=self._reads,
            adapters=x.get("adapters"), loras=self._adapters,
            pieces=self._padded_pieces(x) if padded else (),
        )  # fmt: skip

    def _padded_pieces(self, x: Mapping[str, Tensor]) -> Sequence[Piece]:
        """A padded step of a model that keeps states; rows for nobody have the last of these."""
        if self._batch.states is None:
            return ()
        rows = x["batch_index"].masked_fill(x["slots"] < 0, SPARE)
        if "piece_tokens" not in x:
            return (Piece(torch.arange(len(rows), device=self._device), rows),)
        both = zip(x["piece_tokens"], x["piece_keeps"], strict=True)
        return [Piece(tokens, rows[tokens], keeps=keeps) for tokens, keeps in both]

    def _known(self, x: Mapping[str, Tensor]) -> Tensor:
        """Ids of tokens; of those that the host did not know, what was chosen for their index."""
        ids = torch.where(x["ids"] == PENDING, self._tokens[x["batch_index"]], x["ids"])
        return ids.clamp_(min=0)  # where logits were not finite, until the host knows it

    def _choose(self, logits: Tensor, x: Mapping[str, Tensor]) -> Tensor:
        if self._ranks is None:
            chosen = self._sampled(logits, x)
        elif self._ranks.first:
            chosen = self._ranks.share(self._sampled(logits, x))
        else:
            chosen = self._ranks.share(torch.empty_like(x["sample_index"]))
        self._tokens.index_copy_(0, x["sample_index"], chosen)
        return chosen

    def _sampled(self, logits: Tensor, x: Mapping[str, Tensor]) -> Tensor:
        return sample(
            logits,
            x["temperature"],
            x["top_k"],
            x["top_p"],
            x["seeds"],
            x["steps"],
            workspace_on(logits.device),
            log_min_p=x["log_min_p"],
            edits=self._edits.of(x, logits.shape[1]),
        )


def _to_host(tensor: Tensor) -> Tensor:
    """Its numbers in memory of the host, as soon as the device is there."""
    own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return own.copy_(tensor, non_blocking=True)


def _pair(found: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """What `rank` gave, if it was asked."""
    return (found[1], found[2]) if len(found) > 1 else None
