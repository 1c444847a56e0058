"""The tokens of a step as modules that keep a state take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from inference.scheduling.batch import Bools, Ints
from inference.scheduling.states import StateRows
from inference.scheduling.work import Work

SPARE = -1  # the last row of states, which are nobody's


@dataclass(frozen=True)
class Piece:
    """Tokens of a step that go through a module at once.

    Attributes:
        tokens: int64 [n], which of the step's: of one sequence, or each of another one.
        rows: int64 [B], rows of their states; one for each of them, or for all.
        begins: Whether they are a sequence's first.
        keeps: int64 [B], rows that get the states after them, too, the last row of all where none
            does; None where none of them has one.
        for_others: Whether those rows are of states that the prefix cache keeps, and not of states
            before drafts.
    """

    tokens: Tensor
    rows: Tensor
    begins: bool = False
    keeps: Tensor | None = None
    for_others: bool = False

    def moved(self, move: Callable[[Tensor], Tensor]) -> Piece:
        """The same on another device."""
        keeps = None if self.keeps is None else move(self.keeps)
        return replace(self, tokens=move(self.tokens), rows=move(self.rows), keeps=keeps)


def pieces_of(work: Work, states: StateRows | None = None, *, longest: bool = False) -> list[Piece]:
    """A step in pieces: the next tokens of many sequences as one, and so their first drafts, their
    second ones and so on; then prompts piece by piece.

    Args:
        states: Rows of what runs; default: those of the engine's model, which may have none.
        longest: Cut prompts only where a state is kept: for devices on which sums are grouped by
            what else is in the step anyway.
    """
    batch = work.batch
    states = batch.states if states is None else states
    if states is None:
        return []
    firsts, alone = np.cumsum(work.counts) - work.counts, alone_in(work, states)
    found = list(_next_tokens(work, np.flatnonzero(alone), firsts, states))
    columns = (firsts, work.places, work.starts, work.counts)
    for first, place, start, count in zip(*(x[~alone].tolist() for x in columns), strict=True):
        row, wanted, end = torch.tensor([place]), states.wanted.get(place, {}), start + count
        kept = (stop for stop in sorted(wanted) if start < stop < end)
        cuts = _cuts(start, end, int(batch.prompt[place]), states.piece)
        for begin, stop in pairwise([start, *(kept if longest else cuts), end]):
            tokens = torch.arange(first + begin - start, first + stop - start)
            kept_in = wanted.get(stop, states.before_draft(place, stop))
            keeps = None if kept_in is None else torch.tensor([kept_in])
            found.append(Piece(tokens, row, begin == 0, keeps, for_others=stop in wanted))
    return found


def alone_in(work: Work, states: StateRows) -> Bools:
    """Which sequences of a step have one token after a state, or drafts after it, too, and keep no
    other state than those before drafts."""
    one = (work.counts - work.drafts == 1) & (work.starts > 0)
    return one & ~np.isin(work.places, states.keeping)


def _next_tokens(work: Work, which: Ints, firsts: Ints, states: StateRows) -> Iterator[Piece]:
    """The next token of sequences as a piece, then each of their drafts.

    Args:
        which: Indices of their slices.
        firsts: The first token of each slice.
        states: Says where states before drafts are kept.
    """
    for step in range(int(work.drafts[which].max(initial=0)) + 1 if len(which) else 0):
        which = which[work.drafts[which] >= step]
        places, ends = work.places[which], work.starts[which] + step + 1
        kept = map(states.before_draft, places.tolist(), ends.tolist())
        keeps = torch.tensor([SPARE if row is None else row for row in kept])
        tokens, rows = torch.from_numpy(firsts[which] + step), torch.from_numpy(places)
        yield Piece(tokens, rows, keeps=keeps if bool((keeps != SPARE).any()) else None)


def _cuts(start: int, end: int, prompt: int, piece: int) -> Iterator[int]:
    """Where tokens are cut into pieces: those of a prompt, then single tokens."""
    while True:
        start = start + 1 if start >= prompt else min((start // piece + 1) * piece, prompt)
        if start >= end:
            return
        yield start
