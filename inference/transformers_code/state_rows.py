"""Recurrent states: their rows in a pool, and a step's tokens as modules with a state take them.

Rows are sequences' own, which are never rounded, or kept ones, maybe in int8.
What is rounded at every step collects the loss of all steps: a running state in int8 costs thirty
(Qwen3-Next) to seventy (Mamba-2) times the KL divergence of one that is rounded once in 64 tokens,
and stochastic rounding does not help (random models, the same scales). So a state is rounded when
it is kept for the prefix cache, once, with scales of its own (`kernels.numerics.outer_scales`), and
a sequence that begins with it goes on in floats. States before drafts are kept as they are: drafts
change no token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference.scheduling.batch import Bools, Ints
from inference.scheduling.states import StateRows
from inference.scheduling.work import Work
from kernels.numerics import dequantize, outer_scales, quantize

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


@dataclass(frozen=True)
class StateShape:
    """One state of a sequence: `kind` and `index` say where transformers' layer has it."""

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_rounded(self) -> bool:
        """Whether int8 is for it: matrices. What convolutions keep is small, and stays as it is."""
        return self.kind == "recurrent" and len(self.shape) > 1

    def nbytes(self, *, int8: bool = False) -> int:
        """Bytes of one; `int8`: as it is kept where kept states are rounded."""
        count = math.prod(self.shape)
        if not (int8 and self.is_rounded):
            return count * self.dtype.itemsize
        *heads, rows, columns = self.shape
        return count + 4 * math.prod(heads) * (rows + columns)


class StatesInRows(Tensor):
    """Stands for states of some sequences that stay in their rows of a pool, for functions that
    read and write them there; others can be copied into it, and nothing else computed of it.

    Attributes:
        pool: All rows.
        rows: int64 [B], those of the sequences.
    """

    pool: Tensor
    rows: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in ("to", "float"):
            return args[0]
        if name == "copy_":
            states, other = args
            if other is not states:
                states.pool[states.rows] = other.to(states.pool.dtype)
            return states
        if name in ("__get__", "size", "dim"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise TypeError(f"{name} of states that are in their rows")


class StatePool:
    """One state of many sequences, a row each.

    Args:
        own: What a row holds.
        rows: All rows; one more, the last, is for rows of steps that stand for no sequence.
        int8: How many of these, the last ones, hold kept states in int8; None where states are
            kept as they are.
    """

    def __init__(self, own: StateShape, rows: int, device: torch.device, int8: int | None) -> None:
        kept = int8 if own.is_rounded else None
        self._first = rows - (kept or 0)

        def zeros(count: int, *shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        self._floats = zeros(self._first + 1, *own.shape, dtype=own.dtype)
        self._int8: tuple[Tensor, ...] | None = None  # values, scales of rows and of columns
        if kept is not None:
            *heads, high, wide = own.shape
            self._int8 = (
                zeros(kept, *own.shape, dtype=torch.int8),
                zeros(kept, *heads, high, 1, dtype=torch.float32),
                zeros(kept, *heads, 1, wide, dtype=torch.float32),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._floats.nbytes + sum(part.nbytes for part in self._int8 or ())

    def read(self, rows: Tensor) -> Tensor:
        """States [B, ...] of sequences."""
        return self._floats[rows]

    def in_rows(self, rows: Tensor) -> StatesInRows:
        """The same, which stay where they are."""
        shape = (len(rows), *self._floats.shape[1:])
        states = self._floats[:1].expand(shape).as_subclass(StatesInRows)
        states.pool, states.rows = self._floats, rows
        return states

    def write(self, rows: Tensor, state: Tensor) -> None:
        """Put states [B, ...] into rows of sequences, or of states before drafts."""
        self._floats[rows] = state.to(self._floats.dtype)

    def keep(self, rows: Tensor, state: Tensor) -> None:
        """Put states [B, ...] into rows of kept ones."""
        if self._int8 is None:
            self.write(rows, state)
            return
        for part, found in zip(self._int8, _rounded(state), strict=True):
            part[rows - self._first] = found

    def copy(self, sources: Tensor, targets: Tensor, *, kept: bool) -> None:
        """Copy states to rows of sequences, all at once; `kept`: from rows of kept ones."""
        if self._int8 is None or not kept:
            self._floats[targets] = self._floats[sources]
            return
        q, high, wide = (part[sources - self._first] for part in self._int8)
        self.write(targets, dequantize(q, high * wide))

    def round(self, row: int) -> None:
        """Have in a sequence's row what it would begin with if its state were kept and found."""
        if self._int8 is not None:
            q, high, wide = _rounded(self._floats[row])
            self._floats[row] = dequantize(q, high * wide).to(self._floats.dtype)


def _rounded(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 values of matrices [..., R, C], and the scales of their rows and columns."""
    rows, columns = outer_scales(state)
    return quantize(state, rows * columns), rows, columns
