"""The tokens of a step as modules that keep a state take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from inference.scheduling.batch import Bools
from inference.scheduling.work import Work


@dataclass(frozen=True)
class Piece:
    """Tokens of a step that go through a module at once.

    Attributes:
        tokens: int64 [n], which of the step's: of one sequence, or each of another one.
        rows: int64 [B], rows of their states; one for each of them, or for all.
        begins: Whether they are a sequence's first.
        keeps: Row that gets the state after them, too; None: none.
    """

    tokens: Tensor
    rows: Tensor
    begins: bool = False
    keeps: int | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Piece:
        """The same on another device."""
        return replace(self, tokens=move(self.tokens), rows=move(self.rows))


def pieces_of(work: Work, *, longest: bool = False) -> list[Piece]:
    """A step in pieces: the next tokens of many sequences as one, then prompts piece by piece.

    Args:
        work: The step.
        longest: Cut prompts only where a state is kept: for devices on which sums are grouped by
            what else is in the step anyway.
    """
    states, batch = work.batch.states, work.batch
    if states is None:
        return []
    firsts, alone = np.cumsum(work.counts) - work.counts, alone_in(work)
    found = []
    if alone.any():
        tokens, rows = (torch.from_numpy(x[alone]) for x in (firsts, work.places))
        found.append(Piece(tokens, rows))
    columns = (firsts, work.places, work.starts, work.counts)
    for first, place, start, count in zip(*(x[~alone].tolist() for x in columns), strict=True):
        row, wanted, end = torch.tensor([place]), states.kept_of(place), start + count
        kept = (stop for stop in sorted(wanted) if start < stop < end)
        cuts = _cuts(start, end, int(batch.prompt[place]), states.piece)
        for begin, stop in pairwise([start, *(kept if longest else cuts), end]):
            tokens = torch.arange(first + begin - start, first + stop - start)
            found.append(Piece(tokens, row, begin == 0, wanted.get(stop)))
    return found


def alone_in(work: Work) -> Bools:
    """Which sequences of a step have one token after a state, and keep none after it."""
    assert work.batch.states is not None
    keeping = [place for place, own in work.batch.states.wanted.items() if own]
    return (work.counts == 1) & (work.starts > 0) & ~np.isin(work.places, keeping)


def _cuts(start: int, end: int, prompt: int, piece: int) -> Iterator[int]:
    """Where tokens are cut into pieces: those of a prompt, then single tokens."""
    while True:
        start = start + 1 if start >= prompt else min((start // piece + 1) * piece, prompt)
        if start >= end:
            return
        yield start
