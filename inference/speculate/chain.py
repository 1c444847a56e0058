"""Drafts that a small network computes one after the other, each from the one before.

It has a cache of its own in blocks of the engine's numbers, so that the tables of the running
sequences are its tables, too; what it holds of them `CachedTokens` tells. First one step computes
what is missing there of all sequences that get drafts: as a rule the tokens that came since. Its
logits give the first drafts, and a step of one token a sequence each of the further ones.

A draft is what the model would choose with these logits and the same noise, without penalties,
biases and masks: equal logits give equal tokens, and similar ones mostly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from inference.backend import Backend
from inference.config import EngineConfig
from inference.models.kv_cache import CacheShape, clear_blocks
from inference.models.model import Model
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.sampler import draw_token
from inference.scheduling.work import Work
from inference.speculate.cached_tokens import CachedTokens
from kernels.attention_inputs import KVPool


@dataclass(frozen=True)
class Target:
    """The model that drafts are for.

    Attributes:
        tokenizer: Its tokenizer.
        vocabulary: Its logits.
        sizes: Of its engine, all resolved; `kv_blocks` is what its cache has.
        backend: Where it runs, and where a network that drafts is to run.
        model: The model itself, loaded.
        checkpoint: Where it was loaded from.
    """

    tokenizer: Any
    vocabulary: int
    sizes: EngineConfig
    backend: Backend[Any, Any]
    model: Model
    checkpoint: Checkpoint


class Computed(NamedTuple):
    """What a network has computed for some sequences, at the last token of each.

    Attributes:
        logits: fp32 [sequences, vocabulary] of the next one.
        hidden: What it reads again to go on [sequences, size], or nothing [sequences, 0].
    """

    logits: Tensor
    hidden: Tensor


class ChainProposer:
    """A proposer that runs a network; see `inference.speculate.proposer.Proposer`.

    Args:
        sizes: Of the engine, all resolved.
        longest: Most tokens of a sequence in the network's cache.
        pools: That cache.
        shift: Tokens behind a cached one that what is cached of it depends on.
    """

    def __init__(
        self, sizes: EngineConfig, longest: int, pools: Sequence[KVPool], shift: int = 0
    ) -> None:
        assert sizes.kv_blocks is not None
        self._longest, self._pools, self._shift = longest, pools, shift
        self._held = CachedTokens(sizes.kv_blocks, sizes.max_batch_size, longest, shift)
        self._broken = np.full(sizes.max_batch_size + 1, -1, np.int64)  # serials, by place
        self._most = sizes.max_batched_tokens

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """`Proposer.propose`; none behind the network's last position."""
        counts, room = np.zeros_like(places), self._longest + 1 + self._shift - batch.known[places]
        most = np.minimum(most, room)
        going = np.flatnonzero((most > 0) & (self._broken[places] != batch.serial[places]))
        going = going[self._ready(batch, places[going])]
        if not len(going):
            return counts
        own, known = places[going], batch.known[places[going]]
        starts = self._held.count(batch, own)
        self._held.begin(batch, own, starts, known - self._shift + most[going] - 1)
        counts[going] = self._chain(batch, own, most[going], self._catch_up(batch, own, starts))
        sound = self._broken[own] != batch.serial[own]
        ends = self._kept(known, counts[going])
        self._held.finish(batch, own[sound], starts[sound], ends[sound])
        return counts

    def note_end(self, tokens: Sequence[int], prompt: int) -> None:
        """`Proposer.note_end`: what is cached of it is found by its tokens."""

    def _run(self, work: Work, hidden: Tensor | None) -> Computed:
        """Compute tokens of its cache, of each of the sequences the last of them wanted.

        Args:
            work: Which ones.
            hidden: What was computed of the token before each, where that is not the model's;
                None where it is.
        """
        raise NotImplementedError

    def _ready(self, batch: RunningBatch, places: Ints) -> Ints:
        """Indices of the sequences for which it can draft."""
        return np.arange(len(places))

    def _kept(self, known: Ints, drafts: Ints) -> Ints:
        """How many tokens of sequences its cache holds for good after it has drafted so many."""
        return known + np.maximum(drafts, 1) - 1  # nobody has computed the last one

    def _catch_up(self, batch: RunningBatch, places: Ints, starts: Ints) -> Computed:
        """Compute what the cache lacks from `starts` on, as far as the last known tokens."""
        left = batch.known[places] - self._shift - starts
        found = []
        while left.any():
            now = np.clip(self._most - (np.cumsum(left) - left), 0, left)
            some = np.flatnonzero(now)
            work = _work(batch, places[some], starts[some], now[some])
            last = torch.from_numpy(now[some] == left[some])  # in order of places
            found.append([part[last] for part in self._run(work, None)])
            starts, left = starts + now, left - now
        return Computed(*map(torch.cat, zip(*found, strict=True)))

    def _chain(self, batch: RunningBatch, places: Ints, most: Ints, computed: Computed) -> Ints:
        """Write drafts, the first ones by what is computed: how many of each."""
        counts, going = np.zeros_like(places), np.arange(len(places))
        logits, hidden = computed
        while len(going):
            top, tokens = logits.max(dim=1)
            finite = np.flatnonzero(torch.isfinite(top).numpy())  # NaN is larger than any number
            self._give_up(batch, places[np.delete(going, finite)])
            going, logits, tokens = going[finite], logits[finite], tokens[finite].numpy()
            ends = batch.known[places[going]] + counts[going]
            for i in np.flatnonzero(batch.draws["temperature"][places[going]]).tolist():
                tokens[i] = _draw(batch, int(places[going[i]]), int(ends[i]), logits[i])
            batch.ids[places[going], ends] = tokens
            counts[going] += 1
            more = np.flatnonzero(counts[going] < most[going])
            hidden, going, ends = hidden[finite[more]], going[more], ends[more] - self._shift
            if len(going):
                work = _work(batch, places[going], ends, np.ones_like(going))
                logits, hidden = self._run(work, hidden)
        return counts

    def _give_up(self, batch: RunningBatch, places: Ints) -> None:
        """Draft no more for sequences whose logits are not finite, and clear their blocks.

        Whoever gets one of these reads all of it, NaN included.
        """
        self._broken[places] = batch.serial[places]
        for place in places.tolist():
            blocks = batch.tables[place, : batch.held[place]].astype(np.int64)
            clear_blocks(self._pools, blocks.tolist())
            self._held.forget(blocks)


def _work(batch: RunningBatch, places: Ints, starts: Ints, counts: Ints) -> Work:
    """Tokens [starts, starts + counts) of sequences, of which each one's last logits are wanted."""
    every = np.ones(len(places), np.bool_)
    work = Work.of(batch, places, counts)
    return replace(work, starts=starts, samples=every, host=every, whole=~every)


def _draw(batch: RunningBatch, place: int, end: int, logits: Tensor) -> int:
    """The token that a sequence would have as number `end`, were these the target's logits."""
    sequence = batch.sequences[place]
    assert sequence is not None
    return draw_token(logits.numpy(), sequence.terms.draw, end - int(batch.prompt[place]))


def require_memory(
    name: str, weights: int, cache: CacheShape, backend: Backend[Any, Any], dtype: torch.dtype
) -> None:
    """Refuse a network for which memory is too small.

    Args:
        name: Its folder.
        weights: Bytes of what is loaded and allocated beside its cache.
        cache: Its cache.
        backend: Where it runs.
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
