"""Proposers that run a small network beside the model (`inference.models.model.Network`).

The network has a cache of its own in blocks of the engine's numbers, so that block tables
of the running sequences are its tables, too; which tokens of them it holds `CachedTokens` tells.

A block of 64 tokens that the engine's bookkeeping hands out (`inference.scheduling.blocks`) is a
block in this cache, too. The cache does not know which sequence got it: beside each token of it
stands a hash

    h_p = sum over i <= p + s of (id_i + 1) r_i  mod 2^64,    r_i random and odd

of the text that its K and V were computed from, as far as that token, or as s = `shift` tokens
more: what a head caches for a token depends on the next one, too (EAGLE, MTP), which where a block
ends is another for each sequence that shares the block. A sequence's first tokens are in the cache
as long as the hashes in its blocks are those of its text. So nothing needs to be withdrawn: not
where drafts were rejected, nor where a block was found by its tokens, was handed out to another, is
a copy, or belongs to a sequence that was preempted and runs again.

A recurrent state is that of one text. Each running sequence has a row of it, and goes on with the
state before the first of its last drafts that was wrong, which was kept as a target keeps its own
(`inference.scheduling.states`). A sequence without one begins at its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from inference.backend import Backend
from inference.config import EngineConfig
from inference.models.config import ModelConfig
from inference.models.kv_cache import CacheShape, clear_blocks
from inference.models.model import Chain, Model, Network
from inference.models.parts import Layer
from inference.proposers import Proposer
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.states import DRAFTS, StateRows, piece_of
from inference.scheduling.work import Work, fitting
from inference.transformers_code.attention import Step
from inference.transformers_code.model import CodeModel
from inference.transformers_code.state_rows import Piece, pieces_of
from kernels.op_inputs import KV_BLOCK, KVPool

Hashes = NDArray[np.uint64]


class CachedTokens:
    """Which tokens of running sequences a cache holds.

    Args:
        blocks: Blocks of 64 tokens of the cache.
        places: Most sequences that run at once.
        longest: Most tokens of a sequence that are ever in it.
        shift: Tokens after a cached one that what is cached of it depends on.
    """

    def __init__(self, blocks: int, places: int, longest: int, shift: int = 0) -> None:
        random = np.random.default_rng(0).integers(2**64, size=longest + shift, dtype=np.uint64)
        self._factors, self._shift = random | np.uint64(1), shift
        self._hashes = np.zeros(blocks * KV_BLOCK, np.uint64)  # 0 is that of no text
        self._serial = np.full(places + 1, -1, np.int64)
        self._whole = np.zeros(places + 1, np.int64)  # tokens of whole blocks that were found
        self._before = np.zeros(places + 1, np.uint64)  # hash of those

    def count(self, batch: RunningBatch, places: Ints) -> Ints:
        """How many of the first tokens of sequences the cache holds.

        The last known one is not counted, nor those for which it lacks one of `shift` more. Whole
        blocks are looked at once: who holds them keeps them as they are, but for what depends on
        tokens after them.
        """
        new = places[self._serial[places] != batch.serial[places]]
        self._serial[new] = batch.serial[new]
        self._whole[new] = 0
        first = batch.ids[new, : self._shift].astype(np.uint64) + np.uint64(1)
        self._before[new] = (first * self._factors[: self._shift]).sum(axis=1, dtype=np.uint64)
        starts = self._whole[places]
        ends = np.maximum(batch.known[places] - 1 - self._shift, starts)
        slots, hashes = self._texts(batch, places, ends)
        inside = np.arange(slots.shape[1]) < (ends - starts)[:, None]
        same = (self._hashes[slots] == hashes) & inside
        held = starts + np.logical_and.accumulate(same, axis=1).sum(axis=1)
        whole = held // KV_BLOCK * KV_BLOCK
        more = np.flatnonzero(whole > starts)
        self._before[places[more]] = hashes[more, (whole - starts)[more] - 1]
        self._whole[places] = whole
        return held

    def room(self, most: Ints) -> Ints:
        """As many drafts of each sequence, or fewer, as it can hold."""
        return most

    def begin(self, batch: RunningBatch, places: Ints, starts: Ints, ends: Ints) -> None:
        """Before tokens [starts, ends) are computed: their slots hold nothing known."""
        slots, _ = self._between(batch, places, starts, ends)
        self._hashes[slots] = 0

    def finish(self, batch: RunningBatch, places: Ints, starts: Ints, ends: Ints) -> None:
        """Tokens [starts, ends) are in the cache now."""
        slots, hashes = self._between(batch, places, starts, ends)
        self._hashes[slots] = hashes

    def forget(self, blocks: Ints) -> None:
        """Hold nothing any more of some blocks, whose content is useless."""
        self._hashes.reshape(-1, KV_BLOCK)[blocks] = 0
        self._serial[:] = -1  # others may have found these blocks: all are looked at again

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied, from first to second of each pair."""
        sources, targets = np.array(pairs, np.int64).reshape(-1, 2).T
        hashes = self._hashes.reshape(-1, KV_BLOCK)
        hashes[targets] = hashes[sources]

    def _between(
        self, batch: RunningBatch, places: Ints, starts: Ints, ends: Ints
    ) -> tuple[Ints, Hashes]:
        """Slots and hashes of tokens [starts, ends), sequence by sequence."""
        slots, hashes = self._texts(batch, places, ends)
        positions = self._whole[places, None] + np.arange(slots.shape[1])
        those = (positions >= starts[:, None]) & (positions < ends[:, None])
        return slots[those], hashes[those]

    def _texts(self, batch: RunningBatch, places: Ints, ends: Ints) -> tuple[Ints, Hashes]:
        """Slots and hashes of tokens after the whole blocks that were found.

        Returns:
            Both [places, most of a place]; after a sequence's end they are of no use.
        """
        starts = self._whole[places]
        columns = np.arange(int((ends - starts).max(initial=0)))
        positions = np.minimum(starts[:, None] + columns, np.maximum(ends - 1, 0)[:, None])
        rows = places[:, None]
        read = positions + self._shift
        ids = batch.ids[rows, read].astype(np.uint64) + np.uint64(1)
        hashes = np.cumsum(ids * self._factors[read], axis=1, dtype=np.uint64)
        blocks = batch.tables[rows, positions // KV_BLOCK].astype(np.int64)
        slots = blocks * KV_BLOCK + positions % KV_BLOCK
        return slots, hashes + self._before[rows]


def state_rows(sizes: EngineConfig) -> StateRows:
    """Rows of the states of a model that drafts, as many of them before drafts as a target has."""
    own, places = sizes.speculate, sizes.max_batch_size
    drafts = max(places, DRAFTS, (own and own.depth) or 0)
    return StateRows(places + 1, 0, piece_of(sizes.max_batched_tokens, places), drafts)


class KeptStates(CachedTokens):
    """Which tokens a cache holds beside which a model keeps states: those that one is after.

    Args:
        model: What drafts; has its rows from now on.
        rows: Which of them holds which state.
        sizes: Of the engine, all resolved.
        longest: As of `CachedTokens`.
    """

    def __init__(
        self, model: CodeModel, rows: StateRows, sizes: EngineConfig, longest: int
    ) -> None:
        assert sizes.kv_blocks is not None
        super().__init__(sizes.kv_blocks, sizes.max_batch_size, longest)
        self._model, self._rows = model, rows
        model.keep_states(rows.rows)
        # By place: who had drafts last, how many tokens were known, and which drafts were computed.
        self._drafted = dict[int, tuple[int, int, NDArray[np.int32]]]()

    @override
    def room(self, most: Ints) -> Ints:
        later = np.maximum(most - 1, 0)  # the state before the first draft but one is kept, too
        return most - later + fitting(later, self._rows.drafts)

    @override
    def count(self, batch: RunningBatch, places: Ints) -> Ints:
        held, after = super().count(batch, places), np.zeros_like(batch.known)
        for place, (serial, known, drafts) in list(self._drafted.items()):
            right = drafts == batch.ids[place, known : known + len(drafts)]
            end = known + int(np.logical_and.accumulate(right).sum())
            end = min(end, int(batch.known[place]) - 1)  # the last token's logits are wanted
            if serial != batch.serial[place] or end < known:
                del self._drafted[place]
                continue
            self._rows.go_back(place, end)
            self._drafted[place], after[place] = (serial, end, drafts[:0]), end
        self._model.copy_states(self._rows.take_copies(), self._rows.kept)
        return np.where(after[places] <= held, after[places], 0)

    @override
    def begin(self, batch: RunningBatch, places: Ints, starts: Ints, ends: Ints) -> None:
        super().begin(batch, places, starts, ends)
        known = batch.known[places]
        columns = places.tolist(), known.tolist(), (ends - known).tolist()
        self._rows.keep_before(zip(*columns, strict=True))
        for place in columns[0]:
            self._drafted.pop(place, None)

    @override
    def finish(self, batch: RunningBatch, places: Ints, starts: Ints, ends: Ints) -> None:
        super().finish(batch, places, starts, ends)
        for place, end in zip(places.tolist(), ends.tolist(), strict=True):
            known = int(batch.known[place])
            drafts = batch.ids[place, known:end].copy()
            self._drafted[place] = int(batch.serial[place]), known, drafts

    def pieces(
        self,
        batch: RunningBatch,
        places: Ints,
        starts: Ints,
        counts: Ints,
        *,
        longest: bool = False,
    ) -> list[Piece]:
        """As `Network.pieces`; what comes after prompts goes token by token, as in a target, those
        of all sequences at once, unless pieces are to be as long as can be."""
        later = (starts >= batch.prompt[places]) & (not longest)
        work = replace(Work.of(batch, places, counts), starts=starts)
        work = replace(work, drafts=np.where(later, counts - 1, 0))
        return pieces_of(work, self._rows, longest=longest)


@dataclass(frozen=True)
class Target:
    """The model that drafts are for.

    Attributes:
        vocabulary: Its logits.
        sizes: Of its engine, all resolved; `kv_blocks` is what its cache has.
        backend: Where it runs, and where a network that drafts is to run.
        model: The model itself, loaded.
        checkpoint: Where it was loaded from.
    """

    tokenizer: Any
    vocabulary: int
    sizes: EngineConfig
    backend: Backend
    model: Model
    checkpoint: Checkpoint


class NetworkBackend(Backend, Protocol):
    """A backend that runs networks that draft, beside a model (`Backend.runs_drafters`)."""

    def forward(self, model: Any, pools: Sequence[KVPool]) -> Callable[[Any], Tensor]:
        """What runs the steps of a model on a cache: logits fp32 [R, vocabulary] of a batch."""
        ...

    def captures(self, model: Any) -> bool:
        """Whether steps of one token a sequence of a model may be captured."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of [T, H]."""
        ...

    def run_block(
        self,
        config: ModelConfig,
        layer: Layer[Any, Any],
        read: Tensor,
        x: Tensor,
        batch: Any,
        pool: KVPool,
        window: int | None,
    ) -> Tensor:
        """A decoder block: [T, H] of the residual stream x, where attention reads `read`."""
        ...

    def code_step(self, model: Any, pools: Sequence[KVPool], batch: Any) -> Step:
        """The tokens of a step as transformers' code takes them.

        Args:
            model: What runs, by its shape and type (`inference.transformers_code.model`).
            batch: The tokens, as the device's steps have them.
        """
        ...

    def chain(
        self,
        network: Network,
        pools: Sequence[KVPool],
        sizes: EngineConfig,
        features: Tensor | None,
    ) -> Chain:
        """What drafts by a network.

        Args:
            network: Loaded on this backend.
            sizes: Of the engine, all resolved.
            features: [slots of the cache and one more, size], what it reads of each token; None
                where it reads tokens alone.
        """
        ...


def network_backend(target: Target) -> NetworkBackend:
    """The target's, which `inference.proposers.require_method` has found to be one."""
    return cast(NetworkBackend, target.backend)


class ChainProposer(Proposer):
    """A proposer that runs a network; see `inference.proposers.Proposer`.

    Args:
        network: What it runs.
        target: What it drafts for.
        pools: The network's cache.
        features: As in `NetworkBackend.chain`.
        held: Which tokens that cache holds, of a network that keeps states beside it.
    """

    def __init__(
        self,
        network: Network,
        target: Target,
        pools: Sequence[KVPool],
        features: Tensor | None = None,
        held: CachedTokens | None = None,
    ) -> None:
        sizes = target.sizes
        assert sizes.kv_blocks is not None
        self._longest, self._shift, self._pools = network.longest, network.shift, pools
        self._held = held or CachedTokens(
            sizes.kv_blocks, sizes.max_batch_size, network.longest, network.shift
        )
        self._broken = np.full(sizes.max_batch_size + 1, -1, np.int64)  # serials, by place
        self._chain = network_backend(target).chain(network, pools, sizes, features)

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """`Proposer.propose`; none after the network's last position."""
        counts, room = np.zeros_like(places), self._longest + 1 + self._shift - batch.known[places]
        most = self._held.room(np.minimum(most, room))
        going = np.flatnonzero((most > 0) & (self._broken[places] != batch.serial[places]))
        going = going[self._ready(batch, places[going])]
        if not len(going):
            return counts
        own, known = places[going], batch.known[places[going]]
        starts = self._held.count(batch, own)
        self._held.begin(batch, own, starts, known - self._shift + most[going] - 1)
        counts[going], broken = self._chain.draft(batch, own, starts, most[going])
        self._give_up(batch, own[broken])
        ends = self._kept(known, counts[going])
        self._held.finish(batch, own[~broken], starts[~broken], ends[~broken])
        return counts

    def _ready(self, batch: RunningBatch, places: Ints) -> Ints:
        """Indices of the sequences for which it can draft."""
        return np.arange(len(places))

    def _kept(self, known: Ints, drafts: Ints) -> Ints:
        """How many tokens of sequences its cache holds for good after it has drafted so many."""
        return known + np.maximum(drafts, 1) - 1  # the last draft is not computed

    def _give_up(self, batch: RunningBatch, places: Ints) -> None:
        """Draft no more for sequences whose logits are not finite, and clear their blocks.

        Whoever gets one of these reads all of it, NaN included.
        """
        self._broken[places] = batch.serial[places]
        for place in places.tolist():
            blocks = batch.tables[place, : batch.held[place]].astype(np.int64)
            clear_blocks(self._pools, blocks.tolist())
            self._held.forget(blocks)


def require_memory(
    name: str, weights: int, cache: CacheShape, backend: Backend, dtype: torch.dtype
) -> None:
    """Refuse a network for which memory is too small.

    Args:
        weights: Bytes of what is loaded and allocated beside its cache.
        dtype: Of its cache, where it is not quantized.

    Raises:
        EngineError: it is.
    """
    own, free = cache.nbytes(dtype), backend.free_bytes()
    if weights + own > free:
        raise EngineError(
            f"speculate: {name} needs {weights / 1e9:.2f} GB, and a cache of {cache.blocks} "
            f"blocks, as many as the model's, {own / 1e9:.2f} GB; {free / 1e9:.2f} GB are free. "
            "Lower kv_blocks or kv_memory, or take a smaller draft model"
        )
