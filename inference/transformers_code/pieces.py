"""The tokens of a step as modules that keep a state take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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


def pieces_of(work: Work, device: torch.device | str = "cpu") -> list[Piece]:
    """A step in pieces: the next tokens of many sequences as one, then prompts piece by piece."""
    states, batch = work.batch.states, work.batch
    if states is None:
        return []
    firsts = np.cumsum(work.counts) - work.counts
    alone = (work.counts == 1) & (work.starts > 0) & ~np.isin(work.places, list(states.wanted))
    found = []
    if alone.any():
        tokens, rows = (torch.from_numpy(x[alone]).to(device) for x in (firsts, work.places))
        found.append(Piece(tokens, rows))
    columns = (firsts, work.places, work.starts, work.counts)
    for first, place, start, count in zip(*(x[~alone].tolist() for x in columns), strict=True):
        row, wanted = torch.tensor([place], device=device), states.wanted.get(place, {})
        prompt = int(batch.prompt[place])
        for begin, end in _cut(start, start + count, prompt, states.piece):
            tokens = torch.arange(first + begin - start, first + end - start, device=device)
            found.append(Piece(tokens, row, begin == 0, wanted.get(end)))
    return found


def _cut(start: int, end: int, prompt: int, piece: int) -> Iterator[tuple[int, int]]:
    """Ends of pieces: those of a prompt, then single tokens."""
    while start < end:
        stop = start + 1 if start >= prompt else min((start // piece + 1) * piece, prompt, end)
        yield start, stop
        start = stop
