"""Steps on a GPU: one copy in, a row of kernels or a CUDA graph of them, one copy of tokens out.

Tokens are chosen on the device and kept there by seat, so that the next step can be launched before
the host knows them: a token that it does not know yet stands as `PENDING` in a sequence, and its id
is taken from the sequence's seat.

A step in which every sequence has one new token is padded to the next power of two and, with
`graphs`, replayed as the CUDA graph of that size, captured when it is first needed. Without, the
same tensors go through the same kernels one by one: the tokens are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from inference.gpu.decoder import GpuBatch, forward
from inference.gpu.fields import Fields, Shapes
from inference.gpu.layers import workspace_on
from inference.kv_cache import BlockManager, KVPool
from inference.models.feed_forward import SwiGLU
from inference.models.llama import LlamaModel
from inference.runner import lay_out
from inference.scheduler import PENDING, Slice
from kernels.triton.sampling import sample

OF_TOKENS = ("ids", "positions", "slots", "seats")  # int64


@dataclass(frozen=True)
class Draw:
    """How the next token of a sequence is chosen: see `kernels.triton.sampling.sample`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    step: int = 0


@dataclass(frozen=True)
class Work:
    """A slice of a sequence, and what is wanted of it.

    Attributes:
        part: The slice.
        samples: Whether a token follows it; asked now, since the sequence grows meanwhile.
        seat: Where the sequence's last token is kept on the device.
        draw: How its next token is chosen.
        whole: Whether the logits of all its tokens are wanted.
    """

    part: Slice
    samples: bool
    seat: int
    draw: Draw = Draw()
    whole: bool = False

    @property
    def rows(self) -> int:
        """Rows of logits that it needs."""
        return self.part.count if self.whole else int(self.samples)


@dataclass
class Launched:
    """A step on its way.

    Attributes:
        work: What runs, in an order of its own.
        logits: fp32 [rows, vocabulary] on the device, in the order of `work`; until the next step.
    """

    work: Sequence[Work]
    logits: Tensor
    _tokens: Tensor
    _done: torch.cuda.Event | None

    def tokens(self) -> list[int | None]:
        """Wait for the step: the next token of each sequence, negative where logits were not
        finite; None where the slice is not its last."""
        if self._done is not None:
            self._done.synchronize()
        chosen = iter(self._tokens.tolist())
        return [next(chosen) if work.samples else None for work in self.work]

    def logits_of(self, index: int) -> Tensor:
        """Logits of one slice, fp32 [rows, vocabulary], on the host."""
        start = sum(work.rows for work in self.work[:index])
        return self.logits[start : start + self.work[index].rows].cpu()


@dataclass
class Captured:
    """A decode step of a fixed number of sequences: its arguments and results, and its graph."""

    fields: Fields
    logits: Tensor
    tokens: Tensor
    graph: torch.cuda.CUDAGraph


