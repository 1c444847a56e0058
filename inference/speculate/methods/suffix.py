"""Suffix decoding: what followed the last tokens most often in all that was served is proposed.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). Its suffix tree with counts is here a ring of
the tokens of past requests in which each n-gram of a few lengths leads to the one before it, as in
Lempel and Ziv's dictionaries: the paths of the tree and their counts are read off the newest places
where the longest n-gram occurred. What was served longest ago is overwritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.proposers import DraftMethod
from inference.scheduling.batch import Ints, RunningBatch
from inference.speculate.methods.ngram import BREAK, FORGET, LEAST_CHANCE, MULTIPLIER, NGramProposer

LENGTHS: tuple[int, ...] = (16, 8, 4, 2)  # of n-grams that are looked for; the longest is taken
MOST_PLACES = 32  # newest occurrences that are counted
WORD = (1 << 64) - 1


class SuffixProposer:
    """Drafts from what was served before, and, as an `NGramProposer`, from the sequence's own text.

    About 40 us a sequence and step, beside the n-gram's, and 0.5 us a token of an ended request.

    Args:
        capacity: Tokens of past requests that are kept, a power of 2; 68 bytes each.

    Attributes:
        confidence: See `NGramProposer.confidence`. From past requests it is the share of the
            occurrences that went on so, times how much that share was worth lately for n-grams of
            that length.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        self.confidence: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._served, self._own = Served(capacity), NGramProposer()
        self._drafts: dict[int, _Draft] = {}
        self._told = dict.fromkeys(LENGTHS, 4.0)  # drafts that were verified, each by its share,
        self._right = {n: 4.0 * n / (n + 1) for n in LENGTHS}  # and how many of them were accepted

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """See `Proposer.propose`."""
        counts = self._own.propose(batch, places, most)
        self.confidence = self._own.confidence
        for row, (place, limit) in enumerate(zip(places.tolist(), most.tolist(), strict=True)):
            known = int(batch.known[place])
            self._judge(batch, place, known)
            context = batch.ids[place, max(known - LENGTHS[0], 0) : known].tolist()
            tokens, shares, length = self._served.follow(context, limit)
            worth = self._right[length] / self._told[length] if length else 0.0
            chances = np.minimum(np.array(shares) * worth, 1.0)
            paths = np.cumprod(chances)
            count = int(np.count_nonzero(paths >= LEAST_CHANCE))
            if paths[:count].sum() > np.cumprod(self.confidence[row, : counts[row]]).sum():
                counts[row] = count
                batch.ids[place, known : known + count] = tokens[:count]
                self.confidence[row] = 0.0
                self.confidence[row, :count] = chances[:count]
                serial = int(batch.serial[place])
                self._drafts[place] = _Draft(serial, known, tokens[:count], shares[:count], length)
        return counts

    def note_end(self, tokens: Sequence[int], prompt: int) -> None:
        """See `Proposer.note_end`."""
        self._served.add(tokens)

    def _judge(self, batch: RunningBatch, place: int, known: int) -> None:
        """Learn from which tokens were chosen where there was a draft."""
        draft = self._drafts.pop(place, None)
        if draft is None or draft.serial != batch.serial[place]:
            return
        came = batch.ids[place, draft.known : known].tolist()
        right = told = 0.0
        for token, share, wanted in zip(draft.tokens, draft.shares, came, strict=False):
            told += share
            right += token == wanted
            if token != wanted:
                break
        self._told[draft.length] = FORGET * self._told[draft.length] + told
        self._right[draft.length] = FORGET * self._right[draft.length] + right


@dataclass(frozen=True)
class _Draft:
    """What was proposed, behind how many tokens, and how likely it was by an n-gram of a length."""

    serial: int
    known: int
    tokens: list[int]
    shares: list[float]
    length: int


