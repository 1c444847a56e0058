"""Inference with reference: what followed when the last tokens occurred before is proposed again.

Prompt lookup decoding (A. Saxena, github.com/apoorvumang/prompt-lookup-decoding) and inference with
reference (Yang et al. 2023, arXiv 2304.04487): the longest n-gram that ends the known tokens and
occurred before, in the output, the prompt or a text given with the request, is followed. Where an
output departs from what it repeats, as by a variable with another name, it is expected to come
back: the text is followed on after the change before any n-gram matches again. The change itself
is expected again wherever the replaced tokens come next in that text, until they once stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from inference.proposers import DraftMethod, Proposer
from inference.scheduling.batch import Ints, RunningBatch

BREAK = -1  # is no token; ends a reference
MULTIPLIER, MASK = 0x9E3779B97F4A7C15, (1 << 60) - 1  # of the n-grams' polynomial hash
LONGEST, SHORTEST = 8, 2  # n-grams that are looked for, in tokens
NEAR = 16  # tokens after a change among which its end is looked for
PATIENCE = 8  # tokens after which a change is not expected to end
SURE = 6  # an n-gram that is shorter does not lead away from a text that is followed past a change
LEAST_CHANCE = 0.1  # a draft ends where it is less likely than this to be accepted up to there
FORGET = 0.98  # weight of the past in acceptance rates, for each draft


class NGramProposer(Proposer):
    """Drafts from the sequence's own tokens and its reference; none where no n-gram occurred.

    About 10 us a sequence and step where nothing is found, 40 us for 16 drafts; 0.6 KB of memory
    for each token of a running sequence.

    Attributes:
        confidence: Of the last drafts, float32 [places, most]: the probability that each is right
            if those before it are; 0 where there is none. By the length of the n-gram, from how
            often drafts after such a one were right lately.
    """

    def __init__(self) -> None:
        self.confidence: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._texts: dict[int, tuple[int, Text]] = {}
        lengths = np.arange(LONGEST + 1)
        self._trials = np.full(LONGEST + 1, 4.0)  # what is known before the first: a few drafts,
        self._right = self._trials * (1 - 0.5 ** (1 + lengths / 2))  # better the longer they match

    @override
    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        counts = np.zeros(len(places), np.int64)
        self.confidence = np.zeros((len(places), int(most.max(initial=0))), np.float32)
        for row, (place, limit) in enumerate(zip(places.tolist(), most.tolist(), strict=True)):
            text = self._text(batch, place)
            text.take(batch.ids[place, text.known : batch.known[place]])
            self._judge(text)
            text.find()
            chance = self._chance(text.agreed)
            worth = max(int(math.log(LEAST_CHANCE) / math.log(chance)), 1)
            draft = text.draft(min(limit, worth))
            counts[row] = count = len(draft)
            batch.ids[place, text.known : text.known + count] = draft
            self.confidence[row, :count] = chance
        return counts

    def _text(self, batch: RunningBatch, place: int) -> Text:
        serial, found = int(batch.serial[place]), self._texts.get(place)
        if found is None or found[0] != serial:
            sequence = batch.sequences[place]
            assert sequence is not None
            text = Text(sequence.reference, LONGEST, SHORTEST)
            found = self._texts[place] = serial, text
        return found[1]

    def _chance(self, agreed: int) -> float:
        """That a draft is right after so many tokens that agreed."""
        length = min(agreed, LONGEST)
        return min(max(float(self._right[length] / self._trials[length]), 0.01), 0.99)

    def _judge(self, text: Text) -> None:
        """Count how many of the last drafts were right, and the first that was not."""
        if text.tried:
            length = min(text.drafted_behind, LONGEST)
            self._trials[length] = FORGET * self._trials[length] + text.tried
            self._right[length] = FORGET * self._right[length] + text.right


class Text:
    """Tokens of a sequence, where their n-grams occurred, and what of them is followed.

    Args:
        reference: A text that the output may repeat.
        longest: Longest n-gram that is looked for, in tokens.
        shortest: Shortest.

    Attributes:
        known: How many tokens of the sequence are here.
        agreed: How many tokens before the followed position are the same as the last known.
        tried: How many tokens of the last draft were verified: all up to the first wrong one.
        right: How many of them, the first, were the same.
        drafted_behind: What `agreed` was when it was made.
    """

    def __init__(self, reference: Sequence[int], longest: int, shortest: int) -> None:
        self._tokens = [*reference, BREAK] if len(reference) else []
        self._start = len(self._tokens)
        self._longest, self._shortest = longest, shortest
        self._ends: dict[int, int] = {}  # the last n-gram of a hash: where the tokens after it are
        self._indexed = 0  # all n-grams that end before it are in `_ends`
        self.known = self.agreed = self.tried = self.right = self.drafted_behind = 0
        self._source = -1  # the position that is followed
        self._left = -1  # where the followed text was left, while it is not found again
        self._changed = 0  # the new token
        self._changes: dict[int, tuple[list[int], list[int]]] = {}  # by the first of what goes
        self._draft: list[int] = []
        self._spots: list[int] = []  # where each token of the draft leads to in the followed text

    def take(self, tokens: NDArray[np.int32]) -> None:
        """Append tokens that became known."""
        new = tokens.tolist()
        self.right = _common(new, self._draft)
        self.tried = min(self.right + (self.right < len(new)), len(self._draft))
        self.drafted_behind, self._draft = self.agreed, []
        start = len(self._tokens)
        self._tokens += new
        self.known += len(new)
        if self._source >= 0:
            if self.right:
                if self._left >= 0 and self.agreed + self.right >= self._shortest:
                    self._note_change(start)
                self._source = self._spots[self.right - 1]
                self.agreed += self.right
            for at in range(start + self.right, start + len(new)):
                self._follow(self._tokens[at], at)
        self._index(len(self._tokens) - 1)

    def find(self) -> None:
        """Choose what is followed from here on."""
        length, source = self._longest_match()
        weaker = length < SURE if self._left >= 0 else length <= self.agreed
        if self._source < 0 or not weaker:
            self._source, self.agreed, self._left = source, length, -1

    def draft(self, most: int) -> list[int]:
        """At most so many tokens that may come next."""
        if self._source >= 0:
            self._draft = self._behind(self._source, most)
        return self._draft

    def _follow(self, token: int, at: int) -> None:
        """Go on in the followed text by a token, which may be another than the text's."""
        tokens, source = self._tokens, self._source
        if source < at and tokens[source] == token:
            if self._change_at(source):
                del self._changes[token]  # this time it stayed
            self._source, self.agreed = source + 1, self.agreed + 1
            if self.agreed >= self._shortest and self._left >= 0:
                self._note_change(at + 1)
            return
        if self._left < 0:
            self._left, self._changed = source, at
        self.agreed = 0
        window = tokens[self._left : min(self._left + NEAR, at)]
        if token in window:  # the change ended, or took tokens away
            self._source, self.agreed = self._left + window.index(token) + 1, 1
        elif source - self._left < PATIENCE:
            self._source = source + 1  # as many tokens as there were
        else:
            self._source = self._left = -1

    def _note_change(self, end: int) -> None:
        """The followed text is found again: which tokens replaced which, to expect them again."""
        old = self._tokens[self._left : self._source - self.agreed]
        new = self._tokens[self._changed : end - self.agreed]
        if 0 < len(old) <= PATIENCE and 0 < len(new) <= PATIENCE:
            self._changes[old[0]] = old, new
        self._left = -1

    def _change_at(self, position: int) -> tuple[list[int], list[int]] | None:
        """The change that a position of the followed text begins with, if it was made before."""
        change = self._changes.get(self._tokens[position])
        if change is None or self._tokens[position : position + len(change[0])] != change[0]:
            return None
        return change

    def _index(self, end: int) -> None:
        """Note the n-grams that end before a position."""
        first, tokens = self._indexed, self._tokens
        self._indexed = max(end, first)
        if end - first > 32:
            near = max(first - self._longest, 0)
            hashed = np.array(tokens[near:end], np.int64).astype(np.uint64) + np.uint64(2)
            total = np.zeros(len(hashed), np.uint64)
            for n in range(1, self._longest + 1):
                total[n - 1 :] = (
                    total[n - 1 :] * np.uint64(MULTIPLIER) + hashed[: len(hashed) - n + 1]
                )
                skip = max(n - 1, first - near)
                if n >= self._shortest:
                    keys = (total[skip:] & np.uint64(MASK)).tolist()
                    self._ends.update(zip(keys, range(near + skip + 1, end + 1), strict=True))
            return
        for stop in range(first + 1, end + 1):
            total = 0
            for n in range(1, min(self._longest, stop) + 1):
                total = (total * MULTIPLIER + tokens[stop - n] + 2) & MASK
                if n >= self._shortest:
                    self._ends[total] = stop

    def _longest_match(self) -> tuple[int, int]:
        """Length of the longest n-gram that ended here before, and where its tokens go on."""
        tokens, ends = self._tokens, self._ends
        total, length, source = 0, 0, -1
        for n in range(1, min(self._longest, self.known) + 1):
            total = (total * MULTIPLIER + tokens[-n] + 2) & MASK
            if n >= self._shortest:
                if (end := ends.get(total)) is None:
                    break
                length, source = n, end
        if tokens[source - length : source] != tokens[len(tokens) - length :]:
            return 0, -1  # another n-gram of the same hash
        return length, source

    def _behind(self, source: int, most: int) -> list[int]:
        """Tokens from a position on, changed as before, then those that a repetition brings."""
        end = self._start - 1 if source < self._start else len(self._tokens)
        found, spots, at = [], [], source
        while at < end and len(found) < most:
            old, new = self._change_at(at) or ([0], self._tokens[at : at + 1])
            found += new
            spots += [at] * (len(new) - 1) + [at + len(old)]
            at += len(old)
        while 0 < len(found) < most and end == len(self._tokens):
            found += found[: most - len(found)]
        self._spots = spots + [end + i for i in range(len(found) - len(spots))]
        return found[:most]


def _common(one: list[int], other: list[int]) -> int:
    """How many of the first tokens of two lists are the same."""
    for count, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return count
    return min(len(one), len(other))


METHOD = DraftMethod("ngram", lambda path, target: NGramProposer())
