"""Drafts of a network on a GPU: a whole chain is put on its way, and read once.

A first step computes what the network's cache lacks of some sequences, each token as a row of its
own, chooses their first drafts and leaves on the device where the next step goes on: tokens, what
the network reads again, positions. That step, one token a sequence, does the same for its next; it
is replayed for each further draft. So the host says one block of bytes a chain, and reads its
drafts when the last is there. A sequence that is to have fewer drafts than others writes nothing
after its last (`limit`).

Both steps are padded and captured as CUDA graphs by their sizes. What many tokens have not been
computed of, such as a prompt, is computed before by steps that are not captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.gpu.decoder import GpuBatch
from inference.gpu.fields import Arrays, Fields, HostBlock, HostBlocks, Shape
from inference.gpu.graphs import Captured, Capturer
from inference.gpu.layers import workspace_on
from inference.gpu.sizes import decodes_of
from inference.gpu.steps import DRAWS, GREEDY, write_tables
from inference.models.model import Computed, Network
from inference.scheduling.batch import Bools, Ints, RunningBatch
from inference.scheduling.work import fitting, lay_out
from inference.transformers_code.state_rows import Piece
from kernels.devices import launches_on
from kernels.op_inputs import KV_BLOCK, KVPool
from kernels.triton.sampling.sample import sample

ROWS = 8  # tokens of a sequence that are caught up with as rows; more are computed before
MOST_DRAFTS = 64  # of a chain


@dataclass(frozen=True)
class ChainSize:
    """Rows of a padded first step.

    Attributes:
        tokens: Tokens that are computed.
        sequences: Whose they are.
    """

    tokens: int
    sequences: int


class State:
    """Where so many sequences stand, on the device.

    Args:
        sequences: How many.
        network: What drafts.
        dtype: Of what the network reads again.
        width: Most blocks of a sequence.

    Attributes:
        fields: What the host says of them.
        tokens: int64 [S], the last draft of each; negative where its logits were not finite.
        hidden: [S, size], what the network reads with it.
        positions: int64 [S], where the next step stands.
        steps: int64 [S], how many tokens each will have made by then.
        drafts: int64 [MOST_DRAFTS, S], the chain.
        count: int64 [1], how many drafts of each there are.
    """

    def __init__(
        self, sequences: int, network: Network, device: torch.device, dtype: torch.dtype, width: int
    ) -> None:
        self.fields = Fields(sequence_shapes(sequences, width), device)
        self.tokens, self.positions, self.steps = (
            torch.zeros(sequences, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.hidden = torch.zeros(sequences, network.size, dtype=dtype, device=device)
        drafts = (MOST_DRAFTS, sequences)
        self.drafts = torch.zeros(drafts, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)


class DeviceChain:
    """Runs a network; see `inference.models.model.Chain`.

    Args:
        network: On the GPU.
        dtype: Of what it reads.
        width: Most blocks of a sequence.
        most: Most tokens of a step.
        features: [slots of the cache and one more, size], what it reads of each token; None where
            it reads tokens alone.
        graphs: Capture steps as CUDA graphs.
    """

    def __init__(
        self,
        network: Network,
        pools: Sequence[KVPool],
        device: torch.device,
        dtype: torch.dtype,
        *,
        width: int,
        most: int,
        features: Tensor | None,
        graphs: bool,
    ) -> None:
        self._network, self._pools, self._device, self._dtype = network, pools, device, dtype
        self._width, self._most, self._features = width, most, features
        self._on_gpu = device.type == "cuda"
        self._graphs = graphs and self._on_gpu and network.captured
        self._blocks = HostBlocks(pinned=self._on_gpu)
        self._states: dict[int, State] = {}
        self._rows: dict[ChainSize, Fields] = {}
        self._captured: dict[ChainSize | int, Captured[None]] = {}  # first steps, and next ones
        self._capturer = Capturer(device) if self._graphs else None

    @torch.no_grad()
    def draft(
        self, batch: RunningBatch, places: Ints, starts: Ints, most: Ints
    ) -> tuple[Ints, Bools]:
        """`Chain.draft`."""
        with launches_on(self._device):
            self._workspace = workspace_on(self._device)  # held, so that all kernels share it
            starts = self._computed_before(batch, places, starts)
            depth = min(int(most.max()), MOST_DRAFTS)
            found = self._chain(batch, places, starts, most, depth)
        most = np.minimum(most, depth)
        inside = np.arange(depth)[:, None] < most
        bad = (found < 0) & inside
        broken = np.logical_or.reduce(bad, axis=0)
        counts = np.where(broken, bad.argmax(axis=0), most)
        for i in range(depth):
            own = np.flatnonzero(counts > i)
            batch.ids[places[own], batch.known[places[own]] + i] = found[i, own]
        return counts, broken

    def _chain(
        self, batch: RunningBatch, places: Ints, starts: Ints, most: Ints, depth: int
    ) -> NDArray[np.int64]:
        """Drafts [depth, sequences], those after what a sequence is to have without meaning."""
        count, shift = len(places), self._network.shift
        left = batch.known[places] - shift - starts
        padded = decodes_of(count).decodes
        size = ChainSize(decodes_of(int(left.sum())).decodes, padded)
        state, rows = self._state(padded), self._fields(size)
        own = self._blocks.next(padded, lambda: sequence_shapes(padded, self._width))
        step = self._blocks.next(size, lambda: row_shapes(size.tokens))
        write_sequences(own.arrays, batch, places, most, shift)
        write_rows(step.arrays, batch, places, starts, left, shift)
        write_last(own.arrays, left, size.tokens)
        state.fields.upload(own.bytes)
        rows.upload(step.bytes)
        self._run(size, self._pieces(batch, places, starts, left))
        for i in range(1, depth):
            going = np.where(most > i, places, batch.spare)
            pieces = self._pieces(batch, going, starts + left + i - 1, np.ones_like(left))
            self._run(padded, pieces)
        drafts = state.drafts[:depth]
        if not self._on_gpu:
            return drafts[:, :count].numpy()
        found = torch.empty(drafts.shape, dtype=drafts.dtype, pin_memory=True)
        found.copy_(drafts, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        own.moved = step.moved = done
        done.synchronize()
        return found[:, :count].numpy()

    def _state(self, sequences: int) -> State:
        if sequences not in self._states:
            self._states[sequences] = State(
                sequences, self._network, self._device, self._dtype, self._width
            )
        return self._states[sequences]

    def _fields(self, size: ChainSize) -> Fields:
        if size not in self._rows:
            self._rows[size] = Fields(row_shapes(size.tokens), self._device)
        return self._rows[size]

    def _run(self, what: ChainSize | int, pieces: Sequence[Piece]) -> None:
        if not self._graphs:
            self._step(what, pieces)
            return
        if what not in self._captured:
            self._captured[what] = self._capture(what)
        self._captured[what].graph.replay()

    def _step(self, what: ChainSize | int, pieces: Sequence[Piece] = ()) -> None:
        if isinstance(what, ChainSize):
            self._first_step(what, pieces)
        else:
            self._next_step(what, pieces)

    def _capture(self, what: ChainSize | int) -> Captured[None]:
        """Capture a first or a next step; what it changes when it is run once is put back."""
        assert self._capturer is not None
        state = self._state(what.sequences if isinstance(what, ChainSize) else what)
        changed = (state.tokens, state.hidden, state.positions, state.steps, state.count)
        before = [tensor.clone() for tensor in (*changed, state.drafts)]
        captured = self._capturer.capture(lambda: self._step(what))  # writes K and V as they are
        for tensor, kept in zip((*changed, state.drafts), before, strict=True):
            tensor.copy_(kept)
        return captured

    def _first_step(self, size: ChainSize, pieces: Sequence[Piece]) -> None:
        """Compute tokens that are known, and the first drafts."""
        state, x = self._state(size.sequences), self._fields(size).on_device
        own = state.fields.on_device
        batch = GpuBatch(
            x["ids"],
            x["positions"],
            x["slots"],
            own["tables"].index_select(0, x["sequences"]),
            x["lengths"],
            rows=own["last"],
            padded=self._graphs,
            pieces=pieces,
        )
        computed = self._network.step(batch, self._pools, self._read(x["slots"]))
        state.count.zero_()
        state.positions.copy_(own["positions"])
        state.steps.copy_(own["steps"])
        self._take(state, own, computed)

    def _next_step(self, sequences: int, pieces: Sequence[Piece]) -> None:
        """Compute the last draft of each sequence, and the next."""
        state = self._state(sequences)
        own, at = state.fields.on_device, state.positions
        inside = at <= own["limit"]
        at = torch.where(inside, at, 0)
        block = own["tables"].gather(1, (at // KV_BLOCK)[:, None])[:, 0].long()
        slots = torch.where(inside, block * KV_BLOCK + at % KV_BLOCK, -1)
        lengths = torch.where(inside, at + 1, 0).int()
        hidden = state.hidden if self._network.size else None
        ids = state.tokens.clamp(min=0)  # a sequence whose logits were not finite runs on
        batch = GpuBatch(ids, at, slots, own["tables"], lengths, padded=self._graphs, pieces=pieces)
        self._take(state, own, self._network.step(batch, self._pools, hidden))
        state.positions += 1

    def _take(self, state: State, own: Mapping[str, Tensor], computed: Computed) -> None:
        """Choose drafts by what is computed, and leave what the next step reads."""
        logits, workspace = computed.logits.contiguous(), workspace_on(self._device)
        how = (own["temperature"], own["top_k"], own["top_p"], own["seeds"], state.steps)
        chosen = sample(logits, *how, workspace, log_min_p=own["log_min_p"])
        state.drafts.index_copy_(0, state.count, chosen[None])
        state.count += 1
        state.steps += 1
        state.tokens.copy_(chosen)
        if computed.hidden is not None:
            state.hidden.copy_(computed.hidden)

    def _read(self, slots: Tensor) -> Tensor | None:
        """What the network reads of tokens at some slots beside their ids."""
        if self._features is None:
            return None
        return self._features.index_select(
            0, torch.where(slots < 0, len(self._features) - 1, slots)
        )

    def _pieces(self, *tokens: Any, longest: bool = False) -> Sequence[Piece]:
        """`Network.pieces`, on the device."""
        pieces = self._network.pieces
        found = [] if pieces is None else pieces(*tokens, longest=longest)
        return [own.moved(lambda x: x.to(self._device)) for own in found]

    def _computed_before(self, batch: RunningBatch, places: Ints, starts: Ints) -> Ints:
        """Compute what is more than `ROWS` tokens of a sequence; from where on others are left."""
        ends = batch.known[places] - self._network.shift
        ends = np.where(ends - starts > ROWS, ends - 1, starts)
        while (left := ends - starts).any():
            now = fitting(left, self._most)
            some = np.flatnonzero(now)
            self._prefill(batch, places[some], starts[some], now[some])
            starts = starts + now
        return starts

    def _prefill(self, batch: RunningBatch, places: Ints, starts: Ints, counts: Ints) -> None:
        """Compute tokens [starts, starts + counts) of sequences; nothing is chosen."""
        arrays = HostBlock(row_shapes(int(counts.sum())), pinned=False).arrays
        write_rows(arrays, batch, places, starts, counts, self._network.shift)
        ends = np.cumsum(counts)
        tables = np.zeros((len(places), self._width), np.int32)
        write_tables(tables, batch, places)

        def on_device(array: NDArray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array).to(self._device, dtype)

        step = {name: on_device(array, torch.int64) for name, array in arrays.items()}
        own = GpuBatch(
            step["ids"],
            step["positions"],
            step["slots"],
            on_device(tables, torch.int32),
            on_device(starts + counts, torch.int32),
            rows=on_device(ends - 1, torch.int64),
            query_start=on_device(np.concatenate([[0], ends]), torch.int32),
            pieces=self._pieces(batch, places, starts, counts, longest=True),
        )
        self._network.step(own, self._pools, self._read(step["slots"]))


def sequence_shapes(sequences: int, width: int) -> dict[str, Shape]:
    """Types and shapes of what the host says of the sequences of a chain."""
    return {
        "tables": (torch.int32, (sequences, width)),
        **dict.fromkeys(("last", "positions", "limit", "steps"), (torch.int64, (sequences,))),
        **{name: (dtype, (sequences,)) for name, dtype in DRAWS.items()},
    }


def row_shapes(tokens: int) -> dict[str, Shape]:
    """Types and shapes of what the host says of the tokens of a first step."""
    names = ("ids", "positions", "slots", "sequences")
    return {
        **dict.fromkeys(names, (torch.int64, (tokens,))),
        "lengths": (torch.int32, (tokens,)),
    }


def write_sequences(
    arrays: Arrays, batch: RunningBatch, places: Ints, most: Ints, shift: int
) -> None:
    """Write what is said of sequences; rows after them stand for none."""
    count, known = len(places), batch.known[places]
    values = {
        "positions": known - shift,
        "limit": known - shift + most - 2,
        "steps": known - batch.prompt[places],
        **{name: batch.terms.draws[name][places] for name in DRAWS},
    }
    blank = GREEDY | {"limit": -1}
    for name, own in values.items():
        arrays[name][:count], arrays[name][count:] = own, blank.get(name, 0)
    write_tables(arrays["tables"], batch, places)


def write_last(arrays: Arrays, left: Ints, tokens: int) -> None:
    """Write the row of each sequence's last token; of rows that stand for none, any."""
    arrays["last"][: len(left)] = np.cumsum(left) - 1
    arrays["last"][len(left) :] = tokens - 1


def write_rows(
    arrays: Arrays, batch: RunningBatch, places: Ints, starts: Ints, counts: Ints, shift: int
) -> None:
    """Write tokens [starts, starts + counts) of sequences; rows after them stand for none."""
    rows, total = lay_out(batch, places, starts, counts), int(counts.sum())
    values = {
        "ids": batch.ids[rows.owners, rows.positions + shift],
        "positions": rows.positions,
        "slots": rows.slots,
        "sequences": np.repeat(np.arange(len(places)), counts),
        "lengths": rows.positions + 1,
    }
    for name, own in values.items():
        arrays[name][:total], arrays[name][total:] = own, -1 if name == "slots" else 0
