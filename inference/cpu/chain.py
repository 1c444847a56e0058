"""Drafts of a network on a CPU, each chosen on the host before the next is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inference.cpu.batch import StateBatch, plan_tokens
from inference.models.model import Computed, Network
from inference.scheduling.batch import Bools, Ints, RunningBatch
from inference.scheduling.sampler import draw_token
from inference.scheduling.work import Work, fitting
from kernels.op_inputs import KVPool


class HostChain:
    """Runs a network; see `inference.models.model.Chain`.

    Args:
        network: On a CPU.
        most: Most tokens of a step.
        features: [slots of the cache, size], what it reads of each token; None where it reads
            tokens alone.
    """

    def __init__(
        self, network: Network, pools: Sequence[KVPool], most: int, features: Tensor | None
    ) -> None:
        self._network, self._pools, self._most = network, pools, most
        self._features, self._shift = features, network.shift

    def draft(
        self, batch: RunningBatch, places: Ints, starts: Ints, most: Ints
    ) -> tuple[Ints, Bools]:
        """`Chain.draft`, the first drafts by what is computed of known tokens."""
        logits, hidden = self._catch_up(batch, places, starts)
        counts, going = np.zeros_like(places), np.arange(len(places))
        broken = np.zeros(len(places), np.bool_)
        while len(going):
            top, tokens = logits.max(dim=1)
            finite = np.flatnonzero(torch.isfinite(top).numpy())  # NaN is larger than any number
            broken[np.delete(going, finite)] = True
            going, logits, tokens = going[finite], logits[finite], tokens[finite].numpy()
            ends = batch.known[places[going]] + counts[going]
            for i in np.flatnonzero(batch.terms.draws["temperature"][places[going]]).tolist():
                tokens[i] = _draw(batch, int(places[going[i]]), int(ends[i]), logits[i])
            batch.ids[places[going], ends] = tokens
            counts[going] += 1
            more = np.flatnonzero(counts[going] < most[going])
            hidden = None if hidden is None else hidden[finite[more]]
            going, ends = going[more], ends[more] - self._shift
            if len(going):
                work = _work(batch, places[going], ends, np.ones_like(going))
                logits, hidden = self._run(work, hidden)
        return counts, broken

    def _catch_up(self, batch: RunningBatch, places: Ints, starts: Ints) -> Computed:
        """Compute what the cache lacks from `starts` on, as far as the last known tokens."""
        left = batch.known[places] - self._shift - starts
        found = []
        while left.any():
            now = fitting(left, self._most)
            some = np.flatnonzero(now)
            work = _work(batch, places[some], starts[some], now[some])
            last = torch.from_numpy(now[some] == left[some])  # in order of places
            found.append([None if part is None else part[last] for part in self._run(work, None)])
            starts, left = starts + now, left - now
        logits, hidden = zip(*found, strict=True)
        return Computed(torch.cat(logits), None if hidden[0] is None else torch.cat(hidden))

    def _run(self, work: Work, hidden: Tensor | None) -> Computed:
        """Compute tokens, of each of the sequences the last of them wanted.

        Args:
            hidden: What was computed of the token before each, where the model has not computed
                what is read of it; None where it has.
        """
        own = work.laid_out()
        ids = work.batch.ids[own.owners, own.positions + self._shift].astype(np.int64)
        step = replace(plan_tokens(work), ids=torch.from_numpy(ids))
        if (pieces := self._network.pieces) is not None:
            own = pieces(work.batch, work.places, work.starts, work.counts)
            step = StateBatch(**vars(step), pieces=own)
        if hidden is None and self._features is not None:
            hidden = self._features[step.slots]
        return self._network.step(step, self._pools, hidden)


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
