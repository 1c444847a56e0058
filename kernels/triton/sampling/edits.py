"""What is done to a row of logits before its token is chosen: biases, and a mask of what may come.

Both stand in lists on the device, written when a request starts or a mask changes; a row names its
own. It is edited in place, by the programs that read it first anyway: a row that names none costs
three words more.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import require

LISTED = 512  # biases of a list; a power of two


@dataclass(frozen=True)
class Edits:
    """Biases and masks, and which of them are those of a row.

    Attributes:
        ids: int32 [lists, LISTED], tokens, none twice in what a row names.
        values: fp32 [lists, LISTED], what is added to their logits; -inf forbids one.
        masks: int32 [masks, ceil(V / 32)], bit i % 32 of word i // 32 set where token i may come.
        lists: int64 [B], the list of each row.
        starts: int32 [B], the first of its elements that is a row's.
        ends: int32 [B], one more than the last; `starts` where there is none.
        mask_rows: int32 [B], a row's mask; -1 where all tokens may come.
    """

    ids: Tensor
    values: Tensor
    masks: Tensor
    lists: Tensor
    starts: Tensor
    ends: Tensor
    mask_rows: Tensor

    def check(self, rows: int, vocabulary: int) -> None:
        """Raise ValueError where a shape or type does not fit."""
        lists, words = self.ids.shape[0], -(-vocabulary // 32)
        for name, dtype, shape in (
            ("ids", torch.int32, (lists, LISTED)),
            ("values", torch.float32, (lists, LISTED)),
            ("masks", torch.int32, (self.masks.shape[0], words)),
            ("lists", torch.int64, (rows,)),
            ("starts", torch.int32, (rows,)),
            ("ends", torch.int32, (rows,)),
            ("mask_rows", torch.int32, (rows,)),
        ):
            t: Tensor = getattr(self, name)
            fits = t.shape == shape and t.dtype == dtype and t.is_contiguous()
            require(fits, f"{name} is {t.dtype} {tuple(t.shape)}; needed is {dtype} {shape}")

    def rows(self, start: int, end: int) -> tuple[Tensor, ...]:
        """The arguments of `edit` for some rows."""
        own = (self.lists, self.starts, self.ends, self.mask_rows)
        return (self.ids, self.values, self.masks, *(t[start:end] for t in own))

    def applied(self, logits: Tensor) -> Tensor:
        """New logits, edited; the twin of `edit`."""
        logits = logits.clone()
        for row, line in enumerate(logits):
            own = slice(int(self.starts[row]), int(self.ends[row]))
            tokens = self.ids[self.lists[row], own].long()
            line[tokens] = (line[tokens].float() + self.values[self.lists[row], own]).to(line.dtype)
            if self.mask_rows[row] >= 0:
                i = torch.arange(len(line), device=line.device)
                bits = self.masks[self.mask_rows[row]][i >> 5] >> (i & 31)
                line[((bits & 1) == 0) & (line < torch.inf)] = -torch.inf
        return logits


@triton.jit
def edit(
    line, row, part, V, ids, values, masks, lists, starts, ends, mask_rows,
    LISTED: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Edit a chunk of a row; NaN and infinity stay, and are found by whoever reads it."""
    start, end = tl.load(starts + row), tl.load(ends + row)
    if end > start:
        j = tl.arange(0, LISTED)
        place = tl.load(lists + row) * LISTED + j
        token = tl.load(ids + place, mask=(j >= start) & (j < end), other=-1)
        here = (token >= part * CHUNK) & (token < (part + 1) * CHUNK) & (token < V)
        x = tl.load(line + token, mask=here, other=0.0)
        bias = tl.load(values + place, mask=here, other=0.0)
        tl.store(line + token, (x.to(tl.float32) + bias).to(x.dtype), mask=here)
        tl.debug_barrier()
    own = tl.load(mask_rows + row)
    if own >= 0:
        i = part * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(line + i, mask=i < V, other=0.0)
        words = tl.load(masks + own.to(tl.int64) * WORDS + (i >> 5), mask=i < V, other=-1)
        forbidden = ((words >> (i & 31)) & 1) == 0
        forbidden = forbidden & (x < float("inf"))  # false of NaN
        least = tl.full([CHUNK], float("-inf"), tl.float32).to(x.dtype)
        tl.store(line + i, least, mask=forbidden & (i < V))
        tl.debug_barrier()
