"""Running sequences as arrays: a row for each place of the batch.

What a step does to all of them alike is done to arrays; a sequence by itself is looked at only
where it comes, ends, gives way or gets another block.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from inference.scheduling.sequence import PENDING, Draw, Sequence, Terms
from inference.scheduling.states import StateRows
from kernels.op_inputs import KV_BLOCK

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NO_END = -2  # is no token, and not what stands for logits that are not finite
FLOATS = dict.fromkeys(("temperature", "top_p", "log_min_p"), np.float32)
DRAW_TYPES = FLOATS | {"top_k": np.int32, "seeds": np.int64}


class TermColumns:
    """What does not change while sequences run, by place: `Terms` in columns.

    Attributes:
        last: See `Terms.last`, as for `host_until`, `greedy`, `watched`, `logprobs`, `masked` and
            `adapter`.
        ends: int64 [rows, most of a sequence], tokens that end each, else `NO_END`.
        draws: How the tokens of each are chosen: a column for each field of `Draw`.
        bias_spans: int32 [rows, 2, 2], `Biases.early` and `late`.
        bias_until: How long the former holds, in tokens of the output.
    """

    def __init__(self, rows: int) -> None:
        self.ends = np.full((rows, 1), NO_END, np.int64)
        self.last, self.host_until = (np.zeros(rows, np.int64) for _ in range(2))
        self.greedy, self.watched, self.masked = (np.zeros(rows, np.bool_) for _ in range(3))
        self.logprobs, self.adapter = np.full(rows, -1, np.int64), np.full(rows, -1, np.int32)
        self.draws = {f.name: np.zeros(rows, DRAW_TYPES[f.name]) for f in fields(Draw)}
        self.bias_spans, self.bias_until = np.zeros((rows, 2, 2), np.int32), np.zeros(rows, int)

    def put(self, place: int, terms: Terms) -> None:
        """Note those of the sequence at a place."""
        if len(terms.ends) > self.ends.shape[1]:
            self.ends = _widened(self.ends, len(terms.ends), NO_END)
        self.ends[place] = NO_END
        self.ends[place, : len(terms.ends)] = terms.ends
        self.last[place], self.host_until[place] = terms.last, terms.host_until
        self.greedy[place], self.watched[place] = terms.greedy, terms.watched
        self.logprobs[place], self.adapter[place] = terms.logprobs, terms.adapter
        for name, column in self.draws.items():
            column[place] = getattr(terms.draw, name)
        biases, self.masked[place] = terms.biases, terms.masked
        self.bias_spans[place] = (biases.early, biases.late) if biases else 0
        self.bias_until[place] = biases.until if biases else 0


class RunningBatch:
    """Sequences that run, by place; the last row, `spare`, is for one that is run apart.

    Args:
        places: Most sequences that run at once.

    Attributes:
        spare: The place of a sequence that is run apart, and of rows that stand for none.
        sequences: Who is at a place.
        names: Their names.
        ids: int32 [places + 1, tokens], the tokens of each, `PENDING` where one is on its way.
        times: Seconds at which each token was known; zero for a prompt's.
        tables: int32 [places + 1, blocks], blocks of the cache.
        held: How many blocks each has.
        length: How many tokens each has, the one on its way included.
        known: How many of them are known.
        computed: Of how many K and V are in the cache.
        promised: How many of its first tokens others can find as soon as they are computed.
        prompt: Tokens of its prompt.
        whole: Whether the logits of all its tokens are wanted.
        held_by_client: Whether a client chooses its tokens.
        serial: A number that changes with who is at a place; -1 where there is nobody.
        terms: What does not change while each runs.
        states: Which row holds which recurrent state; None where a model keeps none.
    """

    def __init__(self, places: int) -> None:
        rows = places + 1
        self.spare = places
        self.states: StateRows | None = None
        self.sequences: list[Sequence | None] = [None] * rows
        self.names = [""] * rows
        self.ids = np.zeros((rows, 0), np.int32)
        self.times = np.zeros((rows, 0), np.float64)
        self.tables = np.zeros((rows, 0), np.int32)
        self.held, self.length, self.known = (np.zeros(rows, np.int64) for _ in range(3))
        self.computed, self.prompt, self.promised = (np.zeros(rows, np.int64) for _ in range(3))
        self.whole, self.held_by_client = (np.zeros(rows, np.bool_) for _ in range(2))
        self.serial = np.full(rows, -1, np.int64)
        self.terms = TermColumns(rows)
        self._free = list(range(places))
        self._arrivals = 0

    def enter(self, sequence: Sequence, place: int | None = None) -> int:
        """Give a sequence the first free place, or one that is named; tells which."""
        tokens, times, computed = sequence.tokens, sequence.times_from(0), sequence.computed
        place = heapq.heappop(self._free) if place is None else place
        terms, count = sequence.terms, len(tokens)
        longest = sequence.prompt + 1 if terms.last > 1 << 31 else terms.last + 1
        self._reserve(max(count, longest))
        self.sequences[place], self.names[place] = sequence, sequence.name
        self.ids[place, :count] = tokens
        self.times[place, sequence.prompt : sequence.prompt + len(times)] = times
        self.held[place], self.length[place], self.known[place] = 0, count, count
        self.computed[place], self.prompt[place] = computed, sequence.prompt
        self.whole[place], self.serial[place] = sequence.whole, self._arrivals
        self.promised[place], self.held_by_client[place] = sequence.promised, sequence.held
        self.terms.put(place, terms)
        self._arrivals += 1
        sequence.enter(self, place)
        return place

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's place back; it keeps the tokens that are known."""
        place = sequence.place
        assert place is not None
        sequence.leave()
        self.sequences[place], self.serial[place] = None, -1
        if place != self.spare:
            heapq.heappush(self._free, place)

    def set_table(self, place: int, table: Items[int], start: int = 0) -> None:
        """Note the blocks of a sequence, those from an index on; the others are as they were."""
        self.tables[place, start : len(table)] = table[start:]
        self.held[place] = len(table)

    def append(self, place: int, tokens: Items[int]) -> None:
        """Add known tokens to a sequence."""
        start = int(self.length[place])
        assert self.known[place] == start, "a token is on its way"
        self._reserve(start + len(tokens))
        self.ids[place, start : start + len(tokens)] = tokens
        self.length[place] = self.known[place] = start + len(tokens)

    def on_device(self, places: Ints) -> Bools:
        """Whose next token depends on its logits and `draws` alone, so that a device chooses it."""
        return (self.known[places] >= self.terms.host_until[places]) & ~self.whole[places]

    def missing(self, places: Ints, tokens: Ints) -> Ints:
        """Blocks that sequences lack to hold so many tokens each."""
        return np.maximum(-(-tokens // KV_BLOCK) - self.held[places], 0)

    def expect(self, places: Ints) -> None:
        """Keep room for a token that is being chosen for each, unless it is the last."""
        length = self.length[places]
        going = length < self.terms.last[places]
        places, length = places[going], length[going]
        self.ids[places, length] = PENDING
        self.length[places] = length + 1

    def take(self, places: Ints, tokens: Ints, now: float) -> Bools:
        """Give sequences their next tokens.

        Args:
            places: Whose.
            tokens: The token of each.
            now: Seconds.

        Returns:
            Which of them have to be looked at: those that end, and those that are watched.
        """
        known = self.known[places]
        self.ids[places, known] = tokens
        self.times[places, known] = now
        known += 1
        self.known[places] = known
        self.length[places] = np.maximum(self.length[places], known)
        ended = (tokens[:, None] == self.terms.ends[places]).any(axis=1)
        return ended | (known > self.terms.last[places]) | self.terms.watched[places]

    def take_several(self, places: Ints, counts: Ints, tokens: Ints, now: float) -> Bools:
        """Give sequences their next tokens, all but the last of which are accepted drafts.

        Args:
            places: Whose.
            counts: How many each gets; K and V of all but the last are computed.
            tokens: Those of one after those of the other.
            now: Seconds.

        Returns:
            Which of them have as many as they may have.
        """
        rows, known = np.repeat(places, counts), self.known[places]
        at = np.arange(len(rows)) + np.repeat(known - np.cumsum(counts) + counts, counts)
        self.ids[rows, at], self.times[rows, at] = tokens, now
        known = known + counts
        self.known[places], self.length[places] = known, np.maximum(self.length[places], known)
        self.computed[places] += counts - 1
        return known > self.terms.last[places]

    def _reserve(self, tokens: int) -> None:
        """Have columns for so many tokens."""
        if tokens > self.ids.shape[1]:
            blocks = -(-max(tokens, 2 * self.ids.shape[1]) // KV_BLOCK)
            self.ids = _widened(self.ids, blocks * KV_BLOCK, 0)
            self.times = _widened(self.times, blocks * KV_BLOCK, 0)
            self.tables = _widened(self.tables, blocks, 0)


def _widened(array: NDArray, columns: int, blank: int) -> NDArray:
    """The same rows with more columns; memory of those not yet used is none."""
    shape = (len(array), columns)
    wide = np.full(shape, blank, array.dtype) if blank else np.zeros(shape, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
