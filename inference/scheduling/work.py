"""What a step computes: some tokens of some sequences, as arrays.

Where the tokens of a step stand: in their sequences, and in the paged cache.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference.scheduling.batch import Bools, Ints, RunningBatch
from kernels.op_inputs import KV_BLOCK


class BatchLayout(NamedTuple):
    """The tokens of a step, one sequence's after another's.

    Attributes:
        ids: Id of each token; negative where it is on its way.
        positions: Position of each token in its sequence.
        slots: Where each token's K and V go in the cache: block * 64 + offset.
        owners: Place of each token's sequence.
        contexts: Tokens of each sequence in the cache after the step.
    """

    ids: Ints
    positions: Ints
    slots: Ints
    owners: Ints
    contexts: Ints


def lay_out(batch: RunningBatch, places: Ints, starts: Ints, counts: Ints) -> BatchLayout:
    """Lay out tokens [starts, starts + counts) of sequences, at least one of each."""
    owners, positions, tokens = places, starts, int(counts.sum())
    if tokens > len(places):
        owners = np.repeat(places, counts)
        before = np.cumsum(counts) - counts
        positions = np.arange(tokens) + np.repeat(starts - before, counts)
    blocks = batch.tables[owners, positions // KV_BLOCK].astype(np.int64)
    return BatchLayout(
        ids=batch.ids[owners, positions].astype(np.int64),
        positions=positions,
        slots=blocks * KV_BLOCK + positions % KV_BLOCK,
        owners=owners,
        contexts=starts + counts,
    )


@dataclass(frozen=True)
class Work:
    """Tokens [starts, starts + counts) of the sequences at some places.

    What depends on the state of a sequence is asked when this is made: it grows meanwhile.

    Attributes:
        places: Which ones; each once, but for what `row_by_row` gives.
        starts: First token of each.
        samples: Whether the last of them is the sequence's last, so that a new one follows.
        host: Whether that is chosen on the host.
        whole: Whether the logits of all the tokens are wanted.
        logprobs: How many of the likeliest tokens the device is to give with the new one; -1: none,
            or the host finds them.
        drafts: How many of the tokens, the last ones, are drafts after those that are known.
    """

    batch: RunningBatch
    places: Ints
    starts: Ints
    counts: Ints
    serials: Ints
    samples: Bools
    host: Bools
    whole: Bools
    logprobs: Ints
    drafts: Ints

    @classmethod
    def of(
        cls, batch: RunningBatch, places: Ints, counts: Ints, drafts: Ints | None = None
    ) -> Work:
        """The next so many tokens of the sequences at some places, and drafts after them.

        Args:
            batch: Holds the sequences; `RunningBatch.ids` has the drafts.
            counts: Tokens of each that are known, or on their way.
            drafts: Drafts of each; none where left out. Who has any has no other token to compute
                but its last.
        """
        starts = batch.computed[places]
        samples, host = starts + counts == batch.length[places], ~batch.on_device(places)
        drafts = np.zeros_like(places) if drafts is None else drafts
        return cls(
            batch,
            places,
            starts,
            counts + drafts,
            serials=batch.serial[places],
            samples=samples,
            host=host,
            whole=batch.whole[places],
            logprobs=np.where(samples & ~host, batch.terms.logprobs[places], -1),
            drafts=drafts,
        )

    @classmethod
    def nothing(cls, batch: RunningBatch) -> Work:
        """No tokens."""
        none = np.zeros(0, np.int64)
        return cls.of(batch, none, none)

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def singles(self) -> int:
        """How many are of one token."""
        return int(np.count_nonzero(self.counts == 1))

    @cached_property
    def decodes(self) -> int:
        """How many are of one token beside drafts."""
        return int(np.count_nonzero(self.counts - self.drafts == 1))

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of those that have more to compute."""
        return self.tokens - self.decodes - int(self.drafts.sum())

    @cached_property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return int(self.counts.sum())

    @cached_property
    def rows(self) -> Ints:
        """Rows of logits that each needs: of a draft, too, to tell whether it is what comes."""
        return np.where(self.whole, self.counts, self.samples + self.drafts)

    @cached_property
    def wanted(self) -> Ints:
        """The tokens that these rows are of, by their places among all."""
        ends, last = np.cumsum(self.counts), np.cumsum(self.rows)
        return np.repeat(ends - last, self.rows) + np.arange(self.rows.sum())

    @cached_property
    def masked(self) -> Bools:
        """Whose next token a device chooses from those that a mask lets come."""
        return self.batch.terms.masked[self.places] & self.samples & ~self.host

    @cached_property
    def needs_host(self) -> Bools:
        """Whose logits the host wants, or whose next token it, a mask or a client decides on."""
        batch, places = self.batch, self.places
        return self.host | self.whole | batch.terms.masked[places] | batch.held_by_client[places]

    @cached_property
    def plain(self) -> bool:
        """Whether it is the last token of each, after which a device chooses the next one by logits
        and draws alone: no mask, biases, drafts or log probabilities."""
        others = self.needs_host | ~self.samples | (self.counts != 1) | (self.logprobs >= 0)
        return not (others.any() or self.batch.terms.bias_spans[self.places].any())

    @cached_property
    def adapted(self) -> bool:
        """Whether any of the sequences runs with an adapter."""
        return bool((self.batch.terms.adapter[self.places] >= 0).any())

    @property
    def adapters(self) -> NDArray[np.int32]:
        """The slot of each token's adapter, -1 for none."""
        return np.repeat(self.batch.terms.adapter[self.places], self.counts)

    def laid_out(self) -> BatchLayout:
        """Where its tokens stand."""
        return lay_out(self.batch, self.places, self.starts, self.counts)

    def alive(self) -> Bools:
        """Which of the sequences are still where they were."""
        return self.batch.serial[self.places] == self.serials

    def decodes_first(self) -> Work:
        """The same with sequences of one token, or of one and drafts, before others."""
        later = (self.counts > 1) & (self.drafts == 0)
        if later.all() or not later.any():
            return self
        return self.taken(np.argsort(later, kind="stable"))

    def row_by_row(self, *, every: bool) -> tuple[Work, Ints]:
        """The same with each token of those that have drafts as a slice of its own.

        A place has several then, one after the other, the context of each a token longer; a next
        token is chosen after the last known one and after each draft.

        Args:
            every: Do so with all of them.

        Returns:
            That, and how many slices each becomes.
        """
        parts = self.counts if every else np.where(self.drafts > 0, self.counts, 1)
        if not (self.drafts.any() or every):
            return self, parts
        index = np.repeat(np.arange(len(self)), parts)
        within = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
        own = self.taken(index)
        counts = np.where((own.drafts > 0) | every, 1, own.counts)
        samples = own.samples & (within + counts >= own.counts - own.drafts)
        rows = replace(
            own,
            starts=own.starts + within,
            counts=counts,
            samples=samples,
            logprobs=np.where(samples, own.logprobs, -1),
            drafts=np.zeros_like(own.drafts),
        )
        return rows, parts

    def moved(self, by: Ints) -> Work:
        """As many tokens of the same sequences, each slice so many tokens further on."""
        twin = copy(self)  # with what is cached: none of it depends on where tokens stand
        twin.__dict__["starts"] = self.starts + by
        return twin

    def taken(self, which: Ints | Bools) -> Work:
        """Some of its slices, in an order that is given."""
        names = ("places", "starts", "counts", "serials", "samples", "host", "whole")
        names += ("logprobs", "drafts")
        return replace(self, **{name: getattr(self, name)[which] for name in names})


def fitting(wanted: Ints, room: int) -> Ints:
    """How many each gets of what it wants, in their order, as long as there is room for them."""
    return np.clip(room - (np.cumsum(wanted) - wanted), 0, wanted)