class GpuRunner:
    """Runs steps of a model.

    Args:
        model: On the GPU.
        pools: Its cache.
        blocks: Whose blocks are whose.
        width: Most blocks of a sequence.
        seats: Most sequences of a step.
        graphs: Capture decode steps.
    """

    def __init__(
        self,
        model: LlamaModel,
        pools: Sequence[KVPool],
        blocks: BlockManager,
        width: int,
        seats: int,
        *,
        graphs: bool = True,
    ) -> None:
        self.model, self._pools, self._blocks, self._width = model, pools, blocks, width
        self._device = model.place.device
        dense = all(isinstance(layer.feed_forward, SwiGLU) for layer in model.layers)
        self._graphs = graphs and dense and self._device.type == "cuda"  # routing asks the host
        self._nobody = seats  # the seat of rows that stand for no sequence
        self._tokens = torch.zeros(seats + 1, dtype=torch.int64, device=self._device)
        self._captured: dict[int, Captured] = {}
        if self._graphs:
            self._stream = torch.cuda.Stream(self._device)
            self._pool = torch.cuda.graph_pool_handle()

    def launch(self, work: Sequence[Work]) -> Launched:
        """Start a step; what it reads was put on its way before it, nothing is waited for."""
        work = sorted(work, key=lambda w: w.part.count > 1)  # attention takes single tokens first
        each = all(w.part.count == 1 and w.samples and not w.whole for w in work)
        logits, chosen = self._decode(work) if each else self._mixed(work)
        if self._device.type == "cpu":
            return Launched(work, logits, chosen, None)
        tokens = torch.empty(len(chosen), dtype=torch.int64, pin_memory=True)
        tokens.copy_(chosen, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Launched(work, logits, tokens, done)

    def score(self, part: Slice) -> Tensor:
        """Logits of the tokens of a slice, fp32 [tokens, vocabulary], on the host."""
        return self.launch([Work(part, part.samples, self._nobody, whole=True)]).logits_of(0)

    def warm_up(self, sequences: int) -> None:
        """Compile and capture the decode steps of up to so many sequences."""
        for size in sorted({_padded(n) for n in range(1, sequences + 1)} if self._graphs else ()):
            self._graph_of(size)

    def graph_of(self, sequences: int) -> torch.cuda.CUDAGraph:
        """The graph of a decode step of so many sequences."""
        return self._graph_of(_padded(sequences)).graph

    def _decode(self, work: Sequence[Work]) -> tuple[Tensor, Tensor]:
        size = _padded(len(work))
        values = self._of_slices(work) | _draws(work)
        missing = size - len(work)
        values["slots"] = [*values["slots"], *[-1] * missing]
        values["seats"] = [*values["seats"], *[self._nobody] * missing]
        if self._graphs:
            captured = self._graph_of(size)
            captured.fields.upload(values)
            captured.graph.replay()
            return captured.logits, captured.tokens[: len(work)]
        fields = Fields(self._decode_shapes(size), self._device)
        fields.upload(values)
        logits, chosen = self._one_each(fields.on_device)
        return logits, chosen[: len(work)]

    def _decode_shapes(self, size: int) -> Shapes:
        return _shapes(size, size, size, self._width)

    def _one_each(self, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A step of one token a sequence, and their next ones."""
        ids = self._known(x)
        batch = GpuBatch(ids, x["positions"], x["slots"], x["tables"], x["lengths"])
        logits = forward(self.model, self._pools, batch)
        return logits, self._choose(logits, x, x["seats"])

    def _graph_of(self, size: int) -> Captured:
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        return self._captured[size]

    def _capture(self, size: int) -> Captured:
        fields = Fields(self._decode_shapes(size), self._device)
        nobody = {"slots": [-1] * size, "seats": [self._nobody] * size}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            fields.upload(nobody)
            self._one_each(fields.on_device)  # kernels are compiled before the capture
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits, tokens = self._one_each(fields.on_device)
        return Captured(fields, logits, tokens, graph)

    def _mixed(self, work: Sequence[Work]) -> tuple[Tensor, Tensor]:
        """A step of any slices."""
        counts = [w.part.count for w in work]
        starts = [0, *accumulate(counts)]
        rows, samples, seats = [], [], []
        for w, start in zip(work, starts[:-1], strict=True):
            if w.samples:
                samples.append(len(rows) + w.rows - 1)
                seats.append(w.seat)
            rows += range(start + w.part.count - w.rows, start + w.part.count)
        sampled = [w for w in work if w.samples]
        shapes = {
            **_shapes(starts[-1], len(work), len(sampled), self._width),
            "rows": (torch.int64, (len(rows),)),
            "samples": (torch.int64, (len(samples),)),
            "sample_seats": (torch.int64, (len(samples),)),
            "query_start": (torch.int32, (len(starts),)),
        }
        fields = Fields(shapes, self._device)
        values = {"rows": rows, "samples": samples, "sample_seats": seats, "query_start": starts}
        fields.upload(self._of_slices(work) | _draws(sampled) | values)
        x = fields.on_device
        batch = GpuBatch(
            self._known(x), x["positions"], x["slots"], x["tables"], x["lengths"],
            rows=x["rows"], query_start=x["query_start"], decodes=counts.count(1),
        )  # fmt: skip
        logits = forward(self.model, self._pools, batch)
        return logits, self._choose(logits[x["samples"]], x, x["sample_seats"])

    def _of_slices(self, work: Sequence[Work]) -> dict[str, Sequence]:
        """Where tokens stand, and the tables of their sequences."""
        own = lay_out([w.part for w in work], self._blocks)
        return {
            "ids": own.ids,
            "positions": own.positions,
            "slots": own.slots,
            "seats": [w.seat for w in work for _ in range(w.part.count)],
            "tables": own.tables,
            "lengths": own.contexts,
        }

    def _known(self, x: Mapping[str, Tensor]) -> Tensor:
        """Ids of tokens; of those that the host did not know, what their seats hold."""
        ids = torch.where(x["ids"] == PENDING, self._tokens[x["seats"]], x["ids"])
        return ids.clamp_(min=0)  # a sequence whose logits were not finite runs on until it is told

    def _choose(self, logits: Tensor, x: Mapping[str, Tensor], seats: Tensor) -> Tensor:
        chosen = sample(
            logits,
            x["temperature"],
            x["top_k"],
            x["top_p"],
            x["seeds"],
            x["steps"],
            workspace_on(logits.device),
        )
        self._tokens.index_copy_(0, seats, chosen)
        return chosen


def _padded(sequences: int) -> int:
    """The number of rows of a decode step: the next power of two."""
    return 1 << (sequences - 1).bit_length()


def _shapes(tokens: int, sequences: int, samples: int, width: int) -> Shapes:
    return {
        **dict.fromkeys(OF_TOKENS, (torch.int64, (tokens,))),
        "tables": (torch.int32, (sequences, width)),
        "lengths": (torch.int32, (sequences,)),
        "temperature": (torch.float32, (samples,)),
        "top_p": (torch.float32, (samples,)),
        "top_k": (torch.int32, (samples,)),
        "seeds": (torch.int64, (samples,)),
        "steps": (torch.int64, (samples,)),
    }


def _draws(work: Sequence[Work]) -> dict[str, Sequence]:
    draws = [w.draw for w in work]
    return {
        "temperature": [draw.temperature for draw in draws],
        "top_p": [draw.top_p for draw in draws],
        "top_k": [draw.top_k for draw in draws],
        "seeds": [draw.seed for draw in draws],
        "steps": [draw.step for draw in draws],
    }
