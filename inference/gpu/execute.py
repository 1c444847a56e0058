"""What executes planned steps on a GPU: as kernels, or as a CUDA graph of them.

A plan's block of bytes and its size are all that is looked at. Tokens are chosen on the device and
kept there by batch index: a token that the host does not know yet stands as `PENDING` in its
sequence, and its id is taken from the sequence's index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from inference.gpu.adapters import GpuAdapters
from inference.gpu.code_step import forward_code
from inference.gpu.decoder import (
    GpuBatch,
    GpuDecoder,
    read_logits,
    run_blocks,
    scales_of_rows,
)
from inference.gpu.edit_tables import EditTables
from inference.gpu.fields import Fields, HostBlock
from inference.gpu.fused import FusedLayers
from inference.gpu.graphs import StepGraph, StepGraphs
from inference.gpu.layers import workspace_on
from inference.gpu.ranks import StepRanks
from inference.gpu.sizes import Size, WholeSize, decodes_of
from inference.gpu.steps import StepPlan, step_shapes, write_step
from inference.models.adapters import check_adaptable
from inference.proposers import HiddenStates
from inference.scheduling.batch import RunningBatch
from inference.scheduling.sampler import rank
from inference.scheduling.sequence import PENDING
from inference.scheduling.work import Work
from inference.transformers_code.model import CodeModel
from inference.transformers_code.state_rows import SPARE, Piece
from kernels.devices import launches_on
from kernels.op_inputs import KVPool
from kernels.triton.sampling.sample import sample


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


class StepExecutor:
    """Executes the steps of a model.

    Args:
        model: On the GPU.
        batch: Whose sequences run; steps that are captured have its spare place.
        width: Most blocks of a sequence.
        graphs: Capture steps as CUDA graphs.
        invariant: The model runs each token as a sequence of its own.
        ranks: Those that run the same steps; None where there are no others.

    Attributes:
        edits: Biases and masks on the device.
        graphs: The steps that are captured.
        fused: Runs blocks of steps of few tokens, each in one kernel; None where none is to.
    """

    def __init__(
        self,
        model: GpuDecoder | CodeModel,
        pools: Sequence[KVPool],
        device: torch.device,
        batch: RunningBatch,
        *,
        width: int,
        graphs: bool,
        invariant: bool,
        ranks: StepRanks | None,
    ) -> None:
        self._model, self._pools, self._batch, self._width = model, pools, batch, width
        self._device, self._on_gpu = device, device.type == "cuda"
        self._invariant, self._ranks = invariant, ranks
        self.edits = EditTables(batch, device, pinned=self._on_gpu)
        self._tokens = torch.zeros(len(batch.names), dtype=torch.int64, device=device)
        self._reads: HiddenStates | None = None
        self._adapters: GpuAdapters | None = None
        self._tables = 0  # the version of the adapters' tables that graphs hold
        self.fused = None
        if self._on_gpu and not (invariant or ranks or isinstance(model, CodeModel)):
            self.fused = FusedLayers(model.layers, model.dtype, device)
        self.graphs = StepGraphs(
            device,
            enabled=graphs and self._on_gpu,
            may_ask=isinstance(model, CodeModel),
            ranks=ranks,
        )

    def tell_hidden(self, reads: HiddenStates | None) -> None:
        """Give hidden states of all steps to come to a reader, or to none any more."""
        if reads is not self._reads:
            self._reads = reads
            self.graphs.forget()  # a graph has what it gives to whom

    def adapters(self) -> GpuAdapters:
        """What holds the adapters that requests run with.

        Raises:
            EngineError: none are run with this model.
        """
        if self._adapters is None:
            own = check_adaptable(self._model)
            self._adapters = GpuAdapters(own, self._device, self._ranks)
        return self._adapters

    @property
    def adapted(self) -> bool:
        """Whether there are adapters that steps may run with, on all ranks alike."""
        return self._adapters is not None and bool(self._adapters.version)

    def execute(self, plan: StepPlan) -> Executed:
        """Start a planned step; nothing is waited for."""
        with launches_on(self._device):
            self._workspace = workspace_on(self._device)  # held, so that all kernels share it
            if plan.edits is not None:
                self.edits.put(plan.edits)
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

    def graph_for(self, size: Size) -> StepGraph | None:
        """`StepGraphs.of`; those that hold tables of adapters where these were are given up."""
        adapters = self._adapters
        if size.adapted and adapters is not None and adapters.version != self._tables:
            self._tables = adapters.version
            self.graphs.forget(adapted=True)
        return self.graphs.of(size, self)

    def replay(self, sequences: int, times: int) -> None:
        """Launch the graph of a decode step of so many sequences again and again; where steps are
        not captured, its kernels one by one."""
        size = decodes_of(sequences)
        with launches_on(self._device):
            if self.graphs.enabled:
                replay = self.graphs.made(size, self).captured.graph.replay
            else:
                self._workspace = workspace_on(self._device)
                replay = partial(self.run, self.blank(size).on_device, size)
            for _ in range(times):
                replay()

    def _moved(self, indices: Tensor) -> Tensor:
        """Indices on the device, without waiting."""
        return indices.pin_memory().to(self._device, non_blocking=True) if self._on_gpu else indices

    def _padded(self, plan: StepPlan) -> tuple[Tensor | None, Tensor]:
        """A padded step: logits, if they are kept, and a next token for each of its rows."""
        size = plan.size
        assert isinstance(size, Size)
        graph = self.graph_for(size)
        if graph is not None:
            graph.fields.upload(plan.block)
            graph.captured.graph.replay()
            x, (first, second) = graph.fields.on_device, graph.captured.result
        else:
            x = self._uploaded(size, plan.block).on_device
            first, second = self.run(x, size)
        if plan.wanted is None:
            assert second is not None
            return first, second
        assert first is not None
        rows = torch.cat([x["rows"], self._moved(plan.wanted)])
        logits = read_logits(self._decoder, first[rows], scales_of_rows(second, rows))
        chosen, rest = logits.tensor_split([size.sequences])
        return rest, self._choose(chosen, x)

    def _uploaded(self, size: Size | WholeSize, block: Tensor) -> Fields:
        fields = Fields(step_shapes(size, self._width), self._device)
        fields.upload(block)
        return fields

    def blank(self, size: Size) -> Fields:
        """The arrays of a step that stands for no sequence."""
        block = HostBlock(step_shapes(size, self._width), pinned=self._on_gpu)
        write_step(block.arrays, Work.nothing(self._batch), size)
        return self._uploaded(size, block.bytes)

    def run(self, x: Mapping[str, Tensor], size: Size) -> tuple[Tensor, Tensor | None]:
        """Logits and next tokens of the rows of a padded step, or the rows of all of its tokens."""
        batch = self._inputs(x, size.decodes, padded=True)
        if size.every:
            return run_blocks(self._decoder, self._pools, replace(batch, rows=None))
        logits = self._forward(batch)
        return logits, self._choose(logits, x)

    @property
    def _decoder(self) -> GpuDecoder:
        assert not isinstance(self._model, CodeModel)
        return self._model

    def _forward(self, batch: GpuBatch) -> Tensor:
        """Logits fp32 [R, vocabulary] of the tokens of a step."""
        if isinstance(self._model, CodeModel):
            return forward_code(self._model, self._pools, batch)
        return read_logits(self._model, *run_blocks(self._model, self._pools, batch))

    def _whole(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """A step as it is: logits, and the next tokens of those that sample."""
        x = self._uploaded(plan.size, plan.block).on_device
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
            pieces=self._padded_pieces(x) if padded else (), fused=self.fused,
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
            edits=self.edits.of(x, logits.shape[1]),
        )


def _to_host(tensor: Tensor) -> Tensor:
    """Its numbers in memory of the host, as soon as the device is there."""
    own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return own.copy_(tensor, non_blocking=True)


def _pair(found: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """What `rank` gave, if it was asked."""
    return (found[1], found[2]) if len(found) > 1 else None