class Served:
    """Tokens of past requests, the newest of them, and where their n-grams occurred.

    A position counts all tokens ever added; it stands in the arrays at its remainder. An n-gram is
    known by the position behind it.

    Args:
        capacity: Most tokens, a power of 2.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 2 * LENGTHS[0]
        assert capacity & (capacity - 1) == 0
        self._mask = capacity - 1
        self._shift = 64 - self._mask.bit_length()
        self._text = np.full(capacity, BREAK, np.int32)
        self._newest = {n: np.full(capacity, -1, np.int64) for n in LENGTHS}  # of a hash
        self._before = {n: np.full(capacity, -1, np.int64) for n in LENGTHS}  # of the same hash
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, which never change."""
        tables = [*self._newest.values(), *self._before.values()]
        return self._text.nbytes + sum(table.nbytes for table in tables)

    def add(self, tokens: Sequence[int]) -> None:
        """Take the tokens of a request in, over those of the oldest where there is no room."""
        new = np.array(tokens[-self._mask :], np.int32)
        start, count = self._end, len(new)
        self._text[np.arange(start, start + count) & self._mask] = new
        self._text[(start + count) & self._mask] = BREAK
        self._end = start + count + 1
        total, values = np.zeros(count, np.uint64), new.astype(np.uint64) + np.uint64(2)
        for n in range(1, min(LENGTHS[0], count) + 1):
            total[n - 1 :] = total[n - 1 :] * np.uint64(MULTIPLIER) + values[: count - n + 1]
            if n in LENGTHS:
                spread = total[n - 1 :] * np.uint64(MULTIPLIER)  # the last token, to the high bits
                hashes = (spread >> np.uint64(self._shift)).astype(np.int64)
                self._chain(n, hashes, np.arange(start + n, start + count + 1))

    def follow(self, context: list[int], most: int) -> tuple[list[int], list[float], int]:
        """What came most often behind the longest n-gram that ends a text.

        Args:
            context: The text's last tokens.
            most: Most tokens to tell.

        Returns:
            The tokens; of the occurrences that agreed up to each, the share that had it; and the
            length of the n-gram, 0 if none occurred.
        """
        total, hashes = 0, {}
        for n in range(1, min(LENGTHS[0], len(context)) + 1):
            total = (total * MULTIPLIER + context[-n] + 2) & WORD
            hashes[n] = (total * MULTIPLIER & WORD) >> self._shift
        for n in LENGTHS:
            if n in hashes and len(places := self._places(n, hashes[n], context)):
                wanted = (places[:, None] + np.arange(most)) & self._mask
                return *_most_frequent(self._text[wanted].tolist()), n
        return [], [], 0

    def _places(self, n: int, hashed: int, context: list[int]) -> Ints:
        """Positions behind the newest n-grams that equal the text's last tokens."""
        found, before = [], self._before[n]
        position = int(self._newest[n][hashed])
        while position - n >= self._end - self._mask - 1 and position >= 0:
            found.append(position)
            if len(found) == MOST_PLACES:
                break
            position = int(before[position & self._mask])
        places = np.array(found, np.int64)
        tokens = self._text[(places[:, None] + np.arange(-n, 0)) & self._mask]
        return places[(tokens == context[-n:]).all(axis=1)]

    def _chain(self, n: int, hashes: Ints, positions: Ints) -> None:
        """Note n-grams by their hashes, each before the next of the same hash."""
        order = np.argsort(hashes, kind="stable")
        hashes, positions = hashes[order], positions[order]
        first = np.diff(hashes, prepend=-1) != 0
        before = np.where(first, self._newest[n][hashes], np.roll(positions, 1))
        self._before[n][positions & self._mask] = before
        last = np.roll(first, -1)
        self._newest[n][hashes[last]] = positions[last]


def _most_frequent(texts: list[list[int]]) -> tuple[list[int], list[float]]:
    """The tokens that most texts, the newest first, go on with, one after another.

    Returns:
        Its tokens, and the share of the texts on the path so far that go on with each.
    """
    tokens, shares = [], []
    for at in range(len(texts[0])):
        column = [text[at] for text in texts]
        token, count = column[0], column.count(column[0])
        if count < len(column):
            counts = Counter(column)
            del counts[BREAK]
            token, count = counts.most_common(1)[0]  # of equals the newest
            texts = [text for text in texts if text[at] == token]
        elif token == BREAK:
            break
        tokens.append(token)
        shares.append(count / len(column))
    return tokens, shares


METHOD = DraftMethod("suffix", lambda path, target: SuffixProposer())
