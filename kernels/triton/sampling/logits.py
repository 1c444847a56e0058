"""Rows of logits before a token is chosen of them: bounded, edited, and put in an order.

A vocabulary's bound is c tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2).

Edits are biases, and a mask of what may come. Both stand in lists on the device, written when a
request starts or a mask changes; a row names its own. It is edited in place, by the programs that
read it first anyway: a row that names none costs three words more.

The order is that in which a sampler keeps logits. A logit and its id make one int64, an element:
larger values are larger, of equal ones lower ids, and no two are equal. Probability is counted in
whole 2^-40ths of the largest, so that sums do not depend on their order. A cut is the largest such
integer t with enough elements, or enough of their mass, at or above it, found by bisection.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
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


LOWEST = tl.constexpr(-(2**63))  # below every element
ONE = tl.constexpr(2.0**40)  # mass of the largest logit


@triton.jit
def order(x, i):
    """Logits and their ids as int64: larger values are larger, of equal ones lower ids."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 equals 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)


@triton.jit
def value_of(element):
    """The logit of an element."""
    key = (element >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(element):
    """The id of an element."""
    return 0x7FFFFFFF - (element & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def least_of(x):
    """The least element whose logit is at least x."""
    return order(x, tl.full([], 0x7FFFFFFF, tl.int32))


@triton.jit
def token_of(element, top):
    """The id of an element as int64; -1 where the row's largest logit is infinite."""
    return tl.where(tl.abs(value_of(top)) == float("inf"), -1, id_of(element).to(tl.int64))


@triton.jit
def mass_of(elements, top):
    """exp(x - top) in 2^-40ths, int64; nothing for LOWEST."""
    x = tl.where(elements > LOWEST, value_of(elements), top)
    mass = (tl.exp(tl.where(x == top, 0.0, x - top)) * ONE).to(tl.int64)
    return tl.where(elements > LOWEST, mass, 0)


@triton.jit
def chunk_of(logits, part, V, temperature, CHUNK: tl.constexpr):
    """x and ids of a chunk of a row; a temperature of 0 leaves the logits. NaN becomes infinity."""
    i = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32)
    if temperature > 0:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    x = tl.where(x == x, x, float("inf"))  # false of NaN alone
    return x, i


@triton.jit
def at_least(elements, masses, t):
    """Count and mass of the elements from t up, int64."""
    over = elements >= t
    return tl.sum(over.to(tl.int32), 0).to(tl.int64), tl.sum(tl.where(over, masses, 0), 0)


@triton.jit
def at_least_in_row(logits, V, temperature, top, t, CHUNK: tl.constexpr):
    """`at_least` of a whole row."""
    count, mass = t * 0, t * 0
    for part in range(tl.cdiv(V, CHUNK)):
        x, i = chunk_of(logits, part, V, temperature, CHUNK)
        elements = tl.where(i < V, order(x, i), LOWEST)
        c, s = at_least(elements, mass_of(elements, top), t)
        count += c
        mass += s
    return count, mass


@triton.jit
def cut(
    elements, masses, held, low, high, count, mass, target, by_mass,
    logits, V, temperature, top, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest t with enough at or above it, and what there is: (t, count, mass), int64.

    Args:
        elements, masses: Of a row, all that is at or above `low`, if `held`.
        held: Whether they are; else the row is read (`logits`, `V`, `temperature`, `top`).
        low: Has `count` elements of `mass` at or above it, enough.
        high: Has none.
        target: Enough.
        by_mass: Of mass, else of elements.
    """
    over = count * 0  # elements at or above `high`
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    found = tl.where(by_mass, mass, count)
    while (middle > low) & (found != target) & (count - over > 1):
        if held:
            c, s = at_least(elements, masses, middle)
        else:
            c, s = at_least_in_row(logits, V, temperature, top, middle, CHUNK)
        f = tl.where(by_mass, s, c)
        if f >= target:
            low, count, mass, found = middle, c, s, f
        else:
            high, over = middle, c
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
    return low, count, mass


@triton.jit
def share_of(mass, top_p):
    """The least whole mass that is at least the share top_p of a mass."""
    exact = mass.to(tl.float64) * top_p.to(tl.float64)
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


PART = 4096  # logits of a program


@triton.jit
def softcap_kernel(logits, softcap, COUNT, PART: tl.constexpr):
    """Program (part of PART logits): tanh x = 1 - 2 / (e^(2 x) + 1), of any x without overflow."""
    i = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    x = tl.load(logits + i, mask=i < COUNT, other=0.0)
    y = softcap - 2.0 * softcap / (tl.exp(x * (2.0 / softcap)) + 1.0)
    tl.store(logits + i, y, mask=i < COUNT)


def softcap_logits(logits: Tensor, softcap: float) -> Tensor:
    """Bound logits, fp32 and contiguous, in place; gives them back. NaN stays.

    Raises:
        ValueError: they are not fp32, or not contiguous.
    """
    require(
        logits.dtype == torch.float32 and logits.is_contiguous(),
        f"logits are {logits.dtype} {tuple(logits.shape)}; needed is fp32, contiguous",
    )
    if logits.numel():
        softcap_kernel[(triton.cdiv(logits.numel(), PART),)](
            logits, softcap, logits.numel(), PART=PART, num_warps=8
        )
    return logits
